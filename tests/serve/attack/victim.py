"""The server under attack: it restarts on the same ports, and all its files are on a small disk."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pathlib
import signal
from collections.abc import Iterator
from typing import Any

from jaxinfer.bench.http1 import HttpError, Pool
from tests.serve.attack.disk import Disk, small_disk
from tests.serve.fake_engine import write_fake_folder
from tests.serve.processes import BOUND, ServerProcess, is_alive, with_adapters

PATIENCE = 2.0
"""Seconds that the server waits for a slow reader."""

STEP_TIMEOUT = 3.0
"""Seconds after which a hung core is killed."""

_SETTINGS: dict[str, Any] = {"slow_reader_seconds": PATIENCE, "step_timeout": STEP_TIMEOUT, "header_seconds": 5.0}
_DOORS = {"grpc_port": "gRPC", "http_port": "HTTP", "control_port": "Control"}  # settings, and names in the log


class Victim:
    """The attacked server, of which one process runs at a time.

    Args:
        folder: folder for the model.
        disk: disk for logs and temporary files.
        model: ``fake``, or the model that `jaxinfer.serve` loads.

    Attributes:
        starts: number of servers started.
        grpc_port, http_port, control_port: the same for all servers.
    """

    grpc_port = http_port = control_port = 0

    def __init__(self, folder: pathlib.Path, disk: Disk, model: str) -> None:
        self._folder, self.disk, self._model = folder, disk, model
        self.starts = 0

    def start(self) -> None:
        """Start a server; the first start returns when the server is ready."""
        log = self.disk.folder / f"server-{self.starts}.log"
        self.process = ServerProcess(self._arguments(), log, environment={"TMPDIR": str(self.disk.folder)})
        self.starts += 1
        if self.starts == 1:
            self.process.until_logged("ready: ")
            for setting, door in _DOORS.items():
                setattr(self, setting, self.process.port(door))

    async def until_ready(self) -> None:
        """Wait until ``/ready`` returns 200. Raises TimeoutError: it does not."""
        async with asyncio.timeout(BOUND):
            while await self.asked("/ready") != 200:
                assert self.process.process.poll() is None, self.log()[-5000:]
                await asyncio.sleep(0.02)

    async def asked(self, path: str, seconds: float = 1.0) -> int:
        """Return the HTTP status of a GET request; 0: there is no response."""
        pool = Pool("127.0.0.1", self.http_port, None, seconds)
        try:
            async with asyncio.timeout(seconds):
                head = f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
                return (await pool.exchange(head, lambda *_: None)).status or 0
        except (HttpError, OSError):
            return 0
        finally:
            pool.close()

    async def restart(self) -> None:
        """Start a server after the previous one has ended, and wait until it is ready."""
        self.start()
        await self.until_ready()

    async def drained(self) -> None:
        """Stop the server by SIGTERM. Raises AssertionError: its exit status is not 0."""
        core = self.process.core
        self.process.signal(signal.SIGTERM)
        assert await asyncio.to_thread(self.process.wait) == 0, self.log()[-5000:]
        assert core is None or not is_alive(core)

    def log(self) -> str:
        """Return the log of the running server."""
        return self.process.log()

    def logs(self) -> str:
        """Return the logs of all servers."""
        return "".join(path.read_text(errors="replace") for path in sorted(self.disk.folder.glob("server-*.log")))

    def left_over(self) -> list[str]:
        """Return the names of leftover temporary files."""
        return [path.name for path in self.disk.folder.iterdir() if path.name.startswith("jaxinfer-")]

    def core_resident_mib(self) -> float:
        core = self.process.core
        with contextlib.suppress(OSError):
            pages = int(pathlib.Path(f"/proc/{core}/statm").read_text().split()[1])
            return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
        return 0.0

    def _arguments(self) -> list[str]:
        given = {**_SETTINGS, **{setting: getattr(self, setting) for setting in _DOORS}}
        if self._model == "fake":
            model = str(self._folder / "model")
            given |= with_adapters(self._folder / "adapters")
            return ["-m", "tests.serve.processes", json.dumps({"model": "fake", **given}), "--folder", model,
                    "--seconds", "0.002"]  # fmt: skip
        flags = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        small = ["--max-num-seqs", "16", "--max-model-len", "256", "--num-pages", "96", "--swap-space-gib", "0.05"]
        return ["-m", "jaxinfer.serve", "--model", self._model, *flags, *small]


@contextlib.contextmanager
def victim(folder: pathlib.Path, model: str = "fake") -> Iterator[Victim]:
    """Yield a server that is ready; clean everything up afterwards."""
    with small_disk(folder) as disk:
        write_fake_folder(folder / "model")
        found = Victim(folder, disk, model)
        found.start()
        try:
            yield found
        finally:
            found.process.process.send_signal(signal.SIGCONT)
            found.process.end()
