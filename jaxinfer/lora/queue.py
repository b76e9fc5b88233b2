"""Sequences that wait for their adapters, beside a queue of those that wait for nothing else. No jax."""

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
"""Steps that an adapter waits for a slot to become free by itself; from then on one is drained for it.

No setting: it is good for a wide range around it. Simulated (40 rows of 8 hot adapters in 8 slots, few rare ones), 16
steps let the rare ones wait for 33 steps instead of 49, and hot ones are loaded again 2.5 times as often; with 256 a
request waits for more than twice its fair share. Where slots are few for the adapters in use, fewer steps change
nothing. What there is to choose is the number of slots (``max_loras``)."""
_NAP = 0.01  # seconds


@runtime_checkable
class Waiter(Protocol):
    """Protocol of a sequence, as far as adapters are concerned."""

    request: Request
    arrival: int
    lora_slot: int


@runtime_checkable
class PolicyQueue[W](Protocol):
    """Queue of the scheduler (`jaxinfer.engine.scheduling.queues.Queue`), where the methods are documented."""

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
    def gives_way(self) -> W | None: ...
    def precedes(self, started: W) -> bool: ...
    def prompt_limit(self, sequence: W) -> int | None: ...
    def charge(self, sequence: W, prompt: int = 0, output: int = 0) -> None: ...


@runtime_checkable
class AdapterSource(Protocol):
    """Where adapters come from: `jaxinfer.lora.store.LoRAStore`, where the methods are documented."""

    def __len__(self) -> int: ...
    def retain(self, ref: LoRARef) -> None: ...
    def release(self, ref: LoRARef) -> None: ...
    def pin(self, identity: str) -> None: ...
    def unpin(self, identity: str) -> None: ...
    def prepare(self, identity: str) -> Future[Sequence[Part]]: ...


class _Wanted[W: Waiter]:
    """An adapter's sequences that cannot be admitted, since which step and time, and the least rank of any of them."""

    def __init__(self, since: int, rank: tuple[float, ...], time: float) -> None:
        self.since, self.rank, self.time = since, rank, time
        self.sequences: dict[int, W] = {}  # by arrival


