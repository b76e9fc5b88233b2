"""Tests of the Prometheus metrics, parsed by Prometheus' own client."""

from __future__ import annotations

import dataclasses
import threading
import time
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.parser import text_string_to_metric_families

from jaxinfer.engine.scheduling.stats import EngineStats, HistogramRecorder, StatsRecorder, WeightStats
from jaxinfer.engine.scheduling.usage import DeviceUsage, HostUsage, Usage
from jaxinfer.kv.manager import KVUsage
from jaxinfer.lora.usage import LoRAUsage
from jaxinfer.parallel.driver import DriverFigures
from jaxinfer.serve.runtime.background import Background
from jaxinfer.serve.telemetry.metrics import EngineCollector, ServerMetrics, render
from jaxinfer.types import FinishReason
from tests.engine.scheduling.test_stats import Clock, Fake

MODEL = {"model_name": 'a "quoted" model'}

# vLLM's names, from its page of production metrics.
VLLM = {
    "num_requests_running": "gauge",
    "num_requests_waiting": "gauge",
    "num_requests_waiting_by_reason": "gauge",
    "kv_cache_usage_perc": "gauge",
    "prefix_cache_queries": "counter",
    "prefix_cache_hits": "counter",
    "prompt_tokens": "counter",
    "generation_tokens": "counter",
    "num_preemptions": "counter",
    "request_success": "counter",
    "spec_decode_num_drafts": "counter",
    "spec_decode_num_draft_tokens": "counter",
    "spec_decode_num_accepted_tokens_per_pos": "counter",
    "spec_decode_num_accepted_tokens": "counter",
    "time_to_first_token_seconds": "histogram",
    "inter_token_latency_seconds": "histogram",
    "e2e_request_latency_seconds": "histogram",
    "request_queue_time_seconds": "histogram",
}
LORA = {
    "jaxinfer:lora_loaded": "gauge",
    "jaxinfer:lora_slots": "gauge",
    "jaxinfer:lora_slots_used": "gauge",
    "jaxinfer:lora_loads": "counter",
    "jaxinfer:lora_evictions": "counter",
    "jaxinfer:lora_load_seconds": "histogram",
    "jaxinfer:lora_requests_running": "gauge",
    "jaxinfer:lora_requests_waiting": "gauge",
    "vllm:lora_requests_info": "gauge",
}
OWN = {
    "kv_cache_pages": "gauge",
    "kv_cache_host_pages": "gauge",
    "encoder_cache_queries": "counter",
    "encoder_cache_hits": "counter",
    "replayed_tokens": "counter",
    "replay_mismatches": "counter",
    "not_finite_outputs": "counter",
    "engine_steps": "counter",
    "compilations": "counter",
    "engine_step_seconds": "histogram",
    "weight_version": "gauge",
    "engine_paused": "gauge",
    "engine_sleep_state": "gauge",
    "weight_updates": "counter",
    "weight_update_seconds": "histogram",
    "device_busy_seconds": "counter",
    "device_memory_bytes": "gauge",
    "device_memory_in_use_bytes": "gauge",
    "device_memory_peak_bytes": "gauge",
    "device_memory_limit_bytes": "gauge",
    "device_utilization": "gauge",
    "device_driver_memory_used_bytes": "gauge",
    "device_driver_memory_total_bytes": "gauge",
    "device_power_watts": "gauge",
    "device_temperature_celsius": "gauge",
    "host_memory_bytes": "gauge",
}


