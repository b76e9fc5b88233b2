"""Tests of `Supervisor` with simulated cores: which failures are final, and the limit of a step's duration."""

import asyncio

from jaxinfer.serve.core.messages import Failed, Lifecycle, Pulse, Ready
from jaxinfer.serve.core.supervisor import DEAD, READY, Supervisor, SupervisorTimeouts
from jaxinfer.serve.settings import ServeConfig
from tests.bench import virtual
from tests.serve.fake_engine import fake_card


def test_a_start_that_fails_is_final_unless_the_same_settings_were_ready_before():
    async def failure(*before: Lifecycle) -> tuple[str, str | None]:
        supervisor = Supervisor(ServeConfig(model="fake"))
        for message in (*before, Failed("no memory")):
            supervisor._observe(message)
        return supervisor.state, supervisor.failure

    ready = Ready(fake_card(), "here")
    assert asyncio.run(failure()) == (DEAD, "no memory")
    assert asyncio.run(failure(ready)) == (DEAD, None)


# ---- limit of a step's duration


def limited(*beats: tuple[int, float], **changes) -> float:
    """Return the step limit after a core's READY and its heartbeats: steps, and their 99th percentile."""
    supervisor = Supervisor(ServeConfig(model="fake", **changes))
    ready = Ready(fake_card(), "here")

    async def main() -> float:
        supervisor._observe(ready)
        for steps, p99 in beats:
            supervisor._observe(Pulse(steps, p99=p99))
        return supervisor._step_limit()

    return asyncio.run(main())


def test_left_open_the_limit_is_ten_seconds_or_twenty_times_the_99th_percentile():
    assert limited() == limited((50, 0.01)) == limited((50, 0.5)) == 10.0
    assert limited((50, 0.8)) == 16.0
    assert limited((50, 30.0)) == 600.0


def test_what_a_core_before_took_counts_until_the_next_has_made_enough_steps():
    assert limited((5000, 2.0), (0, 0.0), (10, 0.1)) == 40.0
    assert limited((5000, 2.0), (0, 0.0), (1000, 0.1)) == 10.0


def test_a_limit_that_was_set_holds():
    assert limited((50, 30.0), step_timeout=3.0) == 3.0
    group = {"num_processes": 2, "coordinator_address": "127.0.0.1:1", "group_key_file": "none"}
    assert limited((50, 30.0), group_timeout=7.0, step_timeout=3.0, **group) == 7.0


def test_while_a_profile_is_begun_or_ended_the_limit_is_a_minute():
    group = {"num_processes": 2, "coordinator_address": "127.0.0.1:1", "group_key_file": "none"}
    for config in (ServeConfig(model="fake"), ServeConfig(model="fake", **group)):
        supervisor = Supervisor(config)
        with supervisor._during_long_call():
            assert supervisor._step_limit() == 60.0
        assert supervisor._step_limit() == 10.0


def test_a_core_that_was_ended_by_a_limit_that_nobody_set_leaves_the_next_one_twice_the_time():
    async def main():
        supervisor = Supervisor(ServeConfig(model="fake"), patience=SupervisorTimeouts(tick=0.5))
        limits = []
        for _ in range(4):
            supervisor.state = READY
            limits.append(supervisor._step_limit())
            assert await supervisor._watch() == f"the engine hangs: no step ended in {limits[-1]:g} s"
        assert limits == [10.0, 20.0, 40.0, 60.0]

    virtual.run(main())
