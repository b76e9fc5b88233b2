"""Figures of the HTTP server itself. The labels are routes, statuses and kinds of error: their number is bounded."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.exposition import generate_latest

from jaxinfer.serve.metrics import PREFIX


class HttpMetrics:
    """Counts for one server.

    Attributes:
        requests: answered, by route and status.
        in_flight: being answered, streams included.
        errors: by kind, those in started streams included.
        cut: connections that were closed on their clients, by reason.
        ready: whether generations are accepted, 0 or 1.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        labels = ["route", "status"]
        of = self._registry
        self.requests = Counter(f"{PREFIX}http_requests", "HTTP requests answered.", labels, registry=of)
        self.in_flight = Gauge(f"{PREFIX}http_requests_in_flight", "HTTP requests being answered.", registry=of)
        self.errors = Counter(f"{PREFIX}http_errors", "Errors told to HTTP clients, by kind.", ["kind"], registry=of)
        self.cut = Counter(f"{PREFIX}http_connections_cut", "Connections cut, by reason.", ["reason"], registry=of)
        self.ready = Gauge(f"{PREFIX}ready", "Whether generations are accepted.", registry=of)

    def render(self) -> bytes:
        return generate_latest(self._registry)