def busy() -> EngineStats:
    """Return stats with distinct values, so that a mix-up is detected."""
    clock = Clock()
    recorder = StatsRecorder(clock)
    sequence = Fake()
    recorder.queued(sequence)
    clock.now += 0.25
    recorder.scheduled(sequence)
    clock.now += 0.5
    recorder.emitted([sequence.emit(1)])
    clock.now += 8.0
    recorder.emitted([sequence.emit(16)])
    clock.now += 1.0
    recorder.finished(sequence.end(FinishReason.DEADLINE))
    recorder.prefix(31, 29)
    recorder.encoder(37, 23)
    recorder.drafted(20, 18)
    recorder.drafted(3, 1)
    recorder.replayed(True)
    recorder.replayed(False)
    for _ in range(5):
        recorder.preempted("swap")
    recorder.step(0.125)
    wanted = recorder.lora_wanted()
    clock.now += 2.5
    recorder.lora_loaded(wanted)
    loras = LoRAUsage(21, 2, 1, 25, 24, {"a": 4, "b": 3}, {"b": 1, "c": 5, "d": 2, "e": 2})
    usage = KVUsage(total=16, free=1, cached=3, held=12, host_total=11, host_used=4)
    updates = HistogramRecorder()
    updates.observe(0.5)
    updates.observe(1.25)
    stats = recorder.snapshot(running=7, waiting={"slot": 8, "pages": 5}, kv=usage, loras=loras, compilations=6)
    weights = WeightStats(26, False, ["kv_cache"], updates.snapshot())
    return dataclasses.replace(stats, weights=weights, usage=devices())


def devices() -> Usage:
    """Return the usage of a GPU with a driver, and of a device of which only the arithmetic is known."""
    driver = DriverFigures(utilization=0.75, memory_used=61, memory_total=83, watts=310.5, celsius=64.0)
    gpu = DeviceUsage(
        process=0,
        device=3,
        kind="NVIDIA H200",
        parts={"weights": 40, "temporaries": 2},
        in_use=47,
        peak=53,
        limit=71,
        busy_seconds=12.5,
        driver=driver,
    )
    cpu = DeviceUsage(process=1, device=131072, kind="cpu", parts={"kv_cache": 9}, busy_seconds=1.5)
    hosts = [HostUsage(process=0, parts={"kv_pages": 19}), HostUsage(process=1, parts={})]
    return Usage(devices=[gpu, cpu], hosts=hosts, seconds=20.0)


