"""Load on a server with concurrent faults for a given time, and the accounting of all streams.

`run(victim, seconds, seed)` sends requests to both APIs continuously while one fault after another is injected
(`tests.serve.attack.faults`). The report gives the result of each stream and the resources that the server still holds.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import gc
import random
import re
import time
from collections.abc import Sequence

from tests.serve.attack.faults import Faults
from tests.serve.attack.jobs import Jobs
from tests.serve.attack.victim import Victim
from tests.serve.crowd import GRPC, HTTP, BreakingProxy, Crowd, Job, WrongAnswerError
from tests.serve.doors import Doors, doors

CLIENTS = 24  # half of them connect through the breaking proxies
_FAULTS_AT_ONCE = 2
_MOST_PEACE = 6.0  # most seconds between a fault and the next of the same task
_BEFORE_AGAIN = 0.2  # seconds that a client waits after a rejection
_QUIET = 30.0  # most seconds until a restarted server holds nothing
_FEW, _WAVES = 40, 10
_GROWTH_MIB, _GROWTH_FILES = 96, 8  # growth allowed for allocators and pools

TOLD = {"UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "CANCELLED"}
"""Statuses that a server under faults may return; gRPC itself gives CANCELLED for calls not handed over at a stop."""

LOST, UNTOLD = "lost", "other status"


@dataclasses.dataclass
class Held:
    """Resources held by the server's processes."""

    doors_mib: float
    core_mib: float
    descriptors: int


@dataclasses.dataclass
class Report:
    """Results of all streams.

    Attributes:
        ends: number of streams by result: whole, told (an error status), cut (a connection that broke visibly), left
        (by the client), and the forbidden ones: lost (no end), wrong, doubled, silent, another status.
        faults: number of faults of each kind.
        outages: longest time without a complete stream on each API, in seconds.
        starts: number of servers, including the first.
        trouble: descriptions of forbidden results.
    """

    seed: int
    seconds: float
    ends: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    faults: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    outages: dict[str, float] = dataclasses.field(default_factory=dict)
    starts: int = 0
    before: Held | None = None
    after: Held | None = None
    trouble: list[str] = dataclasses.field(default_factory=list)

    @property
    def begun(self) -> int:
        return self.ends.total()

    def wrong(self) -> list[str]:
        """Return the descriptions of all violations."""
        found = list(self.trouble)
        if self.before is None or self.after is None:
            return [*found, "it did not come to its end"]
        if self.after.doors_mib > self.before.doors_mib + _GROWTH_MIB:
            found.append(f"memory: {self.before}, {self.after}")
        if self.after.descriptors > self.before.descriptors + _GROWTH_FILES:
            found.append(f"descriptors: {self.before}, {self.after}")
        return found

    def lines(self) -> list[str]:
        """Return the report as lines of text."""
        must_not = ("lost", "wrong", "doubled", "silent", UNTOLD)
        return [
            f"chaos: seed {self.seed}, {self.seconds:.0f} s, {self.starts} servers",
            f"  streams begun {self.begun}: " + ", ".join(f"{end} {self.ends[end]}" for end in sorted(self.ends)),
            "  must be 0: " + ", ".join(f"{end} {self.ends[end]}" for end in must_not),
            f"  faults {self.faults.total()}: " + ", ".join(f"{name} {n}" for name, n in self.faults.most_common()),
            "  longest outage: " + ", ".join(f"{door} {seconds:.1f} s" for door, seconds in self.outages.items()),
            f"  before: {self.before}",
            f"  after:  {self.after}",
            *(f"  WRONG: {each}" for each in self.wrong()),
        ]


