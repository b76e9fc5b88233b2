"""Errors that a door answers with instead of a result, once for all doors. No jax."""

from __future__ import annotations

import dataclasses
import enum
import reprlib
from typing import Any

import grpc

from jaxinfer.sampling_params import ContextLengthError, QueueFullError, RequestError


class Kind(enum.Enum):
    """A kind of error: its gRPC status and its HTTP status."""

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
    """An answer to one request. Other requests are not concerned.

    Attributes:
        message: one sentence for the client; under INTERNAL it is opaque and holds an id that the log explains.
        field: which field of the request is wrong, if one is.
        retry_after: seconds after which it is worth trying again, if it is.
        fault: under INTERNAL, the id in the message.
        logged: the log of requests has its line.
        context: of a prompt that is too long, its size with the unit, and the most that it may be.
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
    """The request names a model that is not served here."""


class DuplicateIdError(RequestError):
    """The request's id is in use."""


_KINDS = {QueueFullError: Kind.QUEUE_FULL, UnknownModelError: Kind.NOT_FOUND, DuplicateIdError: Kind.EXISTS}


def refused(error: RequestError, retry_after: float = 1.0) -> ServeError:
    """The answer to a refused request. ``retry_after``: the seconds that a full queue asks to wait."""
    kind = _KINDS.get(type(error), Kind.INVALID)
    context = (error.size, error.most) if isinstance(error, ContextLengthError) else None
    return ServeError(kind, str(error), error.field, retry_after if kind is Kind.QUEUE_FULL else None, context=context)


def invalid(field: str, value: Any, reason: str) -> ServeError:
    """The answer to a value that cannot be served."""
    return ServeError(Kind.INVALID, f"{field}={short(value)} {reason}", field)


def short(value: Any) -> str:
    """A value as it may stand in a message: it may be as long as a request."""
    return reprlib.repr(value)[:200]
