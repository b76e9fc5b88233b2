"""The engine for many clients: one thread steps it, any number of event loops wait for its deltas."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Any, Protocol, runtime_checkable

from jaxinfer.engine.stats import EngineStats
from jaxinfer.types import FinishReason, Request, RequestError, SequenceDelta


class EngineDeadError(RuntimeError):
    """The engine does not run: not started, stopped, or ended by a fault, which is the cause then."""


@runtime_checkable
class Steps(Protocol):
    """What `AsyncEngine` needs of an engine (see `jaxinfer.engine.engine.Engine`)."""

    @property
    def has_work(self) -> bool: ...
    def add(self, request: Request) -> Request: ...
    def abort(self, request_id: str, index: int | None = None) -> None: ...
    def step(self) -> list[SequenceDelta]: ...
    def stats(self) -> EngineStats: ...
    def reset_prefix_cache(self) -> int: ...
    def check(self) -> None: ...


class AsyncEngine:
    """Steps an engine in a thread of its own; all methods but `start` may be called from any event loop.

    Clients put calls into an inbox, which the thread empties between two steps: no lock is held while it steps, and
    without work it sleeps in the inbox. Deltas go to each loop once a step. What a client has not fetched yet is
    merged, one delta for each sample, so that a slow one costs others nothing and loses no token.

    ```
    async with AsyncEngine(engine) as served:
        async for delta in served.generate(request): ...
    ```
    """

    def __init__(self, engine: Steps) -> None:
        self._engine = engine
        self._inbox: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._streams: dict[str, Stream] = {}
        self._thread: threading.Thread | None = None
        self._closed: _Closed | None = _Closed("the engine is not started")
        self._stopping = False

    # ---- life

    def start(self) -> None:
        """Begin to serve.

        Raises:
            EngineDeadError: it was started before.
        """
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
        """`generate` in two steps: what is refused is refused here, before the first delta. Use it with ``async with``.

        Raises:
            RequestError, QueueFullError, EngineDeadError: see `generate`.
        """
        stream = Stream(request, asyncio.get_running_loop(), self._leave)
        try:
            await self._ask(functools.partial(self._add, stream))
        except asyncio.CancelledError:
            self._leave(stream)
            raise
        return stream

    async def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one of its samples; its stream gets a last delta that says so. Unknown ids are ignored.

        Raises:
            EngineDeadError: the engine does not run.
        """
        await self._ask(functools.partial(self._abort, request_id, index))

    # ---- questions

    async def stats(self) -> EngineStats:
        """What the engine does, as it is between two steps."""
        return await self._ask(self._engine.stats)

    def stats_now(self, timeout: float | None = None) -> EngineStats:
        """`stats` for a thread without an event loop; ``timeout`` in seconds.

        Raises:
            TimeoutError: no step ended in time.
            EngineDeadError: the engine does not run.
        """
        return self._post(self._engine.stats).result(timeout)

    async def reset_prefix_cache(self) -> int:
        """Forget every cached page that no sequence uses; how many those were."""
        return await self._ask(self._engine.reset_prefix_cache)

    async def check(self) -> None:
        """A fault, which ends the engine, unless all slots and pages are accounted for."""
        await self._ask(self._engine.check)

    # ---- the way to the thread

    async def _ask[T](self, function: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._post(function))

    def _post[T](self, function: Callable[[], T]) -> concurrent.futures.Future[T]:
        call = _Call(function)
        self._inbox.put(call)
        if self._closed is not None:  # else the thread will come by: it closes first and empties the inbox then
            self._refuse_waiting(self._closed)
        return call.future

    def _leave(self, stream: Stream) -> None:
        """A client has gone: nobody waits for the answer."""
        self._post(functools.partial(self._forget, stream))

    def _refuse_waiting(self, closed: _Closed) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._inbox.get_nowait().refuse(closed)

    # ---- all below runs in the thread

    def _main(self) -> None:
        closed = _Closed("the engine was stopped")
        try:
            self._serve()
        except BaseException as fault:  # whatever it is, nobody may wait for ever
            closed = _Closed(f"the engine ended by a fault: {type(fault).__name__}: {fault}", fault)
            raise
        finally:
            self._closed = closed
            self._refuse_waiting(closed)
            _post_to_loops((stream, closed) for stream in self._streams.values())
            self._streams.clear()

    def _serve(self) -> None:
        while self._engine.has_work or not self._stopping:
            self._answer(wait=not self._engine.has_work)
            if self._engine.has_work:
                self._deliver(self._engine.step())

    def _answer(self, wait: bool) -> None:
        """The calls that are there now; ``wait`` for the first. Later ones come after the next step."""
        for _ in range(max(self._inbox.qsize(), int(wait))):
            self._inbox.get().run()

    def _add(self, stream: Stream) -> None:
        if self._stopping:
            raise _Closed("the engine is stopping").error()
        stream.request = self._engine.add(stream.request)
        self._streams[stream.request.request_id] = stream

    def _abort(self, request_id: str, index: int | None) -> None:
        stream = self._streams.get(request_id)
        if stream is None:
            return
        self._engine.abort(request_id, index)
        ended = [i for i in stream.running if index in (None, i)]
        self._deliver([SequenceDelta(request_id, i, [], finish_reason=FinishReason.ABORT) for i in ended])

    def _forget(self, stream: Stream) -> None:
        request_id = stream.request.request_id
        if self._streams.get(request_id) is stream:  # another request may have the id of one that has ended
            self._engine.abort(request_id)
            del self._streams[request_id]

    def _stop(self, drain: bool) -> None:
        self._stopping = True
        if not drain:
            for request_id in list(self._streams):
                self._abort(request_id, None)

    def _deliver(self, deltas: list[SequenceDelta]) -> None:
        """Hand each delta to its stream, unless its client has gone."""
        mine: list[tuple[Stream, SequenceDelta]] = []
        for delta in deltas:
            stream = self._streams.get(delta.request_id)
            if stream is None or delta.index not in stream.running:
                continue
            mine.append((stream, delta))
            if delta.finish_reason is not None:
                stream.running.discard(delta.index)
                if not stream.running:
                    del self._streams[delta.request_id]
        for stream in _post_to_loops(mine):
            self._forget(stream)


