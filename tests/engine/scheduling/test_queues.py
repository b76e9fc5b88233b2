"""Queue policies: the order of service, and bounds on waiting times."""

from __future__ import annotations

import functools
import tracemalloc
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.engine.scheduling import queues
from jaxinfer.engine.scheduling.queues import Queue, RankQueue
from jaxinfer.engine.scheduling.sequence import Sequence
from jaxinfer.kv.radix import PageKeys
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.types import LoRARef, Request

POLICIES = ("fcfs", "priority", "fair")


@functools.cache
def _params(most: int) -> SamplingParams:
    return SamplingParams(max_tokens=most)


def make_sequence(
    arrival: int, *, tenant: str = "", priority: int = 0, prompt: int = 3, most: int = 4, lora: str | None = None
) -> Sequence:
    """Return a sequence that costs ``prompt + most`` tokens."""
    adapter = None if lora is None else LoRARef(lora, lora)
    request = Request(str(arrival), (1,) * prompt, _params(most), priority=priority, tenant=tenant, lora=adapter)
    return Sequence(
        request,
        0,
        arrival,
        tokens=array("i", [1]) * prompt,
        keys=PageKeys(b"", 16),
        prefill_end=prompt - 1,
        final_length=prompt + most - 1,
    )


def make_queue(policy: str, slots: int = 8, **changes: int) -> Queue:
    return queues.make_queue(policy, slots, **changes)


def drain(queue: Queue) -> list[int]:
    return [queue.pop().arrival for _ in range(len(queue))]


# ---- all policies


@pytest.mark.parametrize("policy", POLICIES)
def test_what_waits_is_counted(policy: str) -> None:
    queue = make_queue(policy)
    sequences = [make_sequence(i, tenant="ab"[i % 2], prompt=i + 1) for i in range(6)]
    for sequence in sequences:
        queue.push(sequence)
    assert (len(queue), queue.tokens) == (6, 21)
    queue.remove(sequences[4])
    assert queue.pop() is sequences[0]
    assert (len(queue), queue.tokens) == (4, 15)
    assert sorted(s.arrival for s in queue) == [1, 2, 3, 5]
    assert sorted(drain(queue)) == [1, 2, 3, 5]
    assert (len(queue), queue.tokens, queue.peek()) == (0, 0, None)


@pytest.mark.parametrize("policy", POLICIES)
def test_misuse_is_refused(policy: str) -> None:
    queue, sequence = make_queue(policy), make_sequence(0)
    with pytest.raises(IndexError):
        queue.pop()
    with pytest.raises(KeyError):
        queue.remove(sequence)
    queue.push(sequence)
    with pytest.raises(ValueError, match="waits already"):
        queue.push(sequence)
    queue.remove(sequence)
    with pytest.raises(KeyError):
        queue.remove(sequence)


def test_unknown_policies_are_refused() -> None:
    with pytest.raises(ValueError, match="'lifo' is none of fair, fcfs, priority"):
        make_queue("lifo")
    with pytest.raises(ValueError, match="quantum = 0"):
        make_queue("fair", quantum=0)


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["push", "push", "pop", "remove", "return", "charge"]),
        st.integers(0, 50),  # index of the sequence that is removed or returns
        st.integers(0, 3),  # tenant and priority
        st.integers(1, 30),  # prompt tokens
    ),
    max_size=60,
)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=100, deadline=None)
@given(operations=OPERATIONS)
def test_order_is_that_of_a_naive_queue(policy: str, operations: list[tuple[str, int, int, int]]) -> None:
    queue, naive = make_queue(policy), NAIVE[policy]()
    waiting: list[Sequence] = []
    served: list[Sequence] = []
    for arrival, (operation, which, kind, prompt) in enumerate(operations):
        if operation == "push":
            waiting.append(make_sequence(arrival, tenant=str(kind), priority=kind, prompt=prompt))
            queue.push(waiting[-1])
            naive.push(waiting[-1])
        elif operation == "pop" and waiting:
            assert (first := queue.peek()) is queue.peek()
            served.append(queue.pop())
            assert served[-1] is first
            assert served[-1] is naive.pop()
            waiting.remove(served[-1])
        elif operation == "remove" and waiting:
            removed = waiting.pop(which % len(waiting))
            queue.remove(removed)
            naive.remove(removed)
        elif operation == "return" and served:
            waiting.append(served.pop(which % len(served)))
            for each in (queue, naive):
                each.push(waiting[-1])
                each.left(waiting[-1])
        elif operation == "charge" and served:
            for each in (queue, naive):
                each.charge(served[which % len(served)], prompt=prompt, output=kind)
    while waiting:
        waiting.remove(sequence := queue.pop())
        assert sequence is naive.pop()


