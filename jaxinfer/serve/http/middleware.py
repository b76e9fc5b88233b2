"""Outermost ASGI middleware: request ids, authorisation, metrics and last-resort error handling."""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import Iterable, Mapping

from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from jaxinfer.serve.api import ignored
from jaxinfer.serve.api.errors import Kind, ServeError, answer_to, unavailable
from jaxinfer.serve.http.anthropic import errors as anthropic
from jaxinfer.serve.http.app_state import AppState
from jaxinfer.serve.http.errors import error_body, error_headers
from jaxinfer.serve.telemetry.request_log import asked

CROWDED = "jaxinfer.crowded"
"""Scope key, set for requests on connections above the connection limit."""
ALLOWED = "jaxinfer.allowed"
"""Scope key, set for requests that were authorised; not for routes that are open to all."""

CERTIFICATE = "jaxinfer.certificate"
"""Scope key for the verified client certificate of the connection, as DER."""

INFER, OBSERVE, ADMIN = "infer", "observe", "admin"
_UNKNOWN = "other"  # metric label for unknown paths, which clients choose freely
_MAX_ID = 128


class AuthMiddleware:
    """ASGI middleware around the application.

    Args:
        scopes: scope that each route requires; None: no API key. An unknown path requires `INFER`, so that clients
            without a key cannot find out which paths exist.

    Attributes:
        inner: the application.
    """

    def __init__(self, app: FastAPI, door: AppState, scopes: Mapping[str, str | None]) -> None:
        self.inner, self._door, self._scopes = app, door, scopes
        self._prefixes = {path.partition("{")[0]: path for path in scopes if "{" in path}

    def _route(self, path: str) -> str | None:
        """Return the route that serves a path."""
        if path in self._scopes:
            return path
        return next((route for prefix, route in self._prefixes.items() if path.startswith(prefix)), None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        route = self._route(scope["path"])
        answer = _Answer(send, request_id(Headers(scope=scope)), route, last=self._door.is_leaving)
        metrics = self._door.metrics
        named, leash = route or _UNKNOWN, _Leash()
        asked(named, scope["path"], ":".join(map(str, scope.get("client") or ())))
        with metrics.http_in_flight.track_inprogress(), metrics.http_seconds.labels(named).time():
            try:
                with self._enter(scope, route, answer.request_id, leash), ignored.collecting() as answer.ignored:
                    await self.inner(scope, receive, answer.send)
            except asyncio.CancelledError:
                await self._end(leash.taken(), scope, receive, answer)
            except Exception as error:  # noqa: BLE001 - the border of the server: every fault gets an answer
                await self._refuse(error, scope, receive, answer)
        metrics.http_requests.labels(named, str(answer.status)).inc()

    def _enter(
        self, scope: Scope, route: str | None, request_id: str, leash: _Leash
    ) -> contextlib.AbstractContextManager[None]:
        """Authorise a request and watch its key within the context. Raises `ServeError` if it is not allowed."""
        state = scope.setdefault("state", {})
        state["request_id"], state["tenant"], state["route"] = request_id, "", route or _UNKNOWN
        needed = INFER if route is None else self._scopes[route]
        if needed is None:
            return contextlib.nullcontext()
        if scope.get(CROWDED):
            raise unavailable("too many connections: try again later")
        if needed == ADMIN and not self._door.operated:
            raise ServeError(
                Kind.FORBIDDEN, f"{route} is for operators, whom nothing tells apart here without api_keys"
            )
        key = api_key(Headers(scope=scope))
        caller = self._door.authoriser.authorise(key, needed, lambda: scope.get(CERTIFICATE))
        state["tenant"], scope[ALLOWED] = caller.name, True
        return self._door.authoriser.during(caller, needed, leash.cut)

    async def _end(self, error: ServeError, scope: Scope, receive: Receive, answer: _Answer) -> None:
        """End a request whose task was cancelled; an event stream ends with an error event, like any failed stream."""
        if not answer.streams:
            if not answer.status:
                await self._refuse(error, scope, receive, answer)
            return
        self._door.refused(error, scope["state"])
        told = b"event: error\ndata: " + error_json(error, scope["state"]) + b"\n\n"
        await answer.send({"type": "http.response.body", "body": told, "more_body": True})
        await answer.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _refuse(self, error: Exception, scope: Scope, receive: Receive, answer: _Answer) -> None:
        if answer.status:  # the status is sent already: the connection is closed before the response is complete
            raise error
        refusal = answer_to(error)
        self._door.refused(refusal, scope["state"])
        response = error_response(refusal, scope["state"])
        if scope.get(CROWDED):
            response.headers["connection"] = "close"
        await response(scope, receive, answer.send)


class _Leash:
    """Cancels the task of a request when its API key is revoked, and keeps the reason."""

    def __init__(self) -> None:
        self._task = asyncio.current_task()
        self._error: ServeError | None = None

    def cut(self, error: ServeError) -> None:
        if self._error is None and self._task is not None:
            self._error = error
            self._task.cancel()

    def taken(self) -> ServeError:
        """Clear the cancellation and return its reason: the error given to `cut`, or else that the server stops."""
        assert self._task is not None
        self._task.uncancel()
        return self._error or unavailable("the server stops: try another, or later")


class _Answer:
    """Sender of a response that records the status (0: nothing sent yet) and whether it is an event stream.

    Args:
        last: close the connection after the response: the server drains, and clients should reconnect elsewhere.

    Attributes:
        ignored: fields that have no effect.
    """

    def __init__(self, send: Send, request_id: str, route: str | None, *, last: bool = False) -> None:
        self._last = last
        self._names = ("x-request-id", *(("request-id",) if route in anthropic.ROUTES else ()))
        self._send, self.request_id, self.status, self.streams = send, request_id, 0, False
        self.ignored: list[str] = []

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(raw=message["headers"])
            for name in self._names:
                headers.setdefault(name, headers.get("x-request-id", self.request_id))
            if self._last:
                headers["connection"] = "close"
            if self.ignored and self.status < 400:
                headers[ignored.HEADER] = ignored.header_of(self.ignored)
            self.streams = headers.get("content-type", "").startswith("text/event-stream")
        elif not message.get("more_body"):
            self.streams = False
        await self._send(message)


def error_response(error: ServeError, state: Mapping[str, str]) -> Response:
    return Response(error_json(error, state), error.kind.http, error_headers(error), "application/json")


def error_json(error: ServeError, state: Mapping[str, str], *, code: str | None = None) -> bytes:
    """Return the error body in the format of the route's API.

    Args:
        state: request state set by the gate.
        code: see `jaxinfer.serve.http.errors.error_body`.
    """
    if state["route"] in anthropic.ROUTES:
        return json.dumps(anthropic.error_body(error, state["request_id"])).encode()
    return json.dumps(error_body(error, code=code)).encode()


def request_id(headers: Headers) -> str:
    """Return the header X-Request-Id if it is usable, else a new id."""
    sent = headers.get("x-request-id", "")
    return sent if usable_id(sent) else uuid.uuid4().hex


def usable_id(text: str) -> bool:
    """Whether ``text`` is usable both as a request id and as a header value."""
    return 0 < len(text) <= _MAX_ID and text.isascii() and text.isprintable()


def api_key(headers: Headers) -> str | None:
    """Return the key of ``Authorization: Bearer`` or Anthropic's ``X-Api-Key``; None if several keys differ."""
    sent = {text.strip() for text in headers.getlist("x-api-key")}
    if not sent:
        return bearer(headers)
    if "authorization" in headers:
        sent.add(bearer(headers) or "")
    return sent.pop() or None if len(sent) == 1 else None


def bearer(headers: Headers) -> str | None:
    """Return the key of ``Authorization: Bearer``; None if there are several such headers."""
    values: Iterable[str] = headers.getlist("authorization")
    kinds = [text.strip().partition(" ") for text in values]
    if len(kinds) != 1 or kinds[0][0].lower() != "bearer":
        return None
    return kinds[0][2].strip() or None
