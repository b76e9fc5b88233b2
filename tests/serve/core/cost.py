"""CPU time per token on both sides of the core link: `python -m tests.serve.core.cost [STREAMS] [TOKENS]`."""

from __future__ import annotations

import asyncio
import os
import pathlib
import sys
import time
from collections.abc import Sequence

from jaxinfer.sampling_params import SamplingParams
from jaxinfer.serve.core.supervisor import Supervisor
from jaxinfer.types import Request
from tests.serve import fake_engine as fake
from tests.serve.core.fake_core import command, make_config

STEP_SECONDS = 0.1  # token rate that one reader can handle, and no step is late


def make_requests(streams: int, tokens: int) -> list[Request]:
    params = SamplingParams(max_tokens=tokens, seed=1)
    return [Request(f"r{i}", (5, 6, 7 + i % 200), params) for i in range(streams)]


def engine_alone(requests: Sequence[Request]) -> float:
    """Return the CPU seconds of the fake engine alone."""
    engine = fake.FakeEngine(max_num_seqs=len(requests), num_pages=16384)
    for request in requests:
        engine.add(request)
    start = time.process_time()
    while engine.has_work:
        engine.step()
    return time.process_time() - start


def cpu_of(pid: int) -> float:
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def through_the_link(requests: Sequence[Request]) -> tuple[float, float, float]:
    """Return the CPU seconds of the core and of this process, and the wall-clock seconds."""
    slots, seconds = str(len(requests)), str(STEP_SECONDS)
    supervisor = Supervisor(make_config(), command("--slots", slots, "--seconds", seconds))
    await supervisor.start()
    await supervisor.until_ready()
    streams = [await supervisor.backend.submit(request) for request in requests]
    assert supervisor._child is not None
    pid = supervisor._child.process.pid

    async def read(stream) -> int:
        return sum([len(delta.token_ids) async for delta in stream])

    core, here, wall = cpu_of(pid), time.process_time(), time.monotonic()
    counts = await asyncio.gather(*map(read, streams))
    spent = cpu_of(pid) - core, time.process_time() - here, time.monotonic() - wall
    assert counts == [request.params.max_tokens for request in requests]
    await supervisor.stop()
    return spent


def main() -> None:
    given = [int(text) for text in sys.argv[1:]]
    streams, tokens = (*given, *(500, 200)[len(given) :])
    requests = make_requests(streams, tokens)
    alone, (core, link, wall) = engine_alone(requests), asyncio.run(through_the_link(requests))
    each = 1e6 / (streams * tokens)
    print(f"{streams} streams, {streams * tokens / wall:.0f} tokens/s")
    print(f"core: {core * each:.1f} us a token, of which the fake engine {alone * each:.1f}")
    print(f"link and readers: {link * each:.1f} us a token")


if __name__ == "__main__":
    main()
