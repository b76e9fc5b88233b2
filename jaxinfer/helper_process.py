"""Helper processes: what may loop for ever, or ask for all memory, runs in one, and is killed there. No jax.

A helper reads frames from stdin and writes one back for each; it ends with its input, or at once where its parent is
killed, whatever it does. A frame is its length (4 bytes, big-endian) and bytes, which on the way out begin with `GOOD`
or `BAD`. Its first frame is its setup.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import IO

GOOD, BAD = b"+", b"-"
MAX_FRAME_BYTES = 256 << 20
"""More than the largest text that a template may write, every character escaped."""

START_CPU_SECONDS = 30.0
_PR_SET_PDEATHSIG = 1
_M_ARENA_MAX = -8
_ENDING_SECONDS = 1.0  # from the end of a process's output to its own
_FROM_OUTSIDE = {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT}
"""Exit codes of a process that somebody else ended."""

# ---- within a helper


def begin(memory: int) -> None:
    """Bound this process, whose argument is the process that started it: ``memory`` in bytes, and the processor's time
    of its start."""
    die_with(int(sys.argv[1]))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # which asks the server, perhaps with all its processes, to reload
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # else whoever started this process might have it ignored
    allow_cpu(START_CPU_SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def die_with(parent: int) -> None:
    """End this process with its parent, which ends the input too, but a template that loops reads none. Linux sends a
    signal; elsewhere it is the limit of the processor's time that ends such a template."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before
        sys.exit(1)


def allow_cpu(seconds: float) -> None:
    """Allow ``seconds`` of the processor from now on; beyond that the kernel ends this process (SIGPROF), whatever it
    does. Hundredths of a second: the limits of `resource` count whole ones."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def stand_back(thread: int = 0) -> None:
    """Let everybody else's claims to the processor go before those of a thread (0: this one), for good (`sched(7)`,
    SCHED_IDLE): only who is root may take that back. Does nothing where the system is not Linux."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # a thread may have ended
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))


def in_threads(serve: Callable[[], bool]) -> None:
    """Call ``serve`` until it says false, each time in a new thread: what the last one did may have stood back.

    All have one heap: glibc would give many threads many, and keep what is free in each.
    """
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
    going = True

    def run() -> None:
        nonlocal going
        going = serve()

    while going:
        going = False  # where `serve` fails
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()


def stands_back() -> bool:
    """Whether this thread does."""
    return sys.platform == "linux" and os.sched_getscheduler(0) == os.SCHED_IDLE


def read_frame(reader: IO[bytes]) -> bytes | None:
    """Read a frame; None at the end of the input, also within a frame or where one is announced that is too large."""
    head = reader.read(4)
    size = int.from_bytes(head)
    if len(head) < 4 or size > MAX_FRAME_BYTES:
        return None
    body = reader.read(size)
    return body if len(body) == size else None


def write_frame(writer: IO[bytes], body: bytes) -> None:
    writer.write(len(body).to_bytes(4))
    writer.write(body)
    writer.flush()


# ---- beside it


class Helper:
    """A helper process and the pipes to it. Methods but `kill` belong to whoever took it out of the pool.

    Args:
        module: that it runs.
        setup: its first frame.
    """

    def __init__(self, module: str, setup: bytes) -> None:
        self._command, self._setup = (sys.executable, "-m", module, str(os.getpid())), setup
        self._process: subprocess.Popen[bytes] | None = None
        self._reap: weakref.finalize[..., Helper] | None = None
        self._killed = self._stopped = False

    def start(self) -> bool:
        """Start it if it does not run; whether that was so: it knows nothing then.

        Raises:
            RuntimeError: it cannot be started.
        """
        if self._process is not None and not self._killed and self._process.poll() is None:
            return False
        if self._reap is not None:
            self._reap()
        # In a group of its own: a Ctrl-C in the terminal is the server's business. Not in a session: Linux shares the
        # processor among sessions first (sched(7), autogroup), and to stand back means something within one alone.
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=_environment(), process_group=0
        )
        self._reap, self._killed, self._stopped = weakref.finalize(self, _end, self._process), False, False
        if self._exchange(self._setup) is None:
            raise RuntimeError(f"{self._command[2]} does not start")
        return True

    def ask(self, question: bytes) -> bytes | None:
        """Ask the helper; None: it was killed, or died."""
        answer = self._exchange(question)
        self._killed = self._killed or answer is None
        return answer

    def stand_back(self) -> None:
        """Let the helper's threads stand back that work now, but for its first one (see `in_threads`). From any
        thread."""
        if self._process is not None:
            folder, first = f"/proc/{self._process.pid}/task", str(self._process.pid)
            with contextlib.suppress(OSError):  # it has ended, or there is no such folder
                for thread in set(os.listdir(folder)) - {first}:
                    stand_back(int(thread))

    def kill(self) -> None:
        """Kill the helper, from any thread. Whoever waits for an answer gets none."""
        self._killed = self._stopped = True
        if self._process is not None:
            self._process.kill()

    @property
    def was_taken_away(self) -> bool:
        """Whether a signal from outside ended it, such as the system's for want of memory: no fault of the question."""
        if self._process is None or self._stopped:
            return False
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(_ENDING_SECONDS) in _FROM_OUTSIDE
        return False

    def _exchange(self, frame: bytes) -> bytes | None:
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            return None
        try:
            write_frame(process.stdin, frame)
        except BrokenPipeError:
            return None
        return read_frame(process.stdout)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # what a write that failed has left in the buffer
                pipe.close()


def _environment() -> dict[str, str]:
    """Templates have no business with the server's environment, but Python must find itself, and this package."""
    passed = ("PATH", "LD_LIBRARY_PATH", "HOME", "TZ", "LANG", "LC_ALL", "SYSTEMROOT")
    passed_on = {name: os.environ[name] for name in passed if name in os.environ}
    return {**passed_on, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
