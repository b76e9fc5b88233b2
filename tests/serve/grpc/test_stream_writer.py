"""Tests of `StreamWriter`, which moves deltas from a generation to a transport that is slow, fails or is closed."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.engine.scheduling.stats import EngineStats
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.serve.api.errors import Kind, ServeError
from jaxinfer.serve.api.streams import Closed, DeltaStream
from jaxinfer.serve.frontend.generation import Generation
from jaxinfer.serve.grpc.stream_writer import StreamWriter
from jaxinfer.text.output import OutputDelta
from jaxinfer.types import FinishReason, Request, SequenceDelta


class Engine:
    """A scripted engine with one request and two outputs."""

    def __init__(self) -> None:
        self.left: list[str] = []
        request = Request("r", (1, 2), SamplingParams(n=2, seed=0))
        self.stream = DeltaStream(request, lambda stream: self.left.append("engine"))
        self.generation = Generation(self, self.stream, None, lambda name, _: self.left.append(name), None)

    def put(self, index: int, token: int, reason: FinishReason | None = None) -> None:
        self.stream.take(SequenceDelta("r", index, [token], finish_reason=reason))

    def end(self) -> None:
        for index in (0, 1):
            self.put(index, 99, FinishReason.LENGTH)

    async def submit(self, request: Request) -> DeltaStream:
        raise NotImplementedError

    async def abort(self, request_id: str, index: int | None = None) -> None:
        raise NotImplementedError

    async def stats(self) -> EngineStats:
        raise NotImplementedError

    async def reset_prefix_cache(self) -> int:
        raise NotImplementedError


class Transport:
    """A transport that records writes; a write blocks while it is closed."""

    def __init__(self) -> None:
        self.tokens: list[list[int]] = [[], []]
        self.reasons: list[str | None] = [None, None]
        self.begun = 0
        self.open = asyncio.Event()
        self.open.set()
        self._writing = False

    async def write(self, piece: OutputDelta) -> None:
        assert not self._writing, "gRPC takes one write at a time"
        self._writing, self.begun = True, self.begun + 1
        await self.open.wait()
        self._writing = False
        assert self.reasons[piece.index] is None
        self.tokens[piece.index] += piece.token_ids
        self.reasons[piece.index] = piece.finish_reason


Script = Callable[[Engine, Transport], Awaitable[None]]


def played(script: Script) -> tuple[Engine, Transport]:
    """Run the pump concurrently with the script until both end."""

    async def scenario() -> tuple[Engine, Transport]:
        engine, transport = Engine(), Transport()
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            group.create_task(StreamWriter(engine.generation, transport.write).run())
            await script(engine, transport)
        return engine, transport

    return asyncio.run(scenario())


@given(st.lists(st.sampled_from(["token", "token", "other", "pass", "shut", "open"]), max_size=40))
def test_every_token_comes_once_and_in_order(actions: list[str]) -> None:
    sent: list[list[int]] = [[], []]

    async def script(engine: Engine, transport: Transport) -> None:
        for token, action in enumerate(actions):
            match action:
                case "token" | "other":
                    index = 1 if action == "other" else 0
                    sent[index].append(token)
                    engine.put(index, token)
                case "pass":
                    await asyncio.sleep(0)
                case "shut":
                    transport.open.clear()
                case "open":
                    transport.open.set()
        engine.end()
        transport.open.set()

    engine, transport = played(script)
    assert transport.tokens == [[*tokens, 99] for tokens in sent]
    assert transport.reasons == ["length", "length"]
    assert engine.left == ["r"]


def test_a_token_is_written_before_who_brings_it_goes_on() -> None:
    async def script(engine: Engine, transport: Transport) -> None:
        await asyncio.sleep(0)
        for token in range(3):
            engine.put(0, token)
            assert transport.tokens[0] == list(range(token + 1))
        engine.end()

    assert played(script)[1].begun == 5


def test_what_comes_during_a_write_is_merged() -> None:
    async def script(engine: Engine, transport: Transport) -> None:
        await asyncio.sleep(0)
        transport.open.clear()
        for token in range(100):
            engine.put(0, token)
        assert transport.begun == 1
        engine.end()
        transport.open.set()

    assert played(script)[1].begun == 3  # the first token; the other tokens with the end; the other output


def raised_by(write: Callable[[OutputDelta], Awaitable[None]], script: Callable[[Engine], None]) -> Exception:
    async def scenario() -> Exception:
        engine = Engine()
        running = asyncio.ensure_future(StreamWriter(engine.generation, write).run())
        await asyncio.sleep(0)
        script(engine)
        await asyncio.wait([running], timeout=30)
        engine.end()  # the generation is no longer read
        error = running.exception()
        assert isinstance(error, Exception)
        return error

    return asyncio.run(scenario())


def test_an_error_of_the_transport_is_raised() -> None:
    async def fail(piece: OutputDelta) -> None:
        await asyncio.sleep(0)
        raise ConnectionError("gone")

    assert str(raised_by(fail, lambda engine: engine.put(0, 1))) == "gone"


def test_an_error_of_the_engine_is_raised() -> None:
    async def take(piece: OutputDelta) -> None: ...

    dead = raised_by(take, lambda engine: engine.stream.take(Closed("the engine is gone")))
    assert isinstance(dead, ServeError)
    assert dead.kind is Kind.UNAVAILABLE
    stopping = ServeError(Kind.UNAVAILABLE, "stops")
    assert raised_by(take, lambda engine: engine.generation.cut(stopping)) is stopping


@pytest.mark.parametrize("write", ["ended", "ends", "waits"])
def test_nothing_is_written_for_who_has_gone(write: str) -> None:
    async def scenario() -> None:
        engine, transport = Engine(), Transport()

        async def call() -> None:
            async with engine.generation as generation:
                await StreamWriter(generation, transport.write).run()

        running = asyncio.ensure_future(call())
        await asyncio.sleep(0)
        if write != "ended":
            transport.open.clear()
        engine.put(0, 1)
        assert transport.begun == 1
        running.cancel()
        if write == "ends":  # the write and the call end at the same time
            transport.open.set()
        engine.put(0, 2)
        begun = transport.begun
        with pytest.raises(asyncio.CancelledError):
            await running
        engine.put(0, 3)
        await asyncio.sleep(0.01)
        assert transport.begun == begun
        assert engine.left == ["r", "engine"]
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(scenario())
