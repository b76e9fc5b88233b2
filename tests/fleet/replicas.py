"""Replicas: servers over the fake core in their own processes, on ports that they keep when they are restarted.

`python -m tests.fleet.replicas SETTINGS OPTIONS` is `python -m jaxinfer.serve` over that core: settings of
`ServeConfig` as JSON, then the core's options.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import pathlib
import re
import signal
import socket
import sys
from collections.abc import Mapping
from typing import NamedTuple

from jaxinfer.serve.__main__ import serve
from jaxinfer.serve.runtime import event_loop, logs, malloc_trim
from jaxinfer.serve.server import Server
from jaxinfer.serve.settings import make_config
from tests.serve.core.fake_core import REPO
from tests.serve.fake_engine import write_fake_folder
from tests.serve.processes import ServerProcess

NAMES = ("a", "b")


class Ports(NamedTuple):
    """Ports of one replica."""

    http: int
    grpc: int


class Step(NamedTuple):
    """A step of the engine: its launch time (`time.monotonic`) and its requests."""

    launched: float
    requests: frozenset[str]


class Replica:
    """A running replica that can be restarted.

    Args:
        folder: folder for its model, logs and journal.
        settings: fields of `ServeConfig`.
        options: command line options of the core.
    """

    def __init__(
        self, folder: pathlib.Path, name: str, ports: Ports, settings: Mapping[str, object], options: tuple[str, ...]
    ) -> None:
        self.name, self.ports, self._folder = name, ports, folder
        self._model, self._journal = write_fake_folder(folder / "model"), folder / f"{name}.journal"
        self._settings = {"model": "fake", "http_port": ports.http, "grpc_port": ports.grpc, **settings}
        self._options, self._starts = options, itertools.count()
        self.process = self._started()

    def _started(self) -> ServerProcess:
        core = ["--folder", str(self._model), "--journal", str(self._journal), *self._options]
        log = self._folder / f"{self.name}{next(self._starts)}.log"
        return ServerProcess(["-m", "tests.fleet.replicas", json.dumps(self._settings), *core], log)

    def start(self) -> None:
        """Restart the replica if it has ended."""
        if self.process.process.poll() is not None:
            self.process = self._started()

    def until_ready(self) -> None:
        self.process.until_logged("ready: ")

    # ---- actions

    def stop(self) -> None:
        """Send SIGTERM, as an orchestrator does."""
        self.process.signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the replica, and return when it is dead."""
        self.process.end()

    def suspend(self) -> None:
        """Suspend the replica: connections stay open without answers."""
        self.process.signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.signal(signal.SIGCONT)

    # ---- observations

    def steps(self) -> list[Step]:
        """Return all steps that its engines launched."""
        if not self._journal.exists():
            return []
        lines = self._journal.read_text().splitlines(keepends=True)
        words = [line.split() for line in lines if line.endswith("\n")]
        return [Step(float(time), frozenset(ids)) for time, *ids in words]

    def requests(self) -> set[str]:
        """Return the ids of the requests that reached its engines."""
        return {name for step in self.steps() for name in step.requests}

    def ended(self) -> list[str]:
        """Return the ids of ended requests, from the log of the running process."""
        return re.findall(r"ended request_id='([^']*)'", self.process.log())


def start_replicas(folder: pathlib.Path, *options: str, **settings: object) -> list[Replica]:
    """Start both replicas; return them when they are ready."""
    free = free_ports(2 * len(NAMES))
    ports = [Ports(*pair) for pair in itertools.batched(free, 2)]
    replicas = [Replica(folder, name, own, settings, options) for name, own in zip(NAMES, ports, strict=True)]
    for replica in replicas:
        replica.until_ready()
    return replicas


def free_ports(count: int) -> list[int]:
    """Return unused ports; all are open at once, so that no two are equal."""
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [listener.getsockname()[1] for listener in listeners]


def main() -> int:
    config = make_config(json.loads(sys.argv[1]))
    core = ["env", f"PYTHONPATH={REPO}", sys.executable, "-m", "tests.fleet.fake_core", *sys.argv[2:]]
    logs.configure(config.log_format, config.log_level)
    return event_loop.run(serve(Server(config, core, opened=malloc_trim.settle)))


if __name__ == "__main__":
    sys.exit(main())
