"""Helper processes for untrusted code that may loop forever or allocate without bound, and that can be killed. No jax.

A helper reads frames from stdin and writes one reply per frame; it exits at end of input, or immediately when its
parent is killed, whatever it is doing. A frame is its length (4 bytes, big-endian) and its bytes. The first frame is
the setup, and the reply to it is `READY`.
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

READY = b"+"
MAX_FRAME_BYTES = 256 << 20
"""Above the largest text that a template may write, every character escaped."""

START_CPU_SECONDS = 30.0
_PR_SET_PDEATHSIG = 1
_M_ARENA_MAX = -8
_ENDING_SECONDS = 1.0  # between the end of a process's output and its exit
_FROM_OUTSIDE = {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT}
"""Exit codes of a process that was killed from outside."""

# ---- within a helper


def begin() -> None:
    """Bind this process to its parent, whose pid is its argument, and limit the CPU time of its start."""
    die_with(int(sys.argv[1]))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # SIGHUP makes the server reload, and may reach all of its processes
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the parent process may have had it ignored
    allow_cpu(START_CPU_SECONDS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit_memory(size: int) -> None:
    """Limit the address space of this process to ``size`` bytes."""
    resource.setrlimit(resource.RLIMIT_AS, (size, size))


def die_with(parent: int) -> None:
    """Exit when the parent dies. End of input is not enough: a template that loops does not read. Linux sends a signal;
    elsewhere the CPU time limit ends such a template."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent died before
        sys.exit(1)


def allow_cpu(seconds: float) -> None:
    """Allow ``seconds`` of CPU time from now; after that the kernel kills this process (SIGPROF), whatever it is doing.
    ``setitimer`` has a resolution of hundredths of a second; limits of `resource` count whole seconds."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def lower_priority(thread: int = 0) -> None:
    """Lower a thread (0: this one) permanently to idle priority (`sched(7)`, SCHED_IDLE); only root may undo that.
    No-op if the system is not Linux."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # the thread may have ended
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))


def in_threads(serve: Callable[[], bool]) -> None:
    """Call ``serve`` until it returns False, each time in a new thread: the previous one may have idle priority.

    All threads share one heap: glibc would create one per thread and keep free memory in each.
    """
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
    going = True

    def run() -> None:
        nonlocal going
        going = serve()

    while going:
        going = False  # if `serve` raises
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()


def trim() -> None:
    """Return free heap memory to the system.

    glibc keeps freed memory below an allocation in use; other C libraries have no such call and do not need it.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def has_low_priority() -> bool:
    """Whether this thread has idle priority."""
    return sys.platform == "linux" and os.sched_getscheduler(0) == os.SCHED_IDLE


def read_frame(reader: IO[bytes]) -> bytes | None:
    """Read a frame; None at end of input, also within a frame, or if the announced frame is too large."""
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


# ---- in the parent


class Helper:
    """A helper process and its pipes. Except `kill` and `lower_priority`, methods are for the thread that owns it only.

    Args:
        module: module that the process runs.
        setup: first frame.
    """

    def __init__(self, module: str, setup: bytes) -> None:
        self._command, self._setup = (sys.executable, "-m", module, str(os.getpid())), setup
        self._process: subprocess.Popen[bytes] | None = None
        self._reap: weakref.finalize[..., Helper] | None = None
        self._killed = self._stopped = False

    def start(self) -> bool:
        """Start the process if it is not running; return whether it was started, and so has no state.

        Raises:
            RuntimeError: it cannot be started.
        """
        if self._process is not None and not self._killed and self._process.poll() is None:
            return False
        if self._reap is not None:
            self._reap()
        # In its own process group: Ctrl-C in the terminal goes to the server alone. Not in its own session: Linux first
        # divides CPU time between sessions (sched(7), autogroup), and SCHED_IDLE has an effect only within one session.
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=_environment(), process_group=0
        )
        self._reap, self._killed, self._stopped = weakref.finalize(self, _end, self._process), False, False
        if self._exchange(self._setup) is None:
            raise RuntimeError(f"{self._command[2]} does not start")
        return True

    def ask(self, question: bytes) -> bytes | None:
        """Send a request to the helper and return its reply; None if it was killed or died."""
        answer = self._exchange(question)
        self._killed = self._killed or answer is None
        return answer

    def lower_priority(self) -> None:
        """Set the helper's current worker threads to idle priority, all except its main thread (see `in_threads`).
        Thread-safe."""
        if self._process is not None:
            folder, first = f"/proc/{self._process.pid}/task", str(self._process.pid)
            with contextlib.suppress(OSError):  # it has ended, or the system has no such folder
                for thread in set(os.listdir(folder)) - {first}:
                    lower_priority(int(thread))

    def kill(self) -> None:
        """Kill the helper, from any thread. A thread that waits for a reply gets None."""
        self._killed = self._stopped = True
        if self._process is not None:
            self._process.kill()

    @property
    def killed_externally(self) -> bool:
        """Whether an external signal ended it, such as the OOM killer's: not the fault of the request."""
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
            with contextlib.suppress(BrokenPipeError):  # data that a failed write left in the buffer
                pipe.close()


def _environment() -> dict[str, str]:
    """Return a minimal environment: templates must not see the server's, but Python must find this package."""
    passed = ("PATH", "LD_LIBRARY_PATH", "HOME", "TZ", "LANG", "LC_ALL", "SYSTEMROOT")
    passed_on = {name: os.environ[name] for name in passed if name in os.environ}
    return {**passed_on, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
