"""Servers in their own processes, started as from a shell, and the kernel's view of them.

`python -m tests.serve.processes SETTINGS OPTIONS` is `python -m jaxinfer.serve` over the fake core: settings of
`ServeConfig` as JSON, then the core's options.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from jaxinfer.serve.__main__ import serve
from jaxinfer.serve.runtime import event_loop, logs, malloc_trim
from jaxinfer.serve.server import Server
from jaxinfer.serve.settings import make_config
from tests.lora.fakes import write_number
from tests.serve.core.fake_core import REPO, command
from tests.serve.fake_engine import write_fake_folder

BOUND = 300.0  # timeout in seconds for operations that take a few on an idle machine


class ServerProcess:
    """A server process; its stderr and that of the core go to ``log``."""

    def __init__(
        self,
        arguments: list[str],
        log: pathlib.Path,
        files: int | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._log = log

        def limit() -> None:
            if files is not None:
                resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=REPO,
                stdin=subprocess.DEVNULL,
                stderr=stderr,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
                preexec_fn=limit,
            )

    # ---- log

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def port(self, door: str) -> int:
        found = re.search(rf"{door} listens on port (\d+)", self.log())
        assert found is not None, self.log()
        return int(found[1])

    @property
    def grpc_port(self) -> int:
        return self.port("gRPC")

    @property
    def http_port(self) -> int:
        return self.port("HTTP")

    @property
    def control_port(self) -> int:
        return self.port("Control")

    def until_logged(self, text: str) -> None:
        """Wait until the log has the text. Raises AssertionError: the process ended before."""
        wait_until(lambda: text in self.log() or self.process.poll() is not None)
        assert text in self.log(), self.log()

    # ---- kernel

    @property
    def core(self) -> int | None:
        """PID of the engine core."""
        for task in pathlib.Path(f"/proc/{self.process.pid}/task").iterdir():
            with contextlib.suppress(OSError):  # a thread or child that has just ended
                for child in (task / "children").read_text().split():
                    if b"core" in pathlib.Path(f"/proc/{child}/cmdline").read_bytes():
                        return int(child)
        return None

    def most_resident_mib(self) -> float:
        """Return the peak memory of the API server process since the last ``resident_mib(anew=True)``."""
        status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"VmHWM:\s+(\d+) kB", status)
        assert found is not None, status
        return int(found[1]) / 1024

    def resident_mib(self, *, anew: bool = False) -> float:
        """Return the resident memory of the API server process."""
        if anew:
            pathlib.Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")  # resets the peak
        pages = int(pathlib.Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    def open_files(self) -> int:
        """Return the number of open files of the API server process, sockets included."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    # ---- end

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def interrupt(self) -> None:
        """Send SIGINT to the whole process group, as Ctrl-C in a terminal does."""
        os.killpg(self.process.pid, signal.SIGINT)

    def wait(self, seconds: float = BOUND) -> int:
        """Return the exit status."""
        return self.process.wait(seconds)

    def end(self) -> None:
        """Kill the server and its core in any state."""
        core = self.core if self.process.poll() is None else None
        self.process.kill()
        self.process.wait()
        if core is not None:
            wait_until(lambda: not is_alive(core))


def is_alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        status = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def wait_until(condition: Callable[[], object], seconds: float = BOUND) -> float:
    """Wait for the condition; return the seconds that it took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() < start + seconds, "it did not come true"
        time.sleep(0.01)
    return time.monotonic() - start


@contextlib.contextmanager
def started(arguments: list[str], folder: pathlib.Path, files: int | None = None) -> Iterator[ServerProcess]:
    """Run ``python ARGUMENTS`` with its log in ``folder``. ``files``: limit of open files."""
    server = ServerProcess(arguments, folder / "server.log", files)
    try:
        yield server
    finally:
        server.end()


@contextlib.contextmanager
def fake_server(
    folder: pathlib.Path,
    *core: str,
    files: int | None = None,
    run: Sequence[str] = ("-m", "tests.serve.processes"),
    **settings: object,
) -> Iterator[ServerProcess]:
    """Yield a server over the fake core with these options, which has all ports and is ready.

    Args:
        files: limit of open files.
        run: command line in place of that of `main`.
    """
    model = str(write_fake_folder(folder / "model"))
    given = {"model": "fake", "grpc_port": 0, "http_port": 0, "control_port": 0, **settings}
    arguments = [*run, json.dumps(given), "--folder", model, *core]
    with started(arguments, folder, files) as server:
        server.until_logged("ready: ")
        yield server


def with_adapters(folder: pathlib.Path) -> dict[str, object]:
    """Return settings of a `fake_server` with LoRA: one adapter in ``folder``, below which more may be loaded."""
    write_number(folder / "pirate", 1)
    return {"engine": {"enable_lora": True}, "lora_root": str(folder)}


def main() -> int:
    config = make_config(json.loads(sys.argv[1]))
    logs.configure(config.log_format, config.log_level)
    return event_loop.run(serve(Server(config, command(*sys.argv[2:]), opened=malloc_trim.settle)))


if __name__ == "__main__":
    sys.exit(main())
