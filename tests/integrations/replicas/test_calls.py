"""Tests of calls received by another gRPC server: answered as on jaxinfer's own port, over the fake engine."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator

import grpc
import pytest

from jaxinfer.integrations.replicas.calls import CallError, Calls, is_near
from jaxinfer.protos.v1 import inference_pb2 as pb
from tests.serve.fake_engine import Mischief, expected_tokens, fake_tokenizer
from tests.serve.grpc.running import Running, request, running

PROMPT = fake_tokenizer().encode("Hi")
BYTES = 1 << 20


@dataclasses.dataclass
class Context:
    """The used subset of Ray's gRPC context."""

    sender: str = "ipv4:127.0.0.1:5000"
    metadata: tuple[tuple[str, str | bytes], ...] = ()
    code: grpc.StatusCode | None = None
    details: str = ""

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        return self.metadata

    def peer(self) -> str:
        return self.sender

    def set_code(self, code: grpc.StatusCode) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        self.details = details


def calls(server: Running, *, most: int = BYTES, guarded: bool = False) -> Calls:
    return Calls(server.servers.handlers(), most, guarded=guarded)


async def events(
    answered: Calls, asked: pb.GenerateRequest, context: Context, name: str = "Generate"
) -> list[pb.GenerateResponse]:
    return [
        pb.GenerateResponse.FromString(each.SerializeToString())
        async for each in answered.streamed(name, asked, context)
    ]


async def refusal(answered: Calls, asked: pb.GenerateRequest, context: Context) -> tuple[grpc.StatusCode | None, str]:
    with pytest.raises(CallError):
        await events(answered, asked, context)
    return context.code, context.details


def test_a_stream_is_that_of_our_own_port() -> None:
    async def story() -> None:
        async with running() as server:
            asked = request(request_id="mine", sampling={"max_tokens": 20, "seed": 3})
            own = [event async for event in server.inference.Generate(asked)]
            context = Context()
            found = await events(calls(server), asked, context)
            assert [i for each in found for i in each.delta.token_ids] == expected_tokens(PROMPT, 3, 0, 20)
            assert (found[0], found[-1]) == (own[0], own[-1])
            assert context.code is None

    asyncio.run(story())


def test_single_answers_are_those_of_our_own_port() -> None:
    async def story() -> None:
        async with running() as server:
            asked = pb.TokenizeRequest(text="Hi")
            found = await calls(server).single("Tokenize", asked, Context())
            assert found.SerializeToString() == (await server.inference.Tokenize(asked)).SerializeToString()

    asyncio.run(story())


def test_a_stream_of_requests_is_answered_each_by_its_id() -> None:
    async def asked() -> AsyncIterator[pb.GenerateRequest]:
        for number in range(5):
            yield request(request_id=f"r{number}", sampling={"max_tokens": 4, "seed": number})

    async def story() -> None:
        async with running() as server:
            found: dict[str, list[int]] = {}
            async for each in calls(server).streamed("GenerateBatch", asked(), Context()):
                event = pb.GenerateResponse.FromString(each.SerializeToString())
                found.setdefault(event.request_id, []).extend(event.delta.token_ids)
            assert found == {f"r{k}": expected_tokens(PROMPT, k, 0, 4) for k in range(5)}

    asyncio.run(story())


@pytest.mark.parametrize("how", ["closed", "cancelled"])
def test_a_stream_that_is_left_stops_generating_within_two_steps(how: str) -> None:
    async def story() -> None:
        async with running(Mischief(seconds=0.05)) as server:
            seen, steps = 0, 0

            async def read() -> None:
                nonlocal seen, steps
                asked = request(sampling={"max_tokens": 1000})
                async with contextlib.aclosing(calls(server).streamed("Generate", asked, Context())) as answer:
                    async for _ in answer:
                        seen += 1
                        if seen == 5:
                            steps = server.engine.steps
                            if how == "closed":
                                return

            task = asyncio.create_task(read())
            while seen < 5:
                await asyncio.sleep(0.001)
            if how == "cancelled":
                task.cancel()
            await asyncio.wait({task})
            await server.baseline()
            assert server.engine.steps <= steps + 2

    asyncio.run(story())


def test_keys_are_looked_at_in_the_metadata() -> None:
    async def story() -> None:
        async with running(keys={"secret": ("alice", "infer"), "poor": ("bob", "observe")}) as server:
            answered = calls(server, guarded=True)
            code, message = await refusal(answered, request(), Context())
            assert (code, message) == (grpc.StatusCode.UNAUTHENTICATED, "no such key")
            code, _ = await refusal(answered, request(), Context(metadata=(("authorization", "Bearer poor"),)))
            assert code is grpc.StatusCode.PERMISSION_DENIED
            good = Context(metadata=(("authorization", "Bearer secret"),), sender="ipv4:192.0.2.7:5000")
            assert (await events(answered, request(sampling={"max_tokens": 2}), good))[-1].HasField("finished")

    asyncio.run(story())


def test_without_keys_other_machines_may_not_call() -> None:
    async def story() -> None:
        async with running() as server:
            away = Context(sender="ipv4:192.0.2.7:5000")
            code, message = await refusal(calls(server), request(), away)
            assert code is grpc.StatusCode.PERMISSION_DENIED
            assert "calls from other machines need api_keys" in message
            code, _ = await refusal(calls(server, guarded=True), request(model="other"), away)
            assert code is grpc.StatusCode.NOT_FOUND

    asyncio.run(story())


def test_a_request_that_is_too_large_or_wrong_is_refused_by_name() -> None:
    async def story() -> None:
        async with running() as server:
            code, message = await refusal(calls(server, most=100), request(prompt="x" * 200), Context())
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "more than limits.message_bytes = 100" in message
            code, message = await refusal(calls(server), request(sampling={"top_p": 2.0}), Context())
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert message.startswith("top_p=2.0")

    asyncio.run(story())


@pytest.mark.parametrize(
    ("peer", "near"),
    [
        ("ipv4:127.0.0.1:80", True),
        ("ipv6:%5B::1%5D:80", True),
        ("ipv6:%5B::ffff:127.0.0.1%5D:80", True),
        ("unix:", True),
        ("ipv4:192.0.2.1:80", False),
        ("ipv6:%5B2001:db8::1%5D:80", False),
        ("ipv6:%5B::ffff:192.0.2.1%5D:80", False),
        ("", False),
        ("somebody", False),
    ],
)
def test_who_is_near(peer: str, near: bool) -> None:
    assert is_near(peer) is near
