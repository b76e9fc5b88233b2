"""Steps of a child process that may hang or die: their journal, and a parent that skips such a step and continues.

A deadlocked kernel never returns, and nothing interrupts JAX while it waits: the process can only be killed. The child
marks in a file where each step begins and ends. The parent kills a child whose file does not grow for too long,
condemns the step that ran, and starts another child, which skips steps that have ended or are condemned. If several
steps ran at once, the next children run one at a time, so that the hanging step is known exactly.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

START_S = 60.0  # limit until the first mark, if the patience is shorter: imports, the driver
KILL_S = 20.0  # limit for a killed process to exit; the driver has to stop its kernels first
LEAST_S = 2.0  # least time for another child
_POLL_S = 0.1
_LATE, _STUCK = "the time is over", "its process does not end"


class Progress(NamedTuple):
    """The state of the steps in a journal.

    Attributes:
        ended: steps that ended, successfully or not.
        condemned: steps in which a child hung or died, and how.
        running: the innermost open step of each thread of the last child.
    """

    ended: frozenset[str]
    condemned: dict[str, str]
    running: tuple[str, ...]


class Journal:
    """Lines of JSON in a file, from any thread, by one process after another. A torn line is dropped."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path, self._lock = path, threading.Lock()

    def put(self, **fields: Any) -> None:
        with self._lock, self.path.open("ab+") as file:
            file.write(b"\n" * _is_torn(file) + json.dumps(fields).encode() + b"\n")

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Mark the beginning and the end of a step. A step that raises an exception has no end mark."""
        thread = threading.get_ident()
        self.put(began=name, thread=thread)
        yield
        self.put(ended=name, thread=thread)

    def lines(self) -> Iterator[dict[str, Any]]:
        for line in self.path.read_bytes().splitlines() if self.path.exists() else ():
            with contextlib.suppress(ValueError):
                yield json.loads(line)

    def progress(self) -> Progress:
        ended, condemned, open_steps = set[str](), dict[str, str](), dict[int, list[str]]()
        for line in self.lines():
            match line:
                case {"child": _}:
                    open_steps.clear()
                case {"began": name, "thread": thread}:
                    open_steps.setdefault(thread, []).append(name)
                case {"ended": name, "thread": thread}:
                    ended.add(name)
                    outer = open_steps[thread]
                    del outer[outer.index(name) :]  # including inner steps that raised an exception
                case {"condemned": name, "why": why}:
                    condemned[name] = why
        running = (steps[-1] for steps in open_steps.values() if steps)
        return Progress(frozenset(ended), condemned, tuple(dict.fromkeys(running)))

    def size(self) -> int:
        return self.path.stat().st_size


def _is_torn(file: Any) -> bool:
    """Return whether the last line is incomplete: a process was killed while it wrote."""
    if file.seek(0, os.SEEK_END) == 0:
        return False
    file.seek(-1, os.SEEK_END)
    return bool(file.read(1) != b"\n")


class Ended(NamedTuple):
    """The end of a child, or of the last one of several.

    Attributes:
        why: "" if its exit status is a final one, else the reason in words.
        code: the exit status; negative: the signal; None: it was killed.
    """

    why: str
    code: int | None

    @property
    def fault(self) -> str:
        """Description of the fault of the running step."""
        return f"it hung: {self.why}" if self.code is None else f"it ended the process: {self.why}"


def supervise(
    start: Callable[[float, bool], subprocess.Popen[bytes]],
    journal: Journal,
    *,
    seconds: float,
    patience: float,
    condemn: Callable[[str, Ended], None] = lambda name, ended: None,
    final: Collection[int] = (0,),
    grace: float = 0.0,
) -> Ended:
    """Run children one after the other until one exits with a final status, one makes no progress, or time is up.

    A child makes progress if a step ended or is condemned that was neither before, or if several ran when it ended.

    Args:
        start: starts a child in a new session, given the seconds left and whether only one step may run at a
            time.
        seconds: for all of them.
        patience: seconds without a line in the journal after which a child is killed.
        condemn: called for a step in which a child hung or died, before it is written to the journal.
        final: exit statuses of a child that is complete.
        grace: seconds for a child to write its results after Ctrl-C (KeyboardInterrupt here).
    """
    end, alone = time.monotonic() + seconds, False
    while True:
        before = journal.progress()
        journal.put(child=True, alone=alone)
        ended = _watched(start(end - time.monotonic(), alone), journal, end, patience, grace)
        if ended.code in final:
            return ended._replace(why="")
        if ended.why == _LATE:
            return Ended(f"stopped after {seconds:g} s", None)
        after = journal.progress()
        guilty = after.running if alone or len(after.running) == 1 else ()
        for name in guilty:
            condemn(name, ended)
            journal.put(condemned=name, why=ended.fault)
        gets_on = after.running or after.ended != before.ended
        if not gets_on or ended.why == _STUCK or end - time.monotonic() < LEAST_S:
            return ended
        alone = alone or len(after.running) > 1


def _watched(process: subprocess.Popen[bytes], journal: Journal, end: float, patience: float, grace: float) -> Ended:
    """Wait for a child, and kill it with all its own children."""
    try:
        ended = _wait(process, journal, end, patience)
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace)
        raise
    finally:
        gone = _kill(process)
    return ended if gone else Ended(_STUCK, None)


def _wait(process: subprocess.Popen[bytes], journal: Journal, end: float, patience: float) -> Ended:
    first = size = journal.size()
    since = time.monotonic()
    while (code := process.poll()) is None:
        now, found = time.monotonic(), journal.size()
        if found != size:
            size, since = found, now
        allowed = patience if size > first else max(patience, START_S)
        if now >= end:
            return Ended(_LATE, None)
        if now - since > allowed:
            return Ended(f"nothing came for {allowed:g} s", None)
        time.sleep(min(_POLL_S, end - now))
    return Ended(_words(code), code)


def _kill(process: subprocess.Popen[bytes]) -> bool:
    """Kill the process group; return whether the process has exited."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        process.wait(KILL_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def _words(code: int) -> str:
    return f"exit {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
