"""A command in its own pseudo-terminal, with simulated typing."""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
import sys
import threading
from collections.abc import Iterator

REPO = pathlib.Path(__file__).resolve().parents[2]
# A test run in the background ignores SIGINT, and its child processes would inherit that.
_SPAWN = """
import os, pty, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])) % 256)
"""
CTRL_C, CTRL_D = "\x03", "\x04"


class Terminal:
    """A pseudo-terminal; the terminal turns a typed Ctrl-C into a signal."""

    def __init__(self, *command: str) -> None:
        words = [sys.executable, "-c", _SPAWN, sys.executable, *command]
        env = {**os.environ, "PYTHONPATH": str(REPO), "TERM": "xterm"}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, cwd=REPO, env=env)
        self._changed = threading.Condition()
        self.text, self._ended = "", False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        while got := os.read(self.process.stdout.fileno(), 4096):
            with self._changed:
                self.text += got.decode(errors="replace")
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def type(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text.encode())
        self.process.stdin.flush()

    def until(self, words: str, after: int = 0) -> int:
        """Wait until ``words`` follow the first ``after`` characters; return the position after them."""
        with self._changed:
            self._changed.wait_for(lambda: words in self.text[after:] or self._ended, 300)
            assert words in self.text[after:], self.text
            return self.text.index(words, after) + len(words)

    def type_until_it_ends(self, key: str) -> int:
        """Return the exit code. The key is typed again while the process lives: readline notices a signal between its
        prompt and its wait for keys only at the next key."""
        while True:
            self.type(key)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
                return self.wait()

    def wait(self) -> int:
        """Return the exit code."""
        code = self.process.wait(300)
        self._reader.join(60)
        return code


@contextlib.contextmanager
def terminal(*command: str) -> Iterator[Terminal]:
    """Yield a terminal; always end its command."""
    made = Terminal(*command)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.wait()
