"""Pauses, drains, aborts of everything and restarts under other weights, between any two steps of random requests."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule, run_state_machine_as_test

from jaxinfer.engine.core import Pace
from jaxinfer.types import Request
from tests.engine.fake_loop import make_loop, make_request
from tests.engine.scheduling.test_scheduler_machine import SchedulerMachine, World, _chooser, draw_config

MODES = ("wait", "keep", "abort")


class PausingWorld(World):
    """A world whose engine pauses: no request is done within a bound."""

    def __init__(self, config) -> None:
        super().__init__(config)
        self.core, self.version = self.loop.core, 0
        self.loop.patience = 10**9

    def _bound(self, request: Request, before: list[Request]) -> float:
        return float("inf")

    def step(self) -> None:
        begun = {sequence.request.request_id for sequence in self.loop.scheduler._running.values()}
        pace, draining = self.core.pace, self.loop.scheduler._draining
        super().step()
        running = {sequence.request.request_id for sequence in self.loop.scheduler._running.values()}
        if pace is Pace.PAUSED:
            assert running <= begun
        if pace is Pace.DRAINING:
            assert running <= draining
        if pace is Pace.DRAINING and self.core.pace is Pace.PAUSED:
            assert not running

    def pause(self, mode: str) -> None:
        self.core.pause(mode)
        self.loop.scheduler.check()

    def restart(self, *, asleep: bool) -> None:
        """Restart, as between an update's commit and the next step, or as by sleep."""
        self.version += 1
        if asleep and self.core.pace is Pace.PAUSED:
            self.core.doze()
        else:
            self.core.settle()
            self.core.renew(self.version, restart=True)
        self.loop.scheduler.check()
        usage = self.loop.kv.usage()
        assert (usage.held, usage.cached, usage.host_used) == (0, 0, 0)

    def drain(self) -> None:
        self.core.resume()
        super().drain()


class PauseMachine(SchedulerMachine):
    @initialize(data=st.data())
    def start(self, data):
        self.world = PausingWorld(draw_config(_chooser(data)))

    @rule(mode=st.sampled_from(MODES))
    def pause(self, mode):
        self.world.pause(mode)

    @rule()
    def resume(self):
        self.world.core.resume()

    @rule(asleep=st.booleans())
    def restart(self, asleep):
        self.world.restart(asleep=asleep)


def test_machine(unchecked):
    run_state_machine_as_test(PauseMachine, settings=settings(max_examples=25, stateful_step_count=25, deadline=None))


@pytest.mark.parametrize(
    "episode", [*range(10), *(pytest.param(number, marks=pytest.mark.slow) for number in range(10, 60))]
)
def test_episodes(unchecked, seed, episode):
    rng = random.Random(f"{seed} {episode}")

    def choose(*options):
        return rng.choice(options)

    world = PausingWorld(draw_config(choose))
    for _ in range(250):
        while len(world.live) < 12 and rng.random() < 0.4:
            world.add(choose)
        if world.live and rng.random() < 0.03:
            world.abort(choose(*world.live), choose(None, 0, 1))
        if (act := rng.random()) < 0.05:
            world.restart(asleep=choose(True, False))
        elif act < 0.09:
            world.pause(choose(*MODES))
        elif act < 0.2:
            world.core.resume()
        world.step()
    world.drain()
    world.loop.check_empty()


def test_wait_ends_what_has_begun_and_begins_nothing():
    loop = make_loop(max_num_seqs=1)
    loop.add(make_request("first", 9, most=5, n=2))
    loop.add(make_request("second", 9, most=5))
    loop.step()
    loop.core.pause("wait")
    loop.add(make_request("third", 9, most=5))
    assert loop.core.pace is Pace.DRAINING
    while loop.core.has_work:
        loop.step()
    assert loop.core.pace is Pace.PAUSED
    assert list(loop.live) == ["second", "third"]
    assert loop.scheduler.queued.requests == 2
    loop.core.resume()
    loop.drain()


def test_deltas_of_steps_in_flight_are_of_the_old_version():
    loop = make_loop()
    loop.add(make_request("a", 9, most=16))
    seen = list[tuple[tuple[int, int], ...]]()
    take = loop.outputs["a"][0].take

    def taking(delta, now) -> None:
        seen.append(delta.weight_versions)
        take(delta, now)

    loop.outputs["a"][0].take = taking
    for step in range(40):
        if step in (5, 15):
            loop.core.settle()
            loop.core.renew(step, restart=True)
        loop.step()
    versions = [version for delta in seen for version, _ in delta or ((0, 1),)]
    assert versions == sorted(versions)
    assert set(versions) == {0, 5, 15}
    assert sum(count for delta in seen for _, count in delta or ((0, 1),)) == 16
