"""Section identity: do 40 mixed requests give the same tokens and logprobs batched, alone, recomputed and swapped?"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from jaxinfer.config import EngineConfig
from jaxinfer.engine.core import EngineCore
from jaxinfer.gpu_check.llama import LLAMA_8B, TINY, random_model, start_engine
from jaxinfer.gpu_check.report import Report
from jaxinfer.models.model import Model
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.types import Request

_LENGTHS = (20, 63, 64, 65, 200, 257, 400, 700, 1000)
_QUICK_LENGTHS = (1, 15, 16, 17, 40)
_ALONE = 10
_START_S = 45.0

Requests = list[tuple[tuple[int, ...], SamplingParams]]
Answers = dict[str, list[Any]]


def run(report: Report) -> None:
    quick = report.quick
    model = random_model(TINY if quick else LLAMA_8B)
    requests = mixed(8 if quick else 40, model.config.vocab_size, _QUICK_LENGTHS if quick else _LENGTHS)
    longest = max(len(prompt) + (params.max_tokens or 0) for prompt, params in requests)
    page = 16 if quick else 64
    config = EngineConfig(max_model_len=-(-longest // page) * page, max_num_seqs=4 if quick else 40, page_size=page)
    tight = dataclasses.replace(config, num_pages=-(-longest // page) + (6 if quick else 40))
    if not report.wanted("together"):
        return
    with report.attempt("together"):
        engine = start_engine(model, config, report)
        expected = answers(engine, requests)
        _in_one_engine(report, engine, requests, expected)
        del engine
        for name, swap in (("recomputed", 0.0), ("swapped", 4.0)):
            if report.time_for(name, 0.0 if quick else _START_S):
                with report.attempt(name):
                    _preempted(report, name, model, dataclasses.replace(tight, swap_space_gib=swap), requests, expected)


def _in_one_engine(report: Report, engine: EngineCore, requests: Requests, expected: Answers) -> None:
    if report.wanted("warm again"):
        with report.attempt("warm again"):
            _compare(report, "warm again", expected, answers(engine, requests))
    if report.wanted("alone"):
        with report.attempt("alone"):
            engine.reset_prefix_cache()
            few = dict(list(enumerate(requests))[:: max(1, len(requests) // _ALONE)])
            alone = {f"{at}": answers(engine, [request], at)[f"{at}"] for at, request in few.items()}
            _compare(report, "alone", {name: expected[name] for name in alone}, alone)


def mixed(count: int, vocab: int, lengths: tuple[int, ...]) -> Requests:
    """Return prompts of all lengths, sampled and greedy, each with logprobs."""
    draw = random.Random(1)
    return [
        (
            tuple(draw.randrange(1, vocab) for _ in range(draw.choice(lengths))),
            SamplingParams(temperature=0.8 * (at % 4 > 0), seed=at, max_tokens=48, ignore_eos=True, logprobs=2),
        )
        for at in range(count)
    ]


def answers(engine: EngineCore, requests: Requests, first: int = 0) -> Answers:
    """Return tokens and logprobs by request; logprobs as their `repr`, so that they compare bitwise."""
    found: Answers = {f"{first + at}": [] for at in range(len(requests))}
    for at, (prompt, params) in enumerate(requests):
        engine.add(Request(f"{first + at}", prompt, params))
    while engine.has_work:
        for delta in engine.step():
            found[delta.request_id] += [*delta.token_ids, *map(repr, delta.logprobs)]
    return found


def _compare(report: Report, name: str, expected: Answers, found: Answers) -> None:
    other = [request for request, answer in expected.items() if found[request] != answer]
    report.put(name, requests=len(expected), differ=other, ok=not other)


def _preempted(
    report: Report, name: str, model: Model, config: EngineConfig, requests: Requests, expected: Answers
) -> None:
    """Compare the answers on a pool that is too small. Without a preemption the comparison proves nothing and fails."""
    engine = start_engine(model, config, report)
    _compare(report, name, expected, answers(engine, requests))
    counted = dict(engine.stats().preemptions)
    report.put(f"{name}: preemptions", ok=sum(counted.values()) > 0, **counted)
