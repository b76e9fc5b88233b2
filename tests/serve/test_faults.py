"""Fault tests with thousands of clients and failing engines, on both APIs of a whole server over the fake core.

Every stream ends with a status, its content is correct, streams without faults are complete, and soon afterwards no
sequence, page, connection or memory is leaked.
"""

import asyncio
import collections
import contextlib
import dataclasses
import gc
import os
import random
import signal
import time

import pytest
from grpc import aio
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from jaxinfer.protos.v1 import control_pb2 as control
from jaxinfer.protos.v1.control_pb2_grpc import ControlStub
from tests.serve import fake_engine as fake
from tests.serve.crowd import CUT, GRPC, HTTP, LEFT, OK, BreakingProxy, Crowd, Job
from tests.serve.processes import BOUND, ServerProcess, fake_server, is_alive

DEADLINE, UNAVAILABLE, TOO_LARGE = "DEADLINE_EXCEEDED", "UNAVAILABLE", "RESOURCE_EXHAUSTED"
PACE = ("--seconds", "0.002")
PATIENCE = 1.0  # seconds that the server waits for readers that do not read
SOON = 20.0  # seconds until resources are free and until health is updated: one is enough on an idle machine
GROWTH_MIB = 48  # growth allowed for allocators after a thousand or ten thousand requests
GROWTH_OF_FULL_BUFFERS_MIB = 96  # growth allowed after a thousand concurrent requests with full buffers

many = pytest.mark.parametrize("count", [400, pytest.param(10_000, marks=pytest.mark.slow)])


@pytest.fixture(scope="module")
def steady(tmp_path_factory):
    """Yield one server for all faults that do not restart the engine."""
    with fake_server(tmp_path_factory.mktemp("steady"), *PACE) as server:
        asyncio.run(warm(server))
        yield server


def prompt(chance: random.Random, length: int) -> tuple[int, ...]:
    """Return an ASCII prompt, so that none of its bytes forms a character with the first byte of the output."""
    return tuple(fake.FIRST_BYTE + chance.randrange(32, 127) for _ in range(length))


def job(chance: random.Random, **changes) -> Job:
    given = {
        "door": chance.choice([GRPC, HTTP]),
        "prompt": prompt(chance, chance.randrange(1, 60)),
        "seed": chance.randrange(1 << 30),
        "tokens": chance.randrange(1, 32),
        "n": chance.choice([1, 1, 1, 2]),
    }
    return Job(**{**given, **changes})


def crowd_of(server: ServerProcess, **options) -> Crowd:
    return Crowd(server.port("gRPC"), server.port("HTTP"), **options)


async def warm(server: ServerProcess) -> None:
    chance = random.Random(0)
    async with crowd_of(server) as crowd:
        await crowd.run([job(chance) for _ in range(400)], 20)  # few enough to be read in time
        assert {outcome.status for outcome in crowd.outcomes} == {OK}


def counted(crowd: Crowd, door: str | None = None) -> collections.Counter:
    return collections.Counter(o.status for o in crowd.outcomes if door in (None, o.job.door))


def is_touched(each: Job) -> bool:
    return each.deadline is not None or each.leave_after is not None or each.reset or each.lingers


def untouched_are_whole(crowd: Crowd) -> None:
    left = [outcome for outcome in crowd.outcomes if not is_touched(outcome.job)]
    assert left
    assert [(o.job.door, o.status, o.details) for o in left if o.status != OK] == []


@contextlib.asynccontextmanager
async def nothing_left(server: ServerProcess, growth: float = GROWTH_MIB):
    """Check that soon after the block all resources are as before it."""
    async with aio.insecure_channel(f"127.0.0.1:{server.port('Control')}") as channel:
        stub = ControlStub(channel)
        await stub.GetStats(control.GetStatsRequest())
        files, most = server.open_files(), server.resident_mib() + growth
        yield
        gc.collect()  # client calls that ended by an error are in reference cycles, which keep their connections open
        end = time.monotonic() + SOON
        while (left := await _left(stub, server, files, most)) is not None:
            assert time.monotonic() < end, left
            await asyncio.sleep(0.01)


async def is_idle(server: ServerProcess) -> bool:
    async with aio.insecure_channel(f"127.0.0.1:{server.port('Control')}") as channel:
        stats = await ControlStub(channel).GetStats(control.GetStatsRequest())
        return not (stats.running or sum(stats.waiting.values()))


