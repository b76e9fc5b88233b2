"""Tests of limits on the resources of clients: partial messages, silent calls, calls that never end."""

import asyncio
import contextlib
import pathlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from jaxinfer.protos.v1 import inference_pb2 as pb
from jaxinfer.serve.api.auth import key_entry, new_key
from jaxinfer.serve.api.requests import ServeLimits
from jaxinfer.serve.grpc import bounds
from jaxinfer.serve.grpc.bounds import STRANGERS, AnonymousCalls, Turns
from tests.serve.grpc.running import Running, failure, plain, running
from tests.serve.grpc.wire import Wire, prefix
from tests.serve.processes import ServerProcess, fake_server, wait_until

TOKENIZE, GENERATE = "/jaxinfer.v1.Inference/Tokenize", "/jaxinfer.v1.Inference/Generate"
CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
KEYS = {"a": ("alice", "infer"), "b": ("bob", "infer")}
ALICE, BOB = [(("authorization", f"Bearer {name}"),) for name in "ab"]
MIB = 1 << 20
STREAMS = 40
FEW = 8
"""Messages that are always allowed concurrently."""


def until(condition: Any) -> Any:
    """Wait for the condition without blocking other tasks."""

    async def wait() -> None:
        async with asyncio.timeout(30):
            while not condition():
                await asyncio.sleep(0.01)

    return wait()


# ---- memory


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, str]]:
    """Yield a server and its only key."""
    folder, key = tmp_path_factory.mktemp("guarded"), new_key()
    (folder / "keys.yaml").write_text(key_entry(key, "me", ["infer"]))
    with fake_server(folder, api_keys=str(folder / "keys.yaml"), header_seconds=3.0) as server:
        yield server, key


@pytest.mark.parametrize(("path", "share"), [(GENERATE, 0.1), (TOKENIZE, 0.1), (CHECK, 0.4), (WATCH, 0.4)])
def test_half_messages_without_a_key_hold_little(guarded: tuple[ServerProcess, str], path: str, share: float) -> None:
    """Unauthenticated calls that send all but the last bytes of 16 MiB messages and then stop hold little memory."""
    server, _ = guarded
    data = prefix(15 * MIB) + bytes(15 * MIB - 1000)
    before = server.resident_mib()

    async def story() -> None:
        async with await Wire.connect(server.grpc_port) as wire:
            streams = [wire.open(path) for _ in range(STREAMS)]
            await asyncio.gather(*(wire.send(stream, data) for stream in streams))
            assert server.resident_mib() - before < share * STREAMS * 15
            await asyncio.wait_for(wire.until_ended(*streams), 60)
        await asyncio.to_thread(wait_until, lambda: server.resident_mib() - before < 0.15 * STREAMS * 15, 30)

    asyncio.run(story())


def test_half_messages_of_one_key_hold_no_more_than_they_may(tmp_path: pathlib.Path) -> None:
    data = prefix(15 * MIB) + bytes(15 * MIB - 1000)

    async def story(server: ServerProcess, key: str) -> None:
        async with await Wire.connect(server.grpc_port) as wire:
            before = server.resident_mib()
            streams = [wire.open(TOKENIZE, ("authorization", f"Bearer {key}")) for _ in range(STREAMS)]
            sending = [asyncio.create_task(wire.send(stream, data)) for stream in streams]
            peak = before
            async with asyncio.timeout(60):
                while not wire.ended.issuperset(streams):
                    peak = max(peak, server.resident_mib())
                    await asyncio.sleep(0.05)
            assert sum(await asyncio.gather(*sending)) > 8 * MIB  # some of the data is received
            assert peak - before < 0.4 * STREAMS * 15

    key = new_key()
    (tmp_path / "keys.yaml").write_text(key_entry(key, "me", ["infer"]))
    settings = {"api_keys": str(tmp_path / "keys.yaml"), "header_seconds": 3.0, "max_receive_bytes": 64 * MIB}
    with fake_server(tmp_path, **settings) as server:
        asyncio.run(story(server, key))


# ---- time


