"""Calls of somebody else's gRPC server, answered by the handlers of ours: the same keys, bounds and errors. No jax."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import grpc
from google.protobuf.message import Message
from grpc import aio

from jaxinfer.serve.errors import Kind, ServeError
from jaxinfer.serve.grpc.connections import plain
from jaxinfer.serve.settings import is_loopback

Metadata = Sequence[tuple[str, str | bytes]]


class CallContext(Protocol):
    """The part of Ray's ``RayServegRPCContext`` that is of interest here."""

    def invocation_metadata(self) -> Metadata: ...
    def peer(self) -> str: ...
    def set_code(self, code: grpc.StatusCode) -> None: ...
    def set_details(self, details: str) -> None: ...


class CallError(Exception):
    """A call that ends by an error. Its code and its message are in the context."""


class Encoded:
    """A message that is written already."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    def SerializeToString(self) -> bytes:  # noqa: N802 - protobuf's name
        return self._raw


class Calls:
    """The RPCs of one service.

    Args:
        handlers: by name, see `jaxinfer.serve.grpc.server.GrpcServers.handlers`.
        message_bytes: of one request at most.
        guarded: callers beyond this machine are let in, for they show keys, or the network is trusted.
    """

    def __init__(self, handlers: Mapping[str, grpc.RpcMethodHandler], message_bytes: int, *, guarded: bool) -> None:
        self._handlers, self._most, self._guarded = handlers, message_bytes, guarded

    async def single(self, name: str, request: Message, context: CallContext) -> Encoded:
        """Answer by one message.

        Raises:
            CallError: the call ends by an error.
        """
        handle = self._handlers[name].stream_unary
        return Encoded(await handle(None, _Context(context, _one(request), self._most, self._guarded)))

    async def streamed(
        self, name: str, requests: Message | AsyncIterator[Message], context: CallContext
    ) -> AsyncGenerator[Encoded]:
        """Answer by messages, as they come. Leaving it ends the call.

        Raises:
            CallError: the call ends by an error.
        """
        sent = _one(requests) if isinstance(requests, Message) else requests
        adapted = _Context(context, sent, self._most, self._guarded)
        task = asyncio.ensure_future(self._handlers[name].stream_stream(None, adapted))
        task.add_done_callback(lambda _: adapted.written.put_nowait(None))
        try:
            while (raw := await adapted.written.get()) is not None:
                yield Encoded(raw)
            await task
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, CallError):
                await task


class _Context:
    """What `jaxinfer.serve.grpc.rpc.Rpc` needs of ``grpc.aio.ServicerContext``.

    Attributes:
        written: what was answered. Whoever serves the client takes it at once, and keeps what the client does not read.
    """

    def __init__(
        self, context: CallContext, requests: AsyncIterator[Message], message_bytes: int, guarded: bool
    ) -> None:
        self._context, self._requests = context, requests
        self._most, self._guarded = message_bytes, guarded
        self.written: asyncio.Queue[bytes | None] = asyncio.Queue()

    def invocation_metadata(self) -> Metadata:
        return self._context.invocation_metadata()

    def time_remaining(self) -> float | None:
        """None: the proxy keeps the deadline, and ends the call."""
        return None

    def peer(self) -> str:
        """The client's address, without a port: connections are the proxy's, and nobody here hears of their end."""
        return f"{self._context.peer().rpartition(':')[0]}:0"

    def auth_context(self) -> Mapping[str, Any]:
        """Return no certificates: TLS ends at the proxy."""
        return {}

    async def send_initial_metadata(self, metadata: Metadata) -> None:
        """Send nothing: the proxy does, with the first message."""

    async def read(self) -> bytes | object:
        """Return the next request, or `grpc.aio.EOF`.

        Raises:
            ServeError: it is too large, or its sender may not call.
        """
        if not (self._guarded or is_near(self._context.peer())):
            raise ServeError(Kind.FORBIDDEN, STRANGER)
        async for request in self._requests:
            raw = request.SerializeToString()
            if len(raw) > self._most:
                what = f"the request has {len(raw)} bytes, more than limits.message_bytes = {self._most}"
                raise ServeError(Kind.TOO_LARGE, what)
            return raw
        return aio.EOF

    async def write(self, raw: bytes) -> None:
        self.written.put_nowait(raw)

    async def abort(self, code: grpc.StatusCode, details: str = "", trailers: Metadata = ()) -> NoReturn:
        """Tell code and message; there is no way for trailing metadata."""
        self._context.set_code(code)
        self._context.set_details(details)
        raise CallError(details)


STRANGER = "calls from other machines need api_keys, or insecure where the network is trusted"
"""What those are told who are not near."""


def is_near(peer: str) -> bool:
    """Whether a client, in gRPC's words, is on this machine."""
    if not peer.startswith(("ipv4:", "ipv6:")):
        return peer.startswith("unix:")
    return is_loopback(plain(peer).partition(" ")[0])


async def _one(request: Message) -> AsyncIterator[Message]:
    yield request