class NaiveRanks:
    def __init__(self, *names: str) -> None:
        self.names, self.waiting = names, list[Sequence]()

    def push(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def pop(self) -> Sequence:
        self.waiting.sort(key=lambda s: (s.request.priority, s.arrival) if self.names else s.arrival)
        return self.waiting.pop(0)

    def remove(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)

    def left(self, sequence: Sequence) -> None:
        pass

    def charge(self, sequence: Sequence, prompt: int, output: int) -> None:
        pass


class NaiveCounters:
    """Virtual token counters of fair queueing, in which every operation scans all tenants.

    Tenants: [tokens used, order of arrival, waiting sequences, number running, lead until its first tokens].
    """

    def __init__(self) -> None:
        self.here: dict[str, list] = {}
        self.debts: dict[str, float] = {}
        self.floor, self.places = 0.0, 0

    def push(self, sequence: Sequence) -> None:
        name = sequence.request.tenant
        if name not in self.here:
            self.debts = self.debts if self.here else {}
            self.places += 1
            self.here[name] = [max(self._least(), self.debts.get(name, 0.0)), self.places, [], 0, 512]
        self.here[name][2] = sorted([*self.here[name][2], sequence], key=lambda s: s.arrival)

    def pop(self) -> Sequence:
        tenant = min((t for t in self.here.values() if t[2]), key=lambda t: (t[0] - t[4], t[3], t[1]))
        tenant[3] += 1
        return tenant[2].pop(0)

    def left(self, sequence: Sequence) -> None:
        self.here[sequence.request.tenant][3] -= 1
        self._forget(sequence.request.tenant)

    def remove(self, sequence: Sequence) -> None:
        self.here[sequence.request.tenant][2].remove(sequence)
        self._forget(sequence.request.tenant)

    def charge(self, sequence: Sequence, prompt: int, output: int) -> None:
        self.here[sequence.request.tenant][0] += prompt + 2 * output
        self.here[sequence.request.tenant][4] = 0

    def _forget(self, name: str) -> None:
        if not self.here[name][2] and not self.here[name][3]:
            self.debts[name] = self.here.pop(name)[0]
            self._least()

    def _least(self) -> float:
        self.floor = max(self.floor, min((t[0] for t in self.here.values()), default=0.0))
        return self.floor


NAIVE = {"fcfs": NaiveRanks, "priority": functools.partial(NaiveRanks, "priority"), "fair": NaiveCounters}


# ---- ranks


def test_a_preempted_sequence_returns_to_its_old_place() -> None:
    for policy in POLICIES:
        queue = make_queue(policy)
        sequences = [make_sequence(i) for i in range(4)]
        for sequence in sequences:
            queue.push(sequence)
        first, second = queue.pop(), queue.pop()
        for sequence in (second, first):
            queue.push(sequence)
            queue.left(sequence)
        assert drain(queue) == [0, 1, 2, 3]


def test_priority_goes_before_arrival() -> None:
    queue = make_queue("priority")
    for arrival, priority in enumerate([0, 5, -1, 0, -1]):
        queue.push(make_sequence(arrival, priority=priority))
    assert drain(queue) == [2, 4, 0, 3, 1]


def test_who_gives_way_last_was_served_first() -> None:
    early, late = make_sequence(1, priority=3), make_sequence(2, priority=0)
    assert make_queue("fcfs").rank(early) < make_queue("fcfs").rank(late)
    assert make_queue("priority").rank(late) < make_queue("priority").rank(early)
    late.times.first_scheduled = 5.0
    assert make_queue("fair").rank(late) < make_queue("fair").rank(early)
    early.times.first_scheduled = 5.0
    assert make_queue("fair").rank(early) < make_queue("fair").rank(late)


@functools.total_ordering
class Counted:
    """A rank that counts how often it is compared."""

    comparisons = 0

    def __init__(self, arrival: int) -> None:
        self.arrival = arrival

    def __lt__(self, other: Counted) -> bool:
        Counted.comparisons += 1
        return self.arrival < other.arrival

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Counted) and self.arrival == other.arrival

    __hash__ = None  # type: ignore[assignment]


def test_ten_thousand_waiting_cost_nothing_to_look_at() -> None:
    queue = RankQueue(lambda sequence: (Counted(sequence.arrival),))  # type: ignore[arg-type,return-value]
    sequences = [make_sequence(arrival) for arrival in range(10_000)]
    for sequence in sequences:
        queue.push(sequence)
    Counted.comparisons = 0
    for _ in range(100):
        assert queue.peek() is sequences[0]
    assert Counted.comparisons == 0
    for sequence in sequences[1:101]:
        queue.remove(sequence)
    assert queue.pop() is sequences[0]
    assert queue.peek() is sequences[101]
    assert Counted.comparisons < 102 * 40  # log2(10,000) = 13.3; a pop compares two children a level


@pytest.mark.parametrize("policy", POLICIES)
def test_removed_sequences_leave_no_trace_behind_one_that_waits_for_ever(policy: str) -> None:
    queue = make_queue(policy)
    queue.push(make_sequence(0, priority=-1))
    others = [make_sequence(arrival, tenant=str(arrival % 7)) for arrival in range(1, 21)]
    tracemalloc.start()
    try:
        for sequence in others * 100:
            queue.push(sequence)
            queue.remove(sequence)
        grown, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(queue) == 1
    assert grown < 60_000  # 30 bytes per push and removal: less than a heap entry
