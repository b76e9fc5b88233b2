"""Prometheus metrics of engine and server, under vLLM's names with our prefix, so that its dashboards need only one
replacement. No jax."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

import grpc
from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector
from prometheus_client import Histogram as ServerHistogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from jaxinfer.engine.scheduling.stats import SECONDS, EngineStats, Histogram, WeightStats
from jaxinfer.engine.scheduling.usage import DeviceUsage, Usage
from jaxinfer.lora.usage import LoRAUsage
from jaxinfer.serve.api.errors import Kind, ServeError
from jaxinfer.serve.core.operations import TAGS
from jaxinfer.serve.core.supervisor import DEAD, READY, STARTING, STOPPED
from jaxinfer.serve.runtime import logs
from jaxinfer.serve.runtime.background import Background
from jaxinfer.serve.runtime.event_loop import LONG_HOLD_SECONDS, Loop
from jaxinfer.types import FinishReason

PREFIX = "jaxinfer:"
LORA_REQUESTS = "vllm:lora_requests_info"
OTHERS = "other"
"""Value of the label ``lora_name`` that adds up the adapters without their own sample."""

_LOADED = "Seconds from the first sequence waiting for a LoRA adapter until it is resident."


@runtime_checkable
class Life(Protocol):
    """The lifecycle state of an engine, as its supervisor reports it."""

    @property
    def state(self) -> str: ...
    @property
    def restarts(self) -> int: ...
    @property
    def background(self) -> Background: ...


class ServerMetrics:
    """Metrics of one server. The labels are routes, methods, statuses and error kinds, so their number is bounded.

    Args:
        engine: source of engine state and restarts (None: they are not exported).

    Attributes:
        http_requests: HTTP requests answered, by route and status.
        http_in_flight: HTTP requests being answered, including streams.
        http_errors: errors by kind, including errors in started streams.
        http_cut: connections that the server closed, by reason.
        http_seconds: seconds from a request's head to the end of its response, by route.
        grpc_cut: idle gRPC connections closed in favour of new ones.
        ready: whether generations are accepted, 0 or 1.
    """

    def __init__(self, engine: Life | None = None) -> None:
        self._registry = of = CollectorRegistry()
        if engine is not None:
            of.register(_LifeCollector(engine))
        of.register(_LogCollector())
        ProcessCollector(registry=of)
        of.register(_LoopCollector())
        self.ready = Gauge(f"{PREFIX}ready", "Whether generation requests are accepted.", registry=of)
        what = "Generation requests rejected or ended by an error over any API, by kind."
        self._failed = Counter(f"{PREFIX}request_errors", what, ["kind"], registry=of)
        for kind in Kind:  # start at 0: a series that first appears as 1 has no rate
            self._failed.labels(kind.name.lower())
        labels = ["route", "status"]
        self.http_requests = Counter(f"{PREFIX}http_requests", "HTTP requests answered.", labels, registry=of)
        self.http_in_flight = Gauge(f"{PREFIX}http_requests_in_flight", "HTTP requests in flight.", registry=of)
        self.http_errors = Counter(f"{PREFIX}http_errors", "Errors sent to HTTP clients.", ["kind"], registry=of)
        self.http_cut = Counter(
            f"{PREFIX}http_connections_cut", "HTTP connections closed by the server.", ["reason"], registry=of
        )
        self.http_seconds = _seconds("http_request_duration_seconds", "Duration of HTTP requests.", "route", of)
        what = "gRPC connections closed at the limit, the longest idle ones first."
        self.grpc_cut = Counter(f"{PREFIX}grpc_connections_cut", what, registry=of)
        self._grpc_requests = Counter(f"{PREFIX}grpc_requests", "Finished RPCs.", ["method", "code"], registry=of)
        self._grpc_seconds = _seconds("grpc_request_duration_seconds", "Duration of RPCs.", "method", of)

    def called(self, method: str, code: grpc.StatusCode, seconds: float) -> None:
        """Count an RPC that has ended; see `jaxinfer.serve.grpc.rpc.Observer`."""
        self._grpc_requests.labels(method, code.name).inc()
        self._grpc_seconds.labels(method).observe(seconds)

    def failed(self, error: ServeError) -> None:
        """Count a generation that was rejected or failed."""
        self._failed.labels(error.kind.name.lower()).inc()

    def render(self) -> bytes:
        """Render one scrape in Prometheus's text format."""
        return generate_latest(_WithoutBirths(self._registry))


