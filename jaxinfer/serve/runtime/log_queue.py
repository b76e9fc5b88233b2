"""Asynchronous logging: a bounded queue and a rate limit for each kind of line. No jax.

The reader of a server's stderr may stall, and a client may cause a thousand log lines a second. Neither may block an
event loop or the engine: a dedicated thread writes the queued lines, excess lines are dropped and counted in the log.
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
"""Bytes of the queued lines."""
BURST, PER_SECOND = 100, 10.0
"""Lines of one kind in a burst, and per second in the long run."""
REPORT_SECONDS = 5.0
"""Seconds between two reports of the dropped lines of a kind."""
REASONS = ("rate", "queue", "write")
"""Reasons for dropping a line: too many of its kind, the queue is full, or writing failed."""

REQUESTS = "jaxinfer.serve.requests"
"""Logger of requests that reached the engine (`jaxinfer.serve.telemetry.request_log`), which bounds their number."""

FLUSH_SECONDS = 1.0
"""Seconds that a process waits for its log when it ends."""

_KINDS = 256
_TEMPLATE = 200  # characters of a template that are reported
_TICK = 1.0
_WRITE_BYTES = 4096  # write size that is atomic on a pipe, also with several writers


@runtime_checkable
class Sink(Protocol):
    """A destination for log lines."""

    def write(self, data: bytes, /) -> object:
        """Write bytes. Raises OSError: the data is lost."""
        ...


class Descriptor:
    """A `Sink` for a file descriptor, blocking or not."""

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
    """A token bucket for one kind of line.

    Attributes:
        name: logger, level and message template.
        left_out: lines dropped since the last report.
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
        """Whether the bucket is full again, the state of a new kind."""
        return not self.left_out and self.room + PER_SECOND * (now - self.at) >= BURST

    def report(self, now: float) -> logging.LogRecord:
        """Return a record of the same logger and level with the number of dropped lines."""
        count, self.left_out, self.reported = self.left_out, 0, now
        logger, level, template = self.name
        message = "%d more lines were left out that are like %r"
        return logging.LogRecord(logger, level, __file__, 0, message, (count, template[:_TEMPLATE]), None)


class Limiter:
    """A rate limiter of log lines, by logger, level and message template.

    The number of kinds is bounded, since a template may be client text: the rest share a bucket per logger and level.

    Args:
        unlimited: loggers with a number of lines that is bounded elsewhere.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, unlimited: Collection[str] = frozenset({REQUESTS})
    ) -> None:
        self._clock, self._unlimited = clock, unlimited
        self._kinds: dict[tuple[str, int, str], _Kind] = {}
        self._swept = -math.inf

    def admit(self, record: logging.LogRecord) -> bool:
        """Return whether to write a line. Debug lines are not limited."""
        if record.levelno <= logging.DEBUG or record.name in self._unlimited:
            return True
        now = self._clock()
        return self._kind(record, now).admit(now)

    def reports(self, at_once: bool = False) -> list[logging.LogRecord]:
        """Report the lines dropped since the last report; ``at_once``: even before `REPORT_SECONDS` have passed."""
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
        """Whether another kind may be added. Kinds with a full bucket are forgotten, once a second at most."""
        if len(self._kinds) >= _KINDS and now - self._swept >= 1.0:
            self._kinds = {name: kind for name, kind in self._kinds.items() if not kind.is_over(now)}
            self._swept = now
        return len(self._kinds) < _KINDS


class QueueHandler(logging.Handler):
    """A logging handler that queues lines for a writer thread. It never blocks.

    Args:
        sink: destination of the lines.
    """

    def __init__(self, sink: Sink, limiter: Limiter | None = None) -> None:
        super().__init__()
        self._sink, self._limiter = sink, Limiter() if limiter is None else limiter
        self._lines: queue.SimpleQueue[bytes | threading.Event | None] = queue.SimpleQueue()
        self._put = self._taken = 0  # bytes; each has one writer
        self._dropped = dict.fromkeys(REASONS, 0)
        self._untold = 0  # lines dropped on a full queue since the last report
        self._thread = threading.Thread(target=self._run, name="jaxinfer-log", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> Mapping[str, int]:
        """Number of dropped lines, by reason."""
        return dict(self._dropped)

    # ---- logging threads, one at a time: `handle` has a lock

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
        """Queue a line as it is, even if the queue is full."""
        self.acquire()
        try:
            self._add(_encoded(line))
        finally:
            self.release()

    def drain(self, seconds: float) -> bool:
        """Wait until the lines logged so far are written, for ``seconds`` at most; return whether they are."""
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
        """Drain the queue at the end of the process, for `FLUSH_SECONDS` at most."""
        self.drain(FLUSH_SECONDS)

    @override
    def close(self) -> None:
        """Close the handler; its thread ends when it has written the queued lines."""
        self._lines.put(None)
        super().close()

    def _report(self, at_once: bool = False) -> None:
        """Log the number of dropped lines."""
        for record in self._limiter.reports(at_once):
            self._enqueue(record)
        if self._untold and self._put - self._taken < QUEUE_BYTES // 2:
            count, self._untold = self._untold, 0
            message = "%d lines were left out: those before them were not read in time"
            self._enqueue(logging.LogRecord(__name__, logging.WARNING, __file__, 0, message, (count,), None))

    # ---- writer thread

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
        """Report dropped lines unless the lock is taken: its holder may be waiting for this thread."""
        assert self.lock is not None
        if self.lock.acquire(blocking=False):
            try:
                self._report()
            finally:
                self.lock.release()

    def _write(self, data: bytes) -> None:
        try:
            self._sink.write(data)
        except OSError:  # the pipe is closed, or the disk is full
            self._dropped["write"] += 1
        finally:
            self._taken += len(data)


def _encoded(line: str) -> bytes:
    return line.encode(errors="backslashreplace") + b"\n"
