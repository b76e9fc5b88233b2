"""Reading of calls with gRPC's errors as the client's own: for both of gRPC's APIs, which differ here."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import grpc.aio

from jaxinfer.client.diagnosis import Explain
from jaxinfer.client.errors import Cancelled, Unavailable, from_call, from_status


@contextlib.contextmanager
def translated(explain: Explain) -> Iterator[None]:
    """Translate gRPC errors to the client's own."""
    try:
        yield
    except grpc.RpcError as error:
        raise explain(from_call(error)) from error


@contextlib.asynccontextmanager
async def translated_async(explain: Explain) -> AsyncIterator[None]:
    """Translate gRPC errors to the client's own."""
    try:
        yield
    except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
        raise await _translation(error, explain) from error


def read_response(call: Any) -> Any:
    """Return the next response of a stream; None: it has ended."""
    return next(call, None)


async def read_response_async(call: Any) -> Any:
    """Return the next response of a stream; None: it has ended."""
    response = await call.read()
    return None if response is grpc.aio.EOF else response


async def _translation(error: grpc.aio.AioRpcError | asyncio.CancelledError, explain: Explain) -> BaseException:
    """Return the client's error. grpc.aio reports a cancelled call like a cancelled task: the task's state decides."""
    if isinstance(error, grpc.aio.AioRpcError):
        found = from_status(error.code(), error.details() or "", error.trailing_metadata() or ())
        return await asyncio.to_thread(explain, found) if isinstance(found, Unavailable) else found
    # Python 3.10 cannot distinguish them, and a cancelled task must not continue.
    cancelling = getattr(asyncio.current_task(), "cancelling", lambda: True)
    return error if cancelling() else Cancelled("the call was cancelled", grpc.StatusCode.CANCELLED)
