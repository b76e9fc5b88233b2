"""Queues: who is served next, who has waited too long, and who may not wait at all. No jax.

A queue hands out one sequence at a time: `peek` until it fits, then `pop`. Looking costs nothing however many wait;
coming, going and giving up are O(log n).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol, runtime_checkable

from jaxinfer.config import ResolvedEngine
from jaxinfer.engine.scheduling.fair import FairQueue
from jaxinfer.engine.scheduling.heap import Heap
from jaxinfer.engine.scheduling.sequence import Sequence
from jaxinfer.sampling_params import QueueFullError
from jaxinfer.types import Request


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
        """Add a sequence. Raises ValueError if it waits already."""
        ...

    def peek(self) -> Sequence | None:
        """The one to be served next. It stays the same until another is pushed, popped or removed."""
        ...

    def pop(self) -> Sequence:
        """Take out the one that `peek` shows: it runs from now on. Raises IndexError if nobody waits."""
        ...

    def left(self, sequence: Sequence) -> None:
        """Note that a sequence that ran has given up its slot."""
        ...

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence. Raises KeyError if it does not wait."""
        ...

    def rank(self, sequence: Sequence) -> tuple[float, ...]:
        """Sorts sequences that run: the greatest is the first to give way when pages run out."""
        ...

    def gives_way(self) -> Sequence | None:
        """The sequence that runs and should leave its slot to the one that `peek` shows, if there is one."""
        ...

    def precedes(self, started: Sequence) -> bool:
        """Whether the one that `peek` shows comes before a prompt that is being computed."""
        ...

    def prompt_limit(self, sequence: Sequence) -> int | None:
        """The prompt tokens of a step up to which chunks of this prompt may be added; None: as many as fit."""
        ...

    def charge(self, sequence: Sequence, prompt: int = 0, output: int = 0) -> None:
        """Note that tokens were computed for a sequence that runs."""
        ...


def make_queue(policy: str, slots: int, *, quantum: int = 512, chunk: int | None = None) -> Queue:
    """The queue of a scheduling policy.

    Args:
        policy: "fcfs": in order of arrival. "priority": by ``Request.priority``, lower first, then by arrival. "fair":
            see `FairQueue`.
        slots: sequences that can run at once.
        quantum: tokens that a tenant may be ahead of another that waits, under "fair".
        chunk: prompt tokens of a step where tenants share the engine, under "fair"; None: as many as fit.

    Raises:
        ValueError: there is no such policy, or the quantum is not positive.
    """
    if policy == "fair":
        return FairQueue(slots, quantum, chunk)
    if policy not in _RANKS:
        raise ValueError(f"scheduling policy {policy!r} is none of fair, {', '.join(_RANKS)}")
    return RankQueue(_RANKS[policy], urgent=policy == "priority")


class Queued(NamedTuple):
    """Counts of what waits: requests whose prompt does, their and others' samples, tokens of prompts."""

    requests: int
    sequences: int
    tokens: int


def require_room(engine: ResolvedEngine, queued: Queued, request: Request, ahead: int = 0) -> None:
    """Raise QueueFullError for a request that may not wait behind those that do, and behind ``ahead`` more. One that is
    alone always may: no time would ever come at which a greater one is taken."""
    would = {"requests": queued.requests + ahead + 1}
    if queued.sequences:
        tokens = queued.tokens + len(request.prompt_token_ids)
        would |= {"sequences": queued.sequences + request.params.n, "tokens": tokens}
    for name, count in would.items():
        most = getattr(engine, f"max_waiting_{name}")
        if most is not None and count > most:
            slots = f"behind {engine.max_num_seqs} slots (max_num_seqs)"
            raise QueueFullError(f"{count} {name} would wait, max_waiting_{name} = {most}, {slots}")


_RANKS: dict[str, Callable[[Sequence], tuple[float, ...]]] = {
    "fcfs": lambda sequence: (sequence.arrival,),
    "priority": lambda sequence: (sequence.request.priority, sequence.arrival),
}


class RankQueue:
    """Serves by a rank that never changes; ``urgent``: who runs gives its slot to one of a lower ``priority``."""

    def __init__(self, rank: Callable[[Sequence], tuple[float, ...]], *, urgent: bool = False) -> None:
        self._rank, self._urgent = rank, urgent
        self._heap: Heap[int, Sequence] = Heap()
        self._running: dict[int, Sequence] = {}
        self._tokens = 0

    @property
    def tokens(self) -> int:
        return self._tokens

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Sequence]:
        return self._heap.values()

    def push(self, sequence: Sequence) -> None:
        if sequence.arrival in self._heap:
            raise ValueError(f"sequence {sequence.arrival} waits already")
        self._tokens += len(sequence.prompt)
        self._heap.put(sequence.arrival, self._rank(sequence), sequence)

    def peek(self) -> Sequence | None:
        first = self._heap.first()
        return first[1] if first else None

    def pop(self) -> Sequence:
        if (sequence := self.peek()) is None:
            raise IndexError("nobody waits")
        self.remove(sequence)
        self._running[sequence.arrival] = sequence
        return sequence

    def left(self, sequence: Sequence) -> None:
        del self._running[sequence.arrival]

    def remove(self, sequence: Sequence) -> None:
        if sequence.arrival not in self._heap:
            raise KeyError(sequence.arrival)
        self._tokens -= len(sequence.prompt)
        self._heap.discard(sequence.arrival)

    def rank(self, sequence: Sequence) -> tuple[float, ...]:
        return self._rank(sequence)

    def gives_way(self) -> Sequence | None:
        first = self.peek()
        if not self._urgent or first is None or not self._running:
            return None
        last = max(self._running.values(), key=self._rank)
        return last if first.request.priority < last.request.priority else None

    def precedes(self, started: Sequence) -> bool:
        return False

    def prompt_limit(self, sequence: Sequence) -> int | None:
        return None

    def charge(self, sequence: Sequence, prompt: int = 0, output: int = 0) -> None:
        """Do nothing: ranks do not depend on what was used."""


class Deadlines:
    """Deadlines at which requests end if they are not done by then."""

    def __init__(self) -> None:
        self._heap: Heap[str, str] = Heap()

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, deadline: float, request_id: str) -> None:
        """Set a deadline, in seconds of the clock that `pop_expired` is given. An id that is known gets a new one."""
        self._heap.put(request_id, deadline, request_id)

    def discard(self, request_id: str) -> None:
        """Forget a request that is done, or never had a deadline."""
        self._heap.discard(request_id)

    def pop_expired(self, clock: Callable[[], float]) -> list[str]:
        """Requests whose deadline has come, earliest first. The clock is read only if there are deadlines."""
        expired: list[str] = []
        now = clock() if len(self._heap) else 0.0
        while (first := self._heap.first()) is not None and first[0] <= now:
            expired.append(first[1])
            self._heap.discard(first[1])
        return expired
