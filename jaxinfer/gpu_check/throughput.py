"""Section engine: tokens a second from end to end, of the engine with the 8B shape and random weights.

All requests arrive at once; each decodes to its last token. The time is from the first `Engine.step` to the last delta,
the host's share included; what is compiled before is told apart.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import jax

from jaxinfer.config import EngineConfig
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.execution.prepare import prepare
from jaxinfer.gpu_check.llama import LLAMA_8B, TINY, random_model
from jaxinfer.gpu_check.report import Report
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.types import Request


class Load(NamedTuple):
    requests: int
    prompt: int
    output: int

    def __str__(self) -> str:
        return f"{self.requests} requests, {self.prompt} + {self.output} tokens"


LOADS = (Load(64, 512, 128), Load(1, 512, 64), Load(8, 512, 64))
QUICK_LOADS = (Load(2, 20, 4),)
_RESERVE_S = 8.0


def run(report: Report) -> None:
    loads = QUICK_LOADS if report.quick else LOADS
    start = time.perf_counter()
    with report.attempt("engine"):
        engine = _engine(loads, report.quick)
        report.put("engine", seconds_to_start=round(time.perf_counter() - start, 1), **_settings(engine))
        for load in loads:
            if not report.time_for(str(load), _RESERVE_S):
                return
            with report.attempt(str(load)):
                report.put(str(load), **_measure(report, engine, load))


def _engine(loads: tuple[Load, ...], quick: bool) -> Engine:
    longest = max(load.prompt + load.output for load in loads)
    settings = EngineConfig(
        max_model_len=-(-longest // 64) * 64,
        max_num_seqs=max(load.requests for load in loads),
        prefill_sizes=(64,) if quick else (256,),
        enable_prefix_caching=False,
        swap_space_gib=0.0,
        exactness="relaxed",
    )
    return Engine(prepare(random_model(TINY if quick else LLAMA_8B), settings, jax.default_backend()))


def _settings(engine: Engine) -> dict[str, Any]:
    config = engine.config
    return {"rows": config.rows, "pages": config.num_pages, "attention": config.attention_backend}


def _measure(report: Report, engine: Engine, load: Load) -> dict[str, Any]:
    """Sampling is greedy; one token is enough warmth: everything was compiled at the start."""
    sampling = SamplingParams(temperature=0.0, max_tokens=load.output, ignore_eos=True)
    for index in range(load.requests):
        prompt = tuple((7 * index + at) % 100 + 1 for at in range(load.prompt))
        engine.add(Request(f"{load} {index}", prompt, sampling))
    start, first, produced, steps = time.perf_counter(), None, 0, 0
    while engine.has_work:
        if report.left() < 1 and not report.quick:
            raise RuntimeError(f"no time was left after {produced} tokens")
        produced += sum(len(delta.token_ids) for delta in engine.step())
        steps += 1
        first = first or (time.perf_counter() if produced else None)
    seconds = time.perf_counter() - start
    return {
        "seconds": round(seconds, 3),
        "seconds_to_first_token": round((first or start) - start, 3),
        "steps": steps,
        "tokens": produced,
        "output_tokens_s": round(produced / seconds, 1),
        "all_tokens_s": round((produced + load.requests * load.prompt) / seconds, 1),
    }
