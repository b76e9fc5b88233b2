"""Who is served next, and how long the others can be made to wait."""

from __future__ import annotations

import functools
import itertools
import tracemalloc
from array import array
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.engine.queues import Deadlines, FairQueue, Queue, RankQueue, make_queue
from jaxinfer.engine.sequence import Sequence
from jaxinfer.kv.radix import PageKeys
from jaxinfer.types import Request, SamplingParams

POLICIES = ("fcfs", "priority", "fair")


@functools.cache
def _params(most: int) -> SamplingParams:
    return SamplingParams(max_tokens=most)


def make_sequence(arrival: int, *, tenant: str = "", priority: int = 0, prompt: int = 3, most: int = 4) -> Sequence:
    """Costs ``prompt + most`` tokens."""
    request = Request(str(arrival), (1,) * prompt, _params(most), priority=priority, tenant=tenant)
    return Sequence(
        request,
        0,
        arrival,
        tokens=array("i", [1]) * prompt,
        keys=PageKeys(b"", 16),
        prefill_end=prompt - 1,
        final_length=prompt + most - 1,
    )


def cost(sequence: Sequence) -> int:
    return len(sequence.prompt) + (sequence.params.max_tokens or 0)


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
        st.sampled_from(["push", "push", "pop", "remove", "return"]),
        st.integers(0, 50),  # which one is removed or returns
        st.integers(0, 3),  # tenant and priority
        st.integers(1, 30),  # prompt tokens
    ),
    max_size=60,
)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=100, deadline=None)
@given(operations=OPERATIONS)
def test_order_is_that_of_a_naive_queue(policy: str, operations: list[tuple[str, int, int, int]]) -> None:
    queue, naive = make_queue(policy, quantum=10), NAIVE[policy]()
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
            queue.push(waiting[-1])
            naive.push(waiting[-1])
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


class NaiveRounds:
    """Deficit round robin, turn by turn. ``ring``: [tenant, round in which it came, tokens saved, who waits]."""

    def __init__(self, quantum: int = 10) -> None:
        self.quantum, self.round, self.turn, self.places = quantum, 0, 0, 0
        self.ring: dict[int, list] = {}

    def push(self, sequence: Sequence) -> None:
        tenant = next((t for t in self.ring.values() if t[0] == sequence.request.tenant), None)
        if tenant is None:
            self.places += 1
            tenant = self.ring[self.places] = [sequence.request.tenant, self.round, 0, []]
        tenant[3] = sorted([*tenant[3], sequence], key=lambda s: s.arrival)

    def pop(self) -> Sequence:
        while not (self.turn in self.ring and cost(self.ring[self.turn][3][0]) <= self.ring[self.turn][2]):
            self._next_turn()
        tenant = self.ring[self.turn]
        sequence = tenant[3][0]
        tenant[2] -= cost(sequence)
        self.remove(sequence)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        for place, (_, _, _, waiting) in list(self.ring.items()):
            if sequence in waiting:
                waiting.remove(sequence)
                if not waiting:
                    del self.ring[place]

    def _next_turn(self) -> None:
        left = [p for p in self.ring if p > self.turn and self.ring[p][1] < self.round]
        if not left:
            self.round, self.turn = self.round + 1, 0
        else:
            self.turn = min(left)
            self.ring[self.turn][2] += self.quantum


NAIVE = {"fcfs": NaiveRanks, "priority": functools.partial(NaiveRanks, "priority"), "fair": NaiveRounds}


# ---- ranks


def test_a_preempted_sequence_returns_to_its_old_place() -> None:
    for policy in POLICIES:
        queue = make_queue(policy)
        sequences = [make_sequence(i) for i in range(4)]
        for sequence in sequences:
            queue.push(sequence)
        first, second = queue.pop(), queue.pop()
        queue.push(second)
        queue.push(first)
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
    assert grown < 60_000  # 30 bytes for each that came and went: less than an entry of its heap


# ---- fair shares


def serve(queue: FairQueue, count: int) -> list[Sequence]:
    return [queue.pop() for _ in range(count)]


def test_a_flood_of_long_prompts_does_not_starve_another_tenant() -> None:
    queue = FairQueue(quantum=512)
    for arrival in range(1_000):
        queue.push(make_sequence(arrival, tenant="flood", prompt=4_000, most=96))
    flood = sum(map(cost, serve(queue, 50)))
    assert flood == 50 * 4_096
    queue.push(make_sequence(1_000, tenant="other", prompt=100, most=28))
    before = [s.request.tenant for s in serve(queue, 2)]
    assert "other" in before


