"""HTTP connections with limits on size, time and count, so that clients cannot hold them open without cost.

uvicorn limits how long an idle connection is kept, and the application limits the body. This module limits the size of
the head and of the body framing, the time for the head and for the body, the number of pipelined requests, the time for
which a client may leave a response unread, and the number of connections: above the limit, the longest idle one is
closed. One sweep per second checks all connections, so there is no cost per token.

Ambiguous heads are rejected (`jaxinfer.serve.http.framing`), trailers are never treated as headers, and protocol
upgrades are not supported.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from jaxinfer.serve.http import connection_eviction, framing
from jaxinfer.serve.http.middleware import ALLOWED, CERTIFICATE, CROWDED
from jaxinfer.serve.runtime.descriptors import SPARE

_CHUNK_BYTES = 24
"""Bytes that frame a chunk without extensions: its size (as long as a 64-bit size may be) and line endings."""


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Limits of one connection, except ``connections``.

    Attributes:
        connections: connections of the server at the same time.
        pipelined: requests that wait for the responses to earlier ones.
        head_bytes: bytes of the request line and headers; the same limit applies to the trailers of a body and to its
            chunk framing.
        waste_bytes: bytes that a client may still send after a response that ends its connection.
        read_seconds: seconds for the head of a request, and again for its body.
        stall_seconds: seconds for which a client may leave sent data unread.
    """

    connections: int = 1024
    pipelined: int = 32
    head_bytes: int = 64 << 10
    waste_bytes: int = 16 << 20
    read_seconds: float = 10.0
    stall_seconds: float = 30.0


