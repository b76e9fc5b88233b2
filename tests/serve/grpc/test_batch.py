"""Tests of `GenerateBatch` on a real server."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc import aio

from jaxinfer.protos.v1 import inference_pb2 as pb
from jaxinfer.protos.v1.inference_pb2_grpc import InferenceStub
from jaxinfer.serve.api.errors import ServeError
from jaxinfer.serve.grpc.bounds import Bounds
from jaxinfer.serve.grpc.inference import Batch, Inference
from jaxinfer.serve.grpc.rpc import Registrar, Rpc, SlowClients
from tests.serve.fake_engine import Mischief, expected_text, fake_tokenizer
from tests.serve.grpc.running import Keys, failure, plain, request, running, unpacked

PROMPT = fake_tokenizer().encode("Hi")


async def by_id(call: aio.StreamStreamCall) -> dict[str, list[pb.GenerateResponse]]:
    found: dict[str, list[pb.GenerateResponse]] = {}
    async for response in call:
        found.setdefault(response.request_id, []).append(response)
    return found


def text_of(responses: list[pb.GenerateResponse]) -> str:
    assert [responses[0].WhichOneof("event"), responses[-1].WhichOneof("event")] == ["started", "finished"]
    return "".join(response.delta.text for response in responses[1:-1])


def test_good_and_bad_requests_share_a_stream() -> None:
    asked = [request(request_id=f"good-{k}", sampling={"seed": k, "max_tokens": 20 + k}) for k in range(50)]
    asked[10:10] = [
        request(request_id="hot", sampling={"temperature": -1.0}),
        pb.GenerateRequest(request_id="empty"),
        pb.GenerateRequest(request_id="blank", prompt=""),
        request(request_id="other", model="other"),
    ]
    asked.append(request())

    async def story() -> None:
        async with running() as server:
            found = await by_id(server.inference.GenerateBatch(iter(asked)))
            for k in range(50):
                assert text_of(found.pop(f"good-{k}")) == expected_text(PROMPT, k, 0, 20 + k)
            errors = {name: found.pop(name) for name in ("hot", "empty", "blank", "other")}
            ((made, responses),) = found.items()
            assert (len(made), text_of(responses)) == (32, expected_text(PROMPT, 1, 0, 4))
            refused = [("hot", 3, "temperature"), ("empty", 3, "input"), ("blank", 3, "prompt"), ("other", 5, "model")]
            for name, code, field in refused:
                (error,) = (response.error for response in errors[name])
                assert error.code == code
                (violation,) = unpacked(error.details)["BadRequest"].field_violations
                assert (violation.field, violation.description) == (field, error.message)
            await server.baseline()

    asyncio.run(story())


def test_an_id_is_used_once_in_a_stream_even_if_its_request_has_ended() -> None:
    async def story() -> None:
        async with running() as server:
            call = server.inference.GenerateBatch()
            await call.write(request(request_id="one"))
            while (await call.read()).WhichOneof("event") != "finished":
                pass
            await call.write(request(request_id="one"))
            again = await call.read()
            assert again.error.code == grpc.StatusCode.ALREADY_EXISTS.value[0]
            assert unpacked(again.error.details)["BadRequest"].field_violations[0].field == "request_id"
            await call.write(request(request_id="two"))
            assert (await call.read()).WhichOneof("event") == "started"
            await call.done_writing()
            while await call.read() is not aio.EOF:
                pass
            assert await call.code() is grpc.StatusCode.OK

    asyncio.run(story())


def test_no_more_is_read_than_there_is_room_for() -> None:
    """The server reads three of ten thousand prompts at a time; the rest wait at the client."""

    async def story() -> None:
        async with running(Mischief(seconds=0.002)) as server:
            most, sent = 0, 0
            small = aio.server()
            registrar = Registrar(Keys(), SlowClients(30.0, 30.0), Bounds())
            registrar.add(small, pb.DESCRIPTOR.services_by_name["Inference"], Inference(lambda: server.frontend, 3))
            port = small.add_insecure_port("127.0.0.1:0")
            await small.start()

            async def prompts() -> AsyncIterator[pb.GenerateRequest]:
                nonlocal sent
                for _ in range(10_000):
                    sent += 1
                    yield request(prompt="x" * 1500, sampling={"max_tokens": 4})

            async with plain(port) as channel:
                call = InferenceStub(channel).GenerateBatch(prompts())
                for _ in range(200):
                    assert await call.read() is not aio.EOF
                    most = max(most, server.frontend.active)
                call.cancel()
            assert most == 3
            assert sent < 5000
            await server.baseline()
            await small.stop(None)

    asyncio.run(story())


def test_cancelling_the_stream_ends_all_its_requests() -> None:
    async def story() -> None:
        async with running(Mischief(seconds=0.002)) as server:
            call = server.inference.GenerateBatch()
            for _ in range(20):
                await call.write(request(sampling={"max_tokens": 2000}))
            for _ in range(30):
                await call.read()
            assert server.frontend.active == 20
            call.cancel()
            await server.baseline()

    asyncio.run(story())


def test_the_streams_deadline_is_that_of_every_request() -> None:
    async def story() -> None:
        async with running(Mischief(seconds=0.01)) as server:
            asked = [request(sampling={"max_tokens": 2000}) for _ in range(3)]
            found = await failure(server.inference.GenerateBatch(iter(asked), timeout=0.3))
            assert found.code is grpc.StatusCode.DEADLINE_EXCEEDED
            await server.baseline()

    asyncio.run(story())


def test_a_stream_that_the_server_sees_end_first_ends_by_its_deadline_too() -> None:
    class Ended(Rpc):
        """A stream without requests, with the given seconds until its deadline."""

        def __init__(self, left: float | None) -> None:
            self.left = left

        async def read(self) -> Any:
            return None

        def time_remaining(self) -> float | None:
            return self.left

    async def story(left: float | None) -> None:
        async with running() as server:
            await Batch(server.frontend, Ended(left), 1).run()

    asyncio.run(story(None))
    asyncio.run(story(0.5))
    with pytest.raises(ServeError, match="the deadline has passed"):
        asyncio.run(story(0.0))


def test_a_fault_in_one_request_is_opaque_and_the_others_go_on() -> None:
    async def story() -> None:
        async with running() as server:
            generate, count = server.frontend.generate, 0

            async def sometimes(call: object) -> object:
                nonlocal count
                count += 1
                if count == 2:
                    raise ZeroDivisionError("the secret")
                return await generate(call)

            server.frontend.generate = sometimes  # type: ignore[method-assign]
            found = await by_id(server.inference.GenerateBatch(iter([request(request_id=str(k)) for k in range(3)])))
            (broken,) = found.pop("1")
            assert broken.error.code == grpc.StatusCode.INTERNAL.value[0]
            assert "secret" not in broken.error.message
            assert {text_of(responses) for responses in found.values()} == {expected_text(PROMPT, 1, 0, 4)}

    asyncio.run(story())
