"""Asynchronous engine: one thread steps the engine core, any number of event loops receive its deltas."""

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
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from jaxinfer.engine.core import EngineCore, Pace, PauseMode
from jaxinfer.engine.scheduling.stats import EngineStats, HistogramRecorder, WeightStats
from jaxinfer.lora.store import LoadedLoRA, LoRAError, LoRAStore
from jaxinfer.sampling_params import QueueFullError, RequestError
from jaxinfer.serve.api.streams import Closed, DeltaStream, EngineDeadError
from jaxinfer.serve.core.messages import Pulse
from jaxinfer.serve.core.pauses import Pauses, Update, Weights
from jaxinfer.types import FinishReason, LoRARef, Request, SequenceDelta

__all__ = ["AsyncEngine", "EngineDeadError", "Feed", "Outlet", "Stream"]


@runtime_checkable
class Outlet(Protocol):
    """A sink for the deltas of several requests. Hashable: the deltas for equal outlets are delivered in one call."""

    def deliver(self, news: Sequence[tuple[Any, SequenceDelta | Closed]]) -> bool:
        """Take the deltas of one step for its feeds. Called in the engine thread; false: the reader is gone."""
        ...


@runtime_checkable
class Feed(Protocol):
    """The engine side of a request's delta stream.

    Attributes:
        request: the request; on acceptance replaced by the one with its seed resolved.
        running: indices of the samples that have not ended; owned by the engine thread.
    """

    request: Request
    running: set[int]

    @property
    def outlet(self) -> Outlet: ...


News = tuple[Feed, SequenceDelta | Closed]


_BOUNDS = tuple(0.01 * 1.1**power for power in range(120))
"""Histogram bounds in seconds, 10 ms to 15 minutes: shorter steps do not matter for hang detection."""