@pytest.mark.parametrize("path", [GENERATE, TOKENIZE, "/jaxinfer.v1.Inference/GenerateBatch", "/no.such/Method"])
def test_who_may_not_call_is_told_before_the_message(path: str) -> None:
    async def story() -> None:
        async with running(keys=KEYS) as server:
            async with await Wire.connect(server.servers.port) as wire:
                streams = [wire.open(path), wire.open(path, ("authorization", "Bearer wrong"))]
                await asyncio.wait_for(wire.until_ended(*streams), 30)
            for metadata in ((), (("authorization", "Bearer wrong"),)):
                found = await silent(server, path, metadata)
                refused = grpc.StatusCode.UNIMPLEMENTED if "such" in path else grpc.StatusCode.UNAUTHENTICATED
                assert found.code is refused

    asyncio.run(story())


async def never() -> AsyncIterator[bytes]:
    """Simulate a client that opens a call and sends nothing."""
    await asyncio.Event().wait()
    yield b""


async def silent(server: Running, path: str, metadata: Any = ()) -> Any:
    """Return the failure of a call whose client sends nothing."""
    return await failure(server.channel.stream_unary(path)(never(), metadata=metadata, timeout=60))


@pytest.mark.parametrize("path", [GENERATE, TOKENIZE, CHECK, WATCH])
def test_a_request_that_does_not_come(path: str) -> None:
    async def story() -> None:
        async with running(keys=KEYS, header_seconds=0.5) as server:
            found = await asyncio.gather(*(silent(server, path, ALICE) for _ in range(FEW)))
            assert {each.code for each in found} == {grpc.StatusCode.DEADLINE_EXCEEDED}
            assert found[0].message == "the request did not come within 0.5 s"
            async with await Wire.connect(server.servers.port) as wire:
                streams = [wire.open(path, *ALICE) for _ in range(900)]
                for stream in streams[::2]:
                    await wire.send(stream, prefix(9) + b"12345678")
                await asyncio.wait_for(wire.until_ended(*streams), 60)

    asyncio.run(story())


def test_a_call_without_a_request_is_refused() -> None:
    async def story() -> None:
        async with running() as server:
            call = server.channel.stream_unary(TOKENIZE)(iter(()))
            found = await failure(call)
            assert (found.code, found.message) == (grpc.StatusCode.INVALID_ARGUMENT, "the call has no request")

    asyncio.run(story())


# ---- number of calls


def test_calls_of_strangers_are_few_and_the_oldest_give_way() -> None:
    async def story() -> None:
        async with running(keys=KEYS) as server:
            watch = server.channel.unary_stream(WATCH)
            calls = []
            for _ in range(STRANGERS + 20):
                calls.append(watch(b""))
                await calls[-1].read()
            await until(lambda: sum(call.done() for call in calls) >= 20)
            assert [call.done() for call in calls] == [True] * 20 + [False] * STRANGERS
            found = await failure(calls[0])
            assert found.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert found.message.startswith("256 calls without a key are open, and this was the oldest of 127.0.0.1")
            assert found.details["RetryInfo"].retry_delay.seconds == 1
            asked = server.inference.Tokenize(pb.TokenizeRequest(text="a"), metadata=ALICE)
            assert (await failure(asked)).code is grpc.StatusCode.OK

    asyncio.run(story())


