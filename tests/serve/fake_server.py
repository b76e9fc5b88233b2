"""A whole server over the fake core, in a process of its own: `python -m tests.serve.fake_server CORE_OPTIONS`.

Its settings are the first line of stdin, as JSON. It prints its ports when it is ready, and ends with its stdin.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import pathlib
import select
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from jaxinfer.serve import logs
from jaxinfer.serve.server import Server
from jaxinfer.serve.settings import make_config
from tests.serve.core.fake_core import REPO, command
from tests.serve.fake_engine import write_fake_folder

READY_SECONDS = 120.0  # what takes a few on an idle machine
_PORTS = {"grpc_port": 0, "http_port": 0, "control_port": 0}


@dataclasses.dataclass(frozen=True)
class ServerProcess:
    """One that runs.

    Attributes:
        log: its stderr, and the core's.
    """

    process: subprocess.Popen[bytes]
    grpc_port: int
    http_port: int
    control_port: int
    log: pathlib.Path

    def resident_bytes(self) -> int:
        """Of the process of the doors."""
        pages = int(pathlib.Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def open_files(self) -> int:
        """Of the process of the doors, sockets included."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))


@contextlib.contextmanager
def server_process(folder: pathlib.Path, *core: str, **settings: object) -> Iterator[ServerProcess]:
    """A server that is ready.

    Args:
        folder: for what it needs on the disk.
        core: options of `tests.serve.core.fake_core`.
        settings: fields of `ServeConfig`.
    """
    model, log = write_fake_folder(folder / "model"), folder / "server.log"
    run = [sys.executable, "-m", "tests.serve.fake_server", "--folder", str(model), *core]
    with log.open("wb") as stderr:
        process = subprocess.Popen(run, cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr)
    try:
        assert process.stdin is not None
        process.stdin.write(json.dumps({"model": "fake", **_PORTS, **settings}).encode() + b"\n")
        process.stdin.flush()
        yield ServerProcess(process, log=log, **_ports_of(process, log))
    finally:
        _end(process)


def _ports_of(process: subprocess.Popen[bytes], log: pathlib.Path) -> Mapping[str, int]:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], READY_SECONDS)
    line = process.stdout.readline() if ready else b""
    assert line, f"the server does not start: {log.read_text(errors='replace')[-2000:]}"
    return json.loads(line)


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    try:
        process.wait(READY_SECONDS)
    finally:
        process.kill()
        process.stdout.close()


async def _serve(settings: Mapping[str, Any], core: list[str]) -> None:
    server = Server(make_config(settings), command(*core))
    try:
        await server.start()
        await server.until_ready()
        ports = {name: getattr(server, name) for name in _PORTS}
        sys.stdout.write(json.dumps(ports) + "\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.buffer.read)
    finally:
        await server.stop()


def main() -> None:
    settings = json.loads(sys.stdin.buffer.readline())
    logs.configure("text", "info")
    asyncio.run(_serve(settings, sys.argv[1:]))


if __name__ == "__main__":
    main()
