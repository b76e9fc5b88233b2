"""Queue of sequences that wait for their adapters, layered over a policy's queue. No jax."""

from __future__ import annotations

import bisect
import collections
import concurrent.futures
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future
from typing import Any, Protocol, runtime_checkable

from jaxinfer.lora.slots import Load, Part, Slots
from jaxinfer.lora.usage import LoadRecorder, LoRAUsage
from jaxinfer.sampling_params import RequestError
from jaxinfer.types import LoRARef, Request

PATIENCE = 64
"""Steps that an adapter waits for a slot to become free before another adapter is drained for it.

A constant rather than a setting, as a wide range around it works. In a simulation (40 rows of 8 hot adapters in 8
slots, few rare ones), with 16 steps the rare ones wait for 33 steps instead of 49, but hot ones are reloaded 2.5 times
as often; with 256 a request waits for more than twice its fair share. If slots are few for the adapters in use, fewer
steps change nothing. The setting to tune is ``max_loras``.
"""
_NAP = 0.01  # seconds


@runtime_checkable
class Waiter(Protocol):
    """Protocol of a sequence, with its LoRA fields."""

    request: Request
    arrival: int
    lora_slot: int


@runtime_checkable
class PolicyQueue[W](Protocol):
    """Protocol of a scheduler queue (`jaxinfer.engine.scheduling.queues.Queue`), where the methods are documented."""

    @property
    def tokens(self) -> int: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[W]: ...
    def push(self, sequence: W) -> None: ...
    def peek(self) -> W | None: ...
    def pop(self) -> W: ...
    def left(self, sequence: W) -> None: ...
    def remove(self, sequence: W) -> None: ...
    def rank(self, sequence: W) -> tuple[float, ...]: ...
    def preemption_victim(self) -> W | None: ...
    def precedes(self, started: W) -> bool: ...
    def prompt_limit(self, sequence: W) -> int | None: ...
    def charge(self, sequence: W, prompt: int = 0, output: int = 0) -> None: ...


@runtime_checkable
class AdapterSource(Protocol):
    """Protocol of an adapter store (`jaxinfer.lora.store.LoRAStore`), where the methods are documented."""

    def __len__(self) -> int: ...
    def retain(self, ref: LoRARef) -> None: ...
    def release(self, ref: LoRARef) -> None: ...
    def pin(self, identity: str) -> None: ...
    def unpin(self, identity: str) -> None: ...
    def prepare(self, identity: str) -> Future[Sequence[Part]]: ...


class _Wanted[W: Waiter]:
    """An adapter's held sequences, the step and time when their wait began, and the least rank of any of them."""

    def __init__(self, since: int, rank: tuple[float, ...], time: float) -> None:
        self.since, self.rank, self.time = since, rank, time
        self.sequences: dict[int, W] = {}  # by arrival


