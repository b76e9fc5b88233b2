"""Sections engine and relaxed: end-to-end tokens per second of the engine with the 8B shape and random weights.

All requests arrive at once; each decodes to its last token. The time is from the first `Engine.step` to the last delta,
host time included; compilation before it is reported separately. The pool takes the remaining memory, as for users.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from benchmarks.gpu.bounds import bytes_per_token, weight_bytes
from benchmarks.gpu_peers.loads import Load, parse_loads
from jaxinfer.config import EngineConfig
from jaxinfer.engine.core import EngineCore
from jaxinfer.gpu_check.llama import LLAMA_8B, TINY, random_model, start_engine
from jaxinfer.gpu_check.report import Report
from jaxinfer.models.model import Model
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.types import Request

# The most informative first: those that the time does not suffice for are skipped from the end.
LOADS = parse_loads("64x512+256,1x512+256,256x1024+256,8x512+256,256x512+256")
QUICK_LOADS = parse_loads("2x20+4")
_RESERVE_S = 8.0


def run(report: Report) -> None:
    """Measure the engine with its default settings: exact mode."""
    _run(report, {})


def run_relaxed(report: Report) -> None:
    """Measure the engine with ``exactness="relaxed"``, without batch invariance."""
    _run(report, {"exactness": "relaxed"})


def _run(report: Report, changes: dict[str, Any]) -> None:
    if not report.wanted("engine"):
        return
    with report.attempt("engine"):
        model = random_model(TINY if report.quick else LLAMA_8B)
        loads = QUICK_LOADS if report.quick else LOADS
        measure(report, "", model, settings(loads, **changes), loads)


def settings(loads: tuple[Load, ...], **changes: Any) -> EngineConfig:
    """Return settings of an engine whose batch holds every request of the largest load."""
    longest = max(load.prompt + load.output for load in loads)
    given = {
        "max_model_len": -(-longest // 64) * 64,
        "max_num_seqs": max(load.requests for load in loads),
        "enable_prefix_caching": False,
        "swap_space_gib": 0.0,
    }
    return EngineConfig(**(given | changes))


def measure(report: Report, name: str, model: Model, config: EngineConfig, loads: tuple[Load, ...]) -> None:
    """Start an engine and run the loads; keys of records begin with ``name``."""
    wanted = {f"{name}{title(load)}": load for load in loads if report.wanted(f"{name}{title(load)}")}
    if not wanted:
        return
    start = time.perf_counter()
    engine = start_engine(model, config, report)
    report.put(f"{name}engine", seconds_to_start=round(time.perf_counter() - start, 1), **_settings(engine))
    for key, load in wanted.items():
        if not report.time_for(key, _RESERVE_S):
            return
        with report.attempt(key):
            report.put(key, **_measure(report, engine, model.with_cache(config.kv_cache_dtype), load))


def title(load: Load) -> str:
    """Return the key of a load's record."""
    return f"{load.requests} requests, {load.prompt} + {load.output} tokens"


def _settings(engine: EngineCore) -> dict[str, Any]:
    config = engine.config
    return {
        "rows": config.rows,
        "pages": config.num_pages,
        "attention": config.attention_backend,
        "gemm": config.gemm_backend,
        "prefill_sizes": list(config.prefill_sizes),
        "prefill_batch_sizes": list(config.prefill_batch_sizes),
    }


def _measure(report: Report, engine: EngineCore, model: Model, load: Load) -> dict[str, Any]:
    """Run one load with greedy sampling, without a warm-up: everything was compiled at startup."""
    sampling = SamplingParams(temperature=0.0, max_tokens=load.output, ignore_eos=True)
    for index, prompt in enumerate(load.prompts("engine", model.config.vocab_size)):
        engine.add(Request(f"{load} {index}", tuple(prompt), sampling))
    start, first, produced, full = time.perf_counter(), None, 0, list[float]()
    while engine.has_work:
        if report.left() < 1 and not report.quick:
            raise RuntimeError(f"no time was left after {produced} tokens")
        begun = time.perf_counter()
        tokens = sum(len(delta.token_ids) for delta in engine.step())
        if tokens == load.requests:
            full.append(time.perf_counter() - begun)
        produced += tokens
        first = first or (time.perf_counter() if produced else None)
    seconds = time.perf_counter() - start
    return {
        "seconds": round(seconds, 3),
        "seconds_to_first_token": round((first or start) - start, 3),
        "tokens": produced,
        "output_tokens_s": round(produced / seconds, 1),
        "all_tokens_s": round((produced + load.requests * load.prompt) / seconds, 1),
        **_of_full_steps(report, model, load, full),
    }


def _of_full_steps(report: Report, model: Model, load: Load, seconds: list[float]) -> dict[str, Any]:
    """Return the milliseconds of a step in which all requests decode, and its share of bandwidth (weights, KV cache).

    All experts of a mixture count as read, as they are when many rows decode.
    """
    if not seconds:
        return {}
    step_ms = statistics.median(seconds) * 1e3
    context = load.prompt + load.output // 2
    moved = weight_bytes(model)[1] + load.requests * context * bytes_per_token(model, 64)
    return {"step_ms": round(step_ms, 3), **report.bandwidth(moved, step_ms)}
