"""Request log: tenant, token counts, durations and finish reason of each request, never its text. No jax."""

from __future__ import annotations

import contextvars
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from jaxinfer.serve.api.errors import Kind, ServeError
from jaxinfer.serve.api.requests import Call, Usage
from jaxinfer.serve.api.tenants import own_id
from jaxinfer.serve.runtime.logs import REQUESTS
from jaxinfer.types import Request

REFUSED = "jaxinfer.serve.refusals"
"""Logger of rejected requests, which cost next to nothing: above a rate they are only counted (`logs.RateLimit`)."""

_asked = contextvars.ContextVar[Mapping[str, str]]("asked", default=MappingProxyType({}))
_MOST_CHARACTERS = 200  # characters of a path

_ended, _refused = logging.getLogger(REQUESTS), logging.getLogger(REFUSED)


def asked(route: str, path: str, peer: str) -> None:
    """Record route, path and client address of this task's request, for the log line of a rejection."""
    _asked.set({"route": route, **({} if path == route else {"path": path[:_MOST_CHARACTERS]}), "peer": peer})


class RequestLog:
    """A log with one line for each ended request.

    Args:
        enabled: whether lines are written.
        clock: clock in seconds.
    """

    def __init__(self, enabled: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        self.enabled, self._clock = enabled, clock

    def begin(self, call: Call) -> RequestLine:
        """Begin the log line of a call."""
        return RequestLine(call, self._clock)

    def refused(self, error: ServeError, route: str, key: str = "", request_id: str | None = None) -> None:
        """Log a request that an API server has rejected, unless it is already logged.

        Args:
            route: HTTP route, or method of an RPC.
            key: name of the client's API key, if it has one.
        """
        if self.enabled and not error.logged and error.kind is not Kind.CANCELLED:
            _refusal(error, {"request_id": request_id, "key": key or None, "route": route})


class RequestLine:
    """The log line of one request, as a `jaxinfer.serve.telemetry.tracing.Trace`."""

    __slots__ = ("_clock", "_first", "_key", "_request_id", "_start")

    def __init__(self, call: Call, clock: Callable[[], float]) -> None:
        self._request_id, self._key = call.request_id, call.tenant or None
        self._clock, self._start = clock, clock()
        self._first: float | None = None

    def accepted(self, request: Request) -> None:
        self._request_id = own_id(request.request_id)

    def token(self) -> None:
        self._first = self._clock() - self._start

    def finished(self, usage: Usage, reasons: Sequence[str]) -> None:
        _ended.info("ended", extra=_known(self._about(usage) | {"finish": ",".join(dict.fromkeys(reasons))}))

    def failed(self, error: ServeError, usage: Usage | None = None) -> None:
        about = self._about(usage)
        if usage is None:
            _refusal(error, about)
            return
        error.logged = True
        _ended.info("ended", extra=_known(about | _fault(error)))

    def _about(self, usage: Usage | None) -> dict[str, object]:
        about: dict[str, object] = {"request_id": self._request_id, "key": self._key}
        if usage is not None:
            about |= {"prompt_tokens": usage.prompt, "cached_tokens": usage.cached, "output_tokens": usage.completion}
        return about | {"ttft": _seconds(self._first), "seconds": _seconds(self._clock() - self._start)}


def _refusal(error: ServeError, about: dict[str, object]) -> None:
    error.logged = True
    _refused.info("refused", extra=_known({**_asked.get(), **about, **_fault(error)}))


def _fault(error: ServeError) -> dict[str, object]:
    """Return kind and field of an error, without its message, which may contain client input."""
    return {"error": error.kind.name.lower(), "field": error.field, "fault": error.fault}


def _known(about: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in about.items() if value is not None}


def _seconds(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
