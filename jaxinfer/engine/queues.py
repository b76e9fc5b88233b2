"""Who is served next, who has waited too long, and who may not wait at all. No jax.

A queue hands out one sequence at a time: `peek` until it fits, then `pop`. Looking costs nothing however many wait;
coming, going and giving up are O(log n).
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jaxinfer.config import ResolvedEngine
from jaxinfer.engine.sequence import Sequence
from jaxinfer.types import QueueFullError

_SLACK = 64  # dead entries that a heap may always keep


@runtime_checkable
class Queue(Protocol):
    """Sequences that wait for a slot, in the order of a policy.

    A sequence that was preempted is pushed again and returns to its old place: its arrival number decides.
    """

    @property
    def tokens(self) -> int:
        """Prompt tokens of all that wait."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Sequence]:
        """All that wait, in no particular order."""
        ...

    def push(self, sequence: Sequence) -> None:
        """Raises ValueError if the sequence waits already."""
        ...

    def peek(self) -> Sequence | None:
        """The one to be served next. It stays the same until another is pushed, popped or removed."""
        ...

    def pop(self) -> Sequence:
        """Take out the one that `peek` shows. Raises IndexError if nobody waits."""
        ...

    def remove(self, sequence: Sequence) -> None:
        """Raises KeyError if the sequence does not wait."""
        ...

    def rank(self, sequence: Sequence) -> tuple[float, ...]:
        """Sorts sequences that run: the greatest is the first to give way when pages run out."""
        ...


def make_queue(policy: str, *, quantum: int = 512) -> Queue:
    """The queue of a scheduling policy.

    Args:
        policy: "fcfs": in order of arrival. "priority": by ``Request.priority``, lower first, then by arrival. "fair":
            see `FairQueue`.
        quantum: tokens of a tenant's turn under "fair".

    Raises:
        ValueError: there is no such policy, or the quantum is not positive.
    """
    if policy == "fair":
        return FairQueue(quantum)
    if policy not in _RANKS:
        raise ValueError(f"scheduling policy {policy!r} is none of fair, {', '.join(_RANKS)}")
    return RankQueue(_RANKS[policy])


def require_room(engine: ResolvedEngine, waiting: int, tokens: int) -> None:
    """Whether one more request may wait, behind ``waiting`` others, with ``tokens`` prompt tokens in all.

    Raises:
        QueueFullError: too much is waiting.
    """
    most, room = engine.max_waiting_requests, engine.max_waiting_tokens
    if most is not None and waiting >= most:
        raise QueueFullError(f"{waiting} requests wait already, max_waiting_requests = {most}")
    if room is not None and tokens > room:
        raise QueueFullError(f"{tokens} prompt tokens would wait, max_waiting_tokens = {room}")


_RANKS: dict[str, Callable[[Sequence], tuple[float, ...]]] = {
    "fcfs": lambda sequence: (sequence.arrival,),
    "priority": lambda sequence: (sequence.request.priority, sequence.arrival),
}


class _Heap[K: Hashable, V]:
    """Values under distinct keys, least order first. Removal is lazy: O(1) now, the entry goes when it surfaces."""

    def __init__(self) -> None:
        self._entries: list[tuple[Any, int, K]] = []  # order, version, key
        self._live: dict[K, tuple[int, V]] = {}
        self._versions = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, key: K) -> bool:
        return key in self._live

    def values(self) -> Iterator[V]:
        return (value for _, value in self._live.values())

    def put(self, key: K, order: Any, value: V) -> None:
        """Insert, or move what ``key`` stands for to another place."""
        self._versions += 1
        self._live[key] = (self._versions, value)
        heapq.heappush(self._entries, (order, self._versions, key))
        self._compact()

    def discard(self, key: K) -> None:
        self._live.pop(key, None)
        self._compact()

    def first(self) -> tuple[Any, V] | None:
        """The least order and its value."""
        while self._entries:
            order, version, key = self._entries[0]
            if (live := self._live.get(key)) is not None and live[0] == version:
                return order, live[1]
            heapq.heappop(self._entries)
        return None

    def _compact(self) -> None:
        """Dead entries never outnumber the living by much: constant cost per removal on average."""
        if len(self._entries) > 2 * len(self._live) + _SLACK:
            live = {version for version, _ in self._live.values()}
            self._entries = [entry for entry in self._entries if entry[1] in live]
            heapq.heapify(self._entries)


class RankQueue:
    """Serves by a rank that never changes."""

    def __init__(self, rank: Callable[[Sequence], tuple[float, ...]]) -> None:
        self._rank = rank
        self._heap: _Heap[int, Sequence] = _Heap()
        self._tokens = 0

    @property
    def tokens(self) -> int:
        return self._tokens

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Sequence]:
        return self._heap.values()

    def push(self, sequence: Sequence) -> None:
        _require_absent(sequence, self._heap)
        self._tokens += len(sequence.prompt)
        self._heap.put(sequence.arrival, self._rank(sequence), sequence)

    def peek(self) -> Sequence | None:
        first = self._heap.first()
        return first[1] if first else None

    def pop(self) -> Sequence:
        if (sequence := self.peek()) is None:
            raise IndexError("nobody waits")
        self.remove(sequence)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        if sequence.arrival not in self._heap:
            raise KeyError(sequence.arrival)
        self._tokens -= len(sequence.prompt)
        self._heap.discard(sequence.arrival)

    def rank(self, sequence: Sequence) -> tuple[float, ...]:
        return self._rank(sequence)


