"""KV events between the engine, whichever runs, and whoever subscribes: numbered, and kept for a while. No jax."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import itertools
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence

from jaxinfer.protos.internal import core_pb2 as pb
from jaxinfer.serve.kv_events.mirror import Copy, Mirror, cut

BATCHES = 10_000
"""Batches that are kept for subscribers who come back, as in vLLM."""
_KEPT_BYTES = 1 << 28
"""Bound on their size: what is beyond is left to snapshots."""
CHUNK_BLOCKS = 512
"""Pages in one chunk of a snapshot: some 5 ms of work."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """What one step changed in one replica's cache, or an engine's end.

    Attributes:
        number: one more than that of the batch before.
        timestamp: seconds since 1970.
        epoch: name of the engine's life.
    """

    number: int
    timestamp: float
    epoch: str
    events: pb.KvEvents


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """A part of what was cached when the batch ``number + count - 1 - index`` had come.

    Attributes:
        first: whether it begins what is known of its replica: all that was known before is void.
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
    """A subscriber has not taken what came for so long that the rest is not kept for it."""


class Subscription:
    """One subscriber's batches, in order and without a gap; to be closed."""

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
        """The next one; None: none came in time.

        Raises:
            LaggedError: too much came that was not taken.
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
    """Numbers batches, keeps the latest, and knows what is cached. Belongs to one event loop.

    Numbers begin with the time in microseconds at which the doors were opened: so those of a later life are larger, and
    whoever comes back with a number of an earlier one is told from the beginning.

    Args:
        ranks: replicas of the engine.
        clock: in seconds since 1970.
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
        """Replicas of the engine."""
        return len(self._mirrors)

    @property
    def number(self) -> int:
        """That of the last batch, or of none before the first one."""
        return self._number

    def mirror(self, rank: int = 0) -> Mirror:
        return self._mirrors[rank]

    def listen(self, listener: Callable[[Batch], object]) -> None:
        """Call it with each batch; it must not wait."""
        self._listeners.append(listener)

    def begin(self) -> None:
        """An engine begins or has ended: nothing is cached any more."""
        self.epoch = secrets.token_hex(8)
        for rank in sorted(self._mirrors):
            self.take(pb.KvEvents(rank=rank, cleared=True))

    def take(self, events: pb.KvEvents) -> None:
        """Number what the engine has told, and tell it on."""
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
        self._bytes += batch.events.ByteSize()
        while len(self._kept) > BATCHES or (self._bytes > _KEPT_BYTES and len(self._kept) > 1):
            self._bytes -= self._kept.popleft().events.ByteSize()

    def since(self, number: int) -> list[Batch] | None:
        """The batches from a number on; None: some of them are not kept, or it was never given."""
        first = self._kept[0].number if self._kept else self._number + 1
        if not first <= number <= self._number + 1:
            return None
        return list(itertools.islice(self._kept, number - first, None))

    def subscribe(self, number: int = 0) -> Subscription:
        """Everything from a batch's number on; from a snapshot where that is not kept, or for number 0."""
        kept = self.since(number) if number else None
        begin: Sequence[Batch | Chunk] = self.snapshot() if kept is None else kept
        subscription = Subscription(begin, lambda gone: self._subscriptions.pop(gone, None))
        self._subscriptions[subscription] = None
        return subscription

    def snapshot(self) -> list[Chunk]:
        """What is cached now, in chunks whose numbers end at that of the last batch."""
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
