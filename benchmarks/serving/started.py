"""Server of `python -m jaxinfer.serve` in processes of its own, for benchmarks that talk to it over gRPC."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

_START_SECONDS = 600.0
_ROOT = pathlib.Path(__file__).resolve().parents[2]


@contextlib.contextmanager
def started(*options: str) -> Iterator[str]:
    """Start a server with these options of the command line; yield the address of its gRPC port.

    Raises:
        SystemExit: it does not get ready; the message is its log.
    """
    command = [sys.executable, "-m", "jaxinfer.serve", "--grpc-port", "0", "--http-port", "off", *options]
    path = os.pathsep.join([str(_ROOT), *filter(None, sys.path)])
    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(folder, "log")
        with log.open("wb") as stderr:
            process = subprocess.Popen(command, cwd=_ROOT, env={**os.environ, "PYTHONPATH": path}, stderr=stderr)
        try:
            yield _ready(process, log)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def _ready(process: subprocess.Popen[bytes], log: pathlib.Path) -> str:
    """Wait until the server is ready; return its address."""
    deadline = time.monotonic() + _START_SECONDS
    while " ready: " not in log.read_text(errors="replace"):
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the server does not start:\n{log.read_text(errors='replace')}")
        time.sleep(0.2)
    port = re.search(r"gRPC listens on port (\d+)", log.read_text(errors="replace"))
    assert port is not None
    return f"127.0.0.1:{port[1]}"
