"""Messages on their way into a stream of grpc.aio, which takes one at a time. No jax."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Awaitable, Callable


class Outbox[T]:
    """Keeps the order; `put` never waits. Belongs to one event loop."""

    def __init__(self) -> None:
        self._messages: collections.deque[T] = collections.deque()
        self._news = asyncio.Event()
        self._calm = asyncio.Event()
        self._calm.set()
        self._closed = False

    def put(self, message: T) -> None:
        self._messages.append(message)
        self._news.set()
        self._calm.clear()

    async def put_last(self, message: T) -> None:
        """Put it as soon as nothing else waits: what comes meanwhile goes before it."""
        while self._messages:
            await self._calm.wait()
        self.put(message)

    @property
    def waiting(self) -> int:
        """Messages that are not being written yet."""
        return len(self._messages)

    def close(self) -> None:
        """Close: nothing will follow, and `run` returns when everything is written."""
        self._closed = True
        self._news.set()

    async def run(self, write: Callable[[T], Awaitable[None]]) -> None:
        """Write until it is closed. What ``write`` raises ends it."""
        while True:
            while self._messages:
                await write(self._messages.popleft())
            if self._closed:
                return
            self._calm.set()
            self._news.clear()
            await self._news.wait()
