"""Between grpc.aio and the servicers, once for all RPCs: keys, parsing, errors, readers that stop reading.

Servicers are written as for `grpc.aio`: methods ``(request, context)`` that return a message, write to the context, or
yield messages, and for streams of requests ``(requests, context)`` with an asynchronous iterator. The context is an
`Rpc`. They raise whatever they like: what is no `ServeError` becomes an opaque INTERNAL whose id the log explains.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from grpc import aio

from jaxinfer.serve.errors import Kind, ServeError
from jaxinfer.serve.faults import answer_to
from jaxinfer.serve.grpc import status
from jaxinfer.serve.grpc.auth import OPEN, SCOPES, Authoriser, Caller, token_of

Observer = Callable[[str, grpc.StatusCode, float], None]
"""Told of every RPC that has ended: its full name ("package.Service/Method"), its status, how many seconds it took."""

_TRACE = ("traceparent", "tracestate")


class Nobody:
    """The caller of an RPC that asks for no key."""

    name = ""


class Rpc:
    """One call, as a servicer sees it: the part of `grpc.aio.ServicerContext` that we need, and who calls.

    Attributes:
        caller: whose key it is.
        writing_since: when the write began that has not ended yet, on the monotonic clock; None: there is none.
    """

    def __init__(self, context: Any, request_class: type[Message]) -> None:
        self.caller: Caller = Nobody()
        self.writing_since: float | None = None
        self._context, self._class = context, request_class
        self._task = asyncio.current_task()
        self._cut: ServeError | None = None
        self._greeting: asyncio.Future[None] | None = None

    # ---- the call

    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]]:
        found: Sequence[tuple[str, str | bytes]] = self._context.invocation_metadata() or ()
        return found

    def time_remaining(self) -> float | None:
        """Seconds until the client's deadline; None: it has none."""
        left: float | None = self._context.time_remaining()
        return left

    def trace(self) -> dict[str, str]:
        """The W3C trace context that the client sent."""
        return {n: v for n, v in self.invocation_metadata() if n in _TRACE and isinstance(v, str)}

    async def abort(self, code: grpc.StatusCode, details: str = "") -> None:
        """For servicers of other packages; ours raise `ServeError`."""
        await self._context.abort(code, details)

    # ---- messages

    def parse(self, raw: bytes) -> Message:
        """Raises `ServeError`: it is no such message. A string that is no UTF-8 is a reason too."""
        try:
            return self._class.FromString(raw)
        except DecodeError:
            name = self._class.DESCRIPTOR.full_name
            raise ServeError(Kind.INVALID, f"the request is no valid {name}") from None

    async def read(self) -> Message | None:
        """The next request; None: the client sends no more."""
        raw = await self._context.read()
        return None if raw is aio.EOF else self.parse(raw)

    async def __aiter__(self) -> AsyncIterator[Message]:
        while (request := await self.read()) is not None:
            yield request

    async def write(self, message: Message) -> None:
        """Return when the transport has taken it. One write at a time."""
        self.writing_since = time.monotonic()
        if self._greeting is None:
            self._greeting = asyncio.ensure_future(self._context.send_initial_metadata(()))
        if not self._greeting.done():
            await asyncio.shield(self._greeting)
        await self._context.write(message.SerializeToString())
        self.writing_since = None

    # ---- its end

    def cut(self, error: ServeError) -> None:
        """End the call with ``error``, whatever its servicer does."""
        if self._cut is None and self._task is not None:
            self._cut = error
            self._task.cancel()

    async def refuse(self, error: ServeError) -> None:
        """Send ``error`` as the status. Where the client does not read, it waits behind what was written before, and
        so does this method: nothing else of the call is left then."""
        self.writing_since = None
        try:
            # Left to the first write, the initial metadata would be sent once more, with the status, if that write is
            # cancelled: gRPC refuses both then, and the client waits for ever.
            if self._greeting is not None:
                await self._greeting
            await status.abort(self._context, error)
        except aio.InternalError:  # the client has gone
            raise asyncio.CancelledError from None

    @property
    def cut_by(self) -> ServeError | None:
        return self._cut


class SlowReaders:
    """Cuts calls whose client takes nothing: one look at all of them now and then costs less than a timer per write.

    Args:
        seconds: that a write may wait for the client.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._calls: set[Rpc] = set()

    @contextlib.contextmanager
    def watching(self, rpc: Rpc) -> Iterator[None]:
        self._calls.add(rpc)
        try:
            yield
        finally:
            self._calls.discard(rpc)

    async def run(self) -> None:
        """Watch, until cancelled."""
        while True:
            await asyncio.sleep(min(1.0, self._seconds / 4))
            self.look(time.monotonic())

    def look(self, now: float) -> None:
        for rpc in list(self._calls):
            if rpc.writing_since is not None and now - rpc.writing_since > self._seconds:
                rpc.cut(ServeError(Kind.TOO_LARGE, f"the client has read nothing for {self._seconds:g} s"))


class Registrar:
    """Makes grpc.aio handlers of servicers.

    Args:
        authoriser: checks the keys.
        slow: is told of every call.
        observer: is told of every call's end.
    """

    def __init__(self, authoriser: Authoriser, slow: SlowReaders, observer: Observer | None = None) -> None:
        self._authoriser, self._slow, self._observer = authoriser, slow, observer

    def add(self, server: aio.Server, service: ServiceDescriptor, servicer: object, name: str | None = None) -> None:
        """Serve all methods of a service, under ``name`` if it has another one too.

        Raises:
            KeyError: a method of it is not in `SCOPES`.
        """
        name = name or service.full_name
        handlers = {method.name: self._handler(method, servicer, f"{name}/{method.name}") for method in service.methods}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))
        server.add_registered_method_handlers(name, handlers)

    def _handler(self, method: MethodDescriptor, servicer: object, path: str) -> grpc.RpcMethodHandler:
        scope, implementation = SCOPES[path], getattr(servicer, method.name)
        request_class = GetMessageClass(method.input_type)
        run = _streamed if method.server_streaming else _single

        async def handle(raw: Any, context: Any) -> bytes | None:
            rpc = Rpc(context, request_class)

            async def go() -> bytes | None:
                return await run(implementation, rpc, rpc if method.client_streaming else rpc.parse(raw))

            return await self._answer(rpc, path, scope, go)

        return _KINDS[method.client_streaming, method.server_streaming](handle)

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
            # Who does not read is refused late: the frames of what failed, and all that they hold, need not wait.
            error.__traceback__ = error.__context__ = error.__cause__ = None
            await rpc.refuse(error)
            return None
        finally:
            if self._observer is not None:
                self._observer(path, code, time.monotonic() - start)

    async def _guarded(self, rpc: Rpc, scope: str | None, run: Callable[[], Awaitable[bytes | None]]) -> bytes | None:
        """The one place where faults become answers. Raises `ServeError`, or what ends a call without one."""
        try:
            if scope is not OPEN:
                rpc.caller = self._authoriser.authorise(token_of(rpc.invocation_metadata()), scope)
            return await run()
        except asyncio.CancelledError:
            if rpc.cut_by is None:
                raise
            raise rpc.cut_by from None
        except aio.AbortError:
            raise
        except aio.InternalError:  # the transport's way to say that the client has gone
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


_KINDS = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}