def test_shares_are_of_tokens_not_of_requests() -> None:
    queue = FairQueue(quantum=100)
    for arrival in range(400):
        queue.push(make_sequence(2 * arrival, tenant="long", prompt=390, most=10))
        queue.push(make_sequence(2 * arrival + 1, tenant="short", prompt=40, most=10))
    served = serve(queue, 360)
    tokens = {t: sum(cost(s) for s in served if s.request.tenant == t) for t in ("long", "short")}
    assert abs(tokens["long"] - tokens["short"]) <= 400 + 100


def test_the_cost_is_that_at_the_push() -> None:
    queue = FairQueue(quantum=10)
    half = make_sequence(0, tenant="a", prompt=30, most=10)
    half.scheduled = 35  # preempted and swapped out: 5 tokens to go
    queue.push(half)
    queue.push(make_sequence(1, tenant="b", prompt=5, most=6))
    assert queue.peek() is half
    half.scheduled = 0  # what happens to it while it waits changes nothing
    assert queue.pop() is half


def test_a_turn_that_is_over_is_not_given_again() -> None:
    """A tenant whose dear head gives up has the tokens for its next one, but its turn of this round may be past."""
    queue = FairQueue(quantum=10)
    dear = make_sequence(0, tenant="a", prompt=96)
    queue.push(dear)
    for arrival, tenant in enumerate("abbbccc", 1):
        queue.push(make_sequence(arrival, tenant=tenant, prompt=6))
    assert [s.request.tenant for s in serve(queue, 3)] == ["b", "c", "b"]
    queue.remove(dear)
    assert [s.request.tenant for s in serve(queue, 4)] == ["c", "a", "b", "c"]


@settings(max_examples=100, deadline=None)
@given(
    quantum=st.integers(1, 60),
    pushes=st.lists(
        st.lists(st.tuples(st.integers(0, 4), st.integers(1, 80)), max_size=4),  # tenant, prompt; then one is served
        min_size=1,
        max_size=40,
    ),
)
def test_the_wait_of_a_head_is_bounded(quantum: int, pushes: list[list[tuple[int, int]]]) -> None:
    """While a head that costs c waits, each other tenant gets less than c + 2 quanta + its own dearest sequence."""
    queue, arrivals = FairQueue(quantum), itertools.count()
    dearest: dict[str, int] = {}
    got: dict[str, dict[str, int]] = {}  # tenant -> what the others got since its head became that
    waiting: dict[str, list[Sequence]] = {}
    for batch in [*pushes, *([[]] * sum(map(len, pushes)))]:
        for tenant, prompt in batch:
            sequence = make_sequence(next(arrivals), tenant=str(tenant), prompt=prompt, most=2)
            name = sequence.request.tenant
            dearest[name] = max(dearest.get(name, 0), cost(sequence))
            if not waiting.setdefault(name, []):
                got[name] = {}
            waiting[name].append(sequence)
            queue.push(sequence)
        if len(queue):
            _check_served(queue.pop(), waiting, got, dearest, quantum)
    assert not any(waiting.values())


def _check_served(
    sequence: Sequence,
    waiting: dict[str, list[Sequence]],
    got: dict[str, dict[str, int]],
    dearest: dict[str, int],
    quantum: int,
) -> None:
    name = sequence.request.tenant
    assert waiting[name].pop(0) is sequence
    for other, tokens in got[name].items():
        assert tokens < cost(sequence) + 2 * quantum + dearest[other]
    got[name] = {}
    for other in _but(name, waiting):
        if waiting[other]:
            got[other][name] = got[other].get(name, 0) + cost(sequence)


def _but(name: str, names: Iterable[str]) -> list[str]:
    return [other for other in names if other != name]


# ---- deadlines


def test_deadlines_expire_in_order() -> None:
    deadlines = Deadlines()
    for name, deadline in (("c", 3.0), ("a", 1.0), ("b", 2.0), ("d", 9.0)):
        deadlines.add(deadline, name)
    assert deadlines.pop_expired(lambda: 0.5) == []
    deadlines.discard("b")
    deadlines.discard("never added")
    assert deadlines.pop_expired(lambda: 3.0) == ["a", "c"]
    assert deadlines.pop_expired(lambda: 3.0) == []
    assert len(deadlines) == 1


def test_an_id_in_use_again_has_its_new_deadline() -> None:
    deadlines = Deadlines()
    deadlines.add(1.0, "a")
    deadlines.add(5.0, "a")
    assert deadlines.pop_expired(lambda: 2.0) == []
    assert deadlines.pop_expired(lambda: 5.0) == ["a"]


def test_the_clock_is_read_only_for_deadlines() -> None:
    readings: list[float] = []

    def clock() -> float:
        readings.append(1.0)
        return 1.0

    deadlines = Deadlines()
    deadlines.pop_expired(clock)
    assert readings == []
    deadlines.add(1.0, "a")
    assert deadlines.pop_expired(clock) == ["a"]
    assert readings == [1.0]
