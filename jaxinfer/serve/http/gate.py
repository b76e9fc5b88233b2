"""What every request passes: its id, its key, its figures, and the last word on what goes wrong."""

from __future__ import annotations

import uuid
from collections.abc import Iterable

from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from jaxinfer.serve.errors import ServeError
from jaxinfer.serve.faults import answer_to, unavailable
from jaxinfer.serve.http.door import INFER, OPEN, SCOPES, Door, route_of
from jaxinfer.serve.http.errors import error_headers, error_json

CROWDED = "jaxinfer.crowded"
"""Set in the scope of requests on connections beyond those that are allowed."""

_UNKNOWN = "other"  # paths are the client's own: as labels they would have no bound
_MAX_ID = 128


class Gate:
    """ASGI, around the application.

    A request without a key reaches nothing but `door.OPEN`: a route that is not in the table needs one too.

    Attributes:
        inner: the application.
    """

    def __init__(self, app: FastAPI, door: Door) -> None:
        self.inner, self._door = app, door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        route = route_of(scope["path"])
        answer = _Answer(send, request_id(Headers(scope=scope)))
        metrics = self._door.metrics
        named = route or _UNKNOWN
        with metrics.http_in_flight.track_inprogress(), metrics.http_seconds.labels(named).time():
            try:
                self._enter(scope, route, answer.request_id)
                await self.inner(scope, receive, answer.send)
            except Exception as error:  # noqa: BLE001 - the border of the server: every fault gets an answer
                await self._refuse(error, scope, receive, answer)
        metrics.http_requests.labels(named, str(answer.status)).inc()

    def _enter(self, scope: Scope, route: str | None, request_id: str) -> None:
        """Raises `ServeError` for those who may not."""
        state = scope.setdefault("state", {})
        state["request_id"], state["tenant"] = request_id, ""
        if route in OPEN:
            return
        if scope.get(CROWDED):
            raise unavailable("too many connections: try again later")
        needed = INFER if route is None else SCOPES[route]
        assert needed is not None
        state["tenant"] = self._door.authoriser.authorise(bearer(Headers(scope=scope)), needed).name

    async def _refuse(self, error: Exception, scope: Scope, receive: Receive, answer: _Answer) -> None:
        if answer.status:  # too late to say anything: the connection is closed before the answer is complete
            raise error
        refusal = answer_to(error)
        self._door.failed(refusal)
        response = error_response(refusal)
        if scope.get(CROWDED):
            response.headers["connection"] = "close"
        await response(scope, receive, answer.send)


class _Answer:
    """Sends, and notices the status. 0: nothing is sent yet."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send, self.request_id, self.status = send, request_id, 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(raw=message["headers"]).setdefault("x-request-id", self.request_id)
        await self._send(message)


def error_response(error: ServeError) -> Response:
    return Response(error_json(error), error.kind.http, error_headers(error), "application/json")


def request_id(headers: Headers) -> str:
    """The header X-Request-Id, where it can be used as it is, else a new one."""
    given = headers.get("x-request-id", "")
    return given if usable_id(given) else uuid.uuid4().hex


def usable_id(text: str) -> bool:
    """Whether it can be both an id and a header."""
    return 0 < len(text) <= _MAX_ID and text.isascii() and text.isprintable()


def bearer(headers: Headers) -> str | None:
    """The key of ``Authorization: Bearer``. Of several such headers none counts."""
    given: Iterable[str] = headers.getlist("authorization")
    kinds = [text.strip().partition(" ") for text in given]
    if len(kinds) != 1 or kinds[0][0].lower() != "bearer":
        return None
    return kinds[0][2].strip() or None