class AdapterQueue[W: Waiter]:
    """A queue that exposes only sequences whose adapter is resident; sequences of other adapters do not block them.

    It wraps the queue of a policy. A sequence that is next but whose adapter is not usable is held outside of that
    queue, and returns to its old position when the adapter is loaded. So an adapter that is being read, or that has no
    slot, delays only its own sequences.

    Adapters get slots in the order of the policy's ranks of their held sequences. If an adapter's sequences have waited
    for ``patience`` steps, a slot is drained for it: the adapter that has been resident for longest admits no further
    sequences until its running ones have ended, and then waits in its turn. As many adapters are drained as are
    overdue. So of W requested adapters none waits for more than W / slots turns of ``patience`` steps and a request's
    length.

    Sequences without an adapter pass through. Only for the engine thread.

    Args:
        slots: number of slots on the device.
        recorder: records how long sequences waited for adapters.
        patience: in steps.

    Attributes:
        held: sequences that wait for their adapters.
    """

    def __init__(
        self,
        queue: PolicyQueue[W],
        slots: int,
        source: AdapterSource,
        recorder: LoadRecorder,
        patience: int = PATIENCE,
    ) -> None:
        self._queue, self._slots, self._source, self._patience = queue, Slots(slots), source, patience
        self._recorder = recorder
        self.held: set[W] = set()
        self._held: dict[str, _Wanted[W]] = {}  # by identity
        self._line: list[tuple[tuple[float, ...], str]] = []  # held adapters without a slot, in order of rank
        self._inside: collections.Counter[str] = collections.Counter()  # sequences in the policy's queue
        self._coming: dict[str, Future[Sequence[Part]]] = {}
        self._draining: list[str] = []
        self._loaded_for: dict[str, tuple[float, ...]] = {}  # by placed identity: rank of its sequence when placed
        self._running: collections.Counter[str] = collections.Counter()
        self._names_running: collections.Counter[str] = collections.Counter()
        self._names_waiting: collections.Counter[str] = collections.Counter()
        self._step = self._held_tokens = self._loads = self._evictions = 0

    # ---- requests

    def enter(self, request: Request) -> None:
        """Keep the adapter of a new request until it is done.

        Raises:
            RequestError: the adapter no longer exists.
        """
        if request.lora is not None:
            self._source.retain(request.lora)

    def done(self, request: Request) -> None:
        """Note that all samples of a request have ended."""
        if request.lora is not None:
            self._source.release(request.lora)

    # ---- a step

    def begin(self) -> tuple[list[Load], list[tuple[W, str]]]:
        """Begin a step: place adapters, and release their sequences. Returns the parts to write before the step's
        programs, and the sequences to end because their adapters cannot be loaded, with the reason."""
        self._step += 1
        failed = self._place()
        self._drain()
        load = self._next_load()
        for identity in self._slots.identities:
            if identity in self._held and self._ready(identity):
                self._let_go(identity)
        return [] if load is None else [load], failed

    def launched(self, runs: bool) -> None:
        """Note that a step was planned; ``runs``: its results will be read."""
        if runs:
            self._slots.launched()

    def read(self) -> None:
        """Note that the earliest launched step has been read."""
        self._slots.read()

    def rest(self) -> None:
        """Sleep briefly for an adapter when there is nothing else to do."""
        coming = [each for each in self._coming.values() if not each.done()]
        if coming:
            concurrent.futures.wait(coming, _NAP, concurrent.futures.FIRST_COMPLETED)

    def _next_load(self) -> Load | None:
        load = self._slots.next_load()
        if load is not None and (whole := self._slots.whole(load[0])) in self._held:
            self._recorder.lora_loaded(self._held[whole].time)
        return load

    def _place(self) -> list[tuple[W, str]]:
        """Prepare the adapters that are next, and assign slots to those that are ready."""
        failed: list[tuple[W, str]] = []
        self._coming = {each: future for each, future in self._coming.items() if each in self._held}
        for _, identity in self._line[: len(self._slots)]:
            if identity not in self._coming:
                self._coming[identity] = self._source.prepare(identity)
        for identity in self._prepared():
            coming = self._coming[identity]
            if (error := coming.exception()) is not None:
                failed += [(sequence, str(error)) for sequence in self._held[identity].sequences.values()]
                del self._coming[identity]
            elif (slot := self._slots.vacant(functools.partial(self._spared, wanted=identity))) is not None:
                self._give(slot, identity, coming.result())
        return failed

    def _give(self, slot: int, identity: str, parts: Sequence[Part]) -> None:
        self._source.pin(identity)
        self._step_out(identity)
        before = self._slots.place(slot, identity, parts)
        del self._coming[identity]
        self._loaded_for[identity] = self._held[identity].rank
        self._loads += 1
        self._evictions += before is not None
        if before is not None:
            del self._loaded_for[before]
            self._source.unpin(before)
            if before in self._held:
                self._line_up(before)

    def _spared(self, placed: str, wanted: str) -> bool:
        """Return whether a placed adapter must not be evicted: its own sequences are due before those of the other one.
        Otherwise two adapters could evict each other forever without running."""
        is_due = self._slots.fresh(placed) and self._inside[placed] > 0
        return is_due and self._loaded_for[placed] < self._held[wanted].rank

    def _prepared(self) -> list[str]:
        """Return the adapters that wait only for a slot, in the order in which they get one."""
        ready = [identity for identity, future in self._coming.items() if future.done()]
        return sorted(ready, key=lambda identity: self._held[identity].rank)

    def _drain(self) -> None:
        """Choose the adapters that admit no sequences, so that their slots become free for waiting adapters."""
        overdue = [each for each in self._prepared() if self._step - self._held[each].since > self._patience]
        if not overdue:
            self._draining = []
            return
        lying = [each for each in self._slots.identities if self._slots.usable(each)]
        drained = [each for each in lying if each in self._draining]
        others = [each for each in lying if each not in drained and not self._spared(each, overdue[0])]
        others.sort(key=lambda each: self._running[each] > 0)
        self._draining = [*drained, *others][: len(overdue)]

    def _ready(self, identity: str) -> bool:
        return self._slots.usable(identity) and identity not in self._draining

    # ---- queue

    @property
    def tokens(self) -> int:
        return self._queue.tokens + self._held_tokens

    def __len__(self) -> int:
        return len(self._queue) + len(self.held)

    def __iter__(self) -> Iterator[W]:
        held = (wanted.sequences.values() for wanted in self._held.values())
        return itertools.chain(self._queue, *held)

    def push(self, sequence: W) -> None:
        self._queue.push(sequence)
        self._count(sequence, 1)

    def peek(self) -> W | None:
        while (first := self._queue.peek()) is not None:
            lora = first.request.lora
            if lora is None or self._ready(lora.identity):
                break
            self._queue.remove(first)
            self._count(first, -1)
            self._hold(first, lora.identity)
        return first

    def pop(self) -> W:
        sequence = self._queue.pop()
        self._count(sequence, -1)
        if (lora := sequence.request.lora) is not None:
            sequence.lora_slot = self._slots.acquire(lora.identity)
            _add(self._running, lora.identity, 1)
            _add(self._names_running, lora.name, 1)
        return sequence

    def left(self, sequence: W) -> None:
        self._queue.left(sequence)
        if (lora := sequence.request.lora) is not None:
            self._slots.release(lora.identity)
            _add(self._running, lora.identity, -1)
            _add(self._names_running, lora.name, -1)
            sequence.lora_slot = -1

    def remove(self, sequence: W) -> None:
        lora = sequence.request.lora
        if lora is None or sequence.arrival not in self._sequences(lora.identity):
            self._queue.remove(sequence)
            self._count(sequence, -1)
            return
        wanted = self._held[lora.identity]
        del wanted.sequences[sequence.arrival]
        self._count_held(sequence, -1)
        if not wanted.sequences:
            self._step_out(lora.identity)
            del self._held[lora.identity]

    def rank(self, sequence: W) -> tuple[float, ...]:
        return self._queue.rank(sequence)

    def preemption_victim(self) -> W | None:
        return self._queue.preemption_victim()

    def precedes(self, started: W) -> bool:
        return self._queue.precedes(started)

    def prompt_limit(self, sequence: W) -> int | None:
        return self._queue.prompt_limit(sequence)

    def charge(self, sequence: W, prompt: int = 0, output: int = 0) -> None:
        self._queue.charge(sequence, prompt, output)

    def _sequences(self, identity: str) -> dict[int, W]:
        wanted = self._held.get(identity)
        return {} if wanted is None else wanted.sequences

    def _hold(self, sequence: W, identity: str) -> None:
        rank, wanted = self._queue.rank(sequence), self._held.get(identity)
        if wanted is None:
            wanted = self._held[identity] = _Wanted(self._step, rank, self._recorder.lora_wanted())
            self._line_up(identity)
        elif rank < wanted.rank:
            self._step_out(identity)
            wanted.rank = rank
            self._line_up(identity)
        wanted.sequences[sequence.arrival] = sequence
        self._count_held(sequence, 1)

    def _line_up(self, identity: str) -> None:
        if identity not in self._slots:
            bisect.insort(self._line, (self._held[identity].rank, identity))

    def _step_out(self, identity: str) -> None:
        if identity not in self._slots:
            del self._line[bisect.bisect_left(self._line, (self._held[identity].rank, identity))]

    def _let_go(self, identity: str) -> None:
        for sequence in self._held.pop(identity).sequences.values():
            self._count_held(sequence, -1)
            self.push(sequence)

    def _count(self, sequence: W, sign: int) -> None:
        if (lora := sequence.request.lora) is not None:
            _add(self._inside, lora.identity, sign)
            _add(self._names_waiting, lora.name, sign)

    def _count_held(self, sequence: W, sign: int) -> None:
        assert sequence.request.lora is not None
        (self.held.add if sign > 0 else self.held.remove)(sequence)
        self._held_tokens += sign * len(sequence.request.prompt_token_ids)
        _add(self._names_waiting, sequence.request.lora.name, sign)

    def usage(self) -> LoRAUsage:
        """Return current usage counts. Safe from any thread."""
        slots, used = len(self._slots), self._slots.used
        running, waiting = dict(self._names_running), dict(self._names_waiting)
        return LoRAUsage(len(self._source), slots, used, self._loads, self._evictions, running, waiting)

    def check(self, running: Iterable[W]) -> None:
        """Check that the running sequences hold all pins, and the slots of their adapters.

        Raises:
            AssertionError: they do not.
        """
        self._slots.check([(lora.identity, each.lora_slot) for each in running if (lora := each.request.lora)])


