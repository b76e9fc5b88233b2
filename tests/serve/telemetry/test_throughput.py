"""Tests of the throughput log: one line per ten seconds of work."""

import asyncio
import dataclasses
import itertools
import logging
from typing import Any

from jaxinfer.engine.scheduling.stats import StatsRecorder
from jaxinfer.kv.manager import KVUsage
from jaxinfer.serve.api.errors import unavailable
from jaxinfer.serve.telemetry.throughput import Throughput


def stats(**changes: Any):
    pages = KVUsage(total=100, free=50, cached=10, held=40, host_total=0, host_used=0)
    return dataclasses.replace(StatsRecorder().snapshot(kv=pages), **changes)


class Engine:
    """An engine that returns these stats in turn; None: it does not run."""

    def __init__(self, *found) -> None:
        self._found = iter(found)

    async def stats(self):
        if (each := next(self._found)) is None:
            raise unavailable("the engine does not run")
        return each


def told(caplog, *found) -> list[dict]:
    caplog.set_level(logging.INFO)
    clock = itertools.count(0.0, 10.0)
    throughput, engine = Throughput(clock=lambda: next(clock)), Engine(*found)

    async def look() -> None:
        for _ in found:
            await throughput.look(engine)

    asyncio.run(look())
    return [vars(record) for record in caplog.records]


def test_rates_are_those_since_the_last_look(caplog):
    first = stats(steps=5, prompt_tokens=100, generated_tokens=50, running=1, prefix_queries=100)
    second = stats(
        steps=9,
        prompt_tokens=300,
        generated_tokens=1050,
        running=3,
        waiting={"slots": 2, "pages": 1},
        prefix_queries=300,
        prefix_hits=50,
    )
    before, after = told(caplog, first, second)
    assert (before["msg"], before["prompt_tokens_per_second"], before["generated_tokens_per_second"]) == (
        "throughput",
        10.0,
        5.0,
    )
    assert (after["prompt_tokens_per_second"], after["generated_tokens_per_second"]) == (20.0, 100.0)
    assert (after["running"], after["waiting"]) == (3, 3)
    assert (after["kv_cache_usage"], after["prefix_cache_hit_rate"]) == (0.4, 0.25)


def test_an_engine_without_work_says_nothing(caplog):
    assert told(caplog, stats(), stats(), stats()) == []
    worked = stats(steps=5, generated_tokens=5)
    assert len(told(caplog, worked, worked, worked)) == 1


def test_one_that_was_started_again_counts_from_zero(caplog):
    worked, again = stats(steps=500, generated_tokens=5000), stats(steps=2, generated_tokens=20)
    assert [each["generated_tokens_per_second"] for each in told(caplog, worked, again)] == [500.0, 2.0]
    caplog.clear()
    assert [each["generated_tokens_per_second"] for each in told(caplog, worked, None, worked)] == [500.0, 500.0]