class _Turn(NamedTuple):
    """A visit to a tenant: in which round, and where in it. Turns sort as they come."""

    round: int
    place: int


@dataclasses.dataclass(eq=False)
class _Tenant:
    """Who waits of a tenant, and the tokens it has saved up at its turn in ``round``."""

    place: int
    round: int
    deficit: int = 0
    heap: _Heap[int, tuple[Sequence, int]] = dataclasses.field(default_factory=_Heap)

    @property
    def head(self) -> tuple[Sequence, int]:
        """The earliest arrival and its cost."""
        first = self.heap.first()
        assert first is not None  # a tenant of whom nobody waits is forgotten
        return first[1]


class FairQueue:
    """Deficit round robin between tenants (Shreedhar & Varghese 1996): each turn adds ``quantum`` tokens to what a
    tenant may spend, and its sequences are served, in order of arrival, as far as that goes.

    A sequence costs the tokens that it may still have computed: those known and not computed, and those it may
    generate, as if nothing were cached and it ran to its ``max_tokens``. The cost is taken when it is pushed. A tenant
    of whom nobody waits loses what it saved; one that comes has its first turn at the end of the next round.

    So while a sequence that costs c is its tenant's head, each other tenant gets less than c + 2 quanta + the cost of
    its own dearest sequence. Rounds in which nobody can be served are skipped, not walked through, so the
    quantum may be small: everything is O(log n).
    """

    def __init__(self, quantum: int = 512) -> None:
        if quantum < 1:
            raise ValueError(f"quantum = {quantum} must be at least 1")
        self._quantum = quantum
        self._tenants: dict[str, _Tenant] = {}
        self._turns: _Heap[str, str] = _Heap()  # tenants by the turn in which their head can be paid for
        self._now = _Turn(0, 0)
        self._places = 0
        self._length = self._tokens = 0

    @property
    def tokens(self) -> int:
        return self._tokens

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for tenant in self._tenants.values() for sequence, _ in tenant.heap.values())

    def push(self, sequence: Sequence) -> None:
        name = sequence.request.tenant
        tenant = self._tenants.get(name) or self._enter(name)
        _require_absent(sequence, tenant.heap)
        tenant.heap.put(sequence.arrival, sequence.arrival, (sequence, _cost(sequence)))
        self._count(sequence, 1)
        self._schedule(name, tenant)

    def peek(self) -> Sequence | None:
        first = self._turns.first()
        return self._tenants[first[1]].head[0] if first else None

    def pop(self) -> Sequence:
        if (first := self._turns.first()) is None:
            raise IndexError("nobody waits")
        self._now, tenant = first[0], self._tenants[first[1]]
        sequence, cost = tenant.head
        tenant.deficit += (self._now.round - tenant.round) * self._quantum - cost
        tenant.round = self._now.round
        self.remove(sequence)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        name = sequence.request.tenant
        tenant = self._tenants.get(name)
        if tenant is None or sequence.arrival not in tenant.heap:
            raise KeyError(sequence.arrival)
        tenant.heap.discard(sequence.arrival)
        self._count(sequence, -1)
        if len(tenant.heap):
            self._schedule(name, tenant)
        else:
            self._turns.discard(name)
            del self._tenants[name]

    def rank(self, sequence: Sequence) -> tuple[float, ...]:
        """By when it was first given a slot: arrival would make late tenants give way to a flood that came before."""
        first = sequence.times.first_scheduled
        return (float("inf") if first is None else first, sequence.arrival)

    def _enter(self, name: str) -> _Tenant:
        self._places += 1
        tenant = self._tenants[name] = _Tenant(self._places, self._now.round)
        return tenant

    def _count(self, sequence: Sequence, sign: int) -> None:
        self._length += sign
        self._tokens += sign * len(sequence.prompt)

    def _schedule(self, name: str, tenant: _Tenant) -> None:
        """Put the tenant at the turn in which it will have saved enough for its head."""
        missing = tenant.head[1] - tenant.deficit
        paid = tenant.round + max(0, -(-missing // self._quantum))
        earliest = self._now.round + (tenant.place < self._now.place)  # its turn of this round may be over
        self._turns.put(name, _Turn(max(paid, earliest), tenant.place), name)


def _require_absent(sequence: Sequence, heap: _Heap) -> None:
    if sequence.arrival in heap:
        raise ValueError(f"sequence {sequence.arrival} waits already")


def _cost(sequence: Sequence) -> int:
    return sequence.final_length + 1 - sequence.scheduled


class Deadlines:
    """When requests end if they are not done by then."""

    def __init__(self) -> None:
        self._heap: _Heap[str, str] = _Heap()

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, deadline: float, request_id: str) -> None:
        """``deadline`` in seconds of the clock that `pop_expired` is given. An id that is known gets a new one."""
        self._heap.put(request_id, deadline, request_id)

    def discard(self, request_id: str) -> None:
        """The request is done, or never had a deadline."""
        self._heap.discard(request_id)

    def pop_expired(self, clock: Callable[[], float]) -> list[str]:
        """Requests whose deadline has come, earliest first. The clock is read only if there are deadlines."""
        expired: list[str] = []
        now = clock() if len(self._heap) else 0.0
        while (first := self._heap.first()) is not None and first[0] <= now:
            expired.append(first[1])
            self._heap.discard(first[1])
        return expired
