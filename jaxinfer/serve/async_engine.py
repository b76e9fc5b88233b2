"""The engine for many clients: one thread steps it, any number of event loops wait for its deltas."""

from __future__ import annotations

import asyncio
import bisect
import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

from jaxinfer.engine.core import EngineCore
from jaxinfer.engine.scheduling.stats import EngineStats
from jaxinfer.lora.store import LoadedLoRA, LoRAError, LoRAStore
from jaxinfer.sampling_params import QueueFullError, RequestError
from jaxinfer.serve.streams import Closed, DeltaStream, EngineDeadError
from jaxinfer.types import FinishReason, LoRARef, Request, SequenceDelta

__all__ = ["AsyncEngine", "EngineDeadError", "Feed", "Outlet", "Pulse", "Stream"]


@runtime_checkable
class Outlet(Protocol):
    """Sink of the deltas of some requests; compared by ``==`` and hashed, to find what goes to the same one."""

    def deliver(self, news: Sequence[tuple[Any, SequenceDelta | Closed]]) -> bool:
        """Take what one step brought to its feeds, on the engine's thread; false: nobody is there any more."""
        ...


@runtime_checkable
class Feed(Protocol):
    """The engine's end of a request.

    Attributes:
        request: replaced when it is accepted, by the one with its seed resolved.
        running: samples that have not ended; the engine thread's.
    """

    request: Request
    running: set[int]

    @property
    def outlet(self) -> Outlet: ...


News = tuple[Feed, SequenceDelta | Closed]


@dataclasses.dataclass(frozen=True, slots=True)
class Pulse:
    """``steps`` that ended; ``busy``: seconds since the thread did something, while there is work, else 0; ``p99``: the
    99th percentile of the seconds that they took."""

    steps: int
    busy: float
    p99: float = 0.0


_BOUNDS = tuple(0.01 * 1.1**power for power in range(120))
"""Seconds, from 10 ms to 15 minutes: what is shorter makes no difference to whoever asks whether an engine hangs."""


