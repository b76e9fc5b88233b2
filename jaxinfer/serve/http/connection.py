"""Connections that cannot be held open for nothing.

uvicorn bounds how long an idle connection is kept, and the application what a body may hold. What is bounded here:
the size of a request's head, the time for the head and again for the body, how long a client may leave an answer
unread, and how many connections there are. One sweep a second looks at all of them: a token costs nothing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Callable, Coroutine
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from jaxinfer.serve.http.gate import CROWDED

SPARE = 64
"""Connections beyond those that are allowed which are still answered: with 503, but for /health and /ready."""


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Of one connection, but for ``connections``.

    Attributes:
        connections: at once.
        head_bytes: of the request line and the headers.
        waste_bytes: of what a client goes on to send after an answer that ends its connection.
        read_seconds: for a request's head, and again for its body.
        stall_seconds: for which a client may leave unread what was sent.
    """

    connections: int = 1024
    head_bytes: int = 64 << 10
    waste_bytes: int = 16 << 20
    read_seconds: float = 10.0
    stall_seconds: float = 30.0


class Connection(HttpToolsProtocol):
    """uvicorn's connection within bounds.

    Args:
        bounds: see there.
        cut: told why a connection is closed on its client: "connections", "head", "body" or "reader".
        settings: of uvicorn.
    """

    def __init__(self, *, bounds: Bounds, cut: Callable[[str], None], **settings: Any) -> None:
        super().__init__(**settings)
        self._bounds, self._cut = bounds, cut
        self._due: float | None = None  # when what is being read must be there
        self._in_head = self._in_body = False
        self._head_bytes = self._waste = 0
        self._refusal: tuple[int, str] | None = None
        self._ending = False  # the last answer is written: what still comes is thrown away
        self._early = False  # an answer began before its request's body was there
        self._stalled: tuple[int, float] | None = None  # unread bytes, and since when they are no fewer

    # ---- asyncio's side

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect()
        crowd = len(self.connections) - self._bounds.connections
        if crowd > SPARE:
            self._close("connections")
        elif crowd > 0:
            self.app = _crowded(self.app)

    def data_received(self, data: bytes) -> None:
        if self._ending:
            self._discard(len(data))
            return
        began = self._in_head
        super().data_received(data)
        if self._ending or self.transport.is_closing():
            return
        if self._in_head and began:  # what a head holds that is not complete is known from outside only
            self._count_head(len(data))
        elif not (self._in_head or self._in_body) and self.timeout_keep_alive_task is None and self._idle:
            self._due = self._due or self._expect()  # blank lines keep no connection open

    def send_400_response(self, msg: str) -> None:
        """uvicorn's answer to what is no HTTP, in OpenAI's shape."""
        if self._ending:
            return
        status, message = self._refusal or (400, msg)
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
        body = json.dumps({"error": error}).encode()
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        if not self._idle:  # an answer is under way, and this would be taken for a part of it
            self.transport.close()
            return
        self.transport.write(STATUS_LINE[status] + head + body)
        self._linger()

    # ---- the parser's side

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0
        self._expect()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._parsed(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._parsed(len(name) + len(value))

    def on_headers_complete(self) -> None:
        self._in_head, self._in_body = False, True
        super().on_headers_complete()
        self._watch_answer(self.cycle)
        if self.flow.read_paused:  # an earlier request is being answered
            self._due = None
        else:
            self._expect()

    def on_message_complete(self) -> None:
        self._in_body, self._due = False, None
        super().on_message_complete()

    # ---- answers

    def on_response_complete(self) -> None:
        if self._early:
            self.pipeline.clear()
        super().on_response_complete()
        if self._early and not self.transport.is_closing():
            self._unset_keepalive_if_required()
            self._linger()

    def _watch_answer(self, cycle: RequestResponseCycle) -> None:
        """See whether its answer begins before the request's body is there: a refusal that nobody needs to read for."""
        plain = cycle.send

        def send(message: Message) -> Coroutine[Any, Any, None]:
            early = message["type"] == "http.response.start" and cycle.more_body
            return self._answer_early(cycle, plain, message) if early else plain(message)  # type: ignore[arg-type]

        cycle.send = send  # type: ignore[method-assign, assignment]

    async def _answer_early(self, cycle: RequestResponseCycle, send: Send, message: Message) -> None:
        """The rest of the body would be taken for the next request's head, or read for nothing: no request follows."""
        self._early = True
        cycle.keep_alive = False  # says so to the client
        await send(message)
        cycle.keep_alive = True  # uvicorn would close at once

    def _linger(self) -> None:
        """Nothing more is said. What the client goes on to send is read for a while and thrown away: closing at once
        would reset the connection, and the client would never see the answer."""
        self._ending, self._in_head, self._in_body, self._waste = True, False, True, 0
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._expect()

    # ---- the sweep

    def sweep(self, now: float) -> None:
        """Close the connection if its time is up; ``now`` as `time.monotonic`."""
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
        """Nothing is written meanwhile, so what is left can only become less."""
        left = self.transport.get_write_buffer_size()
        if self._stalled is None or left < self._stalled[0]:
            self._stalled = left, now
        elif now - self._stalled[1] >= self._bounds.stall_seconds:
            self._close("reader")

    # ----

    @property
    def _idle(self) -> bool:
        """No request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _expect(self) -> float:
        self._due = time.monotonic() + self._bounds.read_seconds
        return self._due

    def _parsed(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > self._bounds.head_bytes:
            self._refusal = self._too_large
            raise ValueError(self._too_large[1])  # stops the parser, which ends in send_400_response

    def _count_head(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > self._bounds.head_bytes:
            self._refusal = self._too_large
            self.send_400_response("")

    @property
    def _too_large(self) -> tuple[int, str]:
        return 431, f"the head of the request is larger than {self._bounds.head_bytes} bytes"

    def _discard(self, size: int) -> None:
        self._waste += size
        if self._waste > self._bounds.waste_bytes:
            self._close("body")

    def _close(self, reason: str) -> None:
        if not self.transport.is_closing():
            self._cut(reason)
        self.transport.abort()


def _crowded(app: ASGIApp) -> ASGIApp:
    async def marked(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, CROWDED: True}, receive, send)

    return marked
