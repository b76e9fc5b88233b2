"""Streams that clients of an engine read, wherever it runs: deltas, merged while nobody fetches them. No jax."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

from jaxinfer.types import Request, SequenceDelta


class EngineDeadError(RuntimeError):
    """The engine does not run: not started, stopped, or ended by a fault, which is the cause then."""


@dataclasses.dataclass(frozen=True)
class Closed:
    """Why the engine does not run. Each client gets an exception of its own: a shared one would gather tracebacks."""

    message: str
    cause: BaseException | None = None

    def error(self) -> EngineDeadError:
        error = EngineDeadError(self.message)
        error.__cause__ = self.cause
        return error


class DeltaStream:
    """The deltas of one request, for one reader on one event loop; all methods belong to that loop.

    Args:
        leave: called with the stream when its reader goes before the end.

    Attributes:
        request: with its seed resolved.
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
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return self._news.pop(next(iter(self._news)))

    async def aclose(self) -> None:
        """Abort what still runs. It does not wait for anything, so it also works in a task that is being cancelled."""
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
        """Whether the next delta must be waited for."""
        return not self._news and bool(self._open) and self._closed is None

    def listen(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` whenever something comes that no reader waits for, be it the end."""
        self._listener = listener

    @property
    def ended(self) -> bool:
        """Whether every sample has ended; the last deltas may not be read yet."""
        return not self._open

    def take(self, news: SequenceDelta | Closed) -> None:
        """Put down what the engine sent."""
        if isinstance(news, Closed):
            self._closed = news
        elif news.index in self._open:
            waiting = self._news.get(news.index)
            self._news[news.index] = news if waiting is None else merged(waiting, news)
            if news.finish_reason is not None:
                self._open.discard(news.index)
        self._wake()

    def _wake(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():
            reader.set_result(None)
        elif self._listener is not None:
            self._listener()


def merged(first: SequenceDelta, then: SequenceDelta) -> SequenceDelta:
    """Two deltas of one sample as one. ``first`` is extended: the engine gave it away. O(``then``), so that a reader
    who fetches nothing costs no more the longer it does."""
    first.token_ids += then.token_ids
    if then.logprobs:
        known = first.logprobs if isinstance(first.logprobs, list) else list(first.logprobs)
        known.extend(then.logprobs)
        first.logprobs = known
    first.finish_reason, first.stop_reason = then.finish_reason, then.stop_reason
    first.prompt_logprobs = first.prompt_logprobs or then.prompt_logprobs
    first.cached_tokens = then.cached_tokens if first.cached_tokens is None else first.cached_tokens
    first.draft_tokens += then.draft_tokens
    first.draft_accepted += then.draft_accepted
    return first