class Connection(HttpToolsProtocol):
    """uvicorn's HTTP connection with limits.

    Args:
        bounds: the limits.
        waiting: idle connections of the whole server.
        cut: called with the reason when a connection is closed: "connections", "head", "body" or "reader".
        settings: arguments of uvicorn's protocol.
    """

    def __init__(
        self, *, bounds: Bounds, waiting: connection_eviction.Idle, cut: Callable[[str], None], **settings: Any
    ) -> None:
        super().__init__(**settings)
        self._bounds, self._waiting, self._cut = bounds, waiting, cut
        self._account = connection_eviction.STRANGER
        self._due: float | None = None  # deadline of the head or body that is being read
        self._in_head = self._in_body = False
        self._head_bytes = self._framing = self._waste = 0
        self._active: RequestResponseCycle | None = None  # the last request that was started
        self._upgrading = False  # the current request asks for an upgrade and is parsed again without it
        self._refusal: tuple[int, str] | None = None
        self._broken: bytes | None = None  # last response, to unparsable input: sent after all other responses
        self._ending = False  # the last response is written: further input is discarded
        self._early = False  # a response started before its request body was complete
        self._stalled: tuple[int, float] | None = None  # unread bytes, and the time since they last decreased

    # ---- asyncio callbacks

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect()
        if (certificate := _certificate(transport)) is not None:
            self.app = _marked(self.app, CERTIFICATE, certificate)
        crowd = len(self.connections) - self._bounds.connections
        if crowd > 0 and not self._waiting.make_room(connection_eviction.STRANGER, connection_eviction.KNOWN):
            if crowd > SPARE and not self._waiting.make_room(connection_eviction.CROWDED):
                self._close("connections")
                return
            self._account, self.app = connection_eviction.CROWDED, _marked(self.app, CROWDED, True)
        self._waiting.add(self, self._account)

    def give_way(self) -> None:
        """Close the connection because another one needs the slot."""
        if self._account == connection_eviction.KNOWN:
            self._cut("connections")
            self.transport.close()  # close() still flushes the last response
        else:
            self.connections.discard(self)
            self._close("connections")

    def data_received(self, data: bytes) -> None:
        if self._ending or self._broken is not None:
            self._discard(len(data))
            return
        in_head, in_body = self._in_head, self._in_body
        self._unset_keepalive_if_required()
        self._parse(data)
        if self._ending or self._broken is not None or self.transport.is_closing():
            return
        if self._in_head and in_head:  # the parser reports only complete elements: count bytes of incomplete ones here
            self._count_head(len(data))
        elif self._in_body and in_body:
            self._count_framing(len(data))
        elif not (self._in_head or self._in_body) and self.timeout_keep_alive_task is None and self._idle:
            self._due = self._due or self._expect()  # blank lines must not keep a connection open

    def connection_lost(self, exc: Exception | None) -> None:
        self._waiting.discard(self)
        if self._active is not None and not self._active.response_complete:  # uvicorn notifies only the last request
            self._active.disconnected = True
            self._active.message_event.set()
        super().connection_lost(exc)

    def _parse(self, data: bytes) -> None:
        """Parse input; requests for a protocol upgrade are answered in HTTP/1.1 (RFC 9110, 7.8). The parser would treat
        the body as data of the new protocol, so a new parser gets the request without its ``Upgrade`` header."""
        try:
            while (rest := self._fed(data)) is not None:
                self.parser, data = self._new_parser(), rest
        except httptools.HttpParserError:
            message = "Invalid HTTP request received."
            self.logger.warning(message)
            self.send_400_response(message)

    def _fed(self, data: bytes) -> bytes | None:
        """Feed the parser. Return the bytes that a new parser must read from the start, or None."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            version = self.parser.get_http_version()
            head = framing.without_upgrade(self.parser.get_method(), version, self.url, self.headers)
            return head + data[upgrade.args[0] :]
        return None

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as in uvicorn: such data is discarded
        return parser

    def send_400_response(self, msg: str) -> None:
        """Answer input that is not valid HTTP, in OpenAI's error format, after the responses to earlier requests."""
        if self._ending or self._broken is not None:
            return
        status, message = self._refusal or self._version_refusal or (400, msg)
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
        body = json.dumps({"error": error}).encode()
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        self._broken = STATUS_LINE[status] + head + body
        if self._in_body:
            self._drop_request()
        self._end_broken()

    def _drop_request(self) -> None:
        """Drop the request whose body cannot be parsed, without a response from the application unless it has
        started."""
        if self.pipeline and self.pipeline[0][0] is self.cycle:
            self.pipeline.popleft()
        elif self._active is not None and not self._active.response_started:
            self._active.disconnected = self._active.response_complete = True
            self._active.message_event.set()

    def _end_broken(self) -> None:
        """Send the error response if all earlier requests are answered."""
        if self._broken is not None and self._idle and not self.transport.is_closing():
            self._unset_keepalive_if_required()
            self.transport.write(self._broken)
            self._linger()

    # ---- parser callbacks

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes, self._framing = True, 0, 0
        self._upgrading = False
        self._expect()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._parsed(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # else it is a trailer: the application may have read the headers already
            super().on_header(name, value.rstrip(b" \t"))
        self._parsed(len(name) + len(value))

    def on_headers_complete(self) -> None:
        method, version = self.parser.get_method(), self.parser.get_http_version()
        if (fault := framing.fault_of(method, version, self.url, self.headers)) is not None:
            self._refuse(*fault)
        if len(self.pipeline) >= self._bounds.pipelined:
            self._refuse(400, f"more than {self._bounds.pipelined} requests wait on this connection")
        if self.parser.should_upgrade():
            self._upgrading = True
            return
        self._in_head, self._in_body, self._head_bytes = False, True, 0
        self.expect_100_continue = self.expect_100_continue and version != "1.0"
        super().on_headers_complete()
        self._waiting.discard(self)
        self._watch_answer(self.cycle)
        if self.flow.read_paused:  # an earlier request is being answered
            self._due = None
        else:
            self._expect()

    def on_chunk_header(self) -> None:
        self._framing -= _CHUNK_BYTES

    def on_body(self, body: bytes) -> None:
        self._framing -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._upgrading:
            return
        self._in_body, self._due = False, None
        super().on_message_complete()

    # ---- responses

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._active = cycle
        if cycle.more_body:
            self._expect()  # the time limit of its body did not run while it waited for an earlier response
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        if self._early:
            self.pipeline.clear()
        if self._account == connection_eviction.STRANGER and self.cycle.scope.get(ALLOWED):
            self._account = connection_eviction.KNOWN
        super().on_response_complete()
        if self._idle and not self.transport.is_closing():
            self._waiting.add(self, self._account)
        if self._early and not self.transport.is_closing():
            self._unset_keepalive_if_required()
            self._linger()
        else:
            self._end_broken()

    def _watch_answer(self, cycle: RequestResponseCycle) -> None:
        """Detect a response that starts before the request body is complete, such as a rejection."""
        plain = cycle.send

        def send(message: Message) -> Coroutine[Any, Any, None]:
            early = message["type"] == "http.response.start" and cycle.more_body
            return self._answer_early(cycle, plain, message) if early else plain(message)  # type: ignore[arg-type]

        cycle.send = send  # type: ignore[method-assign, assignment]

    async def _answer_early(self, cycle: RequestResponseCycle, send: Send, message: Message) -> None:
        """Send a response before the body is complete and then end the connection: the rest of the body would be parsed
        as the next request's head, or read for nothing."""
        self._early = True
        cycle.keep_alive = False  # adds "connection: close"
        await send(message)
        cycle.keep_alive = True  # otherwise uvicorn would close at once

    def _linger(self) -> None:
        """Stop writing, and discard what the client still sends for a while: closing at once would reset the
        connection, and the client would not see the response."""
        self._ending, self._in_head, self._in_body, self._waste = True, False, True, 0
        try:
            if self.transport.can_write_eof():
                self.transport.write_eof()
        except OSError:  # the client has disconnected, which was not reported yet
            self.transport.close()
        self._expect()

    # ---- the sweep

    def sweep(self, now: float) -> None:
        """Close the connection if its time is up. ``now``: time of `time.monotonic`."""
        if self._due is not None and now >= self._due:
            self._overdue()
        elif self.flow.write_paused or self.transport.is_closing():
            self._watch_reader(now)
        else:
            self._stalled = None

    def _overdue(self) -> None:
        self._due = None
        if self._in_body:
            self._close("body")
        else:
            self._cut("head")
            self._refusal = 408, "the head of the request did not come in time"
            self.send_400_response("")

    def _watch_reader(self, now: float) -> None:
        """Close the connection of a client that does not read. The buffer can only shrink: nothing is written
        meanwhile."""
        left = self.transport.get_write_buffer_size()
        if self._stalled is None or left < self._stalled[0]:
            self._stalled = left, now
        elif now - self._stalled[1] >= self._bounds.stall_seconds:
            self._close("reader")

    # ---- helpers

    @property
    def _idle(self) -> bool:
        """Whether no request is being answered or waiting."""
        return not self.pipeline and (self._active is None or self._active.response_complete)

    def _expect(self) -> float:
        self._due = time.monotonic() + self._bounds.read_seconds
        return self._due

    def _refuse(self, status: int, message: str) -> NoReturn:
        """Stop the parser; uvicorn then calls `send_400_response`."""
        self._refusal = status, message
        raise ValueError(message)

    def _parsed(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > self._bounds.head_bytes:
            self._refuse(*self._too_large)

    def _count_head(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > self._bounds.head_bytes:
            self._refusal = self._too_large
            self.send_400_response("")

    def _count_framing(self, size: int) -> None:
        """Count the bytes of a data block within one body; `on_body` subtracts the body content."""
        self._framing += size
        if self._framing > self._bounds.head_bytes:
            self._refusal = 431, f"the body has more than {self._bounds.head_bytes} bytes beside its contents"
            self.send_400_response("")

    @property
    def _too_large(self) -> tuple[int, str]:
        where = "head" if self._in_head else "trailer"
        return 431, f"the {where} of the request is larger than {self._bounds.head_bytes} bytes"

    @property
    def _version_refusal(self) -> tuple[int, str] | None:
        """Status and message for an HTTP version that the parser itself rejected."""
        version = self.parser.get_http_version() if self._in_head else framing.VERSIONS[0]
        known = version in ("0.0", *framing.VERSIONS)  # 0.0: the version was not read yet
        return None if known else (505, f"HTTP/{version} is not served")

    def _discard(self, size: int) -> None:
        self._waste += size
        if self._waste > self._bounds.waste_bytes:
            self._close("body")

    def _close(self, reason: str) -> None:
        if not self.transport.is_closing():
            self._cut(reason)
        self.transport.abort()


def _certificate(transport: asyncio.Transport) -> bytes | None:
    """Return the client certificate as DER, None if the server does not request one."""
    tls = transport.get_extra_info("ssl_object")
    return None if tls is None else tls.getpeercert(binary_form=True)


def _marked(app: ASGIApp, name: str, value: object) -> ASGIApp:
    async def marked(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, name: value}, receive, send)

    return marked
