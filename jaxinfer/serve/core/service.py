"""Engine core side of the stream: an `AsyncEngine` over core.proto. No jax: the caller of `serve` builds the engine."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import gc
import logging
import threading
import time
from collections.abc import AsyncIterable, Callable, Coroutine, Sequence
from typing import Any, Protocol, override, runtime_checkable

import grpc

from jaxinfer.engine.core import EngineCore
from jaxinfer.kv.journal import Journal
from jaxinfer.lora.store import LoRAError
from jaxinfer.protos.internal import core_pb2 as pb
from jaxinfer.protos.internal.core_pb2_grpc import CoreServicer, add_CoreServicer_to_server
from jaxinfer.sampling_params import QueueFullError, RequestError
from jaxinfer.serve.api.requests import ModelCard
from jaxinfer.serve.api.streams import Closed, EngineDeadError, merged
from jaxinfer.serve.core import wire
from jaxinfer.serve.core.async_engine import AsyncEngine, Outlet
from jaxinfer.serve.core.kv_event_encoder import KvEventEncoder
from jaxinfer.serve.core.outbox import Outbox
from jaxinfer.types import LoRARef, Request, SequenceDelta

STOPPED, FAULT, FAILED = 0, 1, 2
"""Results of `serve`, and exit codes of a core: stopped on request, ended by a fault, permanent startup failure."""

BEAT_SECONDS = 0.1
_IDLE_SECONDS = 2.0  # idle seconds after which a full garbage collection delays no request

# The API servers bound the requests; a prompt's log probabilities may be large.
OPTIONS = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))

_log = logging.getLogger("jaxinfer.serve.core")

Report = Callable[[pb.Startup], None]


@runtime_checkable
class Profiler(Protocol):
    """A device profiler. Both methods raise RuntimeError, with one sentence, if profiling is not possible now."""

    def start(self) -> None: ...

    def stop(self) -> str:
        """Stop the profile and return the folder with the trace."""
        ...


@dataclasses.dataclass(frozen=True)
class Built:
    """An engine that is ready, with its metadata for the front end. ``folder``: folder of tokenizer and template;
    ``journals``: cache journals of the engine's replicas, if KV events are enabled.

    ``engine`` is None in a process that follows another one: it takes no requests.
    """

    engine: EngineCore | None
    card: ModelCard
    folder: str
    profiler: Profiler | None = None
    journals: Sequence[Journal] = ()


async def serve(socket: str, build: Callable[[Report], Built], permanent: tuple[type[Exception], ...] = ()) -> int:
    """Listen on a unix socket, build the engine, serve one stream until it ends.

    Args:
        build: called once in a separate thread; may report progress from any thread.
        permanent: exceptions of ``build`` after which a retry cannot succeed; the message is for the user.

    Returns:
        `STOPPED`, `FAULT` or `FAILED`.
    """
    core = _Core(asyncio.get_running_loop())
    server = grpc.aio.server(options=OPTIONS)
    add_CoreServicer_to_server(core, server)
    server.add_insecure_port(f"unix:{socket}")
    await server.start()
    try:
        return await core.live(build, permanent)
    finally:
        await server.stop(grace=1.0)  # for written messages to arrive


@dataclasses.dataclass(eq=False, slots=True)
class _Feed:
    """The engine side of the stream ``number``.

    ``apart``: a large delta is being sent in chunks, and later deltas must not overtake it. Set by the engine thread,
    cleared by the event loop when everything is in the outbox.
    """

    request: Request
    number: int
    outlet: Outlet
    running: set[int]
    apart: bool = False
    deferred: dict[int, SequenceDelta] = dataclasses.field(default_factory=dict)


class _Core(CoreServicer):
    """The servicer of one core. All but `deliver`, `_answered`, `_tell` and `_report` runs in the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._outbox: Outbox[pb.FromCore] = Outbox()
        self._feeds: dict[int, _Feed] = {}
        self._sending: dict[int, asyncio.Task[None]] = {}  # senders of large deltas, by stream number
        self._engine: AsyncEngine | None = None
        self._profiler: Profiler | None = None
        self._taken = False
        self._left = loop.create_future()  # set when the front end requests the end, or is gone
        self._ended = loop.create_future()  # set when the stream is over
        self._tasks: set[asyncio.Task[None]] = set()

    # ---- lifecycle

    async def live(self, build: Callable[[Report], Built], permanent: tuple[type[Exception], ...]) -> int:
        self._spawn(self._beat())
        try:
            code = await self._start_and_serve(build, permanent)
        finally:
            for task in self._tasks:
                task.cancel()
        self._outbox.close()
        await self._ended  # the front end may only be connecting: wait until it has everything
        return code

    async def _start_and_serve(self, build: Callable[[Report], Built], permanent: tuple[type[Exception], ...]) -> int:
        building = _in_thread(functools.partial(build, self._report))
        await asyncio.wait({building, self._left}, return_when=asyncio.FIRST_COMPLETED)
        if not building.done():
            return STOPPED
        try:
            built = building.result()
        except permanent as error:
            self._outbox.put(pb.FromCore(failed=pb.Failed(message=str(error))))
            return FAILED
        except Exception as error:  # noqa: BLE001 - process boundary: the log has the traceback
            _log.exception("the start ended by a fault")
            self._outbox.put(pb.FromCore(fault=pb.Fault(message=f"the engine's start ended by a fault: {error!r}")))
            return FAULT
        return await self._serve(built)

    async def _serve(self, built: Built) -> int:
        if built.engine is None:
            return await self._follow(built)
        ended: asyncio.Future[Closed] = self._loop.create_future()
        tell = (
            functools.partial(self._tell, KvEventEncoder(built.journals, built.engine.loras))
            if built.journals
            else _silent
        )
        engine = AsyncEngine(built.engine, lambda closed: self._from_thread(_settle, ended, closed), tell)
        self._engine, self._profiler = engine, built.profiler
        engine.start()
        gc.collect()
        gc.freeze()  # existing objects stay: collections skip them from now on
        self._outbox.put(_ready(built))
        await asyncio.wait({ended, self._left}, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            self._outbox.put(pb.FromCore(fault=pb.Fault(message=ended.result().message)))
            await engine.stop(drain=False)  # its thread must log the fault before this process exits
            return FAULT
        await engine.stop(drain=False)
        return STOPPED

    async def _follow(self, built: Built) -> int:
        self._outbox.put(_ready(built))
        await self._left
        return STOPPED

    async def _beat(self) -> None:
        collected, quiet = 0, 0.0
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            if self._outbox.waiting:
                continue
            if self._engine is None:  # still starting: report that the process lives
                self._outbox.put(pb.FromCore(beat=pb.Beat()))
                continue
            pulse = self._engine.pulse()
            beat = pb.Beat(steps=pulse.steps, busy_seconds=pulse.busy, p99_step_seconds=pulse.p99)
            self._outbox.put(pb.FromCore(beat=beat))
            quiet = 0.0 if pulse.busy else quiet + BEAT_SECONDS
            if quiet >= _IDLE_SECONDS and pulse.steps != collected:
                collected = pulse.steps
                gc.collect()

    # ---- the stream

    @override
    async def Serve(self, request_iterator: AsyncIterable[pb.ToCore], context: grpc.aio.ServicerContext) -> None:
        if self._taken:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "this core has its front end")
        self._taken = True
        reading = asyncio.create_task(self._read(request_iterator))
        try:
            await self._outbox.run(context.write)
        finally:  # all messages are written, or the front end is gone
            reading.cancel()
            _settle(self._left, None)
            _settle(self._ended, None)

    async def _read(self, messages: AsyncIterable[pb.ToCore]) -> None:
        async for message in messages:
            match message.WhichOneof("kind"):
                case "submit":
                    self._submit(message.submit)
                case "abort":
                    self._spawn(self._abort(message.abort))
                case "leave":
                    self._leave(message.leave.number)
                case "ask":
                    self._answer(message.ask.number, self._answer_to(message.ask.question))
                case "load_lora":
                    self._answer(message.load_lora.number, self._load_lora(message.load_lora))
                case "unload_lora":
                    self._drop(AsyncEngine.unload_lora, message.unload_lora)
                case "release_lora":
                    ref = LoRARef(message.release_lora.name, message.release_lora.identity)
                    self._drop(AsyncEngine.release_lora, ref)
                case _:
                    break
        _settle(self._left, None)

    def _submit(self, message: pb.Submit) -> None:
        number = message.number
        try:
            engine = self._running()
            request = wire.request_of(message.request, time.monotonic())
        except (RequestError, EngineDeadError) as error:
            self._outbox.put(_refusal(number, error))
            return
        feed = _Feed(request, number, self, set(range(request.params.n)))
        self._feeds[number] = feed
        engine.attach(feed).add_done_callback(functools.partial(self._answered, feed))

    def _answered(self, feed: _Feed, future: concurrent.futures.Future[None]) -> None:
        """Accept or reject a request, in the thread that settled the future, mostly the engine's."""
        error = future.exception()
        if error is None:
            accepted = pb.Accepted(number=feed.number, **wire.seed_fields(feed.request.params.seed))
            self._from_thread(self._outbox.put, pb.FromCore(accepted=accepted))
        else:
            self._from_thread(self._refused, feed.number, error)

    def _refused(self, number: int, error: BaseException) -> None:
        self._feeds.pop(number, None)
        self._outbox.put(_refusal(number, error))

    def _leave(self, number: int) -> None:
        feed, sending = self._feeds.pop(number, None), self._sending.pop(number, None)
        if sending is not None:
            sending.cancel()
        if feed is not None and self._engine is not None:
            self._engine.detach(feed)

    async def _abort(self, message: pb.Abort) -> None:
        with contextlib.suppress(EngineDeadError):
            await self._running().abort(message.request_id, message.index if message.HasField("index") else None)

    def _answer(self, number: int, working: Coroutine[Any, Any, pb.Answer]) -> None:
        self._spawn(self._answered_by(number, working))

    async def _answered_by(self, number: int, working: Coroutine[Any, Any, pb.Answer]) -> None:
        try:
            answer = await working
        except (EngineDeadError, LoRAError, RuntimeError, MemoryError) as error:
            answer = pb.Answer(refusal=str(error) or type(error).__name__)
        answer.number = number
        self._outbox.put(pb.FromCore(answer=answer))

    async def _load_lora(self, message: pb.LoadLora) -> pb.Answer:
        loaded = await self._running().load_lora(message.name, message.path)
        return pb.Answer(lora=pb.LoadedLora(**loaded._asdict()))

    def _drop[T](self, how: Callable[[AsyncEngine, T], None], what: T) -> None:
        with contextlib.suppress(EngineDeadError, LoRAError):  # then there is nothing to drop
            how(self._running(), what)

    async def _answer_to(self, question: int) -> pb.Answer:
        engine = self._running()
        match question:
            case pb.Ask.STATS:
                return pb.Answer(stats=wire.stats_message(await engine.stats()))
            case pb.Ask.RESET_PREFIX_CACHE:
                return pb.Answer(pages=await engine.reset_prefix_cache())
            case pb.Ask.CHECK:
                await engine.check()
                return pb.Answer(done=True)
        if self._profiler is None:
            return pb.Answer(refusal="profiling is off: the server was started without profile_dir")
        if question == pb.Ask.START_PROFILE:
            await asyncio.to_thread(self._profiler.start)
            return pb.Answer(done=True)
        return pb.Answer(folder=await asyncio.to_thread(self._profiler.stop))

    def _running(self) -> AsyncEngine:
        if self._engine is None:
            raise EngineDeadError("the engine is starting")
        return self._engine

    # ---- from other threads

    def deliver(self, news: Sequence[tuple[_Feed, SequenceDelta | Closed]]) -> bool:
        """Send the deltas of one step as one message. Called in the engine thread."""
        numbered: list[tuple[int, SequenceDelta]] = []
        apart: list[tuple[_Feed, SequenceDelta]] = []
        for feed, item in news:
            if isinstance(item, SequenceDelta):
                feed.apart = feed.apart or wire.is_large(item)
                if feed.apart:
                    apart.append((feed, item))
                else:
                    numbered.append((feed.number, item))
        if not (numbered or apart):
            return True  # the engine has ended: the front end gets a fault message
        message = pb.FromCore(deltas=wire.deltas_message(numbered)) if numbered else None
        return self._from_thread(self._delivered, message, apart, [feed.number for feed, _ in news if not feed.running])

    def _tell(self, telling: KvEventEncoder) -> None:
        """Send the changes of the cached pages. Called in the engine thread."""
        for message in telling.messages():
            self._from_thread(self._outbox.put, pb.FromCore(kv_events=message))

    def _delivered(
        self, message: pb.FromCore | None, apart: Sequence[tuple[_Feed, SequenceDelta]], ended: list[int]
    ) -> None:
        if message is not None:
            self._outbox.put(message)
        for feed, delta in apart:
            self._defer(feed, delta)
        for number in ended:
            self._feeds.pop(number, None)

    def _defer(self, feed: _Feed, delta: SequenceDelta) -> None:
        """Defer a delta until the large delta of its stream is sent; deferred deltas are merged."""
        if not feed.apart:  # sent since the engine thread looked
            self._outbox.put(pb.FromCore(deltas=wire.deltas_message([(feed.number, delta)])))
            return
        before = feed.deferred.get(delta.index)
        feed.deferred[delta.index] = delta if before is None else merged(before, delta)
        if feed.number not in self._sending:
            self._sending[feed.number] = self._spawn(self._send_apart(feed))

    async def _send_apart(self, feed: _Feed) -> None:
        """Send a large delta in chunks, between other deltas: a long prompt's log probabilities take seconds."""
        while (large := next(filter(wire.is_large, feed.deferred.values()), None)) is not None:
            for part in wire.parts(feed.number, large):
                await self._outbox.put_last(pb.FromCore(deltas=part))
        deferred = [(feed.number, delta) for delta in feed.deferred.values()]
        self._outbox.put(pb.FromCore(deltas=wire.deltas_message(deferred)))
        feed.deferred.clear()
        feed.apart = False
        del self._sending[feed.number]

    def _report(self, startup: pb.Startup) -> None:
        self._from_thread(self._outbox.put, pb.FromCore(startup=startup))

    def _from_thread[**P](self, function: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> bool:
        """Call a function on the event loop; false if the loop is closed."""
        try:
            self._loop.call_soon_threadsafe(functools.partial(function, *args, **kwargs))
        except RuntimeError:
            return False
        return True

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _ready(built: Built) -> pb.FromCore:
    return pb.FromCore(ready=pb.Ready(card=wire.card_message(built.card), folder=built.folder))


def _refusal(number: int, error: BaseException) -> pb.FromCore:
    match error:
        case QueueFullError():
            refused = pb.Refused(kind=pb.Refused.QUEUE_FULL, message=error.reason)
        case RequestError():
            refused = pb.Refused(kind=pb.Refused.REQUEST, place=error.place, message=error.reason)
        case _:
            refused = pb.Refused(kind=pb.Refused.ENGINE, message=str(error))
    refused.number = number
    return pb.FromCore(refused=refused)


def _silent() -> None:
    """Do nothing: KV events are disabled."""


def _settle[T](future: asyncio.Future[T], value: T) -> None:
    if not future.done():
        future.set_result(value)


def _in_thread[T](function: Callable[[], T]) -> asyncio.Future[T]:
    """Run a function in a daemon thread, which does not delay the process's exit, and return its future."""
    future: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - passed on through the future
            future.set_exception(error)

    threading.Thread(target=run, name="jaxinfer-build", daemon=True).start()
    return asyncio.wrap_future(future)
