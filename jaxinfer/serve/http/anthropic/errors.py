"""Error bodies in Anthropic's format. Like OpenAI's, its clients choose the exception class by the HTTP status."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.serve.api.errors import Kind, ServeError

ROUTES = frozenset({"/v1/messages", "/v1/messages/count_tokens"})
"""Routes whose errors have this format."""

_TYPES: Mapping[Kind, str] = {
    Kind.INVALID: "invalid_request_error",
    Kind.UNAUTHENTICATED: "authentication_error",
    Kind.FORBIDDEN: "permission_error",
    Kind.NOT_FOUND: "not_found_error",
    Kind.EXISTS: "invalid_request_error",
    Kind.PRECONDITION: "invalid_request_error",
    Kind.TOO_LARGE: "request_too_large",
    Kind.QUEUE_FULL: "rate_limit_error",
    Kind.CANCELLED: "api_error",
    Kind.INTERNAL: "api_error",
    Kind.UNAVAILABLE: "overloaded_error",
    Kind.DEADLINE: "timeout_error",
}


def error_body(error: ServeError, request_id: str) -> dict[str, Any]:
    """Return ``{"type": "error", "error": {"type", "message"}, "request_id"}``."""
    message = error.message
    if error.context is not None:  # clients match Anthropic's wording and then shorten the history
        size, most = error.context
        message = f"prompt is too long: {size} > {most} maximum"
    told = {"type": _TYPES[error.kind], "message": message}
    return {"type": "error", "error": told, "request_id": request_id}
