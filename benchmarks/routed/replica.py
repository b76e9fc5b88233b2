"""A replica in a process of its own: `python -m benchmarks.routed.replica JSON`. No jax.

The process prints its ports on stdout, and exits when stdin closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator

from benchmarks.routed import core
from jaxinfer.serve.runtime import event_loop
from jaxinfer.serve.server import Server
from jaxinfer.serve.settings import make_config


@dataclasses.dataclass(frozen=True)
class Looked:
    """Prompt tokens that were looked up in a prefix cache, and the hits."""

    queries: int = 0
    hits: int = 0

    def __add__(self, other: Looked) -> Looked:
        return Looked(self.queries + other.queries, self.hits + other.hits)


@dataclasses.dataclass(frozen=True)
class Replica:
    """A replica that is ready."""

    grpc_port: int
    http_port: int

    def looked(self) -> Looked:
        """Read the prefix cache counters of its engine."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http_port}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        counts = [
            sum(
                int(float(line.rpartition(" ")[2]))
                for line in lines
                if line.startswith(f"jaxinfer:prefix_cache_{what}")
            )
            for what in ("queries_total", "hits_total")
        ]
        return Looked(*counts)


@contextlib.contextmanager
def running(folder: str, pages: int, slots: int, page_size: int) -> Iterator[Replica]:
    """Start a replica and wait for it.

    Args:
        folder: folder of its tokenizer.
    """
    engine = {"num_pages": pages, "max_num_seqs": slots, "page_size": page_size, "swap_space_gib": 0.0}
    ports = {"grpc_port": 0, "http_port": 0, "vllm_grpc": True, "kv_events": True, "kv_events_endpoint": "off"}
    settings = json.dumps({"model": folder, "log_requests": False, "engine": engine, **ports})
    arguments = [sys.executable, "-m", "benchmarks.routed.replica", settings]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=core.REPO) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield Replica(**json.loads(process.stdout.readline()))
        finally:
            process.stdin.close()


async def serve(settings: str) -> None:
    """Serve until stdin ends."""
    server = Server(make_config(json.loads(settings)), core.command())
    await server.start()
    try:
        await server.until_ready()
        sys.stdout.write(json.dumps({"grpc_port": server.grpc_port, "http_port": server.http_port}) + "\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.read)
    finally:
        await server.stop()


if __name__ == "__main__":
    event_loop.run(serve(sys.argv[1]))
