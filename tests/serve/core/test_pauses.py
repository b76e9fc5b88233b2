"""Tests of the supervisor's pauses before it restarts a core, in virtual time."""

import asyncio
import dataclasses
import errno
import itertools

import pytest

from jaxinfer.serve.core import supervisor
from jaxinfer.serve.core.messages import Pulse, Ready
from jaxinfer.serve.core.supervisor import Supervisor, SupervisorTimeouts
from tests.bench.virtual import run
from tests.serve.core.fake_core import make_config
from tests.serve.fake_engine import fake_card

DYING = 0.01  # most seconds between a core's end and the pause
USUAL = SupervisorTimeouts()


@dataclasses.dataclass(frozen=True, eq=False)
class Life:
    """Lifetime of a core: seconds from the start to READY (None: never ready), and from there to its end."""

    starting: float | None
    ready: float = 0.0


DEAD_AT_ONCE = Life(None)
NO_PROCESS = Life(None)


class Process:
    def __init__(self, life, observe):
        self._life, self._observe = life, observe
        self.ended = asyncio.ensure_future(self._live())

    async def wait(self):
        await asyncio.shield(self.ended)
        return 1

    async def _live(self):
        await asyncio.sleep(self._life.starting or 0.0)
        if self._life.starting is None:
            return
        self._observe(Ready(fake_card(), "nowhere"))
        end = asyncio.get_running_loop().time() + self._life.ready
        while (left := end - asyncio.get_running_loop().time()) > 0:
            self._observe(Pulse())
            await asyncio.sleep(min(1.0, left))


class Link:
    def __init__(self):
        self._closed = asyncio.Event()

    async def run(self):
        await self._closed.wait()

    def close(self, reason):
        self._closed.set()

    stop = close


def pauses_between(monkeypatch, lives, patience=USUAL) -> list[float]:
    """Return the seconds between the end of each of these lives and the start after it."""
    begun, ended, left = [], [], iter(lives)
    done, over = object(), asyncio.Event()

    class Child:
        link: Link
        process: Process

        @classmethod
        async def start(cls, command, config, observe):
            begun.append(asyncio.get_running_loop().time())
            self, life = cls(), next(left, done)
            if life is done:
                over.set()
                await asyncio.sleep(3600.0)
            if life is NO_PROCESS:
                ended.append(begun[-1])
                raise BlockingIOError(errno.EAGAIN, "no process can be had")
            self.link, self.process = Link(), Process(life, observe)
            return self

        async def end(self, grace):
            ended.append(asyncio.get_running_loop().time())
            return "ended"

    async def main():
        keeper = Supervisor(make_config(), ["core"], patience)
        await keeper.start()
        await over.wait()
        assert keeper.restarts == len(ended)
        await keeper.stop()

    monkeypatch.setattr(supervisor, "Child", Child)
    monkeypatch.setattr(supervisor, "_LAST_WORDS_SECONDS", DYING / 2)
    run(main())
    return [round(start - end, 2) for end, start in zip(ended, begun[1:], strict=True)]


DOUBLING = [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


@pytest.mark.parametrize("life", [DEAD_AT_ONCE, Life(0.2), Life(100.0, 10.0), Life(1.0, 59.9)])
def test_pauses_double_up_to_the_longest(monkeypatch, life):
    """Pauses double regardless of how long a start takes: only the time in READY counts."""
    assert pauses_between(monkeypatch, [life] * len(DOUBLING)) == DOUBLING


def test_they_double_as_well_while_no_process_can_be_had_whether_one_was_ready_before_or_not(monkeypatch):
    assert pauses_between(monkeypatch, [NO_PROCESS] * len(DOUBLING)) == DOUBLING
    lives = [Life(1.0, 3600.0), *[NO_PROCESS] * len(DOUBLING[1:])]
    assert pauses_between(monkeypatch, lives) == DOUBLING


def test_a_healthy_core_is_started_again_as_if_it_were_the_first(monkeypatch):
    lives = [*[DEAD_AT_ONCE] * 8, Life(1.0, 60.1), DEAD_AT_ONCE, DEAD_AT_ONCE, Life(1.0, 3600.0), Life(1.0, 59.0)]
    assert pauses_between(monkeypatch, lives) == [*DOUBLING[:8], 0.5, 1.0, 2.0, 0.5, 1.0]


def test_cores_that_live_long_enough_each_time_never_wait_long(monkeypatch):
    assert pauses_between(monkeypatch, [Life(1.0, 61.0)] * 5) == [0.5] * 5


def test_the_times_are_those_that_were_asked_for(monkeypatch):
    patience = SupervisorTimeouts(first_pause=0.25, longest_pause=3.0, healthy=5.0)
    lives = [*itertools.repeat(Life(0.0, 4.9), 6), Life(0.0, 5.1), DEAD_AT_ONCE]
    assert pauses_between(monkeypatch, lives, patience) == [0.25, 0.5, 1.0, 2.0, 3.0, 3.0, 0.25, 0.5]