class NoAdapters:
    """Stub of `AdapterQueue`'s non-queue methods, for an engine that serves no adapters."""

    held: AbstractSet[Any] = frozenset()

    def enter(self, request: Request) -> None:
        """Reject a request with an adapter."""
        if request.lora is not None:
            raise RequestError("lora", f"={request.lora.name!r}: this engine serves no adapters (enable_lora is off)")

    def done(self, request: Request) -> None:
        """Do nothing: no adapter is kept."""

    def begin(self) -> tuple[list[Load], list[tuple[Any, str]]]:
        """Return no loads and no failed sequences."""
        return [], []

    def launched(self, runs: bool) -> None:
        """Do nothing: steps are not counted."""

    def read(self) -> None:
        """Do nothing: steps are not counted."""

    def rest(self) -> None:
        """Do nothing: no adapter is being loaded."""

    def usage(self) -> None:
        """Return None: there are no adapters."""

    def check(self, running: Iterable[Any]) -> None:
        """Do nothing: no adapter is pinned."""


def with_adapters[W: Waiter](
    queue: PolicyQueue[W], slots: int, source: AdapterSource | None, recorder: LoadRecorder
) -> tuple[AdapterQueue[W] | NoAdapters, PolicyQueue[W]]:
    """Return the scheduler's adapter component and the queue to use. ``source`` None: no adapters are served."""
    if source is None:
        return NoAdapters(), queue
    made = AdapterQueue(queue, slots, source, recorder)
    return made, made


def _add(counts: collections.Counter[str], key: str, number: int) -> None:
    """Add to a count, and delete zero counts, as the set of adapters changes."""
    counts[key] += number
    if not counts[key]:
        del counts[key]