class _StepTimes:
    """A histogram of step durations; `add` costs one binary search. One thread adds, any thread may read."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_BOUNDS) + 1)

    def add(self, seconds: float) -> None:
        self._counts[bisect.bisect_left(_BOUNDS, seconds)] += 1

    def p99(self) -> float:
        """Return the 99th percentile in seconds, at most 10% too large; 0 before the first step."""
        counts = list(self._counts)
        beyond = sum(counts) // 100
        for place in range(len(counts) - 1, -1, -1):
            if counts[place] > beyond:
                return _BOUNDS[min(place, len(_BOUNDS) - 1)]
            beyond -= counts[place]
        return 0.0


class AsyncEngine:
    """An engine core stepped in its own thread; all methods except `start` may be called from any event loop.

    Clients put calls into an inbox, which the engine thread empties between steps: no lock is held during a step, and
    an idle thread blocks on the inbox. Each event loop gets its deltas once per step. Deltas that a client has not
    fetched are merged, one per sample, so a slow client delays no other client and loses no tokens. Methods raise
    EngineDeadError while the engine does not run.

    ```
    async with AsyncEngine(engine) as served:
        async for delta in served.generate(request): ...
    ```

    Args:
        on_end: called by the engine thread when it ends, after a stop or a fault.
        after: called by the engine thread after each step, and after calls that it ran between steps.
        weights: weights and memory of the engine (a `jaxinfer.served.ServedModel`); None: they do not change.
    """

    def __init__(
        self,
        engine: EngineCore,
        on_end: Callable[[Closed], object] | None = None,
        after: Callable[[], object] = lambda: None,
        weights: Weights | None = None,
    ) -> None:
        self._engine, self._on_end, self._after, self._weights = engine, on_end, after, weights
        self._inbox: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._streams: dict[str, Feed] = {}
        self._thread: threading.Thread | None = None
        self._closed: Closed | None = Closed("the engine is not started")
        self._stopping = False
        self._steps = 0
        self._times = _StepTimes()
        self._joining = 0  # requests in the inbox
        self._counting = threading.Lock()
        self._since: float | None = None  # start of the current activity, monotonic seconds; None: idle
        self._retained = collections.Counter[LoRARef]()
        self._changing = threading.Lock()  # held by the change of weights or memory that is in progress
        self._updates = HistogramRecorder()  # seconds of updates of weights
        self._pauses = Pauses(engine, self._abort_all, weights)

    # ---- lifecycle

    def start(self) -> None:
        """Start the engine thread. Raises EngineDeadError if it was started before."""
        if self._thread is not None:
            raise EngineDeadError("the engine was started before")
        self._thread = threading.Thread(target=self._main, name="jaxinfer-engine", daemon=True)
        self._closed = None
        self._thread.start()

    async def stop(self, drain: bool = True) -> None:
        """Reject new requests, finish (``drain``) or abort the admitted ones, and return when the thread has ended. A
        paused engine aborts them."""
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
        """Yield the deltas of all samples of a validated request until the last sample ends.

        Leaving the iterator early (a break, a cancelled task, ``aclose``) aborts the request.

        Raises:
            RequestError, QueueFullError: the request is rejected.
            EngineDeadError: the engine does not run, or ends by a fault.
        """
        async with await self.submit(request) as stream:
            async for delta in stream:
                yield delta

    async def submit(self, request: Request) -> Stream:
        """Submit a request and return its stream, for ``async with``. Rejections are raised here, as in `generate`."""
        stream = Stream(request, asyncio.get_running_loop(), self.detach)
        try:
            await asyncio.wrap_future(self.attach(stream))
        except asyncio.CancelledError:
            self.detach(stream)
            raise
        return stream

    def attach(self, feed: Feed) -> concurrent.futures.Future[None]:
        """Submit ``feed.request``; its deltas go to ``feed.outlet``. The future fails as `submit` does; if the queue is
        full it fails at once, so that under overload a rejection does not wait for the end of a step."""
        try:
            with self._counting:
                if self._closed is None:
                    self._engine.check_capacity(feed.request, self._joining)
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
        """Abort the request of a client that has disconnected, without waiting for the result."""
        self._post(functools.partial(self._forget, feed))

    async def abort(self, request_id: str, index: int | None = None) -> None:
        """Abort a request or one of its samples; its stream gets a last delta with ABORT. Unknown ids are ignored."""
        await self._ask(functools.partial(self._abort, request_id, index))

    # ---- queries

    async def stats(self) -> EngineStats:
        """Return engine statistics, taken between two steps; those of devices meanwhile, by another thread."""
        stats = await self._ask(self._stats)
        return dataclasses.replace(stats, usage=await asyncio.to_thread(self._engine.usage))

    def stats_now(self, timeout: float | None = None) -> EngineStats:
        """Return `stats` to a thread without an event loop; TimeoutError if no step ends within ``timeout`` seconds."""
        return self._post(self._stats).result(timeout)

    def _stats(self) -> EngineStats:
        weights = WeightStats(self.weight_version, self.is_paused, self.asleep, self._updates.snapshot())
        return dataclasses.replace(self._engine.stats(), weights=weights)

    async def reset_prefix_cache(self) -> int:
        """See `Backend.reset_prefix_cache`."""
        return await self._ask(self._engine.reset_prefix_cache)

    async def check(self) -> None:
        """Check that all slots and pages are accounted for; a leak is a fault that ends the engine."""
        await self._ask(self._engine.check)

    # ---- pauses, sleep and new weights

    @property
    def is_paused(self) -> bool:
        """Whether nothing is computed until `resume`. False while it drains."""
        return self._engine.pace is Pace.PAUSED

    @property
    def weight_version(self) -> int:
        """Version of the served weights; 0: those of the start."""
        return self._engine.weight_version

    @property
    def asleep(self) -> list[str]:
        """What `sleep` has freed: "kv_cache", "weights", both or nothing."""
        return [] if self._weights is None else self._weights.asleep

    async def pause(self, mode: PauseMode = "wait") -> None:
        """Compute nothing until `resume`; new requests queue. An engine that is paused already stays as it is.

        Args:
            mode: "keep": running requests go on later; "abort": they end; "wait": those that have begun end first.

        Raises:
            RequestError: `resume` was called while it waited.
        """
        await asyncio.wrap_future(await self._ask(functools.partial(self._pauses.pause, mode)))

    async def resume(self) -> None:
        """Go on after `pause`. Raises RequestError while something is asleep."""
        await self._ask(self._pauses.resume)

    async def abort_all(self) -> int:
        """Abort all requests and return their number."""
        return await self._ask(self._abort_all)

    async def update_weights(
        self, weights: Any, *, version: int | None = None, mode: PauseMode | None = None, **options: bool
    ) -> Update:
        """Serve new weights, all of them from the same step on. They are placed next to the served ones in a worker
        thread, while the engine computes, and exchanged between two steps.

        Args:
            weights, options: see `jaxinfer.served.ServedModel.stage`; a function that returns them is called in the
                worker thread.
            version: see `jaxinfer.served.ServedModel.commit`.
            mode: what becomes of running requests: "keep": they go on under the new weights; "abort": they end; "wait":
                those that have begun end first, under the old weights. None: "keep" if the engine is paused, else
                "wait".

        Raises:
            RequestError: the weights, the version or the mode cannot be served, or another change is in progress; the
                served weights are unchanged.
        """
        with self._alone() as served:
            served.require_version(version)
            staged = await asyncio.to_thread(_staged, served, weights, options)
            mode = mode or ("keep" if self.is_paused else "wait")
            try:
                made = await self._change(mode, functools.partial(served.commit, staged, version))
            except BaseException:
                self._post(functools.partial(served.discard, staged))  # after `commit`, if that has begun
                raise
            self._updates.observe(made.seconds)
            return made

    async def set_weight_version(self, version: int) -> None:
        """Number the served weights anew. Raises RequestError unless the version is greater."""
        with self._alone() as served:
            await self._ask(lambda: self._engine.swap((), served.require_version(version), restart=False))

    async def sleep(self, level: int = 1, tags: Iterable[str] | None = None, mode: PauseMode = "keep") -> None:
        """Free device memory until `wake_up`, see `jaxinfer.served.ServedModel.sleep`; requests queue meanwhile.

        Args:
            tags: what to free; None: everything.
            mode: see `pause`.
        """
        given = () if tags is None else (list(tags),)
        with self._alone() as served:
            await self._change(mode, functools.partial(served.sleep, level, *given))

    async def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Take back what `sleep` freed (None: all of it), and go on unless it was paused before."""
        given = () if tags is None else (list(tags),)
        with self._alone() as served:
            await self._ask(functools.partial(served.wake_up, *given))

    async def weight_checksums(self) -> Mapping[str, str]:
        """Return a digest of each served parameter, by path."""
        with self._alone() as served:
            return await asyncio.to_thread(served.checksums)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[Weights]:
        """Exclude other changes of weights and memory."""
        if self._closed is not None:
            raise self._closed.error()
        if self._weights is None:
            raise RequestError("engine", "has weights and memory that do not change while it serves")
        if not self._changing.acquire(blocking=False):
            raise RequestError("engine", "is changing its weights or memory: one change at a time")
        try:
            yield self._weights
        finally:
            self._changing.release()

    async def _change[T](self, mode: PauseMode, change: Callable[[], T]) -> T:
        """Run a change between two steps, after the running requests have ended as ``mode`` says."""
        if mode != "wait":
            return await self._ask(functools.partial(self._pauses.change_now, mode, change))
        try:
            await asyncio.wrap_future(await self._ask(self._pauses.drain))
            return await self._ask(functools.partial(self._pauses.change_drained, change))
        except BaseException:
            self._post(self._pauses.end_own)
            raise

    # ---- adapters

    async def load_lora(self, name: str, path: str) -> LoadedLoRA:
        """See `LoRABackend`. Concurrent loads are not supported: callers must serialise them."""
        store = self._loras()
        ref = await asyncio.to_thread(store.load, name, path)
        store.retain(ref)
        self._retained[ref] += 1
        return next(each for each in store.list() if each.name == name)

    def unload_lora(self, name: str) -> None:
        """See `LoRABackend`. Unknown names are ignored."""
        with contextlib.suppress(RequestError):
            self._loras().unload(name)

    def release_lora(self, ref: LoRARef) -> None:
        """See `LoRABackend`. Adapters that are not loaded or already released are ignored."""
        if self._retained[ref]:
            self._retained[ref] -= 1
            self._loras().release(ref)

    def _loras(self) -> LoRAStore:
        if self._closed is not None:
            raise self._closed.error()
        if self._engine.loras is None:
            raise LoRAError("this engine serves no adapters: it needs enable_lora")
        return self._engine.loras

    @property
    def steps(self) -> int:
        """Steps so far. From any thread."""
        return self._steps

    def pulse(self) -> Pulse:
        """Return the liveness of the engine thread. Callable from any thread; does not wait."""
        since = self._since
        return Pulse(self._steps, 0.0 if since is None else time.monotonic() - since, self._times.p99())

    # ---- calls into the engine thread

    async def _ask[T](self, function: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._post(function))

    def _post[T](self, function: Callable[[], T]) -> concurrent.futures.Future[T]:
        call = _Call(function)
        self._inbox.put(call)
        if self._closed is not None:  # else the thread handles it: on exit it sets _closed before it empties the inbox
            self._refuse_waiting(self._closed)
        return call.future

    def _refuse_waiting(self, closed: Closed) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._inbox.get_nowait().refuse(closed)

    # ---- the rest runs in the engine thread

    def _main(self) -> None:
        closed = Closed("the engine was stopped")
        try:
            self._serve()
        except BaseException as fault:  # any fault: clients must not wait forever
            closed = Closed(f"the engine ended by a fault: {type(fault).__name__}: {fault}", fault)
            raise
        finally:
            self._closed = closed
            self._since = None
            self._refuse_waiting(closed)
            self._pauses.close(closed.error())
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
            if self._pauses.awaited:
                self._pauses.settle()
            self._after()
            before, self._since = self._since, time.monotonic()
            if stepped and before is not None:
                self._times.add(self._since - before)

    def _answer(self) -> None:
        """Run the calls that are in the inbox now. Later calls run after the next step."""
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
        if self._streams.get(request_id) is feed:  # a new request may reuse the id of one that has ended
            self._engine.abort(request_id)
            del self._streams[request_id]

    def _abort_all(self) -> int:
        aborted = list(self._streams)
        for request_id in aborted:
            self._abort(request_id, None)
        return len(aborted)

    def _stop(self, drain: bool) -> None:
        self._stopping = True
        if not drain or self._engine.pace is Pace.PAUSED:
            self._abort_all()
        elif self._engine.pace is Pace.DRAINING:
            self._pauses.resume()

    def _deliver(self, deltas: list[SequenceDelta]) -> None:
        """Deliver each delta to its feed, unless the client has disconnected."""
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


def _staged(served: Weights, weights: Any, options: Mapping[str, bool]) -> Any:
    return served.stage(weights() if callable(weights) else weights, **options)


class Stream(DeltaStream):
    """A delta stream and `Feed` with its reader in an event loop of this process; made by `AsyncEngine.submit`."""

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
    """An outlet for all streams that are read in one event loop."""

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
        except RuntimeError:  # raised by asyncio if the loop is closed
            return False
        return True


def _post(news: Iterable[News]) -> list[Feed]:
    """Deliver to each outlet once; return the feeds of outlets that have no reader any more."""
    by_outlet: dict[Outlet, list[News]] = collections.defaultdict(list)
    for item in news:
        by_outlet[item[0].outlet].append(item)
    return [feed for outlet, items in by_outlet.items() if not outlet.deliver(items) for feed, _ in items]


def _take_all(news: Sequence[tuple[Stream, SequenceDelta | Closed]]) -> None:
    for stream, item in news:
        stream.take(item)