class _WithoutBirths(Collector):
    """A collector without the ``_created`` series of counters and histograms, which no query uses. prometheus_client
    can disable them only for the whole process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            family.samples = [sample for sample in family.samples if sample.name != f"{family.name}_created"]
            yield family


class _LogCollector(Collector):
    def collect(self) -> Iterator[Metric]:
        yield _counter("log_lines_dropped", "Log lines dropped, by reason.", {}, _by("reason", logs.dropped()))


class _LifeCollector(Collector):
    def __init__(self, engine: Life) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        state, restarts = self._engine.state, self._engine.restarts
        states = {each: int(each == state) for each in (STARTING, READY, DEAD, STOPPED)}
        yield _gauge("engine_state", "1 for the current state of the engine.", {}, _by("state", states))
        yield _counter("engine_restarts", "Engine restarts after a crash or a hang.", {}, _one(restarts))
        failures = _by("task", self._engine.background.failures)
        yield _counter("background_task_failures", "Failures of background tasks, by task.", {}, failures)

    def describe(self) -> list[Metric]:
        """Return no metrics: the engine's supervisor may not exist yet."""
        return []


class _LoopCollector(Collector):
    """A collector of the hold statistics of the running event loop, if it is a `Loop`."""

    def collect(self) -> Iterator[Metric]:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return
        if isinstance(loop, Loop):
            longest, many = loop.holds.longest(), loop.holds.long
            what = "Longest time in the last minute or two for which the event loop was blocked."
            yield _gauge("event_loop_hold_seconds", what, {}, _one(longest))
            what = f"Times the event loop was blocked for more than {LONG_HOLD_SECONDS * 1000:g} ms."
            yield _counter("event_loop_long_holds", what, {}, _one(many))

    def describe(self) -> list[Metric]:
        """Return no metrics: there may be no event loop yet."""
        return []


class EngineCollector(Collector):
    """A collector that takes a snapshot of the engine on each scrape, at no cost between scrapes.

    Args:
        snapshot: returns the engine statistics; called in the thread that serves the scrape.
        model: value of the label ``model_name`` of every sample.
    """

    def __init__(self, snapshot: Callable[[], EngineStats], model: str) -> None:
        self._snapshot, self._model = snapshot, model

    def collect(self) -> Iterator[Metric]:
        stats, model = self._snapshot(), {"model_name": self._model}
        yield from _gauges(stats, model)
        yield from _counters(stats, model)
        yield from _histograms(stats, model)
        if stats.weights is not None:
            yield from _weights(stats.weights, model)
        if stats.usage is not None:
            yield from _devices(stats.usage, model)
        if stats.loras is not None:
            yield from _loras(stats.loras, model)
            yield _histogram("lora_load_seconds", stats.lora_load_time, _LOADED, model)
            yield _lora_requests(stats.loras)

    def describe(self) -> list[Metric]:
        """Return no metrics: registration must not query the engine, which may not run yet."""
        return []


def render(snapshot: Callable[[], EngineStats], model: str) -> bytes:
    """Render one scrape in Prometheus's text format, for a server without its own registry."""
    registry = CollectorRegistry()
    registry.register(EngineCollector(snapshot, model))
    return generate_latest(registry)


def _seconds(name: str, what: str, label: str, registry: CollectorRegistry) -> ServerHistogram:
    return ServerHistogram(PREFIX + name, what, [label], buckets=SECONDS, registry=registry)


_Samples = Sequence[tuple[dict[str, str], float]]  # additional labels, value


def _gauges(stats: EngineStats, model: dict[str, str]) -> Iterator[Metric]:
    waiting = sum(stats.waiting.values())
    yield _gauge("num_requests_running", "Number of running sequences, which have a slot.", model, _one(stats.running))
    yield _gauge("num_requests_waiting", "Number of sequences waiting for a slot.", model, _one(waiting))
    why = "Number of sequences waiting for a slot, by reason."
    yield _gauge("num_requests_waiting_by_reason", why, model, _by("reason", stats.waiting))
    if (kv := stats.kv) is not None:
        what = "Fraction of KV pages held by sequences, 0 to 1. Cached pages without a sequence count as free."
        yield _gauge("kv_cache_usage_perc", what, model, _one(kv.held / kv.total if kv.total else 0.0))
        pages = {"free": kv.free, "cached": kv.cached, "held": kv.held}
        yield _gauge("kv_cache_pages", "Number of KV pages on the device, by state.", model, _by("state", pages))
        host = {"free": kv.host_total - kv.host_used, "used": kv.host_used}
        yield _gauge("kv_cache_host_pages", "Number of KV pages in host memory, by state.", model, _by("state", host))


