"""A command at a terminal of its own, as a person would type at it."""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
import sys
import threading
from collections.abc import Iterator

REPO = pathlib.Path(__file__).resolve().parents[2]
# Whoever runs the tests in the background ignores SIGINT, and so would all that is started here.
_SPAWN = """
import os, pty, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])) % 256)
"""
CTRL_C, CTRL_D = "\x03", "\x04"


class Terminal:
    """What is typed goes through the terminal, so Ctrl-C is the signal that it makes of it."""

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
        """Wait until ``words`` stand behind the first ``after`` characters; the place behind them."""
        with self._changed:
            self._changed.wait_for(lambda: words in self.text[after:] or self._ended, 300)
            assert words in self.text[after:], self.text
            return self.text.index(words, after) + len(words)

    def type_until_it_ends(self, key: str) -> int:
        """The exit code. The key is typed again as long as it lives: a signal that comes after readline's prompt is
        shown and before it waits for keys is seen at the next key only."""
        while True:
            self.type(key)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
                return self.wait()

    def wait(self) -> int:
        """The exit code."""
        code = self.process.wait(300)
        self._reader.join(60)
        return code


@contextlib.contextmanager
def terminal(*command: str) -> Iterator[Terminal]:
    """Ends the command, whatever becomes of the test."""
    made = Terminal(*command)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.wait()
