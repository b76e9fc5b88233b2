"""Adapter between grpc.aio and the servicers, for all RPCs: authorisation, parsing, errors and slow clients.

Servicers are written as for `grpc.aio`: methods ``(request, context)`` that return a message, write to the context, or
yield messages, and for streams of requests ``(requests, context)`` with an asynchronous iterator. The context is an
`Rpc`. Any exception that is not a `ServeError` becomes an opaque INTERNAL error whose id is in the log.

Every RPC is registered with a stream of requests, which is identical on the wire: such handlers start when the metadata
has arrived, those of single requests only after the message. So unauthorised calls are rejected before the message is
sent, and messages in transfer are limited in number and time (`jaxinfer.serve.grpc.bounds`).
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import ssl
import time
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc import aio

from jaxinfer.serve.api.errors import Kind, ServeError, answer_to
from jaxinfer.serve.api.requests import ServeLimits
from jaxinfer.serve.grpc import status
from jaxinfer.serve.grpc.auth import OPEN, SCOPES, Authoriser, Caller, token_of
from jaxinfer.serve.grpc.bounds import Bounds
from jaxinfer.serve.grpc.decode import decode
from jaxinfer.serve.runtime.background import shielded
from jaxinfer.serve.telemetry.request_log import asked

Observer = Callable[[str, grpc.StatusCode, float], None]
"""Callback at the end of every RPC: its full name ("package.Service/Method"), status, and duration in seconds."""

Refused = Callable[[ServeError, str, str], None]
"""Callback for every error of an RPC or of a request in its stream: error, full name of the RPC, caller name."""

_VALUES = ServeLimits().values
_TRACE = ("traceparent", "tracestate")


class AnonymousCaller:
    """The caller of an RPC that requires no API key."""

    name = ""


class Rpc:
    """A call as a servicer sees it: a subset of `grpc.aio.ServicerContext`, and the caller.

    Attributes:
        caller: owner of the API key.
        writing_since: start of the write in progress on the monotonic clock; None: there is none.
        reading_since: start of the read of a single request on the monotonic clock; None: there is none.
    """

    def __init__(
        self,
        context: Any,
        request_class: type[Message],
        values: int,
        refused: Callable[[ServeError, str], None] = lambda error, caller: None,
    ) -> None:
        self.caller: Caller = AnonymousCaller()
        self._refused = refused
        self.writing_since: float | None = None
        self.reading_since: float | None = None
        self._context, self._class, self._values = context, request_class, values
        self._task = asyncio.current_task()
        self._cut: ServeError | None = None
        self._greeting: asyncio.Future[None] | None = None

    # ---- the call

    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]]:
        found: Sequence[tuple[str, str | bytes]] = self._context.invocation_metadata() or ()
        return found

    def time_remaining(self) -> float | None:
        """Return the seconds until the client's deadline; None: it has none."""
        left: float | None = self._context.time_remaining()
        return left

    def peer(self) -> str:
        """Return the client's end of the connection, in gRPC's format."""
        found: str = self._context.peer()
        return found

    def certificate(self) -> bytes | None:
        """Return the client certificate as DER, verified by the transport; None: the client sent none."""
        found = self._context.auth_context().get("x509_pem_cert")
        return ssl.PEM_cert_to_DER_cert(found[0].decode()) if found else None

    def trace(self) -> dict[str, str]:
        """Return the W3C trace context sent by the client."""
        return {n: v for n, v in self.invocation_metadata() if n in _TRACE and isinstance(v, str)}

    async def abort(self, code: grpc.StatusCode, details: str = "") -> None:
        """End the RPC, for servicers of other packages; servicers of this package raise `ServeError`."""
        await self._context.abort(code, details)

    # ---- messages

    async def parse(self, raw: bytes) -> Message:
        """Parse a request. Raises `ServeError`: it is invalid or exceeds limits."""
        return await decode(self._class, raw, self._values)

    async def read(self) -> Message | None:
        """Return the next request; None: the client sends no more."""
        raw = await self._context.read()
        return None if raw is aio.EOF else await self.parse(raw)

    async def __aiter__(self) -> AsyncIterator[Message]:
        while (request := await self.read()) is not None:
            yield request

    async def only(self) -> Message:
        """Read the request of a call with a single request.

        Raises:
            ServeError: the request is missing, invalid or exceeds limits.
        """
        self.reading_since = time.monotonic()
        raw = await self._context.read()
        self.reading_since = None
        if raw is aio.EOF:
            raise ServeError(Kind.INVALID, "the call has no request")
        return await self.parse(raw)

    async def write(self, message: Message) -> None:
        """Write a message and return when the transport has accepted it. Only one write may be in progress."""
        self.writing_since = time.monotonic()
        if self._greeting is None:
            self._greeting = asyncio.ensure_future(self._context.send_initial_metadata(()))
        if not self._greeting.done():
            await shielded(self._greeting)
        await self._context.write(message.SerializeToString())
        self.writing_since = None

    # ---- end of the call

    def answered_with(self, error: ServeError) -> None:
        """Report to the log that a request ends with ``error``."""
        self._refused(error, self.caller.name)

    def cut(self, error: ServeError) -> None:
        """Cancel the servicer and end the call with ``error``."""
        if self._cut is None and self._task is not None:
            self._cut = error
            self._task.cancel()

    async def refuse(self, error: ServeError) -> None:
        """Send ``error`` as the status. If the client does not read, the status and this method wait until earlier
        writes are sent; no other state of the call is kept then."""
        self.writing_since = self.reading_since = None
        try:
            # If the first write sent the initial metadata and were cancelled, they would be sent again with the status:
            # gRPC then rejects both, and the client waits forever.
            if self._greeting is not None:
                await self._greeting
            await status.abort(self._context, error)
        except aio.InternalError:  # the client has disconnected
            raise asyncio.CancelledError from None

    @property
    def cut_by(self) -> ServeError | None:
        return self._cut


