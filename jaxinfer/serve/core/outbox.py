"""Queue of outgoing messages of a grpc.aio stream, which takes one at a time. No jax."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Awaitable, Callable


class Outbox[T]:
    """A FIFO queue; `put` never waits. Must be used from one event loop."""

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
        """Put a message once the queue is empty: messages that are put meanwhile go first."""
        while self._messages:
            await self._calm.wait()
        self.put(message)

    @property
    def waiting(self) -> int:
        """Number of messages that are not being written yet."""
        return len(self._messages)

    def close(self) -> None:
        """Close the queue: `run` returns when all messages are written."""
        self._closed = True
        self._news.set()

    async def run(self, write: Callable[[T], Awaitable[None]]) -> None:
        """Write messages until the queue is closed. Exceptions of ``write`` pass through."""
        while True:
            while self._messages:
                await write(self._messages.popleft())
            if self._closed:
                return
            self._calm.set()
            self._news.clear()
            await self._news.wait()