class AdapterQueue[W: Waiter]:
    """A queue that shows those sequences alone whose adapter is on the device; the others get on as if they were not
    there.

    It stands in front of the queue of a policy. A sequence whose turn it would be, and whose adapter cannot be used, is
    held outside of it, and goes back to its old place when the adapter has come. So an adapter that is read, or for
    which there is no slot, keeps nobody waiting but its own sequences.

    Slots are given to adapters in the order of the policy's ranks of those held. An adapter whose sequences have waited
    for ``patience`` steps gets a slot drained: of the adapter that has lain there for longest no further sequence is
    admitted until those that run have ended, which then waits in its turn. As many are drained as wait too long. So of
    W adapters that are wanted none waits for more than W / slots turns of ``patience`` steps and a request's length.

    Sequences without an adapter pass through. For the engine's thread alone.

    Args:
        slots: on the device.
        recorder: is told how long adapters were waited for.
        patience: in steps.

    Attributes:
        held: those that wait for their adapters.
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
        self._line: list[tuple[tuple[float, ...], str]] = []  # of those of them that have no slot, in order of rank
        self._inside: collections.Counter[str] = collections.Counter()  # sequences in the policy's queue
        self._coming: dict[str, Future[Sequence[Part]]] = {}
        self._draining: list[str] = []
        self._loaded_for: dict[str, tuple[float, ...]] = {}  # by placed identity: the rank of whom it was placed for
        self._running: collections.Counter[str] = collections.Counter()
        self._names_running: collections.Counter[str] = collections.Counter()
        self._names_waiting: collections.Counter[str] = collections.Counter()
        self._step = self._held_tokens = self._loads = self._evictions = 0

    # ---- requests

    def enter(self, request: Request) -> None:
        """Keep the adapter of a new request until it is done.

        Raises:
            RequestError: there is no such adapter any more.
        """
        if request.lora is not None:
            self._source.retain(request.lora)

    def done(self, request: Request) -> None:
        """Note that all samples of a request have ended."""
        if request.lora is not None:
            self._source.release(request.lora)

    # ---- a step

    def begin(self) -> tuple[list[Load], list[tuple[W, str]]]:
        """Begin a step: place adapters, and let their sequences go on. Returns what is to be written before the step's
        programs, and the sequences whose adapters cannot be had, with the reason: they are to be ended."""
        self._step += 1
        failed = self._place()
        self._drain()
        load = self._next_load()
        for identity in self._slots.identities:
            if identity in self._held and self._ready(identity):
                self._let_go(identity)
        return [] if load is None else [load], failed

    def launched(self, runs: bool) -> None:
        """Note that a step was planned; ``runs``: it will be read."""
        if runs:
            self._slots.launched()

    def read(self) -> None:
        """Note that the earliest step that was launched is read."""
        self._slots.read()

    def rest(self) -> None:
        """Wait a while for an adapter, when there is nothing else to do."""
        coming = [each for each in self._coming.values() if not each.done()]
        if coming:
            concurrent.futures.wait(coming, _NAP, concurrent.futures.FIRST_COMPLETED)

    def _next_load(self) -> Load | None:
        load = self._slots.next_load()
        if load is not None and (whole := self._slots.whole(load[0])) in self._held:
            self._recorder.lora_loaded(self._held[whole].time)
        return load

    def _place(self) -> list[tuple[W, str]]:
        """Prepare the adapters that are next, and give slots to those that are ready for one."""
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
        """Whether a placed adapter must not give way: those for whom it came wait for nothing but their turn, which is
        before that of those who want the other one. (Else two could take turns for ever, and nobody run.)"""
        is_due = self._slots.fresh(placed) and self._inside[placed] > 0
        return is_due and self._loaded_for[placed] < self._held[wanted].rank

    def _prepared(self) -> list[str]:
        """Adapters that wait for a slot and nothing else, in the order in which they get one."""
        ready = [identity for identity, future in self._coming.items() if future.done()]
        return sorted(ready, key=lambda identity: self._held[identity].rank)

    def _drain(self) -> None:
        """Choose the adapters of which nobody is admitted, so that their slots become free for those that wait."""
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

    # ---- who waits

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

    def gives_way(self) -> W | None:
        return self._queue.gives_way()

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
        """Figures of now. From any thread."""
        slots, used = len(self._slots), self._slots.used
        running, waiting = dict(self._names_running), dict(self._names_waiting)
        return LoRAUsage(len(self._source), slots, used, self._loads, self._evictions, running, waiting)

    def check(self, running: Iterable[W]) -> None:
        """Check that those who run have all pins, and the slots of their adapters.

        Raises:
            AssertionError: they have not.
        """
        self._slots.check([(lora.identity, each.lora_slot) for each in running if (lora := each.request.lora)])


class NoAdapters:
    """An engine's that serves none: what `AdapterQueue` does besides being a queue."""

    held: AbstractSet[Any] = frozenset()

    def enter(self, request: Request) -> None:
        """Refuse a request that wants an adapter."""
        if request.lora is not None:
            raise RequestError("lora", f"={request.lora.name!r}: this engine serves no adapters (enable_lora is off)")

    def done(self, request: Request) -> None:
        """Nothing is kept."""

    def begin(self) -> tuple[list[Load], list[tuple[Any, str]]]:
        """Nothing to load, and nobody who waits for it."""
        return [], []

    def launched(self, runs: bool) -> None:
        """Nothing is counted."""

    def read(self) -> None:
        """Nothing is counted."""

    def rest(self) -> None:
        """Nothing comes."""

    def usage(self) -> None:
        """Nothing to tell."""

    def check(self, running: Iterable[Any]) -> None:
        """Nothing is pinned."""


def with_adapters[W: Waiter](
    queue: PolicyQueue[W], slots: int, source: AdapterSource | None, recorder: LoadRecorder
) -> tuple[AdapterQueue[W] | NoAdapters, PolicyQueue[W]]:
    """What a scheduler needs for its adapters, and the queue that it has then. ``source`` None: it serves none."""
    if source is None:
        return NoAdapters(), queue
    made = AdapterQueue(queue, slots, source, recorder)
    return made, made


def _add(counts: collections.Counter[str], key: str, number: int) -> None:
    """Count, and forget what comes to nothing: adapters come and go."""
    counts[key] += number
    if not counts[key]:
        del counts[key]
