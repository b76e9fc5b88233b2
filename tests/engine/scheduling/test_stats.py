"""Statistics that the recorder derives from scheduler events."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.engine.scheduling.stats import SECONDS, Histogram, HistogramRecorder, StatsRecorder, Timed, Times
from jaxinfer.kv.manager import KVUsage
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.types import FinishReason, Request

REQUEST = Request("r", (1, 2, 3), SamplingParams())
USAGE = KVUsage(total=8, free=1, cached=2, held=5, host_total=4, host_used=3)


class Clock:
    """A clock that only moves when a test sets it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclasses.dataclass
class Fake:
    """A fake sequence with the fields that the recorder reads."""

    request: Request = REQUEST
    index: int = 0
    generated: int = 0
    finish_reason: FinishReason | None = None
    times: Times = dataclasses.field(default_factory=Times)

    def emit(self, count: int = 1) -> Fake:
        self.generated += count
        return self

    def end(self, reason: FinishReason) -> Fake:
        self.finish_reason = reason
        return self


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def recorder(clock: Clock) -> StatsRecorder:
    return StatsRecorder(clock)


def total(histogram: Histogram) -> tuple[int, float]:
    return histogram.count, pytest.approx(histogram.sum)


# ---- histograms


def test_a_value_at_a_bound_belongs_below_it() -> None:
    recorder = HistogramRecorder((1.0, 2.0, 5.0))
    for value in (0.5, 1.0, 1.5, 2.0, 5.0, 5.1, 1000.0):
        recorder.observe(value)
    histogram = recorder.snapshot()
    assert (histogram.bounds, histogram.counts) == ((1.0, 2.0, 5.0), (2, 2, 1, 2))
    assert histogram.sum == pytest.approx(1015.1)
    assert histogram.mean == pytest.approx(1015.1 / 7)
    assert math.isnan(HistogramRecorder((1.0,)).snapshot().mean)


@given(st.lists(st.tuples(st.floats(0, 2000), st.integers(0, 9)), min_size=1))
def test_many_observations_are_as_good_as_one_by_one(pairs: list[tuple[float, int]]) -> None:
    one, many = HistogramRecorder(), HistogramRecorder()
    for value, times in pairs:
        one.observe(value, times)
    many.observe_many(np.array([value for value, _ in pairs]), np.array([times for _, times in pairs]))
    assert many.snapshot().counts == one.snapshot().counts
    assert many.snapshot().sum == pytest.approx(one.snapshot().sum)


def test_bounds_are_a_series_of_1_2_5() -> None:
    assert list(SECONDS) == sorted(SECONDS)
    assert SECONDS[:4] == (1e-4, 2e-4, 5e-4, 1e-3)
    assert SECONDS[-1] == 500.0


def test_a_snapshot_does_not_change(recorder: StatsRecorder) -> None:
    before = recorder.snapshot(waiting={"slot": 1})
    copy = dataclasses.asdict(dataclasses.replace(before, waiting={}, finished={}, preemptions={}))
    recorder.scheduled(Fake())
    recorder.preempted("swap")
    recorder.emitted([Fake().emit(3)])
    recorder.finished(Fake(finish_reason=FinishReason.STOP))
    assert dataclasses.asdict(dataclasses.replace(before, waiting={}, finished={}, preemptions={})) == copy
    assert sum(before.finished.values()) + sum(before.preemptions.values()) == 0
    with pytest.raises(TypeError):
        before.preemptions["swap"] = 9  # type: ignore[index]


# ---- times


def test_the_life_of_a_sequence(recorder: StatsRecorder, clock: Clock) -> None:
    sequence = Fake()
    assert isinstance(sequence, Timed)
    recorder.queued(sequence)
    clock.now = 102.0
    recorder.scheduled(sequence)
    clock.now = 103.0
    recorder.emitted([sequence.emit()])
    for clock.now in (103.5, 105.0):
        recorder.emitted([sequence.emit()])
    recorder.finished(sequence.end(FinishReason.LENGTH))
    stats = recorder.snapshot()
    assert total(stats.queue_time) == (1, 2.0)
    assert total(stats.time_to_first_token) == (1, 3.0)
    assert total(stats.inter_token_latency) == (2, 2.0)
    assert total(stats.e2e_latency) == (1, 5.0)
    assert (stats.prompt_tokens, stats.generated_tokens) == (3, 3)
    assert stats.finished == dict.fromkeys(FinishReason, 0) | {"length": 1}
    assert sequence.times == Times(100.0, 102.0, 103.0, 105.0, 3)