async def _left(stub, server: ServerProcess, files: int, most: float) -> object:
    stats = await stub.GetStats(control.GetStatsRequest())
    if stats.running or sum(stats.waiting.values()) or stats.kv_pages["held"]:
        return stats
    if (more := server.open_files() - files) > 0:
        return f"{more} more open files"
    resident = server.resident_mib()
    return f"{resident:.0f} MiB, and {most:.0f} may be" if resident > most else None


# ---- clients


@many
def test_clients_that_leave(steady, count):
    async def main():
        chance = random.Random(1)
        jobs = [job(chance) for _ in range(count)]
        jobs = [
            dataclasses.replace(each, leave_after=chance.randrange(each.tokens + 2)) if rank % 2 else each
            for rank, each in enumerate(jobs)
        ]
        async with nothing_left(steady), crowd_of(steady) as crowd:
            await crowd.run(jobs)
        untouched_are_whole(crowd)
        assert len(crowd.outcomes) == count
        for door in (GRPC, HTTP):
            assert set(counted(crowd, door)) == {OK, LEFT}
            assert counted(crowd, door)[LEFT] > count / 8

    asyncio.run(main())


@many
def test_deadlines_in_the_queue_in_the_prompt_and_in_the_output(steady, count):
    def hurried(chance: random.Random, rank: int) -> Job:
        match rank % 6:
            case 1:
                return job(chance, deadline=chance.uniform(0.001, 0.05))
            case 3:
                return job(chance, prompt=prompt(chance, 1900), deadline=chance.uniform(0.005, 0.1))
            case 5:
                return job(chance, tokens=1500, n=1, deadline=chance.uniform(0.3, 1.2))
        return job(chance)

    async def main():
        chance = random.Random(2)
        async with nothing_left(steady), crowd_of(steady) as crowd:
            await crowd.run([hurried(chance, rank) for rank in range(count)])
            # The number of those that had begun depends on the machine; these few need not queue.
            for door in (GRPC, HTTP):
                await crowd.run([job(chance, door=door, tokens=1500, n=1, deadline=2.0) for _ in range(4)])
        untouched_are_whole(crowd)
        for door in (GRPC, HTTP):
            late = [o for o in crowd.outcomes if o.job.door == door and o.status != OK]
            assert {o.status for o in late} == {DEADLINE}
            assert all(o.seconds < o.job.deadline + SOON for o in late)
            begun = sum(any(o.tokens) for o in late)
            assert begun
            assert len(late) - begun > count / 200

    asyncio.run(main())