def _counters(stats: EngineStats, model: dict[str, str]) -> Iterator[Metric]:
    totals = {
        "prefix_cache_queries": (stats.prefix_queries, "Prefix cache queries, in tokens."),
        "prefix_cache_hits": (stats.prefix_hits, "Prefix cache hits, in tokens."),
        "encoder_cache_queries": (stats.encoder_queries, "Encoder cache queries, in images."),
        "encoder_cache_hits": (stats.encoder_hits, "Encoder cache hits, in images; the others were encoded."),
        "prompt_tokens": (stats.prompt_tokens, "Prompt tokens of scheduled requests, cached or not."),
        "generation_tokens": (stats.generated_tokens, "Generated tokens."),
        "spec_decode_num_drafts": (stats.drafts, "Verified drafts."),
        "spec_decode_num_draft_tokens": (stats.draft_tokens, "Verified draft tokens."),
        "spec_decode_num_accepted_tokens": (stats.draft_accepted, "Accepted draft tokens."),
        "replayed_tokens": (stats.replayed_tokens, "Known tokens recomputed after a preemption."),
        "replay_mismatches": (stats.replay_mismatches, "Recomputed tokens with a different result."),
        "not_finite_outputs": (
            stats.finished.get(FinishReason.NOT_FINITE, 0),
            "Sequences ended because of NaN or infinite logits.",
        ),
        "engine_steps": (stats.steps, "Engine steps."),
        "compilations": (stats.compilations, "Programs compiled since the engine was ready."),
    }
    for name, (value, what) in totals.items():
        yield _counter(name, what, model, _one(value))
    places = {str(place): count for place, count in enumerate(stats.draft_accepted_at or (0,))}
    what = "Accepted draft tokens, by position in the draft."
    yield _counter("spec_decode_num_accepted_tokens_per_pos", what, model, _by("position", places))
    yield _counter("num_preemptions", "Preemptions, by kind.", model, _by("kind", stats.preemptions))
    finished = {reason.value: count for reason, count in stats.finished.items()}
    yield _counter("request_success", "Finished sequences, by reason.", model, _by("finished_reason", finished))


def _histograms(stats: EngineStats, model: dict[str, str]) -> Iterator[Metric]:
    for name, histogram, what in (
        ("time_to_first_token_seconds", stats.time_to_first_token, "Seconds from arrival to the first token."),
        ("inter_token_latency_seconds", stats.inter_token_latency, "Seconds between two tokens of a sequence."),
        ("e2e_request_latency_seconds", stats.e2e_latency, "Seconds from arrival to the end."),
        ("request_queue_time_seconds", stats.queue_time, "Seconds from arrival to the first slot."),
        ("engine_step_seconds", stats.step_time, "Seconds between the results of two steps."),
    ):
        yield _histogram(name, histogram, what, model)


def _weights(weights: WeightStats, model: dict[str, str]) -> Iterator[Metric]:
    what = "Version of the served weights; 0 is that of the start."
    yield _gauge("weight_version", what, model, _one(weights.version))
    yield _gauge("engine_paused", "Whether an operator has paused the engine.", model, _one(weights.paused))
    states = {"awake": int(not weights.asleep), **{tag: int(tag in weights.asleep) for tag in TAGS}}
    what = "1 for awake, or for what is asleep."
    yield _gauge("engine_sleep_state", what, model, _by("sleep_state", states))
    updates, what = weights.update_time, "Seconds of placing and exchanging new weights."
    yield _counter("weight_updates", "Updates of the weights.", model, _one(updates.count))
    yield _histogram("weight_update_seconds", updates, what, model)


def _devices(usage: Usage, model: dict[str, str]) -> Iterator[Metric]:
    places = [({"process": str(each.process), "device": str(each.device)}, each) for each in usage.devices]
    busy = [(place, each.busy_seconds) for place, each in places]
    yield _counter("device_busy_seconds", "Seconds with a step in flight on the device.", model, busy)
    parts = [({**place, "part": part}, size) for place, each in places for part, size in each.parts.items()]
    yield _gauge("device_memory_bytes", "Bytes on the device that the engine keeps, by part.", model, parts)
    hosts = [({"process": str(h.process), "part": part}, size) for h in usage.hosts for part, size in h.parts.items()]
    yield _gauge("host_memory_bytes", "Bytes in host memory that the engine keeps, by part.", model, hosts)
    for name, (what, value) in _REPORTED.items():
        samples = [(place, found) for place, each in places if (found := value(each)) is not None]
        if samples:
            yield _gauge(name, what, model, samples)


