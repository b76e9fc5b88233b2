"""Logs of a server: one line an event, as text or as JSON, written by a thread that nobody waits for. No jax."""

from __future__ import annotations

import datetime
import json
import logging
import sys
from collections.abc import Mapping
from typing import Any

from jaxinfer.serve.log_queue import FLUSH_SECONDS, REASONS, Descriptor, QueueHandler, Sink

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")

# At "info" these tell of every request, every connection, every step of their own.
_TALKATIVE = ("uvicorn", "grpc", "jax", "opentelemetry", "asyncio")

# What every record has: whatever else is in it was given as ``extra`` and belongs into the line.
_USUAL = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


_STDERR = 2
_MOST_MESSAGE, _MOST_TRACEBACK = 8192, 16384  # characters of one line


def configure(form: str, level: str, sink: Sink | None = None) -> None:
    """Send what the whole process logs to ``sink``; what was configured before is replaced.

    Args:
        form: one of `FORMATS`; ``level``: one of `LEVELS`.
        sink: default: stderr.
    """
    handler = QueueHandler(Descriptor(_STDERR) if sink is None else sink)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    root = logging.getLogger()
    if (before := _handler()) is not None:
        before.close()
    root.handlers = [handler]
    root.setLevel(level.upper())
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))


def dropped() -> Mapping[str, int]:
    """Lines of this process that are not in its log, by reason: see `jaxinfer.serve.log_queue.REASONS`."""
    handler = _handler()
    return dict.fromkeys(REASONS, 0) if handler is None else handler.dropped


def say(line: str) -> None:
    """A sentence for whoever started the process."""
    if (handler := _handler()) is None:
        sys.stderr.write(f"{line}\n")
    else:
        handler.say(line)


def drain() -> None:
    """Wait until the log is written, but not for ever: for a process that ends without Python's usual end."""
    if (handler := _handler()) is not None:
        handler.drain(FLUSH_SECONDS)


def _handler() -> QueueHandler | None:
    return next((each for each in logging.getLogger().handlers if isinstance(each, QueueHandler)), None)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC, milliseconds), level, logger, message, the extra fields, the traceback."""

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
    """``time level logger: message key=value ...``, and the traceback below it. Line breaks in values are escaped, so
    that nobody can write a line of their own into the log."""

    def format(self, record: logging.LogRecord) -> str:
        extra = "".join(f" {name}={value!r}" for name, value in vars(record).items() if name not in _USUAL)
        message = _cut(record.getMessage()).replace("\r", "\\r").replace("\n", "\\n")
        line = f"{_time(record)} {record.levelname.lower():7} {record.name}: {message}{extra}"
        return f"{line}\n{_traceback(self, record)}" if record.exc_info else line


def _cut(message: str) -> str:
    return message if len(message) <= _MOST_MESSAGE else f"{message[:_MOST_MESSAGE]}…"


def _traceback(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    """Format a traceback from its end, which says what was wrong."""
    assert record.exc_info
    return formatter.formatException(record.exc_info)[-_MOST_TRACEBACK:]


def _time(record: logging.LogRecord) -> str:
    moment = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
