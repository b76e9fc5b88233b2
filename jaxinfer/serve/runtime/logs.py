"""Server logging: one line per event, as text or JSON. No jax.

The reader of a server's stderr may stall, and a client may cause a thousand log lines a second. Neither may block an
event loop or the engine: a thread writes the queued lines. Lines beyond the bounds are dropped, and the log reports how
many.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import json
import logging
import os
import queue
import select
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, override

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")
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

# Loggers that write a line for every request, connection or step at level "info".
_TALKATIVE = ("uvicorn", "grpc", "jax", "opentelemetry", "asyncio")

# Fields of every record: all other fields were given as ``extra`` and are written to the line.
_USUAL = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

_FLUSH_SECONDS = 1.0  # that a process waits for its log when it ends
_KINDS = 256
_TEMPLATE = 200  # characters of a template that are reported
_TICK = 1.0
_WRITE_BYTES = 4096  # write size that is atomic on a pipe, also with several writers
_STDERR = 2
_MOST_MESSAGE, _MOST_TRACEBACK = 8192, 16384  # characters of one line


@dataclasses.dataclass(slots=True)
class _Kind:
    """Lines of one logger, level and message template.

    Attributes:
        due: time at which its lines would all have been admitted, at the rate of the long run.
        left_out: lines dropped since the last report.
    """

    due: float
    reported: float
    left_out: int = 0


class RateLimit(logging.Filter):
    """A rate limit for each kind of line: logger, level and message template. Debug lines are not limited.

    The number of kinds is bounded, since a template may be client text: the rest are one kind per logger and level.

    Args:
        unlimited: loggers with a number of lines that is bounded elsewhere.

    Attributes:
        dropped: number of dropped lines.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, unlimited: Collection[str] = frozenset({REQUESTS})
    ) -> None:
        super().__init__()
        self._clock, self._unlimited = clock, unlimited
        self._lock = threading.RLock()  # a destructor may log while this thread holds it
        self._kinds: dict[tuple[str, int, str], _Kind] = {}
        self._swept = clock()
        self.dropped = 0

    @override
    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno <= logging.DEBUG or record.name in self._unlimited:
            return True
        now = self._clock()
        with self._lock:
            kind = self._kind(record, now)
            if kind.due - now > (BURST - 0.5) / PER_SECOND:
                kind.left_out += 1
                self.dropped += 1
                return False
            kind.due = max(kind.due, now) + 1 / PER_SECOND
        return True

    def reports(self, at_once: bool = False) -> list[logging.LogRecord]:
        """Report the lines dropped since the last report, by records of the same loggers and levels. ``at_once``: even
        before `REPORT_SECONDS` have passed."""
        now, found = self._clock(), []
        with self._lock:
            for (logger, level, template), kind in list(self._kinds.items()):
                if kind.left_out and (at_once or now - kind.reported >= REPORT_SECONDS):
                    message = "%d more lines were left out that are like %r"
                    found.append(_record(logger, level, message, kind.left_out, template[:_TEMPLATE]))
                    kind.left_out, kind.reported = 0, now
        return found

    def _kind(self, record: logging.LogRecord, now: float) -> _Kind:
        name = record.name, record.levelno, str(record.msg)
        if name not in self._kinds and not self._has_room(now):
            name = record.name, record.levelno, ""
        return self._kinds.setdefault(name, _Kind(now, now))

    def _has_room(self, now: float) -> bool:
        """Whether another kind may be added. Kinds that are as new are forgotten, once a second at most."""
        if len(self._kinds) >= _KINDS and now - self._swept >= 1.0:
            self._kinds = {name: kind for name, kind in self._kinds.items() if kind.left_out or kind.due > now}
            self._swept = now
        return len(self._kinds) < _KINDS


