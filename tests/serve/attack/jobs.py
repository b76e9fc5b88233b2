"""Jobs of clients in an attack, and the output that each must return."""

from __future__ import annotations

import dataclasses
import random

from tests.serve import fake_engine as fake
from tests.serve.attack.victim import PATIENCE, Victim
from tests.serve.crowd import GRPC, HTTP, OK, Crowd, Job, by_rule

_RUDE = 0.25
_LONG = 200
_FEW = 20  # events after which a reader that sleeps between them disconnects


class Jobs:
    """Random jobs for the fake engine, whose output follows a rule."""

    oracle = staticmethod(by_rule)

    def polite(self, chance: random.Random) -> Job:
        """Return a job whose client reads the stream to its end."""
        return Job(
            door=chance.choice((GRPC, HTTP)),
            prompt=tuple(fake.FIRST_BYTE + chance.randrange(32, 127) for _ in range(chance.randrange(1, _LONG))),
            seed=chance.randrange(1 << 30),
            tokens=chance.choice((1, 8, 40, _LONG)),
            n=chance.choice((1, 1, 1, 2)),
        )

    def any(self, chance: random.Random) -> Job:
        """Return a polite job, or one whose client disconnects, has a deadline, pauses or reads slowly."""
        job = self.polite(chance)
        if chance.random() > _RUDE:
            return job
        match chance.randrange(5):
            case 0:
                return dataclasses.replace(job, leave_after=chance.randrange(job.tokens + 2))
            case 1:
                return dataclasses.replace(job, door=HTTP, reset=True, leave_after=chance.randrange(8))
            case 2:
                return dataclasses.replace(job, deadline=chance.uniform(0.001, 1.0))
            case 3:
                return dataclasses.replace(job, pause=chance.uniform(0.0, 0.05))
            case _:  # some read nothing for longer than the server waits
                pause = chance.uniform(0.1, 1.5 * PATIENCE)
                return dataclasses.replace(job, door=HTTP, lingers=True, pause=pause, leave_after=_FEW)


class KnownJobs(Jobs):
    """Jobs for a real engine with recorded answers from a run without faults."""

    def __init__(self, chance: random.Random, count: int = 40) -> None:
        self._known = [
            Job(
                door=GRPC,
                prompt=tuple(chance.randrange(3, 200) for _ in range(chance.randrange(1, 60))),
                seed=chance.randrange(1 << 30),
                tokens=chance.choice((1, 8, 40, 120)),
                n=chance.choice((1, 1, 2)),
            )
            for _ in range(count)
        ]
        self._answers: dict[tuple[object, ...], tuple[list[int], str]] = {}

    async def learn(self, victim: Victim) -> None:
        """Run each job once and record its answer."""
        async with Crowd(victim.grpc_port, victim.http_port, oracle=None) as crowd:
            await crowd.run(self._known, 8)
        for outcome in crowd.outcomes:
            assert outcome.status == OK, outcome
            for index in range(outcome.job.n):
                self._answers[_key(outcome.job, index)] = outcome.tokens[index], outcome.texts[index]

    def polite(self, chance: random.Random) -> Job:
        return dataclasses.replace(chance.choice(self._known), door=chance.choice((GRPC, HTTP)))

    def oracle(self, job: Job, index: int) -> tuple[list[int], str]:  # type: ignore[override]
        return self._answers[_key(job, index)]


def _key(job: Job, index: int) -> tuple[object, ...]:
    return job.prompt, job.seed, job.tokens, job.n, index
