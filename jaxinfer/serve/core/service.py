"""Engine core side of the stream: an `AsyncEngine` behind a socket. No jax: the caller of `serve` builds the engine."""

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
from typing import Any

import grpc

from jaxinfer.engine.core import EngineCore
from jaxinfer.engine.scheduling.stats import EngineStats
from jaxinfer.kv.journal import Journal
from jaxinfer.lora.store import LoadedLoRA, LoRAError
from jaxinfer.sampling_params import QueueFullError, RequestError
from jaxinfer.serve.api.requests import ModelCard
from jaxinfer.serve.api.streams import Closed, EngineDeadError
from jaxinfer.serve.core import messages
from jaxinfer.serve.core.async_engine import AsyncEngine, Outlet
from jaxinfer.serve.core.kv_event_encoder import KvEventEncoder
from jaxinfer.serve.core.operate import ReadWeights, operate
from jaxinfer.serve.core.operations import AnyOperation, WeightState
from jaxinfer.serve.core.outbox import Outbox
from jaxinfer.serve.core.pauses import Weights
from jaxinfer.serve.core.profiling import Profiler, Profiling
from jaxinfer.types import Request, SequenceDelta

STOPPED, FAULT, FAILED = 0, 1, 2
"""Results of `serve`, and exit codes of a core: stopped on request, ended by a fault, permanent startup failure."""

BEAT_SECONDS = 0.1
_IDLE_SECONDS = 2.0  # idle seconds after which a full garbage collection delays no request

# The API servers bound the requests; a prompt's log probabilities may be large.
OPTIONS = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))

_log = logging.getLogger("jaxinfer.serve.core")

Report = Callable[[messages.StartupEvent], None]


