"""A pool of resources shared round-robin between tenants. No jax."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Sequence

from jaxinfer.sampling_params import QueueFullError


class FairPool[T]:
    """A round-robin allocator; must be used from one event loop.

    Waiting tenants get one resource per turn, however many each of them waits for. No tenant holds more than its share,
    so one tenant alone never has all of them.

    Args:
        things: the resources; the last one is handed out first.
        share: resources that one tenant may hold at once.
        most: requests that may wait. When that many wait, the tenant with the most waiting requests loses its last one.
        what: name of the waiting requests, for error messages.
    """

    def __init__(self, things: Sequence[T], share: int, most: int, what: str) -> None:
        self._free, self._share, self._most, self._what = list(things), share, most, what
        self._waiting: dict[str, collections.deque[asyncio.Future[T]]] = {}  # by tenant, next turn first
        self._in_use: collections.Counter[str] = collections.Counter()
        self._count = 0

    @property
    def held(self) -> int:
        """Number of resources in use, by all tenants."""
        return self._in_use.total()

    async def take(self, tenant: str) -> T:
        """Wait for the tenant's turn and return a resource, which must be given back with `give`.

        Raises:
            QueueFullError: too many requests wait.
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
        """Give a resource back."""
        self._in_use[tenant] -= 1
        if not self._in_use[tenant]:
            del self._in_use[tenant]
        self._free.append(thing)
        self._hand_out()

    def _give_way(self, tenant: str) -> None:
        """Reject the last request of the tenant that has most, or raise `QueueFullError` if that is this tenant."""
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
            self._waiting[tenant] = queue  # after the other tenants
            self._forget(tenant, future)
            if not future.done():  # else the waiting request was just cancelled
                self._in_use[tenant] += 1
                future.set_result(self._free.pop())