@many
def test_connections_that_are_reset(steady, count):
    """Clients reset HTTP connections during the request or the response; proxies reset connections of both APIs."""

    async def main():
        chance = random.Random(3)
        async with (
            nothing_left(steady),
            BreakingProxy(steady.port("gRPC")) as grpc_proxy,
            BreakingProxy(steady.port("HTTP")) as http_proxy,
            crowd_of(steady) as crowd,
            Crowd(grpc_proxy.port, http_proxy.port) as broken,
        ):
            jobs = [job(chance) for _ in range(count // 4)]
            resets = [job(chance, door=HTTP, reset=True, leave_after=chance.randrange(8)) for _ in jobs]
            behind = [job(chance) for _ in range(count // 2)]
            load = asyncio.gather(crowd.run([*jobs, *resets], 100), broken.run(behind, 100))
            while not load.done():
                proxy = chance.choice([grpc_proxy, http_proxy, http_proxy])
                # gRPC calls share connections: on a slow machine none would complete at this rate of resets.
                if proxy is http_proxy or counted(broken, GRPC)[OK] > grpc_proxy.broken:
                    proxy.break_one(chance)
                await asyncio.wait({load}, timeout=0.03)
            await load
            while not counted(broken, GRPC)[UNAVAILABLE]:  # the broken connections had no call in progress
                more = asyncio.gather(broken.run([job(chance, door=GRPC) for _ in range(8)], 8))
                while not more.done():
                    grpc_proxy.break_one(chance)
                    await asyncio.wait({more}, timeout=0.03)
                await more
        untouched_are_whole(crowd)
        assert set(counted(crowd)) == {OK, LEFT}
        assert set(counted(broken, GRPC)) == {OK, UNAVAILABLE}
        assert set(counted(broken, HTTP)) == {OK, CUT}
        assert min(grpc_proxy.broken, http_proxy.broken) > count // 500  # a busy machine finishes soon after few resets

    asyncio.run(main())


@pytest.fixture(scope="module")
def impatient(tmp_path_factory):
    """Yield a server that cuts slow readers soon; its long model name in each HTTP event fills buffers after a few.

    A thousand clients connect at once, which on a busy machine takes longer than the default header timeout.
    """
    settings = {"slow_reader_seconds": PATIENCE, "header_seconds": 60.0, "served_model_name": "long" * 12_000}
    with fake_server(tmp_path_factory.mktemp("impatient"), *PACE, **settings) as server:
        asyncio.run(warm(server))
        yield server


@pytest.mark.slow
@pytest.mark.parametrize("count", [1000, 10_000])
def test_readers_that_never_read(impatient, count):
    """Readers that never read are cut after a second, a thousand at a time, without effects on other clients."""

    async def wave(chance: random.Random, lazy: list[Job]) -> None:
        async with crowd_of(impatient) as crowd, crowd_of(impatient, narrow=True) as stuck:
            lingering = asyncio.create_task(stuck.run(lazy, len(lazy)))
            # Some are cut before they have read anything: a busy machine does not read either.
            while len(stuck.begun) + len(stuck.outcomes) < len(lazy) or not await is_idle(impatient):
                await crowd.run([job(chance) for _ in range(20)], 20)
                assert not lingering.done()
            await asyncio.sleep(2.5 * PATIENCE)  # the remaining output is written, or its reader is cut
            stuck.released.set()
            await lingering
        untouched_are_whole(crowd)
        assert set(counted(stuck, GRPC)) == {TOO_LARGE}
        # On a busy machine a few may get everything in one or two events, which fit into the kernel's buffers.
        assert counted(stuck, HTTP)[CUT] + counted(stuck, HTTP)[OK] == len(lazy) // 2
        assert counted(stuck, HTTP)[CUT] > 0.45 * len(lazy)

    async def main():
        chance = random.Random(4)
        async with nothing_left(impatient, GROWTH_OF_FULL_BUFFERS_MIB):
            for _ in range(count // 1000):
                lazy = [job(chance, door=HTTP, tokens=60, n=1, lingers=True) for _ in range(500)]
                lazy += [job(chance, door=GRPC, tokens=60, n=1, lingers=True, logprobs=20) for _ in lazy]
                chance.shuffle(lazy)
                await asyncio.wait_for(wave(chance, lazy), BOUND)

    asyncio.run(main())


# ---- the engine


class Watched:
    """Records the readiness that a health watcher receives, with times."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self.heard: list[tuple[float, int]] = []

    async def __aenter__(self):
        self._task = asyncio.create_task(self._listen())
        await self.until(SERVING)
        return self

    async def __aexit__(self, *_):
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        del self._task  # its exception references the call

    async def until(self, status: int) -> float:
        """Return the time at which the status was received."""
        async with asyncio.timeout(BOUND):
            while not self.heard or self.heard[-1][1] != status:
                await asyncio.sleep(0.005)
        return self.heard[-1][0]

    async def _listen(self) -> None:
        asked = health_pb2.HealthCheckRequest(service="jaxinfer.v1.Inference")
        async with aio.insecure_channel(f"127.0.0.1:{self._server.port('gRPC')}") as channel:
            async for answer in HealthStub(channel).Watch(asked):
                self.heard.append((time.monotonic(), answer.status))


SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def patient(crowd: Crowd):
    """Return a function that retries a job until it is answered."""

    async def ask(each: Job) -> None:
        while (outcome := await crowd.ask(each)).status != OK:
            assert outcome.status == UNAVAILABLE, outcome
            await asyncio.sleep(0.1)

    return ask


def all_got_theirs(crowd: Crowd, jobs: list[Job]) -> None:
    """Check that each job completed once, after streams that broke in the middle."""
    assert collections.Counter(o.job for o in crowd.outcomes if o.status == OK) == collections.Counter(jobs)
    for door in (GRPC, HTTP):
        assert set(counted(crowd, door)) == {OK, UNAVAILABLE}
    # At the kill, few streams may be in the middle, at random.
    assert any(o.status == UNAVAILABLE and any(o.tokens) for o in crowd.outcomes)


@pytest.mark.parametrize(("count", "kills"), [(400, 2), pytest.param(10_000, 4, marks=pytest.mark.slow)])
def test_an_engine_core_that_is_killed(tmp_path, count, kills):
    async def main(server: ServerProcess):
        await warm(server)
        chance = random.Random(5)
        jobs = [job(chance, n=1) for _ in range(count)]
        async with nothing_left(server), crowd_of(server) as crowd, Watched(server) as watched:
            load = asyncio.create_task(crowd.run(jobs, ask=patient(crowd)))
            for kill in range(1, kills + 1):
                while counted(crowd)[OK] < kill * count / (kills + 2):
                    await asyncio.sleep(0.005)
                killed, core = time.monotonic(), server.core
                os.kill(core, signal.SIGKILL)
                assert await watched.until(NOT_SERVING) < killed + SOON
                await watched.until(SERVING)
                assert server.core != core
            await load
        all_got_theirs(crowd, jobs)
        assert [status for _, status in watched.heard] == [SERVING, *(NOT_SERVING, SERVING) * kills]

    with fake_server(tmp_path, *PACE) as server:
        asyncio.run(main(server))


@many
def test_an_engine_that_hangs(tmp_path, count):
    """An engine that hangs in a step under load is restarted; the watchdog tolerates a busy machine."""

    async def main(server: ServerProcess):
        chance = random.Random(6)
        jobs = [job(chance, n=1) for _ in range(count)]
        async with nothing_left(server), crowd_of(server) as crowd, Watched(server) as watched:
            await crowd.run(jobs, ask=patient(crowd))
        all_got_theirs(crowd, jobs)
        assert [status for _, status in watched.heard] == [SERVING, NOT_SERVING, SERVING]
        assert "hangs" in server.log()
        assert "fake_engine.py" in server.log()  # location of the hang

    once = ("--hang-at", str(count // 5), "--once", str(tmp_path / "once"))
    with fake_server(tmp_path, *PACE, *once, step_timeout=4.0) as server:
        asyncio.run(main(server))


# ---- the end


async def ended(server: ServerProcess, core: int) -> None:
    assert await asyncio.to_thread(server.wait) == 0
    assert not is_alive(core)


@many
def test_a_server_that_drains_under_load(tmp_path, count):
    """A draining server finishes accepted requests, rejects later ones or connections, and exits with status 0."""

    async def main(server: ServerProcess):
        chance, core = random.Random(7), server.core
        jobs = [job(chance) for _ in range(count)]
        signalled = asyncio.Event()
        # CANCELLED: gRPC's response to calls that it has not handed over when it stops (grpc/grpc#41785).
        refusals = (UNAVAILABLE, CUT, "CANCELLED")

        async def ask(each: Job) -> None:
            late = signalled.is_set()
            outcome = await crowd.ask(each)
            assert outcome.status == OK or (not any(outcome.tokens) and outcome.status in refusals), outcome
            seen[late, outcome.status] += 1

        async with crowd_of(server) as crowd:
            seen: collections.Counter = collections.Counter()
            load = asyncio.create_task(crowd.run(jobs, ask=ask))
            while counted(crowd)[OK] < count / 3:
                await asyncio.sleep(0.005)
            signalled.set()
            server.signal(signal.SIGTERM)
            await load
            await ended(server, core)
        assert seen[True, OK] <= 10  # in flight when the signal arrived
        assert sum(seen.values()) == count

    with fake_server(tmp_path, *PACE) as server:
        asyncio.run(main(server))


def test_a_second_signal_ends_what_runs(tmp_path):
    async def main(server: ServerProcess):
        chance, core = random.Random(8), server.core
        async with crowd_of(server) as crowd:
            jobs = [job(chance, tokens=1500, n=1) for _ in range(200)]
            load = asyncio.create_task(crowd.run(jobs))
            await asyncio.sleep(1.0)  # some run, some wait
            server.signal(signal.SIGTERM)
            await asyncio.to_thread(server.until_logged, "draining")
            before = time.monotonic()
            server.signal(signal.SIGTERM)
            await asyncio.gather(load, ended(server, core))
            assert time.monotonic() < before + SOON
        # CANCELLED: see above, on a machine so slow that calls are not handed over within a second.
        assert set(counted(crowd)) - {"CANCELLED"} == {UNAVAILABLE}
        assert any(any(o.tokens) for o in crowd.outcomes)

    with fake_server(tmp_path, "--seconds", "0.02") as server:
        asyncio.run(main(server))
