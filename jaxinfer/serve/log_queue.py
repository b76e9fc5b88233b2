"""Connect who logs and what is written: a bounded queue and a limit for each kind of line. No jax.

Whoever reads a server's stderr may stop to, and a client may do what is worth a line a thousand times a second. Neither
may hold up an event loop or the engine: lines wait here for a thread of their own that writes them, what is too much
is left out, and the log says how much that was.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import queue
import select
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Protocol, override, runtime_checkable

QUEUE_BYTES = 1 << 20
"""Bytes of the lines that wait to be written."""
BURST, PER_SECOND = 100, 10.0
"""Lines of one kind at once, and in the long run."""
REPORT_SECONDS = 5.0
"""Seconds between two lines that say how many of a kind were left out."""
REASONS = ("rate", "queue", "write")
"""Reasons why a line is not in the log: too many of its kind, too many wait, or it could not be written."""

REQUESTS = "jaxinfer.serve.requests"
"""The logger of requests that the engine has worked on (`jaxinfer.serve.request_log`): it bounds their number."""

FLUSH_SECONDS = 1.0
"""Seconds for which the end of a process waits for its log."""

_KINDS = 256
_TEMPLATE = 200  # characters of one that are told
_TICK = 1.0
_WRITE_BYTES = 4096  # what goes into a pipe in one piece, also where several processes write


@runtime_checkable
class Sink(Protocol):
    """The file that lines are written to."""

    def write(self, data: bytes, /) -> object:
        """Raises OSError: it is lost."""
        ...


class Descriptor:
    """A file descriptor as a `Sink`, whether it blocks or not."""

    def __init__(self, number: int) -> None:
        self._number = number

    def write(self, data: bytes) -> None:
        while data:
            try:
                data = data[os.write(self._number, data[:_WRITE_BYTES]) :]
            except BlockingIOError:
                select.select([], [self._number], [], 1.0)


@dataclasses.dataclass(slots=True)
class _Kind:
    """A bucket of lines that may be written.

    Attributes:
        name: logger, level and template.
        left_out: since the last report.
    """

    name: tuple[str, int, str]
    at: float
    reported: float
    room: float = BURST
    left_out: int = 0

    def admit(self, now: float) -> bool:
        self.room, self.at = min(BURST, self.room + PER_SECOND * (now - self.at)), now
        if self.room < 1:
            self.left_out += 1
            return False
        self.room -= 1
        return True

    def is_over(self, now: float) -> bool:
        """Whether the bucket is full again, as if there had been no such line."""
        return not self.left_out and self.room + PER_SECOND * (now - self.at) >= BURST

    def report(self, now: float) -> logging.LogRecord:
        """Say how many lines were left out, as a line of the same logger and level."""
        count, self.left_out, self.reported = self.left_out, 0, now
        logger, level, template = self.name
        message = "%d more lines were left out that are like %r"
        return logging.LogRecord(logger, level, __file__, 0, message, (count, template[:_TEMPLATE]), None)


class Limiter:
    """Leaves out lines beyond the rate of their kind: of one logger, with one template, at one level.

    The number of kinds is bounded: where a template is a client's own, what is beyond it counts as its logger's.

    Args:
        unlimited: loggers whose lines something else bounds.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, unlimited: Collection[str] = frozenset({REQUESTS})
    ) -> None:
        self._clock, self._unlimited = clock, unlimited
        self._kinds: dict[tuple[str, int, str], _Kind] = {}
        self._swept = -math.inf

    def admit(self, record: logging.LogRecord) -> bool:
        """Lines for debugging are not counted: who asks for them wants them."""
        if record.levelno <= logging.DEBUG or record.name in self._unlimited:
            return True
        now = self._clock()
        return self._kind(record, now).admit(now)

    def reports(self, at_once: bool = False) -> list[logging.LogRecord]:
        """Report the lines left out since the last report; ``at_once``: however short ago that was."""
        now = self._clock()
        kinds = [kind for kind in self._kinds.values() if kind.left_out]
        return [kind.report(now) for kind in kinds if at_once or now - kind.reported >= REPORT_SECONDS]

    def _kind(self, record: logging.LogRecord, now: float) -> _Kind:
        name = record.name, record.levelno, str(record.msg)
        if name not in self._kinds and not self._has_room(now):
            name = record.name, record.levelno, ""
        if name not in self._kinds:
            self._kinds[name] = _Kind(name, now, now)
        return self._kinds[name]

    def _has_room(self, now: float) -> bool:
        """Whether there is room for another kind. Kinds that are over are forgotten, once a second at most."""
        if len(self._kinds) >= _KINDS and now - self._swept >= 1.0:
            self._kinds = {name: kind for name, kind in self._kinds.items() if not kind.is_over(now)}
            self._swept = now
        return len(self._kinds) < _KINDS