def test_probes_are_answered_while_strangers_send_halves() -> None:
    async def story() -> None:
        async with running(keys=KEYS) as server, await Wire.connect(server.servers.port) as wire:
            streams = []
            for _ in range(5):
                streams += [wire.open(CHECK) for _ in range(3 * FEW)]
                for stream in streams[-3 * FEW :]:
                    await wire.send(stream, prefix(MIB) + bytes(1000))
                await HealthStub(server.channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
            async with asyncio.timeout(30):
                while len(wire.ended) < len(streams) - FEW:
                    await wire.change()

    asyncio.run(story())


def test_a_burst_of_probes_is_answered_whole() -> None:
    async def story() -> None:
        async with running(keys=KEYS) as server:
            calls = [failure(HealthStub(server.channel).Check(health_pb2.HealthCheckRequest())) for _ in range(200)]
            assert {found.code for found in await asyncio.gather(*calls)} == {grpc.StatusCode.OK}

    asyncio.run(story())


def test_a_client_whose_messages_do_not_come_waits_for_itself_alone() -> None:
    async def story() -> None:
        limits = ServeLimits(message_bytes=1 << 20)
        async with (
            running(keys=KEYS, limits=limits, max_receive_bytes=1 << 20, header_seconds=3.0) as server,
            plain(server.servers.port) as another,
        ):
            halves = [asyncio.create_task(silent(server, TOKENIZE, ALICE)) for _ in range(FEW)]
            await until(lambda: len(server.servers._slow._calls) == FEW)
            await asyncio.sleep(1.5)
            tokenize = another.unary_unary(TOKENIZE)
            asked = pb.TokenizeRequest(text="a").SerializeToString()
            behind = asyncio.ensure_future(failure(tokenize(asked, metadata=ALICE)))
            for _ in range(5):
                assert (await failure(tokenize(asked, metadata=BOB))).code is grpc.StatusCode.OK
            assert not behind.done()
            assert (await behind).code is grpc.StatusCode.OK
            assert {(await half).code for half in halves} == {grpc.StatusCode.DEADLINE_EXCEEDED}
            assert not server.servers._bounds._places

    asyncio.run(story())


def test_a_burst_of_one_client_is_served_whole() -> None:
    async def story() -> None:
        async with running(keys=KEYS, max_receive_bytes=1) as server:
            asked = pb.TokenizeRequest(text="Hello there")
            calls = [failure(server.inference.Tokenize(asked, metadata=ALICE)) for _ in range(800)]
            assert {found.code for found in await asyncio.gather(*calls)} == {grpc.StatusCode.OK}

    asyncio.run(story())


def test_too_many_who_wait_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        monkeypatch.setattr(bounds, "WAITING", 5)
        async with running(keys=KEYS, max_receive_bytes=1, header_seconds=2.0) as server:
            found = await asyncio.gather(*(silent(server, TOKENIZE, ALICE) for _ in range(FEW + 5 + 7)))
            codes = [each.code for each in found]
            assert codes.count(grpc.StatusCode.RESOURCE_EXHAUSTED) == 7
            assert codes.count(grpc.StatusCode.DEADLINE_EXCEEDED) == FEW + 5

    asyncio.run(story())


# ---- unit tests


class FakeCall:
    caller = None
    reading_since = None

    def __init__(self, host: str) -> None:
        self.host, self.error = host, None

    def peer(self) -> str:
        return f"ipv4:{self.host}:80"

    def cut(self, error: Exception) -> None:
        self.error = error

    async def only(self) -> Any: ...


def test_the_address_with_most_calls_gives_way() -> None:
    crowd, calls = (
        AnonymousCalls(4),
        [FakeCall(host) for host in ("1.1.1.1", "2.2.2.2", "2.2.2.2", "2.2.2.2", "3.3.3.3")],
    )
    with contextlib.ExitStack() as stack:
        for call in calls:
            stack.enter_context(crowd.joined(call))
        assert [call.error is not None for call in calls] == [False, True, False, False, False]
        assert len(crowd) == 4
    assert len(crowd) == 0


def test_addresses_take_turns() -> None:
    async def story() -> None:
        turns, order = Turns(1), []

        async def take(name: str, host: str) -> None:
            async with turns.taken(FakeCall(host)):
                order.append(name)
                await asyncio.sleep(0)

        hosts = {"a": "1.1.1.1", "b": "1.1.1.1", "c": "1.1.1.1", "d": "1.1.1.1", "e": "2.2.2.2", "f": "2.2.2.2"}
        tasks = {name: asyncio.create_task(take(name, host)) for name, host in hosts.items()}
        await asyncio.sleep(0)
        tasks["c"].cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        assert "".join(order) == "abedf"
        await take("last", "3.3.3.3")
        assert turns._turns.held == 0

    asyncio.run(story())


def test_a_turn_that_comes_too_late_is_passed_on() -> None:
    async def story() -> None:
        turns = Turns(1)
        async with turns.taken(FakeCall("1.1.1.1")):
            late = asyncio.create_task(turns._turns.take("1.1.1.1"))
            await asyncio.sleep(0)
        late.cancel()  # granted in the line above, but its task has not run since
        with pytest.raises(asyncio.CancelledError):
            await late
        assert turns._turns.held == 0

    asyncio.run(story())