class SlowClients:
    """Cancels calls of clients that stop reading or do not send their request. One periodic scan of all calls costs
    less than a timer per message.

    Args:
        write_seconds: maximum seconds for which a write may wait for the client.
        read_seconds: maximum seconds for the request of a call with a single request.
    """

    def __init__(self, write_seconds: float, read_seconds: float) -> None:
        self._write, self._read = write_seconds, read_seconds
        self._calls: set[Rpc] = set()

    @contextlib.contextmanager
    def watching(self, rpc: Rpc) -> Iterator[None]:
        self._calls.add(rpc)
        try:
            yield
        finally:
            self._calls.discard(rpc)

    async def run(self) -> None:
        """Scan all calls periodically, until cancelled."""
        while True:
            await asyncio.sleep(min(1.0, self._write / 4, self._read / 4))
            self.look(time.monotonic())

    def look(self, now: float) -> None:
        for rpc in list(self._calls):
            if rpc.writing_since is not None and now - rpc.writing_since > self._write:
                rpc.cut(ServeError(Kind.TOO_LARGE, f"the client has read nothing for {self._write:g} s"))
            elif rpc.reading_since is not None and now - rpc.reading_since > self._read:
                rpc.cut(ServeError(Kind.DEADLINE, f"the request did not come within {self._read:g} s"))


