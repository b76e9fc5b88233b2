"""Hub between the engine and KV event subscribers: numbers batches and keeps recent ones. No jax."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import itertools
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence

from jaxinfer.serve.core.messages import KvEvents
from jaxinfer.serve.kv_events.mirror import Copy, Mirror, cut

BATCHES = 10_000
"""Batches that are kept for subscribers that reconnect, as in vLLM."""
_KEPT_BYTES = 1 << 28
"""Bytes of the kept batches; a subscriber that needs older ones gets a snapshot."""
CHUNK_BLOCKS = 512
"""Pages in one chunk of a snapshot: some 5 ms of work."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The changes of one step in one replica's cache, or its reset at the end of an engine.

    Attributes:
        number: sequence number, one more than the previous batch's.
        timestamp: seconds since 1970.
        epoch: id of the engine run.
    """

    number: int
    timestamp: float
    epoch: str
    events: KvEvents


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """A chunk of a snapshot of the pages that were cached as of batch ``number + count - 1 - index``.

    Attributes:
        first: whether the chunk is the first of its replica, which invalidates all earlier state of the replica.
        total: pages in the whole snapshot, each copy counted.
    """

    number: int
    timestamp: float
    epoch: str
    rank: int
    index: int
    count: int
    first: bool
    total: int
    copies: Sequence[Copy]


class LaggedError(Exception):
    """Error for a subscriber that lags too far: its batches are not kept."""


class Subscription:
    """The batches of one subscriber, in order and without a gap; must be closed."""

    def __init__(self, begin: Sequence[Batch | Chunk], leave: Callable[[Subscription], None]) -> None:
        self._items: collections.deque[Batch | Chunk] = collections.deque(begin)
        self._leave, self._news, self._lagged = leave, asyncio.Event(), False

    def put(self, batch: Batch) -> None:
        if len(self._items) >= BATCHES:
            self._lagged = True
            self._items.clear()
            self._leave(self)
        else:
            self._items.append(batch)
        self._news.set()

    async def next(self, seconds: float | None = None) -> Batch | Chunk | None:
        """Return the next item; None: none came in time.

        Raises:
            LaggedError: the subscriber lags too far.
        """
        if not self._items and not self._lagged:
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), seconds)
            except TimeoutError:
                return None
        if self._lagged:
            raise LaggedError
        return self._items.popleft()

    def close(self) -> None:
        self._leave(self)

    async def __aiter__(self) -> AsyncIterator[Batch | Chunk]:
        while (item := await self.next()) is not None:
            yield item


class Hub:
    """The hub of a server's KV events, which also knows the cached pages; must be used from one event loop.

    Numbers begin with the server's start time in microseconds: those of a later run are larger, so a subscriber that
    returns with a number of an earlier run starts again with a snapshot.

    Args:
        ranks: number of engine replicas.
        clock: clock in seconds since 1970.
    """

    def __init__(self, ranks: int = 1, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self.epoch = secrets.token_hex(8)
        self._number = int(clock() * 1_000_000)
        self._kept: collections.deque[Batch] = collections.deque()
        self._bytes = 0
        self._mirrors = {rank: Mirror() for rank in range(ranks)}
        self._subscriptions: dict[Subscription, None] = {}
        self._listeners: list[Callable[[Batch], object]] = []

    @property
    def ranks(self) -> int:
        """Number of engine replicas."""
        return len(self._mirrors)

    @property
    def number(self) -> int:
        """Sequence number of the last batch, or one less than that of the first."""
        return self._number

    def mirror(self, rank: int = 0) -> Mirror:
        return self._mirrors[rank]

    def listen(self, listener: Callable[[Batch], object]) -> None:
        """Call ``listener`` with each batch; it must not wait."""
        self._listeners.append(listener)

    def begin(self) -> None:
        """Clear all replicas: an engine begins or has ended, so no page is cached."""
        self.epoch = secrets.token_hex(8)
        for rank in sorted(self._mirrors):
            self.take(KvEvents(rank=rank, cleared=True))

    def take(self, events: KvEvents) -> None:
        """Number a batch of the engine's events, and pass it to listeners and subscribers."""
        self._mirrors[events.rank].apply(events)
        self._number += 1
        batch = Batch(self._number, self._clock(), self.epoch, events)
        self._keep(batch)
        for listener in self._listeners:
            listener(batch)
        for subscription in list(self._subscriptions):
            subscription.put(batch)

    def _keep(self, batch: Batch) -> None:
        self._kept.append(batch)
        self._bytes += batch.events.nbytes
        while len(self._kept) > BATCHES or (self._bytes > _KEPT_BYTES and len(self._kept) > 1):
            self._bytes -= self._kept.popleft().events.nbytes

    def since(self, number: int) -> list[Batch] | None:
        """Return the batches from a number on; None: some of them are not kept, or the number was never used."""
        first = self._kept[0].number if self._kept else self._number + 1
        if not first <= number <= self._number + 1:
            return None
        return list(itertools.islice(self._kept, number - first, None))

    def subscribe(self, number: int = 0) -> Subscription:
        """Subscribe from a batch's number on; begins with a snapshot if that batch is not kept, or for number 0."""
        kept = self.since(number) if number else None
        begin: Sequence[Batch | Chunk] = self.snapshot() if kept is None else kept
        subscription = Subscription(begin, lambda gone: self._subscriptions.pop(gone, None))
        self._subscriptions[subscription] = None
        return subscription

    def snapshot(self) -> list[Chunk]:
        """Return the cached pages in chunks, with numbers that end at that of the last batch."""
        copies = {rank: mirror.copies() for rank, mirror in sorted(self._mirrors.items())}
        parts = [
            (rank, part, place == 0) for rank in copies for place, part in enumerate(cut(copies[rank], CHUNK_BLOCKS))
        ]
        total, now = sum(map(len, copies.values())), self._clock()
        begin = self._number - len(parts) + 1
        return [
            Chunk(begin + index, now, self.epoch, rank, index, len(parts), first, total, part)
            for index, (rank, part, first) in enumerate(parts)
        ]