class Stream:
    """The deltas of one request, for one client on one event loop. Obtained from `AsyncEngine.submit`.

    Attributes:
        request: with its seed resolved.
        running: samples that have not ended; the engine thread's.
    """

    def __init__(self, request: Request, loop: asyncio.AbstractEventLoop, leave: Callable[[Stream], None]) -> None:
        self.request, self.loop = request, loop
        self.running = set(range(request.params.n))
        self._open = set(self.running)
        self._leave = leave
        self._news: dict[int, SequenceDelta] = {}
        self._closed: _Closed | None = None
        self._wake = asyncio.Event()

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> SequenceDelta:
        """The next delta of any sample, all that it got since the last one.

        Raises:
            StopAsyncIteration: all samples have ended.
            EngineDeadError: the engine has, before them.
        """
        while not self._news:
            if not self._open:
                raise StopAsyncIteration
            if self._closed is not None:
                raise self._closed.error()
            self._wake.clear()
            await self._wake.wait()
        return self._news.pop(next(iter(self._news)))

    async def aclose(self) -> None:
        """Abort what still runs. It does not wait for anything, so it also works in a task that is being cancelled."""
        if self._open and self._closed is None:
            self._leave(self)
        self._open.clear()
        self._news.clear()
        self._wake.set()

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def take(self, news: SequenceDelta | _Closed) -> None:
        """Put down what the engine thread sent; called on the event loop."""
        if isinstance(news, _Closed):
            self._closed = news
        elif news.index in self._open:
            waiting = self._news.get(news.index)
            self._news[news.index] = news if waiting is None else _merged(waiting, news)
            if news.finish_reason is not None:
                self._open.discard(news.index)
        self._wake.set()


@dataclasses.dataclass(frozen=True)
class _Closed:
    """Why the engine does not run. Each client gets an exception of its own: a shared one would gather tracebacks."""

    message: str
    cause: BaseException | None = None

    def error(self) -> EngineDeadError:
        error = EngineDeadError(self.message)
        error.__cause__ = self.cause
        return error


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
            self.future.set_exception(_Closed(f"the engine ended by a fault: {fault}", fault).error())
            raise

    def refuse(self, closed: _Closed) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(closed.error())


def _merged(first: SequenceDelta, then: SequenceDelta) -> SequenceDelta:
    """Two deltas of one sample as one. ``first`` is extended: the engine gave it away."""
    first.token_ids.extend(then.token_ids)
    return dataclasses.replace(
        first,
        logprobs=[*first.logprobs, *then.logprobs],
        finish_reason=then.finish_reason,
        stop_reason=then.stop_reason,
        prompt_logprobs=first.prompt_logprobs or then.prompt_logprobs,
        cached_tokens=then.cached_tokens if first.cached_tokens is None else first.cached_tokens,
    )


def _post_to_loops(news: Iterable[tuple[Stream, SequenceDelta | _Closed]]) -> list[Stream]:
    """Wake each event loop once; returns the streams whose loop is closed, so that nobody will read them."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Stream, SequenceDelta | _Closed]]] = collections.defaultdict(
        list
    )
    for stream, item in news:
        by_loop[stream.loop].append((stream, item))
    orphans: list[Stream] = []
    for loop, items in by_loop.items():
        try:
            loop.call_soon_threadsafe(_take_all, items)
        except RuntimeError:  # asyncio's way to say that the loop is closed
            orphans += [stream for stream, _ in items]
    return orphans


def _take_all(items: list[tuple[Stream, SequenceDelta | _Closed]]) -> None:
    for stream, item in items:
        stream.take(item)
