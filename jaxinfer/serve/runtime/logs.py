"""Server logging: one line per event, as text or JSON, written by a background thread. No jax."""

from __future__ import annotations

import datetime
import json
import logging
import sys
from collections.abc import Mapping
from typing import Any

from jaxinfer.serve.runtime.log_queue import FLUSH_SECONDS, REASONS, Descriptor, QueueHandler, Sink

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")

# Loggers that write a line for every request, connection or step at level "info".
_TALKATIVE = ("uvicorn", "grpc", "jax", "opentelemetry", "asyncio")

# Fields of every record: all other fields were given as ``extra`` and are written to the line.
_USUAL = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


_STDERR = 2
_MOST_MESSAGE, _MOST_TRACEBACK = 8192, 16384  # characters of one line


def configure(form: str, level: str, sink: Sink | None = None) -> None:
    """Send the log of the whole process to ``sink``, replacing the previous configuration.

    Args:
        form: one of `FORMATS`; ``level``: one of `LEVELS`.
        sink: destination (default: stderr).
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
    """Return the number of lines of this process dropped from the log, by reason: see
    `jaxinfer.serve.runtime.log_queue.REASONS`."""
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
        handler.drain(FLUSH_SECONDS)


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
