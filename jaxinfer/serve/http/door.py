"""State that the routes share, and the table of who may use which."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence

from jaxinfer.serve.auth import Authoriser
from jaxinfer.serve.calls import ServeLimits
from jaxinfer.serve.core.supervisor import READY, STARTING, Condition
from jaxinfer.serve.errors import ServeError
from jaxinfer.serve.faults import unavailable
from jaxinfer.serve.frontend import Frontend
from jaxinfer.serve.metrics import ServerMetrics
from jaxinfer.serve.reading import BodyReader
from jaxinfer.serve.request_log import RequestLog
from jaxinfer.types import LoRARef

INFER, OBSERVE, ADMIN = "infer", "observe", "admin"
OPEN: Mapping[str, None] = {"/health": None, "/ready": None}

SCOPES: Mapping[str, str | None] = {
    **OPEN,
    "/v1/completions": INFER,
    "/v1/chat/completions": INFER,
    "/v1/responses": INFER,
    "/v1/messages": INFER,
    "/v1/messages/count_tokens": INFER,
    "/v1/models": INFER,
    "/v1/models/{model:path}": INFER,
    "/tokenize": INFER,
    "/detokenize": INFER,
    "/version": INFER,
    "/docs": INFER,
    "/openapi.json": INFER,
    "/docs/{file}": INFER,
    "/metrics": OBSERVE,
    "/v1/load_lora_adapter": ADMIN,
    "/v1/unload_lora_adapter": ADMIN,
    "/reset_prefix_cache": ADMIN,
}
"""The scope that each route needs; None: no key at all. What is not listed is refused to those without a key too."""

_MODEL, _PAGE = "/v1/models/", "/docs/"


@dataclasses.dataclass
class Door:
    """One server's state. All of it belongs to the event loop.

    Attributes:
        frontend: None while the model is loading.
        authoriser: knows the keys; without a file of them everybody may do everything.
        engine: how that is; asked by /health, /ready and /metrics.
        version: jaxinfer's.
        requests: has a line for what is refused here.
        reasoning_fields: what messages call their reasoning.
        operated: operators may use their routes here: they are told apart by keys, or nobody else comes here.
        stream_ping_seconds: after so long a stream that waits gives a sign of life.
        long: reads long bodies.
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

    def __post_init__(self) -> None:
        self.long = BodyReader(self.limits)

    def serving(self) -> Frontend:
        """Raises `ServeError` UNAVAILABLE while there is nothing to serve."""
        if self.frontend is None:
            raise unavailable("the model is loading: try again later")
        return self.frontend

    @property
    def is_ready(self) -> bool:
        """Whether a generation would be accepted."""
        return self.condition.state == READY

    @property
    def condition(self) -> Condition:
        """The engine's, or why no generation would be accepted although it runs."""
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
        """Whether clients should take their next request elsewhere."""
        return self.frontend is not None and not self.frontend.is_open

    def refused(self, error: ServeError, state: Mapping[str, str]) -> None:
        """A request is answered by an error; ``state``: what the gate knows of it."""
        self.failed(error)
        self.requests.refused(error, state["route"], state["tenant"], state["request_id"])

    def failed(self, error: ServeError) -> None:
        """A client is told of an error."""
        self.metrics.http_errors.labels(error.kind.name.lower()).inc()


def route_of(path: str) -> str | None:
    """The entry of `SCOPES` that serves a path."""
    if path in SCOPES:
        return path
    if path.startswith(_PAGE):
        return "/docs/{file}"
    return "/v1/models/{model:path}" if path.startswith(_MODEL) else None


def fingerprint(frontend: Frontend, version: str, lora: LoRARef | None = None) -> str:
    """The same for servers that give the same answers: of program, model, adapter and settings."""
    card = frontend.card
    known = [version, card.name, card.architecture, card.dtype, {str(k): str(v) for k, v in card.engine.items()}]
    known += [] if lora is None else [lora.identity]
    return f"fp_{hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:10]}"