def test_a_preempted_sequence_is_scheduled_twice_and_timed_once(recorder: StatsRecorder, clock: Clock) -> None:
    sequence = Fake()
    for clock.now in (100.0, 107.0):
        recorder.queued(sequence)
        clock.now += 1
        recorder.scheduled(sequence)
    stats = recorder.snapshot()
    assert total(stats.queue_time) == (1, 1.0)
    assert stats.prompt_tokens == 3


def test_samples_share_their_prompt(recorder: StatsRecorder) -> None:
    for index in range(3):
        recorder.scheduled(Fake(index=index))
    assert recorder.snapshot().prompt_tokens == 3


def test_several_tokens_at_once_are_spread_over_the_time_since_the_last(recorder: StatsRecorder, clock: Clock) -> None:
    sequence = Fake()
    recorder.queued(sequence)
    clock.now = 101.0
    recorder.emitted([sequence.emit(3)])  # two in addition to the first, 0 seconds after it
    clock.now = 103.0
    recorder.emitted([sequence.emit(4)])  # half a second each
    stats = recorder.snapshot()
    assert stats.generated_tokens == 7
    assert total(stats.time_to_first_token) == (1, 1.0)
    assert total(stats.inter_token_latency) == (6, 2.0)
    assert stats.inter_token_latency.counts[0] == 2
    assert stats.inter_token_latency.counts[SECONDS.index(0.5)] == 4


def test_who_has_nothing_new_counts_for_nothing(recorder: StatsRecorder, clock: Clock) -> None:
    recorder.emitted([])
    recorder.emitted([Fake()])
    sequence = Fake().emit()
    recorder.emitted([sequence, sequence])
    stats = recorder.snapshot()
    assert (stats.generated_tokens, stats.inter_token_latency.count) == (1, 0)


def test_tokens_of_the_step_that_ends_a_sequence_count(recorder: StatsRecorder, clock: Clock) -> None:
    """The scheduler reports the end of a sequence before its last tokens."""
    sequence = Fake()
    recorder.queued(sequence)
    recorder.emitted([sequence.emit()])
    clock.now += 1
    recorder.finished(sequence.emit().end(FinishReason.STOP))
    recorder.emitted([sequence])
    stats = recorder.snapshot()
    assert (stats.generated_tokens, stats.inter_token_latency.count, stats.e2e_latency.count) == (2, 1, 1)


@given(st.lists(st.tuples(st.integers(1, 4), st.floats(0.001, 5)), min_size=1, max_size=20))
def test_latencies_add_up_to_the_time_from_first_to_last_token(steps: list[tuple[int, float]]) -> None:
    clock, sequence = Clock(), Fake()
    recorder = StatsRecorder(clock)
    recorder.queued(sequence)
    for count, seconds in steps:
        clock.now += seconds
        recorder.emitted([sequence.emit(count)])
    stats = recorder.snapshot()
    times = sequence.times
    assert times.first_token is not None
    assert times.last_token is not None
    assert stats.inter_token_latency.count == sequence.generated - 1
    assert stats.inter_token_latency.sum == pytest.approx(times.last_token - times.first_token)


# ---- counters


def test_counters(recorder: StatsRecorder) -> None:
    recorder.prefix(30, 10)
    recorder.prefix(5, 5)
    recorder.drafted(4, 1)
    recorder.drafted(3, 3)
    for same in (True, False, True):
        recorder.replayed(same)
    recorder.preempted("swap")
    recorder.preempted("recompute")
    recorder.preempted("swap")
    recorder.step(0.25)
    recorder.step(0.5)
    for reason in FinishReason:
        recorder.finished(Fake(finish_reason=reason))
    stats = recorder.snapshot()
    assert (stats.prefix_queries, stats.prefix_hits) == (35, 15)
    assert (stats.drafts, stats.draft_tokens, stats.draft_accepted) == (2, 7, 4)
    assert stats.draft_accepted_at == (2, 1, 1, 0)
    assert (stats.replayed_tokens, stats.replay_mismatches) == (3, 1)
    assert stats.preemptions == {"recompute": 1, "swap": 2}
    assert stats.finished == dict.fromkeys(FinishReason, 1)
    assert (stats.steps, total(stats.step_time)) == (2, (2, 0.75))
    with pytest.raises(KeyError):
        recorder.preempted("evict")


def test_what_only_the_engine_knows_is_handed_on(recorder: StatsRecorder) -> None:
    stats = recorder.snapshot(running=3, waiting={"slot": 2}, kv=USAGE, compilations=1)
    assert (stats.running, stats.waiting, stats.kv, stats.compilations) == (3, {"slot": 2}, USAGE, 1)
    stats = recorder.snapshot()
    assert (stats.running, stats.waiting, stats.kv, stats.compilations) == (0, {}, None, 0)
