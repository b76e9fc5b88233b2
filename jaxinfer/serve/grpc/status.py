"""Conversion of `ServeError` to a gRPC status with google.rpc details.

The codes are those of `Kind`. A wrong field becomes a BadRequest with one violation, a retry delay becomes a RetryInfo
and the trailing metadata entry ``grpc-retry-pushback-ms`` (gRFC A6), and the id of an internal error is in an
ErrorInfo. Details are sent as a ``google.rpc.Status`` under ``grpc-status-details-bin``, as all gRPC libraries expect.
"""

from __future__ import annotations

import datetime
import math
from typing import Any

from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from jaxinfer.protos.v1 import inference_pb2
from jaxinfer.serve.api.errors import Kind, ServeError

DOMAIN = "jaxinfer"
"""Domain of ErrorInfo: the namespace of its reasons."""

_DETAILS = "grpc-status-details-bin"
_PUSHBACK = "grpc-retry-pushback-ms"
# The message occurs twice in the trailing metadata, which clients limit to 8 KiB.
_MAX_MESSAGE = 1000


def message_of(error: ServeError) -> str:
    """Return the status message: one line that fits into the trailing metadata."""
    text = " ".join(error.message.split())
    return text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]}…"


def details_of(error: ServeError) -> list[Message]:
    """Return the google.rpc detail messages of an error."""
    found: list[Message] = []
    if error.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=message_of(error))
        found.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after is not None:
        info = error_details_pb2.RetryInfo()
        info.retry_delay.FromTimedelta(datetime.timedelta(seconds=error.retry_after))
        found.append(info)
    if error.fault is not None:
        found.append(error_details_pb2.ErrorInfo(reason=error.kind.name, domain=DOMAIN, metadata={"id": error.fault}))
    return found


def trailers_of(error: ServeError) -> tuple[tuple[str, str | bytes], ...]:
    """Return the trailing metadata of a status."""
    pairs: list[tuple[str, str | bytes]] = []
    if details := details_of(error):
        status = status_pb2.Status(code=code_of(error.kind), message=message_of(error))
        for detail in details:
            status.details.add().Pack(detail)
        pairs.append((_DETAILS, status.SerializeToString()))
    if error.retry_after is not None:
        pairs.append((_PUSHBACK, str(math.ceil(error.retry_after * 1000))))
    elif error.kind is Kind.TOO_LARGE:  # has the status of a full queue, which clients would retry
        pairs.append((_PUSHBACK, "-1"))
    return tuple(pairs)


def error_message(error: ServeError) -> inference_pb2.Error:
    """Return an error for a stream that continues."""
    message = inference_pb2.Error(code=code_of(error.kind), message=message_of(error))
    for detail in details_of(error):
        message.details.add().Pack(detail)
    return message


def code_of(kind: Kind) -> int:
    """Return the number of the gRPC status."""
    number: int = kind.code.value[0]
    return number


async def abort(context: Any, error: ServeError) -> None:
    """End a `grpc.aio` call with an error. Raises the exception with which `grpc.aio` ends a handler.

    If the client does not read, the status waits until earlier writes are sent.
    """
    await context.abort(error.kind.code, message_of(error), trailers_of(error))
