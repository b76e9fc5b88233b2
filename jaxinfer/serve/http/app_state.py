"""State shared by all HTTP routes."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from jaxinfer.serve.api.auth import Authoriser
from jaxinfer.serve.api.errors import ServeError, unavailable
from jaxinfer.serve.api.requests import ServeLimits
from jaxinfer.serve.core.supervisor import READY, STARTING, Condition
from jaxinfer.serve.frontend.frontend import Frontend
from jaxinfer.serve.frontend.operations import Operations
from jaxinfer.serve.telemetry.metrics import ServerMetrics
from jaxinfer.serve.telemetry.request_log import RequestLog
from jaxinfer.serve.workers.tasks import BodyReader
from jaxinfer.types import LoRARef


@runtime_checkable
class Profiler(Protocol):
    """Profiler of the engine; see `jaxinfer.serve.core.supervisor.Supervisor`."""

    async def start_profile(self, steps: int) -> None: ...
    async def stop_profile(self) -> str: ...


@dataclasses.dataclass
class AppState:
    """State of the HTTP API server; used only from the event loop.

    Attributes:
        frontend: None while the model is loading.
        authoriser: checks API keys; without a keys file every client has all scopes.
        engine: returns the engine's condition; read by /health, /ready and /metrics.
        version: version of jaxinfer.
        requests: request log, which records rejected requests.
        reasoning_fields: names of the reasoning field in messages.
        operated: whether admin routes are served: operators have API keys, or only operators can reach this server.
        stream_ping_seconds: seconds of silence after which a waiting stream sends a keep-alive.
        operations: what operators may change; None: nothing.
        profiler: takes device profiles; None: there is no folder for them.
        long: parses long bodies.
    """

    version: str
    limits: ServeLimits = dataclasses.field(default_factory=ServeLimits)
    authoriser: Authoriser = dataclasses.field(default_factory=lambda: Authoriser(None))
    frontend: Frontend | None = None
    engine: Callable[[], Condition] = lambda: Condition(READY)
    metrics: ServerMetrics = dataclasses.field(default_factory=ServerMetrics)
    requests: RequestLog = dataclasses.field(default_factory=lambda: RequestLog(enabled=False))
    reasoning_fields: Sequence[str] = ("reasoning", "reasoning_content")
    operated: bool = True
    stream_ping_seconds: float = 5.0
    operations: Operations | None = None
    profiler: Profiler | None = None

    def __post_init__(self) -> None:
        self.long = BodyReader(self.limits)

    def serving(self) -> Frontend:
        """Return the front end. Raises `ServeError` UNAVAILABLE while the model is loading."""
        if self.frontend is None:
            raise unavailable("the model is loading: try again later")
        return self.frontend

    @property
    def is_ready(self) -> bool:
        """Whether a generation would be accepted."""
        return self.condition.state == READY

    @property
    def condition(self) -> Condition:
        """The engine's condition, or the reason why generations are rejected although the engine runs."""
        found = self.engine()
        if found.state != READY:
            return found
        if self.frontend is None:
            return Condition(STARTING, "the model is loading")
        if not self.frontend.is_open:
            return Condition("draining", "the server is draining")
        return found

    @property
    def is_leaving(self) -> bool:
        """Whether the server is draining, so that clients should send their next request elsewhere."""
        return self.frontend is not None and not self.frontend.is_open

    def refused(self, error: ServeError, state: Mapping[str, str]) -> None:
        """Record that a request is answered with an error. ``state``: request state set by the gate."""
        self.failed(error)
        self.requests.refused(error, state["route"], state["tenant"], state["request_id"])

    def failed(self, error: ServeError) -> None:
        """Count an error that was sent to a client."""
        self.metrics.http_errors.labels(error.kind.name.lower()).inc()


def fingerprint(frontend: Frontend, version: str, lora: LoRARef | None = None) -> str:
    """Return a hash of version, model, adapter and engine settings: equal for servers that give equal outputs."""
    card = frontend.card
    known = [version, card.name, card.architecture, card.dtype, {str(k): str(v) for k, v in card.engine.items()}]
    known += [] if lora is None else [lora.identity]
    return f"fp_{hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:10]}"
