"""Section agree, log-probabilities: are those that an engine serves those of `LLM.logprobs` and `Model.logprobs`?

A pool that is too small preempts sequences, and some prompts begin alike. Requests go to the engine, as packages that
`LLM` needs may be missing: `LLM.logprobs` is requests with forced tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxinfer.agreement import Difference, Sample, Sequences, applied, requests, training_step
from jaxinfer.config import EngineConfig
from jaxinfer.engine.core import EngineCore
from jaxinfer.gpu_check.llama import LLAMA_8B, TINY, random_model, start_engine
from jaxinfer.gpu_check.report import Report
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.types import Request

DTYPES = ("bfloat16", "float32")
_SMALL = {
    **LLAMA_8B,
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
_CONFIG = EngineConfig(
    max_num_seqs=8, max_model_len=640, page_size=64, num_pages=10, prefill_sizes=(64, 256), swap_space_gib=0
)
_QUICK = EngineConfig(
    max_num_seqs=4, max_model_len=96, page_size=16, num_pages=6, prefill_sizes=(16, 32), swap_space_gib=0
)
_START_S = 60.0  # of an engine, and of the compilation of a training step


def run(report: Report) -> None:
    for dtype in DTYPES:
        name = f"log-probabilities, {dtype}"
        if report.time_for(name, 0.0 if report.quick else _START_S):
            with report.attempt(name):
                _compare(report, name, dtype)


def _compare(report: Report, name: str, dtype: str) -> None:
    config, sizes, (sequences, tokens) = (_QUICK, TINY, (12, 24)) if report.quick else (_CONFIG, _SMALL, (96, 64))
    model = random_model(sizes, dtype)
    engine = start_engine(model, config, report)
    asked = requests(engine.config, model.config.vocab_size, sequences, tokens, seed=1)
    served = Sequences.of(_samples(engine, *asked))
    report.goes_on("tokens are generated")
    prompts, completions = zip(*served.parts, strict=True)
    again = [SamplingParams(logprobs=0, forced_token_ids=each) for each in completions]
    forced = [np.array(each.logprobs) for each in _samples(engine, prompts, again)]
    _put(report, f"{name}: LLM.logprobs", served.difference_from(forced), exact=True)
    step = training_step(model, engine.served_programs())
    _put(report, f"{name}: Model.logprobs", served.difference(step), exact=True)
    _put(report, f"{name}: Model.apply", served.difference(applied(model)), exact=False)
    report.put(name, **_modes(engine))


def _samples(engine: EngineCore, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Sample]:
    """Return the samples of all requests, in order."""
    found: dict[tuple[str, int], tuple[list[int], list[float]]] = {}
    for at, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
        engine.add(Request(f"{at}", tuple(prompt), each))
        found |= {(f"{at}", index): ([], []) for index in range(each.n)}
    while engine.has_work:
        for delta in engine.step():
            ids, logprobs = found[delta.request_id, delta.index]
            ids += delta.token_ids
            logprobs += [position.chosen.logprob for position in delta.logprobs]
    return [Sample(prompts[int(name)], *sample) for (name, _), sample in found.items()]


def _put(report: Report, key: str, found: Difference, *, exact: bool) -> None:
    verdict = {"ok": found.largest == 0} if exact else {}
    report.put(key, **verdict, tokens=found.tokens, largest=found.largest, kl=found.kl)


def _modes(engine: EngineCore) -> dict[str, Any]:
    """Return what ran. Without preemptions and hits of the prefix cache the comparison tells less, and fails."""
    stats = engine.stats()
    preemptions, hits = sum(stats.preemptions.values()), stats.prefix_hits
    products = engine.config.gemm_backend
    return {"ok": min(preemptions, hits) > 0, "preemptions": preemptions, "cached_tokens": hits, "gemm": products}
