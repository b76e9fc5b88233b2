"""Error bodies and headers in OpenAI's format."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import pydantic

from jaxinfer.serve.api.errors import Kind, ServeError, short

# ``type`` and ``code`` of each error kind; OpenAI clients choose the exception class by the HTTP status.
_NAMES: Mapping[Kind, tuple[str, str | None]] = {
    Kind.INVALID: ("invalid_request_error", None),
    Kind.UNAUTHENTICATED: ("authentication_error", "invalid_api_key"),
    Kind.FORBIDDEN: ("permission_error", "insufficient_permissions"),
    Kind.NOT_FOUND: ("invalid_request_error", "model_not_found"),
    Kind.EXISTS: ("invalid_request_error", "duplicate_request_id"),
    Kind.PRECONDITION: ("invalid_request_error", "not_enabled"),
    Kind.TOO_LARGE: ("invalid_request_error", "request_too_large"),
    Kind.QUEUE_FULL: ("rate_limit_error", "rate_limit_exceeded"),
    Kind.CANCELLED: ("server_error", "cancelled"),
    Kind.INTERNAL: ("server_error", "internal_error"),
    Kind.UNAVAILABLE: ("server_error", "unavailable"),
    Kind.DEADLINE: ("server_error", "deadline_exceeded"),
}


def error_body(error: ServeError, *, code: str | None = None) -> dict[str, Any]:
    """Return ``{"error": {"message", "type", "param", "code"}}``."""
    kind, usual = _NAMES[error.kind]
    message = error.message
    if error.context is not None:  # clients match OpenAI's wording and then shorten the history
        (size, most), usual, what = error.context, "context_length_exceeded", error.field or "prompt"
        message = (
            f"This model's maximum context length is {most} {size.rpartition(' ')[2]}. However, your {what} resulted "
        )
        message += f"in {size}. Please reduce the length of the {what}."
    return {"error": {"message": message, "type": kind, "param": error.field, "code": code or usual}}


def error_event(error: ServeError) -> bytes:
    """Encode the error event that ends a server-sent event stream after it has started."""
    return b"event: error\ndata: " + json.dumps(error_body(error)).encode() + b"\n\n"


def error_headers(error: ServeError) -> dict[str, str]:
    """Return the retry headers (in seconds and in milliseconds) and the authentication challenge of an error."""
    headers = {}
    if error.retry_after is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after)))
        headers["retry-after-ms"] = str(max(1, round(error.retry_after * 1000)))
    if error.kind is Kind.UNAUTHENTICATED:
        headers["www-authenticate"] = "Bearer"
    return headers


def from_pydantic(error: pydantic.ValidationError, place: str = "") -> ServeError:
    """Convert the first validation error, with field and value. ``place``: field path prefix with a trailing dot."""
    first = error.errors(include_url=False, include_context=False)[0]
    field = place + _path(first["loc"])
    match first["type"]:
        case "missing":
            message = f"{field} is missing"
        case _:
            message = f"{field}={short(first['input'])}: {first['msg'][:1].lower()}{first['msg'][1:]}"
    return ServeError(Kind.INVALID, message, field=field)


def _path(loc: tuple[int | str, ...]) -> str:
    """Return a path such as ``messages[0].role``; names may be arbitrary client text."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part[:100]}" for part in loc]
    return "".join(parts).removeprefix(".")