class QueueHandler(logging.Handler):
    """A logging handler that queues lines for a writer thread. It never blocks, also within a destructor.

    `logging.handlers` has no bound in bytes, no time limit of a flush and no reports, so it is not used.

    Args:
        write: writes bytes to the destination; after an OSError they are lost.
    """

    def __init__(self, write: Callable[[bytes], object], limit: RateLimit | None = None) -> None:
        super().__init__()
        self._sink, self._limit = write, RateLimit() if limit is None else limit
        self.addFilter(self._limit)
        self._lines: queue.SimpleQueue[bytes | threading.Event | None] = queue.SimpleQueue()
        self._put = self._taken = 0  # bytes; each counter is written by one thread
        self._full = self._told = 0  # lines dropped on a full queue, and those of them that were reported
        self._failed = 0
        self._thread = threading.Thread(target=self._run, name="jaxinfer-log", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> Mapping[str, int]:
        """Number of dropped lines, by reason."""
        return dict(zip(REASONS, (self._limit.dropped, self._full, self._failed), strict=True))

    # ---- logging threads, one at a time: `handle` has a lock

    @override
    def emit(self, record: logging.LogRecord) -> None:
        line = self._line(record)
        if self._put - self._taken + len(line) > QUEUE_BYTES:
            self._full += 1
        else:
            self._add(line)

    def say(self, line: str) -> None:
        """Queue a line as it is, even if the queue is full."""
        self.acquire()
        try:
            self._add(_encoded(line))
        finally:
            self.release()

    def drain(self, seconds: float = _FLUSH_SECONDS) -> bool:
        """Wait until the lines logged so far are written, for ``seconds`` at most; return whether they are."""
        written = threading.Event()
        self._lines.put(written)
        return self._thread.is_alive() and written.wait(seconds)

    @override
    def flush(self) -> None:
        """Drain the queue at the end of the process."""
        self.drain()

    @override
    def close(self) -> None:
        """Close the handler; its thread ends when it has written the queued lines."""
        self._lines.put(None)
        super().close()

    def _line(self, record: logging.LogRecord) -> bytes:
        try:
            return _encoded(self.format(record))
        except (TypeError, ValueError):
            record.msg, record.args = f"{record.msg!r} does not fit its arguments", None
            return _encoded(self.format(record))

    def _add(self, line: bytes) -> None:
        self._put += len(line)
        self._lines.put(line)

    # ---- writer thread

    def _run(self) -> None:
        reported = time.monotonic()
        while True:
            with contextlib.suppress(queue.Empty):
                item = self._lines.get(timeout=_TICK)
                if item is None:
                    return
                if isinstance(item, threading.Event):
                    self._report(at_once=True)
                    item.set()
                else:
                    self._write(item)
                    self._taken += len(item)
            if time.monotonic() - reported >= _TICK:
                self._report()
                reported = time.monotonic()

    def _report(self, at_once: bool = False) -> None:
        """Write the number of dropped lines."""
        for record in self._limit.reports(at_once):
            self._write(self._line(record))
        if (full := self._full) > self._told and self._put - self._taken < QUEUE_BYTES // 2:
            message = "%d lines were left out: those before them were not read in time"
            self._write(self._line(_record(__name__, logging.WARNING, message, full - self._told)))
            self._told = full

    def _write(self, line: bytes) -> None:
        try:
            self._sink(line)
        except OSError:  # the pipe is closed, or the disk is full
            self._failed += 1


def write_to(descriptor: int, data: bytes) -> None:
    """Write all of ``data`` to a file descriptor, blocking or not."""
    while data:
        try:
            data = data[os.write(descriptor, data[:_WRITE_BYTES]) :]
        except BlockingIOError:
            select.select([], [descriptor], [], 1.0)


def _record(logger: str, level: int, message: str, *args: Any) -> logging.LogRecord:
    return logging.LogRecord(logger, level, __file__, 0, message, args, None)


def _encoded(line: str) -> bytes:
    return line.encode(errors="backslashreplace") + b"\n"


# ---- the log of this process


def configure(form: str, level: str, write: Callable[[bytes], object] | None = None) -> None:
    """Send the log of the whole process to ``write``, replacing the previous configuration.

    Args:
        form: one of `FORMATS`; ``level``: one of `LEVELS`.
        write: see `QueueHandler` (default: to stderr).
    """
    handler = QueueHandler(functools.partial(write_to, _STDERR) if write is None else write)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    root = logging.getLogger()
    if (before := _handler()) is not None:
        before.close()
    root.handlers = [handler]
    root.setLevel(level.upper())
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))


def dropped() -> Mapping[str, int]:
    """Return the number of lines of this process dropped from the log, by reason (`REASONS`)."""
    handler = _handler()
    return dict.fromkeys(REASONS, 0) if handler is None else handler.dropped


def say(line: str) -> None:
    """Print a message for the user who started the process."""
    if (handler := _handler()) is None:
        sys.stderr.write(f"{line}\n")
    else:
        handler.say(line)


def drain() -> None:
    """Wait until the log is written, for a limited time, before an exit without Python's shutdown (`os._exit`)."""
    if (handler := _handler()) is not None:
        handler.drain()


def _handler() -> QueueHandler | None:
    return next((each for each in logging.getLogger().handlers if isinstance(each, QueueHandler)), None)


class JsonFormatter(logging.Formatter):
    """A JSON formatter, one object a line: time (UTC, ms), level, logger, message, extra fields, traceback."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _cut(record.getMessage()),
        }
        line |= {name: value for name, value in vars(record).items() if name not in _USUAL and name not in line}
        if record.exc_info:
            line["traceback"] = _traceback(self, record)
        return json.dumps(line, ensure_ascii=False, default=str)


class TextFormatter(logging.Formatter):
    """A text formatter: ``time level logger: message key=value ...``, and the traceback below it. Line breaks in values
    are escaped, so that no client can inject a log line."""

    def format(self, record: logging.LogRecord) -> str:
        extra = "".join(f" {name}={value!r}" for name, value in vars(record).items() if name not in _USUAL)
        message = _cut(record.getMessage()).replace("\r", "\\r").replace("\n", "\\n")
        line = f"{_time(record)} {record.levelname.lower():7} {record.name}: {message}{extra}"
        return f"{line}\n{_traceback(self, record)}" if record.exc_info else line


def _cut(message: str) -> str:
    return message if len(message) <= _MOST_MESSAGE else f"{message[:_MOST_MESSAGE]}…"


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    """Format a traceback, truncated at its beginning: the end has the error."""
    assert record.exc_info
    return formatter.formatException(record.exc_info)[-_MOST_TRACEBACK:]


def _time(record: logging.LogRecord) -> str:
    moment = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
