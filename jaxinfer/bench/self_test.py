"""Self-test of the load generator on this machine: its own latency, and the tokens per second that it can receive."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
from collections.abc import AsyncIterator
from typing import Any

from rich.console import Console

from jaxinfer.bench.datasets import Asked, Lengths, random
from jaxinfer.bench.drive import Driver
from jaxinfer.bench.figures import Goals, percentiles, summary
from jaxinfer.bench.grpc_target import GrpcTarget
from jaxinfer.bench.http_target import HttpTarget
from jaxinfer.bench.null_server import HOST, VOCAB, Script
from jaxinfer.bench.prompts import Ids
from jaxinfer.bench.target import Access, Sampling, Target, TargetError
from jaxinfer.bench.watch import Bounds, Watch

SCRIPT = Script(ttft=0.05, itl=0.01)
FLOOR_USERS, TOKENS = 4, 200
MOST_USERS = 2048
LATE = 0.010  # seconds at p99 by which tokens may be late while the generator counts as keeping up


async def measure(report: Console, protocols: tuple[str, ...] = ("grpc", "http")) -> int:
    """Run the command; return exit code 0."""
    for protocol in protocols:
        async with null_server(protocol, SCRIPT) as target:
            _show(report, protocol, await capability(target))
    return 0


@contextlib.asynccontextmanager
async def null_server(protocol: str, script: Script) -> AsyncIterator[Target]:
    """Start a null server in a separate process, as an open target.

    Raises:
        TargetError: it does not start.
    """
    words = ["-m", "jaxinfer.bench.null_server", protocol, "--ttft", str(script.ttft), "--itl", str(script.itl)]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, *words, stdin=pipe, stdout=pipe)
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        port = (await process.stdout.readline()).decode().strip()
        if not port:
            raise TargetError("the null server does not start")
        access = Access(f"{protocol}://{HOST}:{port}")
        target: Target = GrpcTarget(access, Sampling())
        if protocol == "http":
            target = HttpTarget(access, Sampling(), "completions", VOCAB)
        await target.open()
        yield target
        await target.close()
    finally:
        process.kill()
        await process.wait()


async def capability(target: Target) -> dict[str, Any]:
    """Measure the generator's own latency with few users, then double the users until tokens are late."""
    await _round(target, FLOOR_USERS)  # establishes connections and warms up the code
    floor = await _round(target, FLOOR_USERS)
    best, users = floor, 2 * FLOOR_USERS
    while users <= MOST_USERS:
        found = await _round(target, users)
        if found["late"]["p99"] > LATE or found["generator"]["doubts"] or found["errors"]:
            break
        best, users = found, 2 * users
    return {"floor": floor, "best": best, "stopped_at": None if users > MOST_USERS else found}


async def _round(target: Target, users: int) -> dict[str, Any]:
    """Measure ``users`` concurrent requests."""
    loop = asyncio.get_running_loop()
    watch, driver = Watch(loop.time), Driver(target, loop.time, timeout=60.0)
    spec = Asked(Ids(VOCAB), 1.0, input=Lengths(16, 16), output=Lengths(TOKENS, TOKENS))
    items = itertools.islice(random(spec, 0), users)
    watch.start()
    await driver.closed_loop(items, users)
    await watch.stop()
    late = [
        time - (record.sent + SCRIPT.ttft + number * SCRIPT.itl)
        for record in driver.records
        for number, time in enumerate(itertools.islice(_token_times(record.times, record.counts), TOKENS))
    ]
    figures = summary(driver.records, Goals())
    figures["generator"] = watch.report(driver.records, Bounds(), open_loop=False)
    return figures | {"users": users, "late": percentiles(late)}


def _token_times(times: Any, counts: Any) -> Any:
    return itertools.chain.from_iterable(map(itertools.repeat, times, counts))


def _show(report: Console, protocol: str, found: dict[str, Any]) -> None:
    floor, best, stopped = found["floor"]["late"], found["best"], found["stopped_at"]
    lines = [
        f"{protocol}: a token is in hand {floor['p50'] * 1e3:.2f} ms (p99 {floor['p99'] * 1e3:.2f}) after its time, "
        f"with {FLOOR_USERS} streams",
        _rate(best) + f", p99 {best['late']['p99'] * 1e3:.2f} ms late",
    ]
    if stopped is not None:
        who = "the generator" if stopped["generator"]["cpu_share"] > Bounds().cpu_share else "the null server"
        lines.append(f"{_rate(stopped)}: too much, p99 {stopped['late']['p99'] * 1e3:.0f} ms late; first of all {who}")
    for number, line in enumerate(lines):
        report.print(line if number == 0 else f"  {line}", highlight=False)


def _rate(figures: dict[str, Any]) -> str:
    generator = figures["generator"]
    each = generator["cpu_seconds_per_delivery"] or 0.0
    return (
        f"{figures['users']} streams, {figures['output_tokens_per_second']:.0f} tokens/s: "
        f"{generator['cpu_share']:.0%} of a processor, {each * 1e6:.0f} us a token"
    )
