"""Load runs against one server, and their figures."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import os
import pathlib
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.peers import machine
from benchmarks.serving import core
from benchmarks.serving.clients import Client, GrpcClient, Heard, HttpClient
from benchmarks.serving.paced import Pace, Stamps
from benchmarks.serving.server import Running, ServerSettings, running

_TICKS = os.sysconf("SC_CLK_TCK")
_START_SECONDS = 30.0
_FILLER_STEP_SECONDS, _FILLER_TOKENS = 0.25, 1500  # of the requests that keep a queue full: longer than any run
_QUIET_SECONDS = 1.0  # between the last stream's start and the first figure


@dataclasses.dataclass(frozen=True)
class Delivery:
    """Load of ``streams`` for ``seconds``, each with its share of ``rate`` tokens a second; see `Pace.groups`."""

    door: str
    streams: int = 500
    rate: float = 5000.0
    groups: int = 10
    seconds: float = 8.0
    connections: int = 8

    @property
    def pace(self) -> Pace:
        return Pace(self.streams / self.rate, self.groups, core.TOKEN)

    @property
    def tokens(self) -> int:
        """Tokens of each stream: before, while and after figures are taken."""
        return int((self.seconds + 4 * _QUIET_SECONDS) / self.pace.step_seconds)


@dataclasses.dataclass(frozen=True)
class Overload:
    """Load of requests of ``tokens`` tokens that arrive at random, ``factor`` times as many as ``slots`` can serve."""

    door: str
    slots: int = 32
    waiting: int = 32
    tokens: int = 32
    step_seconds: float = 0.02
    factor: float = 2.0
    seconds: float = 10.0
    connections: int = 8

    @property
    def pace(self) -> Pace:
        return Pace(self.step_seconds, 1, core.TOKEN)

    @property
    def service_rate(self) -> float:
        """Requests a second, at most."""
        return self.slots / (self.tokens * self.step_seconds)

    @property
    def queue_bound(self) -> float:
        """Bound of the last accepted request's TTFT in seconds: a slot for all requests before it, plus a step."""
        return self.waiting / self.service_rate + self.step_seconds


@dataclasses.dataclass(frozen=True)
class Refusals:
    """Load of ``count`` requests on a full queue, in bursts of ``at_once``, each after all are answered."""

    door: str
    at_once: int = 1
    count: int = 1024
    connections: int = 8


@dataclasses.dataclass
class Cpu:
    """Processor seconds of the three processes, and of everything else on the machine."""

    front: float
    engine: float
    client: float
    others: float

    @classmethod
    def now(cls, server: Running) -> Cpu:
        used = cpu_seconds(server.front), cpu_seconds(server.engine), time.process_time()
        return cls(*used, machine.busy_seconds() - sum(used))

    def since(self, then: Cpu) -> Cpu:
        return Cpu(*(a - b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(then), strict=True)))

    def each(self, count: int) -> dict[str, float]:
        return {name: getattr(self, name) / max(1, count) for name in ("front", "engine", "client")}

    def share_of_others(self, seconds: float) -> float:
        """Return the share of all cores that other programs used."""
        return max(0.0, self.others) / seconds / (os.cpu_count() or 1)


