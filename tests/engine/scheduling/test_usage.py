"""Tests of the clock of busy time, and of usages that are put together."""

import dataclasses
import json

import pytest

from jaxinfer.engine.scheduling.usage import BusyTime, DeviceUsage, HostUsage, Usage, joined, usage_of
from jaxinfer.parallel.driver import DriverFigures


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_time_counts_while_any_step_is_in_flight():
    clock = Clock()
    busy = BusyTime(clock)
    clock.now += 5
    assert (busy.busy, busy.seconds) == (0, 5)
    busy.begin()
    clock.now += 1
    assert busy.busy == 1  # the step is still in flight
    busy.begin()
    clock.now += 2
    busy.end()
    clock.now += 4
    busy.end()
    clock.now += 8
    assert (busy.busy, busy.seconds) == (7, 20)
    busy.begin()
    clock.now += 0.5
    busy.end()
    assert busy.busy == 7.5


def device(number, **fields):
    return DeviceUsage(process=0, device=number, kind="cpu", parts={"weights": 3, "kv_cache": 4}, **fields)


def test_usages_of_engines_are_joined_with_host_memory_by_process():
    first = Usage(devices=[device(0)], hosts=[HostUsage(process=0, parts={"kv_pages": 5})], seconds=2.0)
    hosts = [HostUsage(process=1, parts={"kv_pages": 1}), HostUsage(process=0, parts={"kv_pages": 6, "weights": 7})]
    found = joined([first.timed(1.0, 2.0), Usage(devices=[device(1)], hosts=hosts).timed(1.5, 3.0)])
    assert [(each.device, each.busy_seconds, each.known) for each in found.devices] == [(0, 1.0, 7), (1, 1.5, 7)]
    assert [(each.process, each.parts) for each in found.hosts] == [
        (0, {"kv_pages": 11, "weights": 7}),
        (1, {"kv_pages": 1}),
    ]
    assert found.seconds == 3.0
    assert joined([]).devices == []


@pytest.mark.parametrize("driver", [None, DriverFigures(utilization=0.5, memory_used=3)])
def test_a_usage_is_sent_as_json(driver):
    usage = Usage(devices=[device(2, in_use=9, driver=driver)], hosts=[HostUsage(process=1, parts={})])
    assert usage_of(json.loads(json.dumps(dataclasses.asdict(usage)))) == usage
