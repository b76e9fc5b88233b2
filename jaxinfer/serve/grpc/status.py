"""`ServeError` as a gRPC status with google.rpc details.

The codes are those of `Kind`. A wrong field is a BadRequest with one violation, a time to come back is a RetryInfo and
the trailing metadatum ``grpc-retry-pushback-ms`` (gRFC A6), and an internal error's id is in an ErrorInfo. Details
travel as a ``google.rpc.Status`` under ``grpc-status-details-bin``, as every gRPC library expects them.
"""

from __future__ import annotations

import datetime
import math
from typing import Any

from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from jaxinfer.protos.v1 import inference_pb2
from jaxinfer.serve.errors import Kind, ServeError

DOMAIN = "jaxinfer"
"""Domain of ErrorInfo: who gives the reasons their names."""

_DETAILS = "grpc-status-details-bin"
_PUSHBACK = "grpc-retry-pushback-ms"
# Twice in the trailing metadata, of which clients take 8 KiB.
_MAX_MESSAGE = 1000


def message_of(error: ServeError) -> str:
    """The status message: one line that fits into the trailing metadata."""
    text = " ".join(error.message.split())
    return text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]}…"


def details_of(error: ServeError) -> list[Message]:
    """The google.rpc messages that belong to an error."""
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
    """The trailing metadata of a status."""
    pairs: list[tuple[str, str | bytes]] = []
    if details := details_of(error):
        status = status_pb2.Status(code=code_of(error.kind), message=message_of(error))
        for detail in details:
            status.details.add().Pack(detail)
        pairs.append((_DETAILS, status.SerializeToString()))
    if error.retry_after is not None:
        pairs.append((_PUSHBACK, str(math.ceil(error.retry_after * 1000))))
    elif error.kind is Kind.TOO_LARGE:  # the same status as a full queue, after which clients come back
        pairs.append((_PUSHBACK, "-1"))
    return tuple(pairs)


def error_message(error: ServeError) -> inference_pb2.Error:
    """The same within a stream that goes on."""
    message = inference_pb2.Error(code=code_of(error.kind), message=message_of(error))
    for detail in details_of(error):
        message.details.add().Pack(detail)
    return message


def code_of(kind: Kind) -> int:
    """The number of its gRPC status."""
    number: int = kind.code.value[0]
    return number


async def abort(context: Any, error: ServeError) -> None:
    """End a call of `grpc.aio` with an error. It raises what `grpc.aio` raises to end a handler.

    Where the client does not read, the status waits behind what was written before.
    """
    await context.abort(error.kind.code, message_of(error), trailers_of(error))