@dataclasses.dataclass(frozen=True)
class Built:
    """An engine that is ready, with its metadata for the front end. ``folder``: folder of tokenizer and template;
    ``journals``: cache journals of the engine's replicas, if KV events are enabled.

    ``engine`` is None in a process that follows another one: it takes no requests. ``weights``: see `AsyncEngine`;
    ``read_weights``: see `jaxinfer.serve.core.operate.ReadWeights`.
    """

    engine: EngineCore | None
    card: ModelCard
    folder: str
    profiler: Profiler | None = None
    journals: Sequence[Journal] = ()
    weights: Weights | None = None
    read_weights: ReadWeights | None = None


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
    service, method = messages.METHOD.strip("/").split("/")
    handlers = {method: grpc.stream_stream_rpc_method_handler(core.serve)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
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


class _Core:
    """One core. All but `deliver`, `_answered`, `_tell` and `_report` runs in the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._outbox: Outbox[bytes] = Outbox()
        self._feeds: dict[int, _Feed] = {}
        self._sending: dict[int, asyncio.Task[None]] = {}  # senders of large deltas, by stream number
        self._engine: AsyncEngine | None = None
        self._built: Built | None = None
        self._profiling: Profiling | None = None
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
            self._send(messages.Failed(str(error)))
            return FAILED
        except Exception as error:  # noqa: BLE001 - process boundary: the log has the traceback
            _log.exception("the start ended by a fault")
            self._send(messages.Fault(f"the engine's start ended by a fault: {error!r}"))
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
        engine = AsyncEngine(
            built.engine, lambda closed: self._from_thread(_settle, ended, closed), tell, built.weights
        )
        self._engine, self._built = engine, built
        if built.profiler is not None:
            self._profiling = Profiling(built.profiler, lambda: engine.steps)
        engine.start()
        gc.collect()
        gc.freeze()  # existing objects stay: collections skip them from now on
        self._send(messages.Ready(built.card, built.folder))
        await asyncio.wait({ended, self._left}, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            self._send(messages.Fault(ended.result().message))
            await engine.stop(drain=False)  # its thread must log the fault before this process exits
            return FAULT
        await engine.stop(drain=False)
        return STOPPED

    async def _follow(self, built: Built) -> int:
        self._send(messages.Ready(built.card, built.folder))
        await self._left
        return STOPPED

    async def _beat(self) -> None:
        collected, quiet = 0, 0.0
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            if self._outbox.waiting:
                continue
            if self._engine is None:  # still starting: report that the process lives
                self._send(messages.Pulse())
                continue
            pulse = self._engine.pulse()
            self._send(pulse)
            quiet = 0.0 if pulse.busy else quiet + BEAT_SECONDS
            if quiet >= _IDLE_SECONDS and pulse.steps != collected:
                collected = pulse.steps
                gc.collect()

    # ---- the stream

    async def serve(self, incoming: AsyncIterable[bytes], context: grpc.aio.ServicerContext) -> None:
        if self._taken:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "this core has its front end")
        self._taken = True
        reading = asyncio.create_task(self._read(incoming))
        try:
            await self._outbox.run(context.write)
        finally:  # all messages are written, or the front end is gone
            reading.cancel()
            _settle(self._left, None)
            _settle(self._ended, None)

    async def _read(self, incoming: AsyncIterable[bytes]) -> None:
        try:
            async for data in incoming:
                message = messages.decode_to_core(data)
                if isinstance(message, messages.Stop):
                    break
                self._take(message)
        except messages.MessageError:
            _log.exception("the front end sent something else than messages")
        _settle(self._left, None)

    def _take(self, message: messages.ToCore) -> None:
        match message:
            case messages.Submit():
                self._submit(message)
            case messages.Abort():
                self._spawn(self._abort(message))
            case messages.Leave():
                self._leave(message.number)
            case messages.Ask():
                self._spawn(self._answer(message.number, self._answer_to(message.question)))
            case messages.StartProfile():
                self._spawn(self._answer(message.number, self._start_profile(message.steps)))
            case messages.LoadLora():
                self._spawn(self._answer(message.number, self._load_lora(message)))
            case messages.Operate():
                self._spawn(self._answer(message.number, self._operate(message.operation)))
            case messages.UnloadLora():
                self._drop(AsyncEngine.unload_lora, message.name)
            case messages.ReleaseLora():
                self._drop(AsyncEngine.release_lora, message.lora)

    def _submit(self, message: messages.Submit) -> None:
        number = message.number
        try:
            engine = self._running()
            request = messages.decode_request(message.request, time.monotonic())
        except (RequestError, EngineDeadError) as error:
            self._send(_refusal(number, error))
            return
        feed = _Feed(request, number, self, set(range(request.params.n)))
        self._feeds[number] = feed
        engine.attach(feed).add_done_callback(functools.partial(self._answered, feed))

    def _answered(self, feed: _Feed, future: concurrent.futures.Future[None]) -> None:
        """Accept or reject a request, in the thread that settled the future, mostly the engine's."""
        error = future.exception()
        if error is None:
            self._from_thread(self._send, messages.Accepted(feed.number, feed.request.params.seed))
        else:
            self._from_thread(self._refused, feed.number, error)

    def _refused(self, number: int, error: BaseException) -> None:
        self._feeds.pop(number, None)
        self._send(_refusal(number, error))

    def _leave(self, number: int) -> None:
        feed, sending = self._feeds.pop(number, None), self._sending.pop(number, None)
        if sending is not None:
            sending.cancel()
        if feed is not None and self._engine is not None:
            self._engine.detach(feed)

    async def _abort(self, message: messages.Abort) -> None:
        with contextlib.suppress(EngineDeadError):
            await self._running().abort(message.request_id, message.index)

    async def _answer(self, number: int, working: Coroutine[Any, Any, Any]) -> None:
        try:
            value = await working
            self._send((messages.Operated if isinstance(value, WeightState) else messages.Answer)(number, value))
        except RequestError as error:
            self._send(_refusal(number, error))
        except (EngineDeadError, LoRAError, RuntimeError, MemoryError, OSError) as error:
            self._send(messages.Refused(number, "question", str(error) or type(error).__name__))

    async def _load_lora(self, message: messages.LoadLora) -> LoadedLoRA:
        return await self._running().load_lora(message.name, message.path)

    def _drop[T](self, how: Callable[[AsyncEngine, T], None], what: T) -> None:
        with contextlib.suppress(EngineDeadError, LoRAError):  # then there is nothing to drop
            how(self._running(), what)

    async def _answer_to(self, question: str) -> EngineStats | int | str | None:
        engine = self._running()
        match question:
            case "stats":
                return await engine.stats()
            case "reset_prefix_cache":
                return await engine.reset_prefix_cache()
            case "check":
                await engine.check()
                return None
            case "stop_profile":
                return await self._profiles().stop()
        await self._profiles().wait()
        return None

    async def _start_profile(self, steps: int) -> None:
        await self._profiles().start(steps)

    def _profiles(self) -> Profiling:
        if self._profiling is None:
            raise RuntimeError("profiling is off: the server was started without profile_dir")
        return self._profiling

    async def _operate(self, operation: AnyOperation) -> WeightState:
        read = None if self._built is None else self._built.read_weights
        return await operate(self._running(), operation, read)

    def _running(self) -> AsyncEngine:
        if self._engine is None:
            raise EngineDeadError("the engine is starting")
        return self._engine

    # ---- from other threads

    def deliver(self, news: Sequence[tuple[_Feed, SequenceDelta | Closed]]) -> bool:
        """Send the deltas of one step, mostly as one message. Called in the engine thread."""
        numbered: list[tuple[int, SequenceDelta]] = []
        apart: list[tuple[_Feed, SequenceDelta]] = []
        for feed, item in news:
            if isinstance(item, SequenceDelta):
                feed.apart = feed.apart or messages.is_large(item)
                if feed.apart:
                    apart.append((feed, item))
                else:
                    numbered.append((feed.number, item))
        if not (numbered or apart):
            return True  # the engine has ended: the front end gets a fault message
        data = [messages.encode(some) for some in messages.split(messages.deltas_of(numbered))] if numbered else []
        return self._from_thread(self._delivered, data, apart, [feed.number for feed, _ in news if not feed.running])

    def _tell(self, telling: KvEventEncoder) -> None:
        """Send the changes of the cached pages. Called in the engine thread."""
        for events in telling.messages():
            self._from_thread(self._send, events)

    def _delivered(self, data: Sequence[bytes], apart: Sequence[tuple[_Feed, SequenceDelta]], ended: list[int]) -> None:
        for message in data:
            self._outbox.put(message)
        for feed, delta in apart:
            self._defer(feed, delta)
        for number in ended:
            self._feeds.pop(number, None)

    def _defer(self, feed: _Feed, delta: SequenceDelta) -> None:
        """Defer a delta until the large delta of its stream is sent; deferred deltas are merged."""
        if not feed.apart:  # sent since the engine thread looked
            self._send(messages.deltas_of([(feed.number, delta)]))
            return
        before = feed.deferred.get(delta.index)
        feed.deferred[delta.index] = delta if before is None else before.extended(delta)
        if feed.number not in self._sending:
            self._sending[feed.number] = self._spawn(self._send_apart(feed))

    async def _send_apart(self, feed: _Feed) -> None:
        """Send a large delta in chunks, between other deltas: a long prompt's log probabilities take seconds."""
        while (large := next(filter(messages.is_large, feed.deferred.values()), None)) is not None:
            for part in messages.parts(feed.number, large):
                await self._outbox.put_last(messages.encode(part))
        self._send(messages.deltas_of([(feed.number, delta) for delta in feed.deferred.values()]))
        feed.deferred.clear()
        feed.apart = False
        del self._sending[feed.number]

    def _report(self, event: messages.StartupEvent) -> None:
        self._from_thread(self._send, event)

    def _send(self, message: messages.FromCore) -> None:
        self._outbox.put(messages.encode(message))

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


def _refusal(number: int, error: BaseException) -> messages.Refused:
    match error:
        case QueueFullError():
            return messages.Refused(number, "queue_full", error.reason)
        case RequestError():
            return messages.Refused(number, "request", error.reason, error.place)
    return messages.Refused(number, "engine", str(error))


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