def samples(text: bytes) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return the samples by name and labels; the common label is checked and left out."""
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            assert MODEL.items() <= sample.labels.items() or sample.name.startswith("vllm:")
            key = sample.name.removeprefix("jaxinfer:"), frozenset(sample.labels.items() - MODEL.items())
            assert key not in found
            found[key] = sample.value
    return found


@pytest.fixture(scope="module")
def scraped() -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return samples(render(busy, MODEL["model_name"]))


def test_names_and_kinds() -> None:
    families = {f.name: f for f in text_string_to_metric_families(render(busy, "m").decode())}
    wanted = {f"jaxinfer:{name}": kind for name, kind in (VLLM | OWN).items()} | LORA
    assert {name: family.type for name, family in families.items()} == wanted
    assert all(f.documentation.endswith(".") for f in families.values())


@pytest.mark.parametrize(
    ("name", "label", "value"),
    [
        ("num_requests_running", "", 7),
        ("num_requests_waiting", "", 13),
        ("num_requests_waiting_by_reason", "reason=slot", 8),
        ("num_requests_waiting_by_reason", "reason=pages", 5),
        ("kv_cache_usage_perc", "", 0.75),
        ("kv_cache_pages", "state=free", 1),
        ("kv_cache_pages", "state=cached", 3),
        ("kv_cache_pages", "state=held", 12),
        ("kv_cache_host_pages", "state=free", 7),
        ("kv_cache_host_pages", "state=used", 4),
        ("weight_version", "", 26),
        ("engine_paused", "", 0),
        ("engine_sleep_state", "sleep_state=awake", 0),
        ("engine_sleep_state", "sleep_state=kv_cache", 1),
        ("engine_sleep_state", "sleep_state=weights", 0),
        ("device_busy_seconds_total", "process=0,device=3", 12.5),
        ("device_busy_seconds_total", "process=1,device=131072", 1.5),
        ("device_memory_bytes", "process=0,device=3,part=weights", 40),
        ("device_memory_bytes", "process=0,device=3,part=temporaries", 2),
        ("device_memory_bytes", "process=1,device=131072,part=kv_cache", 9),
        ("device_memory_in_use_bytes", "process=0,device=3", 47),
        ("device_memory_peak_bytes", "process=0,device=3", 53),
        ("device_memory_limit_bytes", "process=0,device=3", 71),
        ("device_utilization", "process=0,device=3", 0.75),
        ("device_driver_memory_used_bytes", "process=0,device=3", 61),
        ("device_driver_memory_total_bytes", "process=0,device=3", 83),
        ("device_power_watts", "process=0,device=3", 310.5),
        ("device_temperature_celsius", "process=0,device=3", 64),
        ("host_memory_bytes", "process=0,part=kv_pages", 19),
        ("weight_updates_total", "", 2),
        ("weight_update_seconds_sum", "", 1.75),
        ("prefix_cache_queries_total", "", 31),
        ("prefix_cache_hits_total", "", 29),
        ("encoder_cache_queries_total", "", 37),
        ("encoder_cache_hits_total", "", 23),
        ("prompt_tokens_total", "", 3),
        ("generation_tokens_total", "", 17),
        ("num_preemptions_total", "kind=swap", 5),
        ("num_preemptions_total", "kind=recompute", 0),
        ("request_success_total", "finished_reason=deadline", 1),
        ("request_success_total", "finished_reason=stop", 0),
        ("spec_decode_num_drafts_total", "", 2),
        ("spec_decode_num_draft_tokens_total", "", 23),
        ("spec_decode_num_accepted_tokens_per_pos_total", "position=0", 2),
        ("spec_decode_num_accepted_tokens_per_pos_total", "position=17", 1),
        ("spec_decode_num_accepted_tokens_per_pos_total", "position=19", 0),
        ("spec_decode_num_accepted_tokens_total", "", 19),
        ("replayed_tokens_total", "", 2),
        ("replay_mismatches_total", "", 1),
        ("engine_steps_total", "", 1),
        ("compilations_total", "", 6),
        ("time_to_first_token_seconds_sum", "", 0.75),
        ("time_to_first_token_seconds_count", "", 1),
        ("inter_token_latency_seconds_sum", "", 8.0),
        ("inter_token_latency_seconds_count", "", 16),
        ("e2e_request_latency_seconds_sum", "", 9.75),
        ("request_queue_time_seconds_sum", "", 0.25),
        ("engine_step_seconds_sum", "", 0.125),
        ("lora_loaded", "", 21),
        ("lora_slots", "", 2),
        ("lora_slots_used", "", 1),
        ("lora_loads_total", "", 25),
        ("lora_evictions_total", "", 24),
        ("lora_load_seconds_sum", "", 2.5),
        ("lora_load_seconds_count", "", 1),
        ("lora_requests_running", "lora_name=a", 4),
        ("lora_requests_running", "lora_name=b", 3),
        ("lora_requests_waiting", "lora_name=c", 5),
        ("lora_requests_waiting", "lora_name=d", 2),
        ("lora_requests_waiting", "lora_name=other", 3),
    ],
)
def test_values(scraped, name: str, label: str, value: float) -> None:
    labels = frozenset(tuple(each.split("=")) for each in label.split(",") if each)
    assert scraped[name, labels] == value


def test_what_a_platform_does_not_report_is_absent(scraped) -> None:
    told = {name for name, labels in scraped if ("device", "131072") in labels}
    assert told == {"device_busy_seconds_total", "device_memory_bytes"}
    cpu = dataclasses.replace(devices(), devices=devices().devices[1:])
    families = [
        family.name for family in EngineCollector(lambda: dataclasses.replace(busy(), usage=cpu), "m").collect()
    ]
    assert [name for name in families if "device" in name] == [
        "jaxinfer:device_busy_seconds",
        "jaxinfer:device_memory_bytes",
    ]
    assert not [name for name, _ in samples(render(StatsRecorder().snapshot, MODEL["model_name"])) if "device" in name]


def test_names_of_adapters_are_bounded(scraped) -> None:
    shown = [labels for name, labels in scraped if name == "lora_requests_waiting"]
    assert len(shown) == 3  # of four adapters, with two slots


def test_an_adapter_may_be_called_as_the_others_are() -> None:
    usage = LoRAUsage(3, 1, 1, 1, 0, {"other": 2, "a": 1}, {})
    found = samples(render(lambda: StatsRecorder().snapshot(loras=usage), MODEL["model_name"]))
    assert found["lora_requests_running", frozenset({("lora_name", "other")})] == 3


def test_gateways_find_the_adapters_that_run_and_wait(scraped) -> None:
    before = time.time()
    found = samples(render(busy, MODEL["model_name"]))
    ((labels, value),) = [(dict(labels), v) for (name, labels), v in found.items() if name.startswith("vllm:")]
    assert labels == {"max_lora": "2", "running_lora_adapters": "a,b", "waiting_lora_adapters": "b,c,d,e"}
    assert before <= value <= time.time()


def test_an_engine_without_adapters_says_nothing_of_them() -> None:
    names = {name for name, _ in samples(render(StatsRecorder().snapshot, MODEL["model_name"]))}
    assert not [name for name in names if "lora" in name]


def test_buckets_are_cumulative(scraped) -> None:
    name = "inter_token_latency_seconds_bucket"
    buckets = {dict(labels)["le"]: value for (n, labels), value in scraped.items() if n == name}
    assert (buckets["0.2"], buckets["0.5"], buckets["500.0"], buckets["+Inf"]) == (0, 16, 16, 16)
    assert list(buckets.values()) == sorted(buckets.values())


def test_an_engine_without_a_cache_has_no_usage() -> None:
    names = {name for name, _ in samples(render(StatsRecorder().snapshot, MODEL["model_name"]))}
    assert "num_requests_running" in names
    assert "kv_cache_usage_perc" not in names
    empty = KVUsage(total=0, free=0, cached=0, held=0, host_total=0, host_used=0)
    text = render(lambda: StatsRecorder().snapshot(kv=empty), MODEL["model_name"])
    assert samples(text)["kv_cache_usage_perc", frozenset()] == 0


def test_a_server_shows_what_it_counts_and_not_since_when() -> None:
    metrics = ServerMetrics()
    metrics.http_requests.labels("/metrics", "200").inc(3)
    metrics.http_seconds.labels("/metrics").observe(0.25)
    text = metrics.render().decode()
    assert "_created" not in text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    kinds = {name.removeprefix("jaxinfer:"): family.type for name, family in families.items()}
    assert (kinds["http_requests"], kinds["http_request_duration_seconds"]) == ("counter", "histogram")
    (total,) = families["jaxinfer:http_requests"].samples
    assert (total.name, total.value) == ("jaxinfer:http_requests_total", 3)
    seconds = {sample.name.rpartition("_")[2] for sample in families["jaxinfer:http_request_duration_seconds"].samples}
    assert seconds == {"bucket", "sum", "count"}
    assert "process_start_time_seconds" in families


def test_registering_does_not_ask_the_engine() -> None:
    def unready() -> EngineStats:
        raise AssertionError("nobody scraped")

    registry = CollectorRegistry(auto_describe=True)  # like the client's default registry
    registry.register(EngineCollector(unready, "m"))
    with pytest.raises(AssertionError, match="nobody scraped"):
        list(registry.collect())


class Reborn:
    state, restarts, background = "dead", 3, Background()


def test_the_engines_life_is_told() -> None:
    families = text_string_to_metric_families(ServerMetrics(Reborn()).render().decode())
    told = {(s.name, s.labels.get("state")): s.value for family in families for s in family.samples}
    assert told["jaxinfer:engine_restarts_total", None] == 3
    states = {state: value for (name, state), value in told.items() if name == "jaxinfer:engine_state"}
    assert states == {"starting": 0, "ready": 0, "dead": 1, "stopped": 0}


def test_over_http() -> None:
    registry = CollectorRegistry()
    registry.register(EngineCollector(busy, MODEL["model_name"]))
    server, thread = start_http_server(0, "127.0.0.1", registry)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=10) as response:
            assert samples(response.read())["num_requests_running", frozenset()] == 7
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
    assert not any(t is thread for t in threading.enumerate())