def cpu_seconds(pid: int) -> float:
    """Return the user and system time of all threads of a process (proc(5))."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


async def deliver(load: Delivery, profile: str | None = None) -> dict[str, Any]:
    """Start all streams, take figures for a while when all run, and end them."""
    async with _served(load.pace, load.streams, load.tokens, load.streams, None, profile) as (server, stamps):
        client = _client(load.door, server, load.connections)
        with _no_collections():
            tasks = [asyncio.ensure_future(client.generate(row, load.tokens)) for row in range(load.streams)]
            before, begun = Cpu.now(server), time.monotonic()
            await _until(lambda: bool(stamps.times[:, 0].all()), _START_SECONDS)
            await asyncio.sleep(_QUIET_SECONDS)
            start, first = Cpu.now(server), time.monotonic()
            await asyncio.sleep(load.seconds)
            used, last = Cpu.now(server).since(start), time.monotonic()
            heards = await asyncio.gather(*tasks)
            whole, ended = Cpu.now(server).since(before), time.monotonic()
        await client.close()
        return _delivered(load, heards, stamps.times, (first, last), used) | {
            "whole": {"seconds": ended - begun, "cpu_per_token": whole.each(load.streams * load.tokens)}
        }


def _delivered(
    load: Delivery, heards: Sequence[Heard], stamps: np.ndarray, window: tuple[float, float], used: Cpu
) -> dict[str, Any]:
    latency, sent, messages = delays(heards, stamps, window)
    seconds = window[1] - window[0]
    return {
        "load": dataclasses.asdict(load),
        "errors": errors(heards, load.tokens),
        "tokens_per_second": sent / seconds,
        "tokens_per_message": sent / max(1, messages),
        "cpu_per_token": used.each(sent),
        "used_by_others": used.share_of_others(seconds),
        "delivery": spread(latency),
    }


def delays(heards: Sequence[Heard], stamps: np.ndarray, window: tuple[float, float]) -> tuple[np.ndarray, int, int]:
    """Return the seconds from the engine to the client of all tokens that left it in the window; their number, and the
    number of their messages."""
    found, messages = [], 0
    for heard in heards:
        arrived = np.repeat(heard.times, heard.counts)
        left = np.asarray(stamps[heard.row, : len(arrived)])
        inside = (left >= window[0]) & (left < window[1])
        found.append(arrived[inside] - left[inside])
        messages += len(np.unique(arrived[inside]))
    latency = np.concatenate(found)
    return latency, len(latency), messages


def errors(heards: Sequence[Heard], tokens: int) -> list[str]:
    """Describe the streams that failed or brought a wrong number of tokens."""
    found = []
    for heard in heards:
        if heard.error is not None or heard.refused:
            found.append(f"{heard.row}: {heard.error or 'refused'}")
        elif sum(heard.counts) != tokens:
            found.append(f"{heard.row}: {sum(heard.counts)} of {tokens} tokens")
    return found


async def overload(load: Overload) -> dict[str, Any]:
    """Run an open loop: rejected requests are not retried."""
    arrivals = _arrivals(load)
    async with _served(load.pace, len(arrivals), load.tokens, load.slots, load.waiting, None) as (server, _):
        client = _client(load.door, server, load.connections)
        with _no_collections():
            before, start = Cpu.now(server), time.monotonic() + 0.1
            tasks = [asyncio.ensure_future(_at(client, start + due, row, load)) for row, due in enumerate(arrivals)]
            heards = await asyncio.gather(*tasks)
            used, seconds = Cpu.now(server).since(before), time.monotonic() - start
        await client.close()
    return _overloaded(load, heards) | {
        "cpu_per_request": used.each(len(heards)),
        "used_by_others": used.share_of_others(seconds),
    }


async def refuse(load: Refusals) -> dict[str, Any]:
    """Measure rejections: one request has the only slot, another the only queue entry; both outlast the run."""
    async with _served(Pace(_FILLER_STEP_SECONDS, 1, core.TOKEN), load.count + 2, _FILLER_TOKENS, 1, 1, None) as (
        server,
        _,
    ):
        client = _client(load.door, server, load.connections)
        fillers: list[asyncio.Future[Heard]] = []
        for row in range(2):  # the second one when the first has its slot: the queue has one entry
            fillers.append(asyncio.ensure_future(client.generate(row, _FILLER_TOKENS)))
            await asyncio.sleep(4 * _FILLER_STEP_SECONDS)
        assert not any(task.done() for task in fillers), fillers
        heards: list[Heard] = []
        with _no_collections():
            before, start = Cpu.now(server), time.monotonic()
            for first in range(2, load.count + 2, load.at_once):
                rows = range(first, min(first + load.at_once, load.count + 2))
                heards += await asyncio.gather(*(client.generate(row, 1) for row in rows))
            used, seconds = Cpu.now(server).since(before), time.monotonic() - start
        for task in fillers:
            task.cancel()
        await asyncio.gather(*fillers, return_exceptions=True)
        await client.close()
    return {
        "load": dataclasses.asdict(load),
        "errors": [f"{heard.row}: {heard.error or 'accepted'}" for heard in heards if not heard.refused],
        "refusal": spread(np.asarray([heard.ended - heard.sent for heard in heards])),
        "cpu_per_refusal": used.each(load.count),
        "used_by_others": used.share_of_others(seconds),
    }


def _arrivals(load: Overload) -> list[float]:
    rng = np.random.default_rng(0)
    rate = load.factor * load.service_rate
    times = np.cumsum(rng.exponential(1 / rate, int(rate * load.seconds)))
    return [float(each) for each in times]


async def _at(client: Client, due: float, row: int, load: Overload) -> Heard:
    await asyncio.sleep(due - time.monotonic())
    return await client.generate(row, load.tokens)


def _overloaded(load: Overload, heards: Sequence[Heard]) -> dict[str, Any]:
    accepted = [heard for heard in heards if not heard.refused]
    refused = [heard for heard in heards if heard.refused]
    ended = [heard.ended for heard in accepted]
    served = len(accepted) / (max(ended) - min(heard.sent for heard in heards))
    return {
        "load": dataclasses.asdict(load),
        "errors": errors(accepted, load.tokens),
        "requests": len(heards),
        "refused": len(refused),
        "accepted_per_second": served,
        "queue_bound": load.queue_bound,
        "rejection": spread(np.asarray([heard.ended - heard.sent for heard in refused])),
        "ttft": spread(np.asarray([heard.times[0] - heard.sent for heard in accepted if heard.times])),
    }


def spread(seconds: np.ndarray) -> dict[str, float]:
    if not len(seconds):
        return {"median": 0.0, "p90": 0.0, "p99": 0.0, "max": 0.0}
    median, p90, p99 = (float(each) for each in np.percentile(seconds, (50, 90, 99)))
    return {"median": median, "p90": p90, "p99": p99, "max": float(seconds.max())}


@contextlib.asynccontextmanager
async def _served(
    pace: Pace, rows: int, tokens: int, slots: int, waiting: int | None, profile: str | None
) -> AsyncIterator[tuple[Running, Stamps]]:
    with tempfile.TemporaryDirectory(prefix="jaxinfer-load-") as folder:
        path = pathlib.Path(folder) / "stamps"
        stamps = Stamps(path, rows, tokens)
        settings = ServerSettings(core.Table(str(path), rows, tokens), pace, slots, waiting, profile)
        async with running(settings) as server:
            yield server, stamps


def _client(door: str, server: Running, connections: int) -> Client:
    return GrpcClient(server.grpc_port, connections) if door == "grpc" else HttpClient(server.http_port)


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Stop garbage collection in the load generator: its pauses would be taken for the server's."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def _until(true: Callable[[], bool], seconds: float) -> None:
    async with asyncio.timeout(seconds):
        while not true():
            await asyncio.sleep(0.05)
