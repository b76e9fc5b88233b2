"""Delta streams of an engine in this or another process: deltas are merged until they are fetched. No jax."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

from jaxinfer.types import Request, SequenceDelta


class EngineDeadError(RuntimeError):
    """Error for an engine that does not run: not started, stopped, or ended by a fault, which is the cause then."""


@dataclasses.dataclass(frozen=True)
class Closed:
    """The reason why the engine does not run. Each client gets its own exception: a shared one gathers tracebacks."""

    message: str
    cause: BaseException | None = None

    def error(self) -> EngineDeadError:
        error = EngineDeadError(self.message)
        error.__cause__ = self.cause
        return error


class DeltaStream:
    """The delta stream of one request, for one reader. All methods must be called from the reader's event loop.

    Args:
        leave: called with the stream if its reader leaves before the end.

    Attributes:
        request: the request with its seed resolved.
    """

    def __init__(self, request: Request, leave: Callable[[Any], None]) -> None:
        self.request = request
        self._open = set(range(request.params.n))
        self._leave = leave
        self._news: dict[int, SequenceDelta] = {}
        self._closed: Closed | None = None
        self._reader: asyncio.Future[None] | None = None
        self._listener: Callable[[], None] | None = None

    def __aiter__[S: DeltaStream](self: S) -> S:
        return self

    async def __anext__(self) -> SequenceDelta:
        """Return the next delta of any sample, with all that it got since its last one.

        Raises:
            StopAsyncIteration: all samples have ended.
            EngineDeadError: the engine ended before them.
        """
        while not self._news:
            if not self._open:
                raise StopAsyncIteration
            if self._closed is not None:
                raise self._closed.error()
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return self._news.pop(next(iter(self._news)))

    async def aclose(self) -> None:
        """Abort the samples that still run. Does not wait, so it also works in a task that is being cancelled."""
        if self._open and self._closed is None:
            self._leave(self)
        self._open.clear()
        self._news.clear()
        self._wake()

    async def __aenter__[S: DeltaStream](self: S) -> S:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @property
    def idle(self) -> bool:
        """Whether the next delta is not available yet."""
        return not self._news and bool(self._open) and self._closed is None

    def listen(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` on each delta, or the end of the stream, that arrives while no reader waits."""
        self._listener = listener

    @property
    def ended(self) -> bool:
        """Whether every sample has ended; the last deltas may not be read yet."""
        return not self._open

    def take(self, news: SequenceDelta | Closed) -> None:
        """Store a delta or the end of the engine, and wake the reader."""
        if isinstance(news, Closed):
            self._closed = news
        elif news.index in self._open:
            waiting = self._news.get(news.index)
            self._news[news.index] = news if waiting is None else waiting.extended(news)
            if news.finish_reason is not None:
                self._open.discard(news.index)
        self._wake()

    def _wake(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():
            reader.set_result(None)
        elif self._listener is not None:
            self._listener()
