"""A few things that many tenants want, shared out in turns. No jax."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Sequence

from jaxinfer.sampling_params import QueueFullError


class Turns[T]:
    """Belongs to one event loop.

    Tenants that wait take turns, one thing a turn: however much one waits for, the next has its turn after one of it.
    And none holds more than its share, so that one alone never has all of them.

    Args:
        things: what is shared out; who comes first gets the last.
        share: how many one tenant may hold at once.
        most: how many may wait. Where that is full, whoever waits most in number gives way.
        what: waits, in words.
    """

    def __init__(self, things: Sequence[T], share: int, most: int, what: str) -> None:
        self._free, self._share, self._most, self._what = list(things), share, most, what
        self._waiting: dict[str, collections.deque[asyncio.Future[T]]] = {}  # by tenant, whose turn it is first
        self._in_use: collections.Counter[str] = collections.Counter()
        self._count = 0

    @property
    def held(self) -> int:
        """Things that are in use, by all tenants."""
        return self._in_use.total()

    async def take(self, tenant: str) -> T:
        """One of the things, when it is the tenant's turn; it must be given back.

        Raises:
            QueueFullError: too many wait.
        """
        if self._count >= self._most:
            self._give_way(tenant)
        mine: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, collections.deque()).append(mine)
        self._count += 1
        self._hand_out()
        try:
            return await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled() and mine.exception() is None:
                self.give(tenant, mine.result())
            else:
                self._forget(tenant, mine)
            raise

    def give(self, tenant: str, thing: T) -> None:
        """Give a thing back."""
        self._in_use[tenant] -= 1
        if not self._in_use[tenant]:
            del self._in_use[tenant]
        self._free.append(thing)
        self._hand_out()

    def _give_way(self, tenant: str) -> None:
        """Raises `QueueFullError` unless another tenant has more that wait: its last one is refused instead."""
        refusal = QueueFullError(f"{self._count} {self._what} already")
        longest = max(self._waiting, key=lambda name: len(self._waiting[name]), default=tenant)
        mine = self._waiting.get(tenant, ())
        if len(self._waiting.get(longest, ())) <= len(mine) + 1:
            raise refusal
        last = self._waiting[longest][-1]
        self._forget(longest, last)
        if not last.done():
            last.set_exception(refusal)

    def _forget(self, tenant: str, future: asyncio.Future[T]) -> None:
        queue = self._waiting.get(tenant)
        if queue is None or future not in queue:
            return
        queue.remove(future)
        self._count -= 1
        if not queue:
            del self._waiting[tenant]

    def _hand_out(self) -> None:
        while self._free:
            tenant = next((name for name in self._waiting if self._in_use[name] < self._share), None)
            if tenant is None:
                return
            future = self._waiting[tenant][0]
            queue = self._waiting.pop(tenant)
            self._waiting[tenant] = queue  # behind the others
            self._forget(tenant, future)
            if not future.done():  # else whoever waited was cancelled just now
                self._in_use[tenant] += 1
                future.set_result(self._free.pop())
