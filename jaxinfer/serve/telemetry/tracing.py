"""OpenTelemetry tracing: a span for each generation, in the conventions for generative AI. No jax.

https://opentelemetry.io/docs/specs/semconv/gen-ai/
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from jaxinfer.serve.api.errors import Kind, ServeError
from jaxinfer.serve.api.requests import Call, Conversation, Usage
from jaxinfer.serve.api.tenants import own_id
from jaxinfer.serve.telemetry.request_log import RequestLog
from jaxinfer.types import Request

HEADERS = ("traceparent", "tracestate")

# Sampling parameters that the conventions name.
_SAMPLING = ("temperature", "top_p", "top_k", "max_tokens", "seed", "presence_penalty", "frequency_penalty")
# Errors caused by the client, not by the server.
_EXPECTED = (Kind.CANCELLED, Kind.INVALID, Kind.NOT_FOUND, Kind.EXISTS)


@runtime_checkable
class Trace(Protocol):
    """A receiver of the events of one generation, which ends with either `finished` or `failed`."""

    def accepted(self, request: Request) -> None: ...
    def token(self) -> None: ...
    def finished(self, usage: Usage, reasons: Sequence[str]) -> None: ...
    def failed(self, error: ServeError, usage: Usage | None = None) -> None: ...


class Tracing:
    """A factory of `Trace` objects for calls: a line of the request log, and a span that is exported in the background.

    Args:
        endpoint: OTLP collector (gRPC), "http://..." for one without TLS; None: no spans are recorded.
        exporter: replaces the exporter to ``endpoint``.
        failed: called for each generation that was rejected or failed, recorded or not.
        log: request log.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        exporter: SpanExporter | None = None,
        failed: Callable[[ServeError], None] | None = None,
        log: RequestLog | None = None,
    ) -> None:
        self._log = log or RequestLog(enabled=False)
        if exporter is None and endpoint is not None:
            exporter = OTLPSpanExporter(endpoint=endpoint, insecure=endpoint.startswith("http://"))
        self._provider: TracerProvider | None = None
        self._tracer: Tracer | None = None
        self._failed = failed or NOTHING.failed
        self._unrecorded: Trace = _Nothing(self._failed)
        if exporter is not None:
            self._provider = TracerProvider(resource=Resource.create({"service.name": "jaxinfer"}))
            self._provider.add_span_processor(BatchSpanProcessor(exporter))
            self._tracer = self._provider.get_tracer("jaxinfer")

    def begin(self, call: Call, model: str) -> Trace:
        """Begin the trace of a call; its span is a child of the client's, if the client sent its context."""
        span = self._unrecorded if self._tracer is None else self._recorded(self._tracer, call, model)
        return _Both(self._log.begin(call), span) if call.logged and self._log.enabled else span

    def line(self, call: Call) -> Trace:
        """Return the log line alone, for a call that is made of several generations."""
        return self._log.begin(call) if self._log.enabled else NOTHING

    def _recorded(self, tracer: Tracer, call: Call, model: str) -> Trace:
        operation = "chat" if isinstance(call.prompt, Conversation) else "text_completion"
        attributes: dict[str, str] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "jaxinfer",
            "gen_ai.request.model": call.model or model,
            "gen_ai.response.model": model,
        }
        parent = TraceContextTextMapPropagator().extract(_lower(call.trace))
        span = tracer.start_span(f"{operation} {model}", parent, SpanKind.SERVER, attributes)
        return _Recorded(span, self._failed)

    def close(self) -> None:
        """Export the recorded spans and stop."""
        if self._provider is not None:
            self._provider.shutdown()


class _Recorded:
    def __init__(self, span: Span, failed: Callable[[ServeError], None]) -> None:
        self._span, self._start, self._first = span, time.monotonic(), True
        self._failed = failed

    def accepted(self, request: Request) -> None:
        self._span.set_attribute("gen_ai.response.id", own_id(request.request_id))
        for name in _SAMPLING:
            if (value := getattr(request.params, name)) is not None:
                self._span.set_attribute(f"gen_ai.request.{name}", value)
        if request.params.n != 1:
            self._span.set_attribute("gen_ai.request.choice.count", request.params.n)

    def token(self) -> None:
        if self._first:
            self._first = False
            self._span.add_event("first token")
            self._span.set_attribute("gen_ai.response.time_to_first_chunk", time.monotonic() - self._start)

    def finished(self, usage: Usage, reasons: Sequence[str]) -> None:
        self._span.set_attribute("gen_ai.usage.input_tokens", usage.prompt)
        self._span.set_attribute("gen_ai.usage.output_tokens", usage.completion)
        self._span.set_attribute("gen_ai.usage.cache_read.input_tokens", usage.cached)
        self._span.set_attribute("gen_ai.response.finish_reasons", list(reasons))
        self._span.end()

    def failed(self, error: ServeError, usage: Usage | None = None) -> None:
        self._span.set_attribute("error.type", error.kind.name.lower())
        if error.kind not in _EXPECTED:
            self._span.set_status(StatusCode.ERROR, error.message)
        self._span.end()
        self._failed(error)


class _Nothing:
    """A trace that records no span; it only passes errors to ``failed``."""

    def __init__(self, failed: Callable[[ServeError], None] = lambda error: None) -> None:
        self._failed = failed

    def accepted(self, request: Request) -> None: ...
    def token(self) -> None: ...
    def finished(self, usage: Usage, reasons: Sequence[str]) -> None: ...

    def failed(self, error: ServeError, usage: Usage | None = None) -> None:
        self._failed(error)


@dataclasses.dataclass(slots=True)
class _Both:
    """A trace that passes each event to two traces."""

    first: Trace
    second: Trace

    def accepted(self, request: Request) -> None:
        self.first.accepted(request)
        self.second.accepted(request)

    def token(self) -> None:
        self.first.token()
        self.second.token()

    def finished(self, usage: Usage, reasons: Sequence[str]) -> None:
        self.first.finished(usage, reasons)
        self.second.finished(usage, reasons)

    def failed(self, error: ServeError, usage: Usage | None = None) -> None:
        self.first.failed(error, usage)
        self.second.failed(error, usage)


NOTHING: Trace = _Nothing()


def _lower(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}
