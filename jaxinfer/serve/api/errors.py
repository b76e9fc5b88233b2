"""Errors that the gRPC and HTTP APIs return. No jax."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import logging
import reprlib
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import grpc

from jaxinfer.sampling_params import ContextLengthError, QueueFullError, RequestError
from jaxinfer.serve.api.streams import EngineDeadError


class Kind(enum.Enum):
    """A kind of error, with its gRPC status and its HTTP status."""

    INVALID = (grpc.StatusCode.INVALID_ARGUMENT, 400)
    UNAUTHENTICATED = (grpc.StatusCode.UNAUTHENTICATED, 401)
    FORBIDDEN = (grpc.StatusCode.PERMISSION_DENIED, 403)
    NOT_FOUND = (grpc.StatusCode.NOT_FOUND, 404)
    EXISTS = (grpc.StatusCode.ALREADY_EXISTS, 409)
    PRECONDITION = (grpc.StatusCode.FAILED_PRECONDITION, 400)
    TOO_LARGE = (grpc.StatusCode.RESOURCE_EXHAUSTED, 413)
    QUEUE_FULL = (grpc.StatusCode.RESOURCE_EXHAUSTED, 429)
    CANCELLED = (grpc.StatusCode.CANCELLED, 499)
    UNIMPLEMENTED = (grpc.StatusCode.UNIMPLEMENTED, 501)
    INTERNAL = (grpc.StatusCode.INTERNAL, 500)
    UNAVAILABLE = (grpc.StatusCode.UNAVAILABLE, 503)
    DEADLINE = (grpc.StatusCode.DEADLINE_EXCEEDED, 504)

    @property
    def code(self) -> grpc.StatusCode:
        return self.value[0]

    @property
    def http(self) -> int:
        return self.value[1]


@dataclasses.dataclass
class ServeError(Exception):
    """An error response to one request. Other requests are not affected.

    Attributes:
        message: one sentence for the client; for INTERNAL it is generic and has the id of the log entry.
        field: name of the invalid field of the request, if any.
        retry_after: seconds after which a retry may succeed, if it may.
        fault: for INTERNAL, the id in the message.
        logged: whether the request log has a line for it.
        context: for a prompt that is too long, its size with the unit, and the limit.
    """

    kind: Kind
    message: str
    field: str | None = None
    retry_after: float | None = None
    fault: str | None = None
    logged: bool = dataclasses.field(default=False, compare=False, repr=False)
    context: tuple[str, int] | None = None

    def __str__(self) -> str:
        return self.message


class UnknownModelError(RequestError):
    """Error for a request that names an unknown model."""


class DuplicateIdError(RequestError):
    """Error for a request id that is in use."""


_KINDS = {QueueFullError: Kind.QUEUE_FULL, UnknownModelError: Kind.NOT_FOUND, DuplicateIdError: Kind.EXISTS}


def refused(error: RequestError, retry_after: float = 1.0) -> ServeError:
    """Return the error response to a rejected request. ``retry_after``: seconds to wait if the queue is full."""
    kind = _KINDS.get(type(error), Kind.INVALID)
    context = (error.size, error.most) if isinstance(error, ContextLengthError) else None
    return ServeError(kind, str(error), error.field, retry_after if kind is Kind.QUEUE_FULL else None, context=context)


def invalid(field: str, value: Any, reason: str) -> ServeError:
    """Return the INVALID error for the value of a field."""
    return ServeError(Kind.INVALID, f"{field}={short(value)} {reason}", field)


def short(value: Any) -> str:
    """Return a truncated repr of a value, which may be as long as a request, for a message."""
    return reprlib.repr(value)[:200]


RETRY_SECONDS = 1.0
"""Seconds after which a client may retry while the engine does not run: most restarts begin sooner."""

_MAX_MESSAGE = 500

_log = logging.getLogger("jaxinfer.serve")


@contextlib.contextmanager
def map_exceptions(*passed: type[Exception]) -> Iterator[None]:
    """Convert every exception raised inside to `ServeError`. Cancellation passes through, and the types ``passed``."""
    passed = (ServeError, *passed)
    try:
        yield
    except passed:
        raise
    except Exception as error:  # front end boundary: every fault gets an error response
        raise answer_to(error) from error


def answer_to(error: Exception) -> ServeError:
    """Return the response to a rejected request, a dead engine, or a fault, which gets the id of its log entry."""
    match error:
        case ServeError():
            return error
        case RequestError():
            answer = refused(error)
            answer.message = _shortened(answer.message)
            return answer
        case EngineDeadError():
            return unavailable("the engine does not run: try again later")
        case _:
            return _internal(error)


@contextlib.contextmanager
def rename_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Rename fields to the client's names in errors raised inside. ``names``: differing names, by front end name."""
    try:
        yield
    except ServeError as error:
        if error.field is not None and error.field in names:
            error.message = names[error.field] + error.message.removeprefix(error.field)
            error.field = names[error.field]
        raise


def prompt_as(name: str) -> dict[str, str]:
    """Map the fields of a prompt (text, token ids, images) to the client's ``name``; see `rename_fields`."""
    return dict.fromkeys(("prompt", "prompt_token_ids", "images"), name)


def unavailable(message: str) -> ServeError:
    return ServeError(Kind.UNAVAILABLE, message, retry_after=RETRY_SECONDS)


def _internal(error: Exception) -> ServeError:
    fault = uuid.uuid4().hex
    _log.error("internal error %s", fault, exc_info=error)
    return ServeError(Kind.INTERNAL, f"internal error {fault}: the server's log explains it", fault=fault)


def _shortened(message: str) -> str:
    """Truncate a message: a rejected value may be as long as a request."""
    return message if len(message) <= _MAX_MESSAGE else f"{message[:_MAX_MESSAGE]}…"