class QueueHandler(logging.Handler):
    """Puts lines into a queue, from which a thread writes them. It never waits.

    Args:
        sink: where they go.
    """

    def __init__(self, sink: Sink, limiter: Limiter | None = None) -> None:
        super().__init__()
        self._sink, self._limiter = sink, Limiter() if limiter is None else limiter
        self._lines: queue.SimpleQueue[bytes | threading.Event | None] = queue.SimpleQueue()
        self._put = self._taken = 0  # bytes; each has one writer
        self._dropped = dict.fromkeys(REASONS, 0)
        self._untold = 0  # lines for which there was no room, since the log said so
        self._thread = threading.Thread(target=self._run, name="jaxinfer-log", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> Mapping[str, int]:
        """Lines that are not in the log, by reason."""
        return dict(self._dropped)

    # ---- whoever logs, one at a time: `handle` has a lock

    @override
    def emit(self, record: logging.LogRecord) -> None:
        if self._limiter.admit(record):
            self._enqueue(record)
        else:
            self._dropped["rate"] += 1

    def _enqueue(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except (TypeError, ValueError):
            record.msg, record.args = f"{record.msg!r} does not fit its arguments", None
            line = self.format(record)
        size = len(data := _encoded(line))
        if self._put - self._taken + size > QUEUE_BYTES:
            self._dropped["queue"] += 1
            self._untold += 1
        else:
            self._add(data)

    def _add(self, data: bytes) -> None:
        self._put += len(data)
        self._lines.put(data)

    def say(self, line: str) -> None:
        """Write a line as it is, however many wait."""
        self.acquire()
        try:
            self._add(_encoded(line))
        finally:
            self.release()

    def drain(self, seconds: float) -> bool:
        """Wait until what was logged is written, but no longer than this; whether it is."""
        if not self._thread.is_alive():
            return False
        self.acquire()
        try:
            self._report(at_once=True)
        finally:
            self.release()
        written = threading.Event()
        self._lines.put(written)
        return written.wait(seconds)

    @override
    def flush(self) -> None:
        """Drain at the end of the process, before which nobody waits longer."""
        self.drain(FLUSH_SECONDS)

    @override
    def close(self) -> None:
        """The thread ends when it has written what is there."""
        self._lines.put(None)
        super().close()

    def _report(self, at_once: bool = False) -> None:
        """Log what was left out."""
        for record in self._limiter.reports(at_once):
            self._enqueue(record)
        if self._untold and self._put - self._taken < QUEUE_BYTES // 2:
            count, self._untold = self._untold, 0
            message = "%d lines were left out: those before them were not read in time"
            self._enqueue(logging.LogRecord(__name__, logging.WARNING, __file__, 0, message, (count,), None))

    # ---- the thread

    def _run(self) -> None:
        reported = time.monotonic()
        while True:
            with contextlib.suppress(queue.Empty):
                item = self._lines.get(timeout=_TICK)
                if item is None:
                    return
                if isinstance(item, threading.Event):
                    item.set()
                else:
                    self._write(item)
            if time.monotonic() - reported >= _TICK:
                self._report_if_free()
                reported = time.monotonic()

    def _report_if_free(self) -> None:
        """Whoever has the lock may wait for this thread."""
        assert self.lock is not None
        if self.lock.acquire(blocking=False):
            try:
                self._report()
            finally:
                self.lock.release()

    def _write(self, data: bytes) -> None:
        try:
            self._sink.write(data)
        except OSError:  # nobody reads any more, or the disk is full
            self._dropped["write"] += 1
        finally:
            self._taken += len(data)


def _encoded(line: str) -> bytes:
    return line.encode(errors="backslashreplace") + b"\n"
