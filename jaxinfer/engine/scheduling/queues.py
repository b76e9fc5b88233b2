"""Waiting queues by scheduling policy, and queue limits. No jax.

A queue returns one sequence at a time: `peek` until it fits, then `pop`. `peek` costs nothing however many wait; push,
pop and remove are O(log n).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol, runtime_checkable

from jaxinfer.config import ResolvedEngine
from jaxinfer.engine.scheduling.fair import FairQueue, Heap
from jaxinfer.engine.scheduling.sequence import Sequence
from jaxinfer.sampling_params import QueueFullError
from jaxinfer.types import Request


@runtime_checkable
class Queue(Protocol):
    """Sequences that wait for a slot, in the order of a policy.

    A preempted sequence is pushed again and returns to its old position: its arrival number decides.
    """

    @property
    def tokens(self) -> int:
        """Prompt tokens of all waiting sequences."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over all waiting sequences, in no particular order."""

    def push(self, sequence: Sequence) -> None:
        """Add a sequence. Raises ValueError if it waits already."""

    def peek(self) -> Sequence | None:
        """Return the sequence to be served next. It stays the same until another is pushed, popped or removed."""

    def pop(self) -> Sequence:
        """Take out the sequence that `peek` returns: it runs from now on. Raises IndexError if none waits."""

    def left(self, sequence: Sequence) -> None:
        """Record that a running sequence has given up its slot."""

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence. Raises KeyError if it does not wait."""

    def rank(self, sequence: Sequence) -> tuple[float, ...]:
        """Return the rank of a running sequence: the greatest is preempted first when pages run out."""

    def preemption_victim(self) -> Sequence | None:
        """Return the running sequence to preempt for the one that `peek` returns, if there is one."""

    def precedes(self, started: Sequence) -> bool:
        """Whether the sequence that `peek` returns precedes a prompt that is being computed."""
        return False

    def prompt_limit(self, sequence: Sequence) -> int | None:
        """Return the prompt tokens per step up to which chunks of this prompt may be added; None: as many as fit."""
        return None

    def charge(self, sequence: Sequence, prompt: int = 0, output: int = 0) -> None:
        """Record that tokens were computed for a running sequence."""
        return


def make_queue(policy: str, slots: int, *, quantum: int = 512, chunk: int | None = None) -> Queue:
    """Make the queue of a scheduling policy.

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
    """Counts of the waiting queue: requests with a waiting prompt, all waiting samples, and prompt tokens."""

    requests: int
    sequences: int
    tokens: int


def require_capacity(engine: ResolvedEngine, queued: Queued, request: Request, ahead: int = 0) -> None:
    """Raise QueueFullError for a request over the queue limits, given the waiting ones and ``ahead`` more. Limits do
    not apply to a request in an empty queue: a larger one could otherwise never be accepted."""
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


class RankQueue(Queue):
    """Serves by a constant rank; ``urgent``: running sequences are preempted for those of a lower ``priority``."""

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

    def preemption_victim(self) -> Sequence | None:
        first = self.peek()
        if not self._urgent or first is None or not self._running:
            return None
        last = max(self._running.values(), key=self._rank)
        return last if first.request.priority < last.request.priority else None
