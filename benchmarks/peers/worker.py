"""Client of `protocol`: runs a peer's process, which computes only during a request."""

from __future__ import annotations

import json
import os
import pathlib
import select
import signal
import subprocess
from collections.abc import Sequence
from typing import Any

from benchmarks.peers.protocol import Reply

REPO = pathlib.Path(__file__).resolve().parent.parent.parent


class PeerDied(RuntimeError):
    """Error: the peer's process ended or did not reply. The message ends with the last lines of its log."""


class Worker:
    """A peer's process. Between requests it is stopped (SIGSTOP), so that none of its threads can spin on a core.

    Args:
        name: name in messages.
        command: the program and its arguments.
        log: file for its stderr.
        seconds: timeout of a reply.

    Attributes:
        versions: versions that the peer reported.
        idle_cpu_seconds: CPU time it used between requests; more than a few clock ticks spoil the other peers' figures.

    Raises:
        PeerDied: it did not start.
    """

    def __init__(self, name: str, command: Sequence[str], log: pathlib.Path, seconds: float = 1800.0) -> None:
        self.name, self.idle_cpu_seconds = name, 0.0
        self._log, self._seconds = log, seconds
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                command, cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True
            )
        try:
            self.versions: dict[str, str] = self._read()
        except PeerDied:
            self.close()
            raise
        self._stop()

    @property
    def used_cpu_seconds(self) -> float:
        return cpu_seconds(self._process.pid)

    def ask(self, op: str, **request: Any) -> Reply:
        """Send a request and return the reply. The process runs only in between.

        Raises:
            PeerDied: there was no reply.
        """
        self._continue()
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(json.dumps({"op": op, **request}) + "\n")
            stdin.flush()
        except BrokenPipeError as cause:
            raise PeerDied(self._last_words()) from cause
        reply = self._read()
        self._stop()
        return reply

    def close(self) -> None:
        """Kill the process in any state."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _read(self) -> Reply:
        stdout = self._process.stdout
        assert stdout is not None
        ready, _, _ = select.select([stdout], [], [], self._seconds)
        if not ready:
            raise PeerDied(f"{self.name}: no reply within {self._seconds:.0f} s")
        line = stdout.readline()
        if not line:
            raise PeerDied(self._last_words())
        return json.loads(line)

    def _last_words(self) -> str:
        status = self._process.wait()
        lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n")
        said = next((line for line in reversed(lines) if line.strip()), "nothing on stderr")
        return f"{self.name}: exit status {status}: {said.strip()[:300]}"

    def _stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)
        self._idle_since = cpu_seconds(self._process.pid)

    def _continue(self) -> None:
        self.idle_cpu_seconds += cpu_seconds(self._process.pid) - self._idle_since
        self._process.send_signal(signal.SIGCONT)


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process has used, all threads; 0 without /proc or without such a process."""
    try:
        text = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0.0
    user, system = text.rpartition(")")[2].split()[11:13]  # fields 14 and 15; the name before them may hold blanks
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