class _StepTimes:
    """Histogram of the steps' durations, at the cost of one search for each. One thread adds, any may ask."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_BOUNDS) + 1)

    def add(self, seconds: float) -> None:
        self._counts[bisect.bisect_left(_BOUNDS, seconds)] += 1

    def p99(self) -> float:
        """99th percentile in seconds, at most a tenth too large; 0 before the first step."""
        counts = list(self._counts)
        beyond = sum(counts) // 100
        for place in range(len(counts) - 1, -1, -1):
            if counts[place] > beyond:
                return _BOUNDS[min(place, len(_BOUNDS) - 1)]
            beyond -= counts[place]
        return 0.0


class AsyncEngine:
    """Steps an engine in a thread of its own; all methods but `start` may be called from any event loop.

    Clients put calls into an inbox, which the thread empties between two steps: no lock is held while it steps, and
    without work it sleeps in the inbox. Deltas go to each loop once a step. What a client has not fetched yet is
    merged, one delta for each sample, so that a slow one costs others nothing and loses no token. Where the engine
    does not run, all that asks it raises EngineDeadError.

    ```
    async with AsyncEngine(engine) as served:
        async for delta in served.generate(request): ...
    ```

    Args:
        on_end: called by the thread when it ends, stopped or by a fault.
        after: called by the thread after each step, and whenever something was done between steps.
    """

    def __init__(
        self,
        engine: EngineCore,
        on_end: Callable[[Closed], object] | None = None,
        after: Callable[[], object] = lambda: None,
    ) -> None:
        self._engine, self._on_end, self._after = engine, on_end, after
        self._inbox: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._streams: dict[str, Feed] = {}
        self._thread: threading.Thread | None = None
        self._closed: Closed | None = Closed("the engine is not started")
        self._stopping = False
        self._steps = 0
        self._times = _StepTimes()
        self._joining = 0  # requests in the inbox
        self._counting = threading.Lock()
        self._since: float | None = None  # when the thread began what it does; None: it waits for a call
        self._retained = collections.Counter[LoRARef]()

    # ---- life

    def start(self) -> None:
        """Begin to serve. Raises EngineDeadError if it was started before."""
        if self._thread is not None:
            raise EngineDeadError("the engine was started before")
        self._thread = threading.Thread(target=self._main, name="jaxinfer-engine", daemon=True)
        self._closed = None
        self._thread.start()

    async def stop(self, drain: bool = True) -> None:
        """Refuse new requests, let the others finish (``drain``) or abort them, and return when nothing is left."""
        if self._thread is None:
            return
        with contextlib.suppress(EngineDeadError):
            await self._ask(functools.partial(self._stop, drain))
        await asyncio.to_thread(self._thread.join)

    async def __aenter__(self) -> AsyncEngine:
        self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await self.stop(drain=kind is None)

    # ---- requests

    async def generate(self, request: Request) -> AsyncGenerator[SequenceDelta, None]:
        """The deltas of all samples of a validated request, until the last one has ended.

        Leaving early (a break, a cancelled task, ``aclose``) aborts the request.

        Raises:
            RequestError, QueueFullError: it is refused.
            EngineDeadError: the engine does not run, or ends by a fault.
        """
        async with await self.submit(request) as stream:
            async for delta in stream:
                yield delta

    async def submit(self, request: Request) -> Stream:
        """`generate` in two steps: raises here, before the first delta. Use it with ``async with``."""
        stream = Stream(request, asyncio.get_running_loop(), self.detach)
        try:
            await asyncio.wrap_future(self.attach(stream))
        except asyncio.CancelledError:
            self.detach(stream)
            raise
        return stream

    def attach(self, feed: Feed) -> concurrent.futures.Future[None]:
        """Submit ``feed.request``, deltas go to ``feed.outlet``. The future fails as `submit` does, at once where the
        queue is full: under overload nobody waits for the end of a step to be refused."""
        try:
            with self._counting:
                if self._closed is None:
                    self._engine.check_room(feed.request, self._joining)
                self._joining += 1
        except QueueFullError as refusal:
            refused: concurrent.futures.Future[None] = concurrent.futures.Future()
            refused.set_exception(refusal)
            return refused
        future = self._post(functools.partial(self._add, feed))
        future.add_done_callback(self._joined)
        return future

    def _joined(self, _: concurrent.futures.Future[None]) -> None:
        with self._counting:
            self._joining -= 1

    def detach(self, feed: Feed) -> None:
        """A client has gone: abort its request. Nobody waits for the answer."""
        self._post(functools.partial(self._forget, feed))

    async def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one of its samples; its stream gets a last delta that says so. Unknown ids are ignored."""
        await self._ask(functools.partial(self._abort, request_id, index))

    # ---- questions

    async def stats(self) -> EngineStats:
        """Statistics of the engine, as they are between two steps."""
        return await self._ask(self._engine.stats)

    def stats_now(self, timeout: float | None = None) -> EngineStats:
        """`stats` for a thread without an event loop; TimeoutError if no step ends within ``timeout`` seconds."""
        return self._post(self._engine.stats).result(timeout)

    async def reset_prefix_cache(self) -> int:
        """See `Backend.reset_prefix_cache`."""
        return await self._ask(self._engine.reset_prefix_cache)

    async def check(self) -> None:
        """A fault, which ends the engine, unless all slots and pages are accounted for."""
        await self._ask(self._engine.check)

    # ---- adapters

    async def load_lora(self, name: str, path: str) -> LoadedLoRA:
        """See `LoRABackend`: who loads several takes one after the other."""
        store = self._loras()
        ref = await asyncio.to_thread(store.load, name, path)
        store.retain(ref)
        self._retained[ref] += 1
        return next(each for each in store.list() if each.name == name)

    def unload_lora(self, name: str) -> None:
        """See `LoRABackend`; names that are not known are ignored."""
        with contextlib.suppress(RequestError):
            self._loras().unload(name)

    def release_lora(self, ref: LoRARef) -> None:
        """See `LoRABackend`; what was not loaded, or is released already, is ignored."""
        if self._retained[ref]:
            self._retained[ref] -= 1
            self._loras().release(ref)

    def _loras(self) -> LoRAStore:
        if self._closed is not None:
            raise self._closed.error()
        if self._engine.loras is None:
            raise LoRAError("this engine serves no adapters: it needs enable_lora")
        return self._engine.loras

    def pulse(self) -> Pulse:
        """Whether the thread gets on, from any thread and without waiting for it."""
        since = self._since
        return Pulse(self._steps, 0.0 if since is None else time.monotonic() - since, self._times.p99())

    # ---- the way to the thread

    async def _ask[T](self, function: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._post(function))

    def _post[T](self, function: Callable[[], T]) -> concurrent.futures.Future[T]:
        call = _Call(function)
        self._inbox.put(call)
        if self._closed is not None:  # else the thread will come by: it closes first and empties the inbox then
            self._refuse_waiting(self._closed)
        return call.future

    def _refuse_waiting(self, closed: Closed) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._inbox.get_nowait().refuse(closed)

    # ---- all below runs in the thread

    def _main(self) -> None:
        closed = Closed("the engine was stopped")
        try:
            self._serve()
        except BaseException as fault:  # whatever it is, nobody may wait for ever
            closed = Closed(f"the engine ended by a fault: {type(fault).__name__}: {fault}", fault)
            raise
        finally:
            self._closed = closed
            self._since = None
            self._refuse_waiting(closed)
            _post((feed, closed) for feed in self._streams.values())
            self._streams.clear()
            if self._on_end is not None:
                self._on_end(closed)

    def _serve(self) -> None:
        while self._engine.has_work or not self._stopping:
            if not self._engine.has_work:
                self._since = None
                call = self._inbox.get()
                self._since = time.monotonic()
                call.run()
            self._answer()
            stepped = self._engine.has_work
            if stepped:
                self._deliver(self._engine.step())
                self._steps += 1
            self._after()
            before, self._since = self._since, time.monotonic()
            if stepped and before is not None:
                self._times.add(self._since - before)

    def _answer(self) -> None:
        """The calls that are there now. Later ones come after the next step."""
        for _ in range(self._inbox.qsize()):
            self._inbox.get().run()

    def _add(self, feed: Feed) -> None:
        if self._stopping:
            raise Closed("the engine is stopping").error()
        feed.request = self._engine.add(feed.request)
        self._streams[feed.request.request_id] = feed

    def _abort(self, request_id: str, index: int | None) -> None:
        feed = self._streams.get(request_id)
        if feed is None:
            return
        self._engine.abort(request_id, index)
        ended = [i for i in feed.running if index in (None, i)]
        self._deliver([SequenceDelta(request_id, i, [], finish_reason=FinishReason.ABORT) for i in ended])

    def _forget(self, feed: Feed) -> None:
        request_id = feed.request.request_id
        if self._streams.get(request_id) is feed:  # another request may have the id of one that has ended
            self._engine.abort(request_id)
            del self._streams[request_id]

    def _stop(self, drain: bool) -> None:
        self._stopping = True
        if not drain:
            for request_id in list(self._streams):
                self._abort(request_id, None)

    def _deliver(self, deltas: list[SequenceDelta]) -> None:
        """Hand each delta to its feed, unless its client has gone."""
        mine: list[News] = []
        for delta in deltas:
            feed = self._streams.get(delta.request_id)
            if feed is None or delta.index not in feed.running:
                continue
            mine.append((feed, delta))
            if delta.finish_reason is not None:
                feed.running.discard(delta.index)
                if not feed.running:
                    del self._streams[delta.request_id]
        for feed in _post(mine):
            self._forget(feed)


