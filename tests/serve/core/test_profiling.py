"""Tests of profiles that end by themselves, with a profiler that only counts."""

import asyncio

import pytest

from jaxinfer.serve.api.errors import ServeError
from jaxinfer.serve.core.profiling import MAX_STEPS, Profiling, checked_steps


class Counting:
    """A profiler that records calls; ``broken``: its folder cannot be written."""

    def __init__(self, broken=False):
        self.calls, self.runs, self.broken = [], False, broken

    def start(self):
        if self.runs:
            raise RuntimeError("a profile is running")
        self.runs = True
        self.calls.append("start")

    def stop(self):
        if not self.runs:
            raise RuntimeError("no profile is running")
        self.runs = False
        if self.broken:
            raise RuntimeError("not a directory")
        self.calls.append("stop")
        return f"traces/{len(self.calls) // 2}"


class Engine:
    steps = 100


def run(story, seconds=600.0, broken=False):
    async def main():
        profiler, engine = Counting(broken), Engine()
        await story(Profiling(profiler, lambda: engine.steps, seconds), profiler, engine)

    asyncio.run(main())


def test_a_profile_ends_after_its_steps_and_stop_returns_its_folder_once():
    async def story(profiling, profiler, engine):
        await profiling.start(3)
        engine.steps += 2
        waiting = asyncio.create_task(profiling.wait())
        await asyncio.sleep(0.02)
        assert (profiler.calls, waiting.done()) == (["start"], False)
        engine.steps += 1
        await waiting
        assert profiler.calls == ["start", "stop"]
        assert await profiling.stop() == "traces/1"
        with pytest.raises(RuntimeError, match="no profile"):
            await profiling.stop()

    run(story)


def test_a_profile_is_stopped_before_its_steps_and_the_next_is_another_one():
    async def story(profiling, profiler, engine):
        await profiling.wait()  # there is none
        await profiling.start(3)
        with pytest.raises(RuntimeError, match="is running"):
            await profiling.start(3)
        assert await profiling.stop() == "traces/1"
        await profiling.wait()
        engine.steps += 10
        await profiling.start(2)
        engine.steps += 2
        await profiling.wait()
        assert profiler.calls == ["start", "stop"] * 2
        await profiling.start(1)  # no caller has asked for the folder of the one before
        assert await profiling.stop() == "traces/3"

    run(story)


def test_a_profile_of_an_idle_engine_ends_in_time():
    async def story(profiling, profiler, engine):
        await profiling.start(3)
        await profiling.wait()
        assert profiler.calls == ["start", "stop"]

    run(story, seconds=0.01)


def test_a_profile_that_cannot_be_written_leaves_none_behind():
    async def story(profiling, profiler, engine):
        await profiling.start(1)
        engine.steps += 1
        await profiling.wait()
        with pytest.raises(RuntimeError, match="no profile"):
            await profiling.stop()
        await profiling.start(1)

    run(story, broken=True)


def test_steps_are_bounded():
    assert (checked_steps(None), checked_steps(1), checked_steps(MAX_STEPS)) == (MAX_STEPS, 1, MAX_STEPS)
    for wrong in (0, -1, MAX_STEPS + 1):
        with pytest.raises(ServeError) as refused:
            checked_steps(wrong, "num_steps")
        assert refused.value.field == "num_steps"
