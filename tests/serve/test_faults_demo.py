"""Tests of some faults of `tests.serve.test_faults` with the real engine on the demo model: every stream ends with a
status, its content is that of the fault-free run, and soon afterwards no resource is leaked."""

import asyncio
import collections
import dataclasses
import os
import random
import signal

import pytest

from jaxinfer import client as c
from tests.serve.processes import BOUND, started
from tests.serve.test_faults import nothing_left

pytestmark = pytest.mark.slow  # half a minute, mostly for the engine's two starts

COUNT = 60
SERVE = ["-m", "jaxinfer.serve", "--model", "demo", "--grpc-port", "0", "--http-port", "0", "--control-port", "0"]
SMALL = ["--max-num-seqs", "16", "--max-model-len", "256"]
LEFT = "LEFT"


@dataclasses.dataclass(frozen=True)
class Job:
    """A request. ``leave_after``: number of deltas; ``timeout``: seconds."""

    prompt: str
    tokens: int
    leave_after: int | None = None
    timeout: float | None = None

    @property
    def question(self) -> tuple[str, int]:
        return self.prompt, self.tokens


@dataclasses.dataclass
class Outcome:
    job: Job
    status: str
    text: str
    token_ids: list[int]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with started([*SERVE, *SMALL], tmp_path_factory.mktemp("demo")) as found:
        found.until_logged("ready: ")
        yield found


def jobs_of(chance: random.Random) -> list[Job]:
    names = ("ROMEO", "JULIET", "First Citizen", "KING HENRY", "The")
    return [Job(f"{chance.choice(names)}: {chance.randrange(100)}", chance.randrange(20, 120)) for _ in range(COUNT)]


async def ask(client: c.AsyncClient, job: Job) -> Outcome:
    """Run a job with greedy sampling."""
    outcome, deltas = Outcome(job, "OK", "", []), 0
    options = {"max_tokens": job.tokens, "temperature": 0.0, "ignore_eos": True, "timeout": job.timeout or BOUND}
    try:
        async with client.stream(job.prompt, **options) as stream:
            while deltas != job.leave_after and (delta := await anext(stream, None)) is not None:
                deltas += 1
                outcome.text += delta.text
                outcome.token_ids += delta.token_ids
            if deltas == job.leave_after:
                outcome.status = LEFT
    except c.ServerError as error:
        outcome.status = error.code.name
    return outcome


async def ask_all(server, jobs: list[Job]) -> list[Outcome]:
    async with c.AsyncClient(f"127.0.0.1:{server.grpc_port}", retry=None) as client:
        return await asyncio.gather(*(ask(client, job) for job in jobs))


async def fault_free(server, jobs: list[Job]) -> dict[tuple[str, int], Outcome]:
    plain = [Job(*question) for question in {job.question for job in jobs}]
    found = await ask_all(server, plain)
    assert {outcome.status for outcome in found} == {"OK"}
    return {outcome.job.question: outcome for outcome in found}


def check(outcomes: list[Outcome], want: dict[tuple[str, int], Outcome]) -> None:
    """Check that all output received is correct, and that streams with status OK are complete."""
    for outcome in outcomes:
        whole = want[outcome.job.question]
        assert outcome.token_ids == whole.token_ids[: len(outcome.token_ids)], outcome
        assert whole.text.startswith(outcome.text), outcome
        if outcome.status == "OK":
            assert (outcome.text, outcome.token_ids) == (whole.text, whole.token_ids)
            assert len(outcome.token_ids) == outcome.job.tokens


def statuses(outcomes: list[Outcome]) -> collections.Counter:
    return collections.Counter(outcome.status for outcome in outcomes)


def test_clients_that_leave(server):
    async def main():
        chance = random.Random(1)
        jobs = jobs_of(chance)
        want = await fault_free(server, jobs)
        rude = [dataclasses.replace(j, leave_after=chance.randrange(1, 15)) if i % 2 else j for i, j in enumerate(jobs)]
        async with nothing_left(server):
            outcomes = await ask_all(server, rude)
        check(outcomes, want)
        assert {o.status for o in outcomes if o.job.leave_after is None} == {"OK"}
        assert statuses(outcomes) == {"OK": COUNT // 2, LEFT: COUNT // 2}

    asyncio.run(main())


def test_deadlines(server):
    async def main():
        chance = random.Random(2)
        jobs = jobs_of(chance)
        want = await fault_free(server, jobs)
        late = [dataclasses.replace(j, timeout=chance.uniform(0.01, 0.3)) if i % 2 else j for i, j in enumerate(jobs)]
        async with nothing_left(server):
            outcomes = await ask_all(server, late)
        check(outcomes, want)
        assert {o.status for o in outcomes if o.job.timeout is None} == {"OK"}
        assert set(statuses(outcomes)) == {"OK", "DEADLINE_EXCEEDED"}

    asyncio.run(main())


def test_an_engine_core_that_is_killed(server):
    async def main():
        jobs = jobs_of(random.Random(3))
        want = await fault_free(server, jobs)
        core = server.core
        async with nothing_left(server):
            load = asyncio.create_task(ask_all(server, jobs))
            await asyncio.sleep(0.15)  # some run, some wait
            os.kill(core, signal.SIGKILL)
            outcomes = await asyncio.wait_for(load, BOUND)
            async with c.AsyncClient(f"127.0.0.1:{server.grpc_port}", retry=None) as client:
                await client.wait_ready(timeout=BOUND)
            assert server.core != core
            again = await ask_all(server, jobs)
        check([*outcomes, *again], want)
        assert set(statuses(outcomes)) <= {"OK", "UNAVAILABLE"}
        assert any(o.status == "UNAVAILABLE" and o.token_ids for o in outcomes)
        assert statuses(again) == {"OK": COUNT}

    asyncio.run(main())
