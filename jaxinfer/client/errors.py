"""Errors of client calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.message import DecodeError

from jaxinfer.protos.internal.standard_pb2 import BadRequest, ErrorInfo, RetryInfo, RpcStatus
from jaxinfer.protos.v1 import inference_pb2 as pb

_DETAILS = "grpc-status-details-bin"


@dataclasses.dataclass
class ServerError(Exception):
    """A failed call. Subclasses are the kinds of errors; this class itself is for statuses without a subclass.

    Attributes:
        message: the server's sentence.
        code: the gRPC status.
        field: name of the invalid field of the request, if there is one.
        retry_after: seconds after which the server suggests a retry, if it does.
        fault: for an `InternalError`: the id of its entry in the server's log.
    """

    message: str
    code: grpc.StatusCode = grpc.StatusCode.UNKNOWN
    field: str | None = None
    retry_after: float | None = None
    fault: str | None = None

    def __str__(self) -> str:
        return self.message


class InvalidRequest(ServerError):
    """A value of the request is invalid or too long for the model: ``field`` and the message name it."""


class Unauthenticated(ServerError):
    """The API key is missing or unknown."""


class PermissionDenied(ServerError):
    """The API key does not permit this call."""


class NotFound(ServerError):
    """The server does not serve the model, or has no adapter of this name."""


class AlreadyExists(ServerError):
    """The request id, or the name of an adapter, is in use."""


class FailedPrecondition(ServerError):
    """The server was not started for this: a retry would fail, too."""


class ResourceExhausted(ServerError):
    """The request exceeds a limit of the server: a retry would fail, too."""


class QueueFull(ResourceExhausted):
    """The server's queue is full: retry after ``retry_after`` seconds."""


class Unavailable(ServerError):
    """The connection failed, or the server is starting, draining, or has lost its engine: a retry may succeed."""


class Incompatible(ServerError):
    """Client and server cannot connect: only one of them uses TLS, a certificate is rejected, or the port has another
    protocol. A retry would fail, too."""


class DeadlineExceeded(ServerError):
    """The timeout of the call has passed."""


class Cancelled(ServerError):
    """The call was cancelled, by either side."""


class InternalError(ServerError):
    """A bug or failure of the server, with details in its log under ``fault``."""


class Truncated(ServerError):
    """The stream ended with status OK before the answer did: the answer is incomplete."""


_CLASSES: dict[grpc.StatusCode, type[ServerError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExists,
    grpc.StatusCode.FAILED_PRECONDITION: FailedPrecondition,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhausted,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.INTERNAL: InternalError,
}
_CODES = {code.value[0]: code for code in grpc.StatusCode}


def from_call(call: grpc.Call) -> ServerError:
    """Return the error of a failed call of the sync API."""
    return from_status(call.code(), call.details() or "", call.trailing_metadata() or ())


def from_status(code: grpc.StatusCode, message: str, trailing: Iterable[tuple[str, str | bytes]]) -> ServerError:
    """Return the exception for a status and its trailing metadata."""
    return _error(code, message, _details_in(trailing))


def from_message(error: pb.Error) -> ServerError:
    """Return the exception for one request's error within a batch."""
    return _error(_CODES.get(error.code, grpc.StatusCode.UNKNOWN), error.message, error.details)


def _details_in(trailing: Iterable[tuple[str, str | bytes]]) -> Iterable[Any]:
    for key, value in trailing:
        if key == _DETAILS and isinstance(value, bytes):
            try:
                return RpcStatus.FromString(value).details
            except DecodeError:  # details in another server's format: the status itself still counts
                return ()
    return ()


def _error(code: grpc.StatusCode, message: str, details: Iterable[Any]) -> ServerError:
    field = retry_after = fault = None
    for detail in details:
        try:
            match detail.type_url.rpartition("/")[2]:
                case "google.rpc.BadRequest":
                    field = _first_field(BadRequest.FromString(detail.value))
                case "google.rpc.RetryInfo":
                    delay = RetryInfo.FromString(detail.value).retry_delay
                    retry_after = delay.seconds + delay.nanos / 1e9
                case "google.rpc.ErrorInfo":
                    fault = ErrorInfo.FromString(detail.value).metadata.get("id")
        except DecodeError:
            continue
    kind = _CLASSES.get(code, ServerError)
    if kind is ResourceExhausted and retry_after is not None:
        kind = QueueFull
    return kind(message, code, field, retry_after, fault)


def _first_field(request: BadRequest) -> str | None:
    return next((violation.field for violation in request.field_violations), None)
