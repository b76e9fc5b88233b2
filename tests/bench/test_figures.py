"""Tests of jaxinfer/bench: percentiles, goodput, arrivals and the sweep, against hand-computed values."""

import math
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.bench.figures import Goals, guaranteed, keeping_up, percentiles, summary
from jaxinfer.bench.load import arrivals
from jaxinfer.bench.record import Record
from jaxinfer.bench.sweep import Knee, Search


def record(number: int, due: float, first: float, itl: float, tokens: int = 3, error: str | None = None) -> Record:
    times = array("d", [first + itl * n for n in range(tokens)])
    made = Record(number, due, due + 0.25, 10, tokens, times, array("L", [1] * tokens), times[-1])
    made.prompt_tokens, made.output_tokens, made.error_kind = 10, tokens, error
    return made


def test_percentiles_by_hand() -> None:
    assert percentiles([float(n) for n in range(101)]) == {"p50": 50, "p90": 90, "p99": 99, "max": 100, "mean": 50}
    assert percentiles([1.0, 2.0])["p90"] == pytest.approx(1.9)


def test_for_rates_the_percentile_is_what_most_reach() -> None:
    assert guaranteed([float(n) for n in range(101)]) == {"p50": 50, "p90": 10, "p99": 1, "min": 0, "mean": 50}


def test_a_summary_by_hand() -> None:
    records = [record(0, 0.0, 1.0, 0.5), record(1, 1.0, 3.0, 1.0), record(2, 2.0, 4.0, 3.0, error="timeout")]
    figures = summary(records, Goals(ttft=1.5, tpot=1.0))
    assert (figures["requests"], figures["completed"], figures["errors"]) == (3, 2, {"timeout": 1})
    assert figures["seconds"] == 10.0
    assert (figures["input_tokens"], figures["output_tokens"], figures["tokens_of_failed_requests"]) == (20, 6, 3)
    assert (figures["output_tokens_per_second"], figures["requests_per_second"]) == pytest.approx((0.6, 0.2))
    latency = figures["latency"]
    assert (latency["ttft"]["mean"], latency["ttft_sent"]["mean"]) == pytest.approx((1.5, 1.25))
    assert (latency["tpot"]["max"], latency["itl"]["p50"], latency["e2e"]["max"]) == pytest.approx((1.0, 0.75, 4.0))
    assert latency["user_tokens_per_second"]["min"] == pytest.approx(1.0)
    assert figures["goodput"]["requests"] == 1  # the first token of the second request is late
    assert (figures["goodput"]["share"], figures["goodput"]["requests_per_second"]) == pytest.approx((1 / 3, 0.1))
    assert figures["peak_in_flight"] == 2


@pytest.mark.parametrize(
    ("goals", "good"),
    [
        (Goals(), True),
        (Goals(ttft=1.0, tpot=0.5, e2e=2.0), True),
        (Goals(ttft=0.99), False),
        (Goals(tpot=0.49), False),
        (Goals(e2e=1.99), False),
    ],
)
def test_goals(goals: Goals, good: bool) -> None:
    assert goals.met(record(0, 0.0, 1.0, 0.5)) is good
    assert not goals.met(record(0, 0.0, 1.0, 0.5, error="timeout"))


def test_tokens_of_prompts_the_cached_ones_and_other_lengths_are_counted() -> None:
    records = [record(0, 0.0, 1.0, 0.5), record(1, 0.0, 4.0, 0.5, tokens=5)]
    records[0].asked_output, records[0].cached_tokens = 9, 8
    figures = summary(records, Goals())
    assert (figures["other_length"], figures["cached_tokens"]) == (1, 8)
    assert figures["tokens_per_second"] == pytest.approx((20 + 8) / 6)


def test_deliveries_of_several_tokens() -> None:
    made = record(0, 0.0, 1.0, 0.6)
    made.counts, made.output_tokens = array("L", [1, 4, 4]), 9
    assert made.tpot == pytest.approx(1.2 / 8)
    assert made.gaps == pytest.approx([0.6, 0.6])
    assert summary([made], Goals())["tokens_per_delivery"] == 3.0


def test_a_single_token_has_no_tpot_and_nothing_is_no_crash() -> None:
    assert record(0, 0.0, 1.0, 0.0, tokens=1).tpot is None
    figures = summary([], Goals(ttft=1.0))
    assert (figures["seconds"], figures["latency"]["ttft"], figures["goodput"]["share"]) == (0.0, None, 0.0)


def test_a_server_keeps_up_or_does_not() -> None:
    steady = [record(n, n * 1.0, n * 1.0 + 5, 0.1) for n in range(50)]
    queueing = [record(n, n * 1.0, n * 2.0 + 5, 0.1) for n in range(50)]
    assert keeping_up(steady) == pytest.approx(1.0)
    assert keeping_up(queueing) == pytest.approx(0.5)
    assert keeping_up(steady[:9]) is None


@pytest.mark.parametrize("burstiness", [1.0, 0.25, 4.0])
def test_arrivals_have_the_rate_and_the_burstiness(burstiness: float) -> None:
    source = arrivals(20.0, burstiness, np.random.default_rng(1))
    gaps = np.diff([next(source) for _ in range(40_000)])
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.03)
    assert gaps.var() / gaps.mean() ** 2 == pytest.approx(1 / burstiness, rel=0.08)
    if burstiness == 1.0:  # Poisson: the number of arrivals per second has equal mean and variance; P(gap > mean) = 1/e
        assert (gaps > 1 / 20).mean() == pytest.approx(math.exp(-1), abs=0.01)


def test_arrivals_even_and_at_once_and_reproducible() -> None:
    rng = np.random.default_rng(0)
    even, at_once = arrivals(4.0, math.inf, rng), arrivals(math.inf, 1.0, rng)
    assert [next(even) for _ in range(3)] == [0.25, 0.5, 0.75]
    assert [next(at_once) for _ in range(3)] == [0.0] * 3
    one, same, other = (arrivals(3.0, 1.0, np.random.default_rng(seed)) for seed in (5, 5, 6))
    times = [[next(each) for _ in range(2000)] for each in (one, same, other)]
    assert times[0] == times[1] != times[2]


def sweep(search: Search, capacity: float) -> tuple[Knee, list[float]]:
    """Simulate a server that sustains rates up to ``capacity``."""
    rates, tried = search.rates(), []
    try:
        rate = next(rates)
        while True:
            tried.append(rate)
            rate = rates.send(rate <= capacity)
    except StopIteration as found:
        return found.value, tried


@given(capacity=st.floats(0.05, 5000), start=st.floats(0.1, 100), precision=st.floats(0.01, 0.5))
def test_a_sweep_encloses_the_capacity(capacity: float, start: float, precision: float) -> None:
    knee, tried = sweep(Search(start, precision), capacity)
    assert knee.holds is not None
    assert knee.breaks is not None
    assert knee.holds <= capacity < knee.breaks <= knee.holds * (1 + precision)
    assert len(tried) == len(set(tried)) < 30


def test_a_sweep_doubles_then_bisects() -> None:
    knee, tried = sweep(Search(1.0, 0.5), 6.0)
    assert tried == pytest.approx([1, 2, 4, 8, 32**0.5])
    assert (knee.holds, knee.breaks) == pytest.approx((32**0.5, 8.0))


def test_a_sweep_that_finds_no_knee() -> None:
    assert sweep(Search(1.0, highest=10.0), 1e9)[0] == Knee(8.0, None)
    assert sweep(Search(1.0, lowest=0.2), 0.0)[0] == Knee(None, 0.25)
