"""Tests of offline iterations, with engines of known times."""

import itertools

import pytest

from jaxinfer.bench.datasets import DatasetError
from jaxinfer.bench.iterations import WARM_REQUESTS, Ran, measure
from jaxinfer.bench.target import Item


class Scripted:
    """An engine whose first token comes after ``ttft`` seconds, and the others ``itl`` seconds after one another."""

    def __init__(self, log, name, ttft=0.5, itl=0.25, rest=1.0):
        self.log, self.name, self.ttft, self.itl, self.rest = log, name, ttft, itl, rest

    def run(self, items):
        self.log.append((self.name, [item.prompt for item in items]))
        deliveries = [[(self.ttft + self.itl * n, 1) for n in range(item.output_len)] for item in items]
        last = max(times[-1][0] for times in deliveries)
        return Ran(last + self.rest, deliveries, ["length"] * len(items))

    def figures(self):
        return {"about": self.name}

    def close(self):
        pass


def items(output_len=5):
    return (Item([number], 10, output_len) for number in itertools.count())


def test_engines_take_turns_with_the_same_requests():
    log, done = [], []
    engines = {name: Scripted(log, name) for name in ("a", "b")}
    measure(engines, items(), requests=2, warmup=1, iterations=3, on_iteration=done.append)
    assert log == [
        *(("a", [[0], [1]]), ("b", [[0], [1]])),
        *(("a", [[2], [3]]), ("b", [[2], [3]])),
        *(("b", [[4], [5]]), ("a", [[4], [5]])),
        *(("a", [[6], [7]]), ("b", [[6], [7]])),
    ]
    assert done == [1, 2, 3]


def test_each_engine_has_a_clock_of_its_own():
    engines = {"quick": Scripted([], "quick"), "slow": Scripted([], "slow", ttft=100.0)}
    found = measure(engines, items(), requests=4, warmup=0, iterations=3)
    quick = found["quick"]
    assert quick["iterations"] == [2.5] * 3  # 0.5 + 4 x 0.25, and 1.0 after the last token
    assert (quick["requests"], quick["completed"], quick["input_tokens"], quick["output_tokens"]) == (12, 12, 120, 60)
    assert quick["seconds"] == pytest.approx(2 * 2.5 + 1.5)  # to the last token
    assert quick["output_tokens_per_second"] == pytest.approx(60 / 6.5)
    assert {name: quick["latency"][name]["p50"] for name in ("iteration", "ttft", "tpot", "itl", "e2e")} == {
        "iteration": 2.5,
        "ttft": 0.5,
        "tpot": 0.25,
        "itl": 0.25,
        "e2e": 1.5,
    }
    assert quick["other_length"] == 0
    assert (quick["about"], found["slow"]["latency"]["ttft"]["p99"]) == ("quick", 100.0)


def test_warm_ups_are_short_and_not_measured():
    log = []
    found = measure({"a": Scripted(log, "a")}, items(), requests=WARM_REQUESTS + 5, warmup=2, iterations=1)
    assert [len(prompts) for _, prompts in log] == [WARM_REQUESTS, WARM_REQUESTS, WARM_REQUESTS + 5]
    assert (found["a"]["requests"], len(found["a"]["iterations"])) == (WARM_REQUESTS + 5, 1)


def test_a_data_set_that_ends_has_a_last_short_iteration_and_then_none():
    three = list(itertools.islice(items(), 3))
    found = measure({"a": Scripted([], "a")}, iter(three), requests=2, warmup=0, iterations=2)
    assert found["a"]["requests"] == 3
    with pytest.raises(DatasetError):
        measure({"a": Scripted([], "a")}, iter(three), requests=2, warmup=0, iterations=3)