class Stream(DeltaStream):
    """A stream whose reader is on an event loop of the engine's own process: a `Feed`, from `AsyncEngine.submit`."""

    def __init__(self, request: Request, loop: asyncio.AbstractEventLoop, leave: Callable[[Stream], None]) -> None:
        super().__init__(request, leave)
        self.running = set(range(request.params.n))
        self.outlet = _Loop(loop)


class _Call:
    """A function for the engine thread and the future of its result."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self.future: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self._function())
        except (RequestError, EngineDeadError) as refusal:
            self.future.set_exception(refusal)
        except BaseException as fault:
            self.future.set_exception(Closed(f"the engine ended by a fault: {fault}", fault).error())
            raise

    def refuse(self, closed: Closed) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(closed.error())


class _Loop:
    """The outlet of all streams whose readers are on one event loop."""

    __slots__ = ("_loop",)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Loop) and other._loop is self._loop

    def __hash__(self) -> int:
        return id(self._loop)

    def deliver(self, news: Sequence[tuple[Any, SequenceDelta | Closed]]) -> bool:
        try:
            self._loop.call_soon_threadsafe(_take_all, news)
        except RuntimeError:  # asyncio's way to say that the loop is closed
            return False
        return True


def _post(news: Iterable[News]) -> list[Feed]:
    """Call each outlet once; returns the feeds of those that are gone."""
    by_outlet: dict[Outlet, list[News]] = collections.defaultdict(list)
    for item in news:
        by_outlet[item[0].outlet].append(item)
    return [feed for outlet, items in by_outlet.items() if not outlet.deliver(items) for feed, _ in items]


def _take_all(news: Sequence[tuple[Stream, SequenceDelta | Closed]]) -> None:
    for stream, item in news:
        stream.take(item)
