"""Tests of jaxinfer/bench: the load generator in virtual time, with exact figures."""

import asyncio
import itertools
from collections.abc import Coroutine
from typing import Any

import pytest

from jaxinfer.bench.drive import INTERRUPTED, Driver, Prepared
from jaxinfer.bench.figures import Goals, summary
from jaxinfer.bench.record import Record
from jaxinfer.bench.target import Item, SendFailed
from jaxinfer.bench.watch import Bounds, Watch
from tests.bench.virtual import Scripted, VirtualLoop, run

ITEM = Item([1, 2, 3], 3, 4)


def due(*times: float) -> list[Prepared]:
    return [Prepared(ITEM, b"4", time) for time in times]


def driver(target: Scripted, timeout: float = 100.0) -> Driver:
    return Driver(target, asyncio.get_running_loop().time, timeout)


def drive(target: Scripted, prepared: list[Prepared], timeout: float = 100.0) -> list[Record]:
    async def main() -> list[Record]:
        driven = driver(target, timeout)
        await driven.open_loop(prepared)
        return driven.records

    return run(main())


def test_times_of_an_open_loop() -> None:
    first, second = drive(Scripted(ttft=0.5, itl=0.1), due(1.0, 3.0))
    assert (first.due, first.sent, first.ended) == pytest.approx((1.0, 1.0, 1.8))
    assert list(first.times) == pytest.approx([1.5, 1.6, 1.7, 1.8])
    assert (second.ttft, second.ttft_sent, second.tpot, second.e2e) == pytest.approx((0.5, 0.5, 0.1, 0.8))
    assert second.gaps == pytest.approx([0.1, 0.1, 0.1])
    assert (second.prompt_tokens, second.output_tokens, second.finish) == (7, 4, "length")


def test_an_open_loop_does_not_wait_for_answers() -> None:
    records = drive(Scripted(ttft=10.0, slots=1), due(0.0, 1.0, 2.0))
    assert [record.sent for record in records] == pytest.approx([0.0, 1.0, 2.0])
    assert [record.ttft for record in records] == pytest.approx([10.0, 19.3, 28.6])


def test_a_late_sender_does_not_make_the_server_look_fast() -> None:
    class Slow(Scripted):
        def stream(self, message: bytes, note: Any) -> Coroutine[Any, Any, Any]:
            loop = asyncio.get_running_loop()
            assert isinstance(loop, VirtualLoop)
            loop.work(2.0)  # the generator is busy: requests due meanwhile are sent late
            return super().stream(message, note)

    first, second = drive(Slow(), due(0.0, 0.5))
    assert (first.sent, second.sent) == pytest.approx((0.0, 2.0))
    assert (second.ttft, second.ttft_sent) == pytest.approx((4.0, 2.5))
    assert (second.e2e - second.e2e_sent) == pytest.approx(1.5)


def test_a_closed_loop_has_so_many_under_way_and_is_never_late() -> None:
    async def main() -> list[Record]:
        driven = driver(Scripted(ttft=0.7, itl=0.1))
        await driven.closed_loop(itertools.repeat(ITEM, 5), 2)
        return driven.records

    records = run(main())
    assert [record.sent for record in records] == pytest.approx([0.0, 0.0, 1.0, 1.0, 2.0])
    assert all(record.due == record.sent for record in records)
    assert summary(records, Goals())["peak_in_flight"] == 2


def test_a_duration_ends_a_closed_loop_and_what_is_under_way_ends_by_itself() -> None:
    async def main() -> list[Record]:
        driven = driver(Scripted(ttft=0.7, itl=0.1))
        await driven.closed_loop(itertools.repeat(ITEM), 1, duration=2.5)
        return driven.records

    assert [record.ended for record in run(main())] == pytest.approx([1.0, 2.0, 3.0])


def test_failures_are_counted_by_kind_and_disturb_no_other() -> None:
    target = Scripted()
    target.failing = {1: SendFailed("UNAVAILABLE", "draining"), 2: SendFailed("UNAVAILABLE", "later")}
    figures = summary(drive(target, due(0, 1, 2, 3)), Goals())
    assert (figures["completed"], figures["errors"]) == (2, {"UNAVAILABLE": 2})
    assert figures["error_examples"] == {"UNAVAILABLE": "draining"}


def test_a_timeout() -> None:
    (record,) = drive(Scripted(ttft=0.5, itl=0.4), due(0.0), timeout=1.0)
    assert (record.error_kind, record.ended) == ("timeout", pytest.approx(1.0))
    assert (len(record.times), record.output_tokens) == (2, 2)
    assert summary([record], Goals())["tokens_of_failed_requests"] == 2


def test_what_is_cut_short_is_there() -> None:
    async def main() -> list[Record]:
        driven = driver(Scripted(ttft=1.0, itl=0.1))
        task = asyncio.ensure_future(driven.open_loop(due(0.0, 2.0, 50.0)))
        await asyncio.sleep(2.5)
        task.cancel()
        await asyncio.wait([task])
        return driven.records

    assert [record.error_kind for record in run(main())] == [None, INTERRUPTED]


def test_the_watch_sees_a_busy_loop() -> None:
    async def main(busy: float) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        watch = Watch(loop.time, cpu=lambda: loop.time() / 2)
        watch.start()
        for _ in range(100):
            await asyncio.sleep(0.005)
            loop.work(busy)
        await watch.stop()
        return watch.report([], Bounds(), open_loop=False)

    quiet, busy = run(main(0.0)), run(main(0.03))
    assert quiet["loop_lag"]["max"] == pytest.approx(0.0, abs=1e-9)
    assert quiet["doubts"] == []
    assert busy["loop_lag"]["p99"] >= 0.02
    assert busy["cpu_share"] == pytest.approx(0.5)
    assert ["lagged" in doubt for doubt in busy["doubts"]] == [True]


def test_lateness_and_cpu_are_doubts() -> None:
    records = [Record(0, 1.0, 1.5, 1, 1), Record(1, 2.0, 2.0, 1, 1)]
    clock, cpu = iter([0.0, 10.0]), iter([0.0, 9.5])

    async def main() -> Watch:
        watch = Watch(lambda: next(clock), lambda: next(cpu))
        watch.start()
        await watch.stop()  # before its first check
        return watch

    watch = run(main())
    doubts = watch.report(records, Bounds(), open_loop=True)["doubts"]
    assert ["late" in doubts[0], "95% of a processor" in doubts[1]] == [True, True]
    assert len(watch.report(records, Bounds(), open_loop=False)["doubts"]) == 1
