"""Server in a process of its own: `python -m benchmarks.serving.server JSON` prints its ports, and ends with stdin.
Everything but the engine is as in production. No jax."""

from __future__ import annotations

import asyncio
import contextlib
import cProfile
import dataclasses
import json
import pathlib
import pstats
import sys
from collections.abc import AsyncIterator
from typing import Any

from benchmarks.serving import core
from benchmarks.serving.paced import Pace
from jaxinfer.config import EngineConfig
from jaxinfer.serve.runtime import event_loop, malloc_trim
from jaxinfer.serve.server import Server
from jaxinfer.serve.settings import ServeConfig

_STOP_SECONDS = 20.0


@dataclasses.dataclass(frozen=True)
class ServerSettings:
    """Settings of the server to start.

    Attributes:
        slots: sequences that run at once.
        waiting: requests that may wait; None: all.
        profile: file for cProfile's table of the front end; None: it is not profiled.
    """

    table: core.Table
    pace: Pace
    slots: int
    waiting: int | None = None
    profile: str | None = None

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ServerSettings:
        fields: dict[str, Any] = json.loads(text)
        return cls(**{**fields, "table": core.Table(**fields["table"]), "pace": Pace(**fields["pace"])})


@dataclasses.dataclass(frozen=True)
class Running:
    """A server that is ready: its ports and its two processes."""

    grpc_port: int
    http_port: int
    front: int
    engine: int


@contextlib.asynccontextmanager
async def running(settings: ServerSettings) -> AsyncIterator[Running]:
    """Start a server and wait for it.

    Raises:
        RuntimeError: it did not get ready; its log is on stderr.
    """
    pipe = asyncio.subprocess.PIPE
    command = [sys.executable, "-m", "benchmarks.serving.server", settings.to_json()]
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, cwd=core.REPO)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        ports = await process.stdout.readline()
        if not ports:
            raise RuntimeError("the server did not start")
        yield Running(**json.loads(ports), front=process.pid, engine=_child(process.pid))
    finally:
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), _STOP_SECONDS)
        except TimeoutError:
            process.kill()
            await process.wait()


def _child(pid: int) -> int:
    children = pathlib.Path(f"/proc/{pid}/task").glob("*/children")
    found = {int(word) for path in children for word in path.read_text().split()}
    cores = [each for each in found if b"benchmarks.serving.core" in pathlib.Path(f"/proc/{each}/cmdline").read_bytes()]
    return cores[0]


async def serve(settings: ServerSettings) -> None:
    """Serve until stdin ends."""
    engine = EngineConfig(
        max_num_seqs=settings.slots,
        max_model_len=core.CONTEXT,
        num_pages=1 << 15,
        max_waiting_requests=settings.waiting,
        swap_space_gib=0.0,
        enable_prefix_caching=False,
    )
    config = ServeConfig(model="paced", grpc_port=0, http_port=0, log_level="warning", engine=engine)
    server = Server(config, core.command(settings.table, settings.pace), opened=malloc_trim.settle)
    try:
        await server.start()
        await server.until_ready()
        print(json.dumps({"grpc_port": server.grpc_port, "http_port": server.http_port}), flush=True)
        await asyncio.to_thread(sys.stdin.read)
    finally:
        await server.stop()


def main() -> None:
    settings = ServerSettings.from_json(sys.argv[1])
    if settings.profile is None:
        event_loop.run(serve(settings))
        return
    profiler = cProfile.Profile()
    profiler.runcall(event_loop.run, serve(settings))
    with open(settings.profile, "w", encoding="utf-8") as file:
        pstats.Stats(profiler, stream=file).sort_stats("tottime").print_stats(60)


if __name__ == "__main__":
    main()
