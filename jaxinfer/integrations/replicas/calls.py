"""Adapter of another gRPC server's calls to jaxinfer's handlers: same keys, limits and errors. No jax."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import grpc
from google.protobuf.message import Message
from grpc import aio

from jaxinfer.serve.api.errors import Kind, ServeError
from jaxinfer.serve.grpc.connections import plain
from jaxinfer.serve.settings import is_loopback

Metadata = Sequence[tuple[str, str | bytes]]


class CallContext(Protocol):
    """The subset of Ray's ``RayServegRPCContext`` that is used here."""

    def invocation_metadata(self) -> Metadata: ...
    def peer(self) -> str: ...
    def set_code(self, code: grpc.StatusCode) -> None: ...
    def set_details(self, details: str) -> None: ...


class CallError(Exception):
    """A call that ends with an error; code and message are set in the context."""


class Encoded:
    """A message that is already serialized."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    def SerializeToString(self) -> bytes:  # noqa: N802 - protobuf's name
        return self._raw


class Calls:
    """RPCs of one service.

    Args:
        handlers: by name, see `jaxinfer.serve.grpc.server.GrpcServers.handlers`.
        message_bytes: maximum bytes of one request.
        guarded: whether callers from other machines are accepted, because they need keys or the network is trusted.
    """

    def __init__(self, handlers: Mapping[str, grpc.RpcMethodHandler], message_bytes: int, *, guarded: bool) -> None:
        self._handlers, self._most, self._guarded = handlers, message_bytes, guarded

    async def single(self, name: str, request: Message, context: CallContext) -> Encoded:
        """Answer with one message.

        Raises:
            CallError: the call ends with an error.
        """
        handle = self._handlers[name].stream_unary
        return Encoded(await handle(None, _Context(context, _one(request), self._most, self._guarded)))

    async def streamed(
        self, name: str, requests: Message | AsyncIterator[Message], context: CallContext
    ) -> AsyncGenerator[Encoded]:
        """Yield the response messages as they arrive. Closing the generator ends the call.

        Raises:
            CallError: the call ends with an error.
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
    """Subset of ``grpc.aio.ServicerContext`` that `jaxinfer.serve.grpc.rpc.Rpc` needs.

    Attributes:
        written: response messages. The other server takes them at once and buffers what the client does not read.
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
        """Return None: the proxy enforces the deadline and ends the call."""
        return None

    def peer(self) -> str:
        """Return the client's address without a port: the end of the proxy's connections is not reported here."""
        return f"{self._context.peer().rpartition(':')[0]}:0"

    def auth_context(self) -> Mapping[str, Any]:
        """Return no certificates: TLS ends at the proxy."""
        return {}

    async def send_initial_metadata(self, metadata: Metadata) -> None:
        """Do nothing: the proxy sends it with the first message."""

    async def read(self) -> bytes | object:
        """Return the next request, or `grpc.aio.EOF`.

        Raises:
            ServeError: the request is too large, or the sender is on another machine and not allowed.
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
        """Set code and message of the status; trailing metadata cannot be sent."""
        self._context.set_code(code)
        self._context.set_details(details)
        raise CallError(details)


STRANGER = "calls from other machines need api_keys, or insecure where the network is trusted"
"""Error message for callers on other machines."""


def is_near(peer: str) -> bool:
    """Return whether a client, in gRPC's format, is on this machine."""
    if not peer.startswith(("ipv4:", "ipv6:")):
        return peer.startswith("unix:")
    return is_loopback(plain(peer).partition(" ")[0])


async def _one(request: Message) -> AsyncIterator[Message]:
    yield request