class Registrar:
    """Creates grpc.aio handlers from servicers.

    Args:
        authoriser: checks API keys.
        slow: watches every call.
        bounds: limits on messages in transfer and on calls without a key.
        observer: called at the end of every call.
        refused: called for every error.
        values: maximum number of values in a request, see `jaxinfer.serve.grpc.decode`.
    """

    def __init__(
        self,
        authoriser: Authoriser,
        slow: SlowClients,
        bounds: Bounds,
        observer: Observer | None = None,
        *,
        refused: Refused = lambda error, method, caller: None,
        values: int = _VALUES,
    ) -> None:
        self._refused = refused
        self._authoriser, self._slow, self._bounds, self._observer = authoriser, slow, bounds, observer
        self._values = values

    def add(self, server: aio.Server, service: ServiceDescriptor, servicer: object, name: str | None = None) -> None:
        """Serve all methods of a service, under ``name`` instead of its full name if given.

        Raises:
            KeyError: a method is not in `SCOPES`.
        """
        name = name or service.full_name
        handlers = self.handlers(service, servicer, name)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))
        server.add_registered_method_handlers(name, handlers)

    def handlers(
        self, service: ServiceDescriptor, servicer: object, name: str | None = None
    ) -> dict[str, grpc.RpcMethodHandler]:
        """Return the handlers of all methods of a service, by method name.

        Raises:
            KeyError: a method is not in `SCOPES`.
        """
        name = name or service.full_name
        return {method.name: self._handler(method, servicer, f"{name}/{method.name}") for method in service.methods}

    def _handler(self, method: MethodDescriptor, servicer: object, path: str) -> grpc.RpcMethodHandler:
        scope, implementation = SCOPES[path], getattr(servicer, method.name)
        request_class = GetMessageClass(method.input_type)
        run = _streamed if method.server_streaming else _single

        def refused(error: ServeError, caller: str) -> None:
            self._refused(error, path, caller)

        async def handle(_: Any, context: Any) -> bytes | None:
            rpc = Rpc(context, request_class, self._values, refused)
            asked(path, path, urllib.parse.unquote(context.peer()).partition(":")[2])

            async def go() -> bytes | None:
                request = rpc if method.client_streaming else await self._bounds.received(rpc, scope)
                return await run(implementation, rpc, request)

            return await self._answer(rpc, path, scope, go)

        if method.server_streaming:
            return grpc.stream_stream_rpc_method_handler(handle)
        return grpc.stream_unary_rpc_method_handler(handle)

    async def _answer(
        self, rpc: Rpc, path: str, scope: str | None, run: Callable[[], Awaitable[bytes | None]]
    ) -> bytes | None:
        start, code = time.monotonic(), grpc.StatusCode.CANCELLED
        try:
            with self._slow.watching(rpc):
                response = await self._guarded(rpc, scope, run)
            code = grpc.StatusCode.OK
            return response
        except ServeError as error:
            code = error.kind.code
            rpc.answered_with(error)
            # Sending the status to a slow reader takes long: free the frames of the failed call meanwhile.
            error.__traceback__ = error.__context__ = error.__cause__ = None
            await rpc.refuse(error)
            return None
        finally:
            if self._observer is not None:
                self._observer(path, code, time.monotonic() - start)

    async def _guarded(self, rpc: Rpc, scope: str | None, run: Callable[[], Awaitable[bytes | None]]) -> bytes | None:
        """Authorise and run a call, converting all exceptions to `ServeError`, except cancellation and
        `aio.AbortError`."""
        try:
            if scope is OPEN:
                return await self._bounds.held(rpc, run, stranger=True)
            token = token_of(rpc.invocation_metadata())
            rpc.caller = self._authoriser.authorise(token, scope, rpc.certificate)
            with self._authoriser.during(rpc.caller, scope, rpc.cut):
                return await self._bounds.held(rpc, run, stranger=False)
        except asyncio.CancelledError:
            if rpc.cut_by is None:
                raise
            raise rpc.cut_by from None
        except aio.AbortError:
            raise
        except aio.InternalError:  # raised by the transport if the client has disconnected
            raise asyncio.CancelledError from None
        except Exception as fault:  # noqa: BLE001 - the border to the client: every fault gets an answer
            raise answer_to(fault) from None


async def _single(implementation: Callable[..., Any], rpc: Rpc, request: Message | Rpc) -> bytes:
    response: Message = await implementation(request, rpc)
    return response.SerializeToString()


async def _streamed(implementation: Callable[..., Any], rpc: Rpc, request: Message | Rpc) -> None:
    made = implementation(request, rpc)
    if not inspect.isasyncgen(made):
        await made
        return
    async with contextlib.aclosing(made):
        async for response in made:
            await rpc.write(response)