class Load:
    """Clients that send requests until ``over`` is set."""

    def __init__(self, report: Report, jobs: Jobs, chance: random.Random) -> None:
        self._report, self.jobs, self.chance = report, jobs, chance
        self._last_whole = {door: time.monotonic() for door in (GRPC, HTTP)}
        self.over = False

    async def client(self, crowd: Crowd) -> None:
        while not self.over:
            await self.one(crowd, self.jobs.any(self.chance))

    async def one(self, crowd: Crowd, job: Job) -> str:
        """Run one job and return its result."""
        start, end = time.monotonic(), "told"
        try:
            outcome = await crowd.ask(job)
        except TimeoutError as error:
            end = self._trouble(LOST, error)
        except WrongAnswerError as error:
            end = self._trouble(error.kind, error)
        else:
            match outcome.status:
                case "OK":
                    end = "whole"
                    self._whole(job.door, start)
                case "LEFT" | "CUT":
                    end = outcome.status.lower()
                case status if status not in TOLD:
                    end = self._trouble(UNTOLD, outcome)
            crowd.outcomes.clear()
        self._report.ends[end] += 1
        if end in ("told", "cut"):
            await asyncio.sleep(_BEFORE_AGAIN)
        return end

    def _trouble(self, end: str, what: object) -> str:
        if len(self._report.trouble) < _FEW:
            self._report.trouble.append(f"{end}: {what!s:.1500}")
        return end

    def _whole(self, door: str, start: float) -> None:
        """Update the longest outage. A stream that began in an outage shows when the outage was over."""
        now = time.monotonic()
        outages = self._report.outages
        outages[door] = max(outages.get(door, 0.0), now - self._last_whole[door])
        self._last_whole[door] = now


async def run(victim: Victim, jobs: Jobs, seconds: float, seed: int) -> Report:
    """Attack for ``seconds``, then check that no resources are leaked."""
    report, chance = Report(seed, seconds), random.Random(seed)
    load = Load(report, jobs, chance)
    async with contextlib.AsyncExitStack() as stack:
        proxies = [
            await stack.enter_async_context(BreakingProxy(port)) for port in (victim.grpc_port, victim.http_port)
        ]
        crowds = [
            await stack.enter_async_context(Crowd(*ports, oracle=jobs.oracle))
            for ports in ((victim.grpc_port, victim.http_port), (proxies[0].port, proxies[1].port))
        ]
        for crowd in crowds:
            crowd.released.set()  # lingering clients use only their pauses
        client = await stack.enter_async_context(doors(victim))
        await _warm(load, crowds)
        report.before = await _held(victim, client)
        faults = Faults(victim, tuple(proxies), client, chance)
        await _attack(load, crowds, faults, report)
        await _quiet(victim, client, report)
        await _warm(load, crowds)
        await _quiet(victim, client, report)
        report.after = await _held(victim, client)
    await victim.drained()
    report.starts = victim.starts
    if left := victim.left_over():
        report.trouble.append(f"temporary files are left: {left}")
    return report


async def _warm(load: Load, crowds: Sequence[Crowd]) -> None:
    """Warm the server up, which also checks that it serves."""
    for wave in range(_WAVES):
        await asyncio.gather(*(load.one(crowds[wave % 2], load.jobs.polite(load.chance)) for _ in range(CLIENTS)))


async def _attack(load: Load, crowds: Sequence[Crowd], faults: Faults, report: Report) -> None:
    async def misfortune() -> None:
        while not load.over:
            report.faults[await faults.one()] += 1
            await asyncio.sleep(load.chance.uniform(0.0, _MOST_PEACE))

    async with asyncio.TaskGroup() as tasks:
        for number in range(CLIENTS):
            tasks.create_task(load.client(crowds[number % 2]))
        for _ in range(_FAULTS_AT_ONCE):
            tasks.create_task(misfortune())
        await asyncio.sleep(report.seconds)
        load.over = True


async def _quiet(victim: Victim, client: Doors, report: Report) -> None:
    """Wait until the server is ready and holds nothing; report what it still holds as trouble."""
    await victim.until_ready()
    gc.collect()  # client calls that ended by an error are in reference cycles, which keep their connections open
    try:
        async with asyncio.timeout(_QUIET):
            await client.baseline()
    except TimeoutError:
        report.trouble.append(f"held after {_QUIET:.0f} s: {await client.stats()}")
    if len(left := victim.left_over()) > 1:  # the one of the running core
        report.trouble.append(f"temporary files are left: {left}")
    report.trouble += [f"log: {each[:1500]}" for each in _faults_logged(victim.logs())]


def _faults_logged(log: str) -> list[str]:
    """Return the errors in the log that injected faults do not explain."""
    found = re.findall(r"^.*(?:\n(?!\d{4}-).*)*Traceback.*(?:\n(?!\d{4}-).*)*|^.*internal error.*", log, re.MULTILINE)
    taken = r"\[Errno (24|28)\]|accept\(\) out of system resource"  # asyncio's message for EMFILE
    return [each for each in found if not re.search(taken, each)]


async def _held(victim: Victim, client: Doors) -> Held:
    await client.stats()
    return Held(round(victim.process.resident_mib()), round(victim.core_resident_mib()), victim.process.open_files())
