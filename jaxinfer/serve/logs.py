"""Logs of a server: one line an event, as text or as JSON. No jax."""

from __future__ import annotations

import datetime
import io
import json
import logging
import sys
from typing import Any, TextIO

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")

# At "info" these tell of every request, every connection, every step of their own.
_TALKATIVE = ("uvicorn", "grpc", "jax", "opentelemetry", "asyncio")

# What every record has: whatever else is in it was given as ``extra`` and belongs into the line.
_USUAL = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def configure(form: str, level: str, stream: TextIO | io.TextIOBase = sys.stderr) -> None:
    """Send what the whole process logs to ``stream``; what was configured before is replaced.

    Args:
        form: one of `FORMATS`; ``level``: one of `LEVELS`.
    """
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC, milliseconds), level, logger, message, the extra fields, the traceback."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in vars(record).items() if name not in _USUAL and name not in line}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class TextFormatter(logging.Formatter):
    """``time level logger: message key=value ...``, and the traceback below it. Line breaks in values are escaped, so
    that nobody can write a line of their own into the log."""

    def format(self, record: logging.LogRecord) -> str:
        extra = "".join(f" {name}={value!r}" for name, value in vars(record).items() if name not in _USUAL)
        message = record.getMessage().replace("\r", "\\r").replace("\n", "\\n")
        line = f"{_time(record)} {record.levelname.lower():7} {record.name}: {message}{extra}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _time(record: logging.LogRecord) -> str:
    moment = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
