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
        self._waiting = dict[str, dict[asyncio.Future[T], None]]()  # by tenant, next turn first
        self._in_use = collections.Counter[str]()

    @property
    def held(self) -> int:
        """Number of resources in use, by all tenants."""
        return self._in_use.total()

    @property
    def waiting(self) -> int:
        """Number of waiting requests, of all tenants."""
        return sum(map(len, self._waiting.values()))

    async def take(self, tenant: str) -> T:
        """Wait for the tenant's turn and return a resource, which must be given back with `give`.

        Raises:
            QueueFullError: too many requests wait.
        """
        if self.waiting >= self._most:
            self._make_room(tenant)
        mine: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, {})[mine] = None
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
        self._in_use -= collections.Counter([tenant])
        self._free.append(thing)
        self._hand_out()

    def _make_room(self, tenant: str) -> None:
        """Reject the last request of the tenant that has most, or raise `QueueFullError` if that is this tenant."""
        refusal = QueueFullError(f"{self.waiting} {self._what} already")
        longest = max(self._waiting, key=lambda name: len(self._waiting[name]), default=tenant)
        if len(self._waiting.get(longest, ())) <= len(self._waiting.get(tenant, ())) + 1:
            raise refusal
        last = next(reversed(self._waiting[longest]))
        self._forget(longest, last)
        if not last.done():
            last.set_exception(refusal)

    def _forget(self, tenant: str, future: asyncio.Future[T]) -> None:
        queue = self._waiting.get(tenant, {})
        queue.pop(future, None)
        if not queue:
            self._waiting.pop(tenant, None)

    def _hand_out(self) -> None:
        while self._free:
            tenant = next((name for name in self._waiting if self._in_use[name] < self._share), None)
            if tenant is None:
                return
            queue = self._waiting.pop(tenant)
            future = next(iter(queue))
            del queue[future]
            if queue:
                self._waiting[tenant] = queue  # after the other tenants
            if not future.done():  # else the waiting request was just cancelled
                self._in_use[tenant] += 1
                future.set_result(self._free.pop())