def _driver(field: str) -> Callable[[DeviceUsage], float | None]:
    return lambda each: None if each.driver is None else getattr(each.driver, field)


_REPORTED: Mapping[str, tuple[str, Callable[[DeviceUsage], float | None]]] = {
    "device_memory_in_use_bytes": ("Bytes that JAX's allocator has given out.", lambda each: each.in_use),
    "device_memory_peak_bytes": ("Most bytes in use since the start.", lambda each: each.peak),
    "device_memory_limit_bytes": ("Bytes that JAX's allocator may give out.", lambda each: each.limit),
    "device_utilization": ("Share of the time with a running kernel, of the driver.", _driver("utilization")),
    "device_driver_memory_used_bytes": ("Bytes in use by all programs, of the driver.", _driver("memory_used")),
    "device_driver_memory_total_bytes": ("Bytes of the device, of the driver.", _driver("memory_total")),
    "device_power_watts": ("Power, of the driver.", _driver("watts")),
    "device_temperature_celsius": ("Temperature, of the driver.", _driver("celsius")),
}
"""Metrics of devices that only some platforms have: absent there, never 0."""


def _loras(usage: LoRAUsage, model: dict[str, str]) -> Iterator[Metric]:
    yield _gauge("lora_loaded", "Loaded LoRA adapters, which requests may name.", model, _one(usage.loaded))
    yield _gauge("lora_slots", "LoRA adapter slots on the device.", model, _one(usage.slots))
    yield _gauge("lora_slots_used", "LoRA adapter slots in use.", model, _one(usage.slots_used))
    yield _counter("lora_loads", "LoRA adapters loaded into a slot.", model, _one(usage.loads))
    yield _counter("lora_evictions", "LoRA adapters evicted from their slot.", model, _one(usage.evictions))
    for name, what, counts in (
        ("lora_requests_running", "Running sequences, by LoRA adapter.", usage.running),
        ("lora_requests_waiting", "Waiting sequences, by LoRA adapter.", usage.waiting),
    ):
        yield _gauge(name, what, model, _by("lora_name", _most(counts, usage.slots)))


def _lora_requests(usage: LoRAUsage) -> Metric:
    """Return the metric that the Gateway API Inference Extension routes by, with the name and labels that it expects.
    The newest sample counts, so the value is the time."""
    labels = {
        "max_lora": str(usage.slots),
        "running_lora_adapters": ",".join(sorted(usage.running)),
        "waiting_lora_adapters": ",".join(sorted(usage.waiting)),
    }
    family = GaugeMetricFamily(
        LORA_REQUESTS, "LoRA adapters of running and waiting requests; the value is the time of the scrape."
    )
    family.add_sample(LORA_REQUESTS, labels, time.time())
    return family


def _most(counts: Mapping[str, int], count: int) -> dict[str, int]:
    """Keep the ``count`` largest entries and add up the rest as `OTHERS`: labels must be bounded, names are not."""
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    found = dict(ranked[:count])
    if rest := sum(number for _, number in ranked[count:]):
        found[OTHERS] = found.get(OTHERS, 0) + rest
    return found


def _histogram(name: str, histogram: Histogram, what: str, model: dict[str, str]) -> Metric:
    family = HistogramMetricFamily(PREFIX + name, what, labels=list(model))
    family.add_metric(list(model.values()), _buckets(histogram), histogram.sum)
    return family


def _gauge(name: str, what: str, model: dict[str, str], samples: _Samples) -> Metric:
    family = GaugeMetricFamily(PREFIX + name, what)
    for labels, value in samples:
        family.add_sample(PREFIX + name, {**model, **labels}, value)
    return family


def _counter(name: str, what: str, model: dict[str, str], samples: _Samples) -> Metric:
    family = CounterMetricFamily(PREFIX + name, what)
    for labels, value in samples:
        family.add_sample(f"{PREFIX}{name}_total", {**model, **labels}, value)
    return family


def _one(value: float) -> _Samples:
    return [({}, value)]


def _by(label: str, values: Mapping[str, int]) -> _Samples:
    return [({label: key}, value) for key, value in values.items()]


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Return cumulative buckets, as Prometheus expects: each includes the lower ones."""
    cumulative, total = [], 0
    bounds = [*histogram.bounds, float("inf")]
    for bound, count in zip(bounds, histogram.counts, strict=True):
        total += count
        cumulative.append((floatToGoString(bound), float(total)))
    return cumulative
