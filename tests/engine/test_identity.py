"""Tokens and logprobs of a request are bitwise identical alone and in every serving mode.

The slow tier runs 200 requests on three models; the fast tier 40 on a tiny model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jaxinfer.compilations import count_compilations
from jaxinfer.engine.scheduling.pages import SequencePages
from jaxinfer.engine.scheduling.sequence import Sequence
from jaxinfer.engine.scheduling.stats import EngineStats
from jaxinfer.llm import LLM
from jaxinfer.models.model import Model
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.spec import Drafted, Tree, register
from tests.engine.test_invariance import bits
from tests.fakes import medium_model, mixed_params, random_model

Requests = list[tuple[list[int], SamplingParams]]
LENGTH = 160
SETTINGS: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": LENGTH, "page_size": 16, "prefill_sizes": (16, 64)}
ROOMY, TIGHT = 200, 24  # pages
VOCAB = 97  # vocabulary size of random_model


def make_requests(count: int, vocab: int, longest: int = 24) -> Requests:
    """Return prompts of all lengths; many share a prefix, some repeat themselves, some have several samples."""
    rng = np.random.default_rng(0)
    shared = [rng.integers(0, vocab, 90).tolist() for _ in range(4)]
    requests: Requests = []
    for number in range(count):
        own = rng.integers(0, vocab, int(rng.integers(1, 60))).tolist()
        prompt = shared[number % 7][: int(rng.integers(10, 90))] + own if number % 7 < 4 else own
        if number % 7 == 4:
            prompt = (own[:8] * 20)[: int(rng.integers(20, 110))]
        changes: dict[str, Any] = {"n": 3} if number % 11 == 5 else {}
        requests.append((prompt, mixed_params(number, max_tokens=4 + number % (longest - 3), **changes)))
    return requests


def run(llm: LLM, requests: Requests) -> list[Any]:
    outputs = llm.generate([prompt for prompt, _ in requests], [params for _, params in requests])
    llm.engine.check()
    return [bits(output) for output in outputs]


def alone(model: Model, requests: Requests, **settings: Any) -> list[Any]:
    """Return the results of each request alone, the prefix cache reset in between."""
    llm = LLM(model, num_pages=ROOMY, **settings)
    results = []
    for request in requests:
        results += run(llm, [request])
        llm.engine.reset_prefix_cache()
    return results


class Adversary:
    """A drafter that proposes arbitrary chains: known tokens, invalid tokens, too many, none."""

    def __init__(self) -> None:
        self._chance = np.random.default_rng(0)

    def propose(self, sequence: Drafted, limit: int) -> Tree:
        tokens = self._chance.choice(sequence.tokens, self._chance.integers(0, 2 * limit + 1)).astype(np.int64)
        wild = self._chance.choice([-1, -7, 2**40, VOCAB, 0, VOCAB - 1], len(tokens))
        return Tree.chain(np.where(self._chance.random(len(tokens)) < 0.2, wild, tokens))

    def end(self, sequence: Drafted) -> None: ...
    def reset(self) -> None: ...


register("adversary", lambda config: Adversary())


def preempted(kind: str) -> Callable[[EngineStats], bool]:
    return lambda stats: stats.preemptions.get(kind, 0) > 0


MODES: dict[str, tuple[dict[str, Any], Callable[[EngineStats], bool]]] = {
    "full batch": ({}, lambda stats: True),
    "small budget": ({"max_num_batched_tokens": 72}, lambda stats: True),
    "no prefix cache": ({"enable_prefix_caching": False}, lambda stats: not stats.kv.cached),
    "recomputed": ({"num_pages": TIGHT, "swap_space_gib": 0}, preempted("recompute")),
    "swapped": ({"num_pages": TIGHT}, preempted("swap")),
    "synchronous": ({"async_scheduling": False}, lambda stats: True),
    "several steps": ({"multi_step": 4}, lambda stats: True),
    "drafts": ({"speculative": "ngram", "speculative_adaptive": False}, lambda stats: stats.draft_accepted > 0),
    "drafts of suffixes": (
        {"speculative": "suffix", "speculative_adaptive": False, "num_speculative_tokens": 7, "max_num_seqs": 3},
        lambda stats: stats.draft_accepted > 0,
    ),
    "drafts of an adversary": (
        {"speculative": "adversary", "speculative_adaptive": False, "num_speculative_tokens": 7, "max_num_seqs": 3},
        lambda stats: 0 < stats.draft_accepted < 0.5 * stats.draft_tokens,
    ),
    "a draft model": (
        {"speculative": "draft_model", "speculative_adaptive": False, "max_num_seqs": 3, "num_speculative_tokens": 7},
        lambda stats: 0 < stats.draft_accepted < stats.draft_tokens,
    ),
    "a draft model, swapped": (
        {"speculative": "draft_model", "num_pages": TIGHT, "max_num_seqs": 6, "num_speculative_tokens": 7},
        preempted("swap"),
    ),
    "fair": ({"scheduling_policy": "fair"}, lambda stats: True),
    "priority": ({"scheduling_policy": "priority"}, lambda stats: True),
    "one page a step": (
        {"num_pages": 12, "max_num_batched_tokens": 72},
        lambda stats: sum(stats.preemptions.values()) > 0,
    ),
    "static": ({"batching": "static"}, lambda stats: True),
    "drafts, recomputed": (
        {"speculative": "ngram", "num_pages": TIGHT, "swap_space_gib": 0},
        preempted("recompute"),
    ),
}
SLOW = ("small budget", "no prefix cache", "synchronous", "drafts", "drafts of suffixes", "priority", "static")


@pytest.fixture(scope="module")
def tiny() -> tuple[Model, Requests, list[Any]]:
    model = random_model()
    requests = make_requests(40, model.config.vocab_size)
    return model, requests, alone(model, requests, **SETTINGS)


@pytest.mark.parametrize("mode", [pytest.param(m, marks=pytest.mark.slow) if m in SLOW else m for m in MODES])
def test_every_mode_gives_the_bits_of_each_request_alone(tiny, mode, monkeypatch):
    model, requests, expected = tiny
    changes, happened = MODES[mode]
    if mode.endswith("swapped"):
        monkeypatch.setattr("jaxinfer.engine.scheduling.pages.prefer_swap", lambda *_: True)
    model = model.replace(draft=random_model(seed=1, num_hidden_layers=1))
    check_mode(LLM(model, **{**SETTINGS, "num_pages": ROOMY, **changes}), requests, expected, happened)


def check_mode(llm: LLM, requests: Requests, expected: list[Any], happened: Callable[[EngineStats], bool]) -> None:
    with count_compilations() as compilations:
        cold = run(llm, requests)
        warm = run(llm, requests[::-1])[::-1]
    assert compilations.count == 0
    stats = llm.engine.stats()
    assert happened(stats), stats
    assert stats.replay_mismatches == 0
    for name, results in (("cold", cold), ("warm", warm)):
        wrong = [index for index, pair in enumerate(zip(results, expected, strict=True)) if pair[0] != pair[1]]
        assert not wrong, f"{name}: requests {wrong[:10]}, {len(wrong)} in all"


def test_the_prefix_cache_is_used(tiny):
    model, requests, _ = tiny
    llm = LLM(model, **SETTINGS, num_pages=ROOMY)
    run(llm, requests)
    cold = llm.engine.stats().prefix_hits
    run(llm, requests)
    warm = llm.engine.stats().prefix_hits - cold
    assert 0 < 1.5 * cold < warm


@pytest.mark.slow
@pytest.mark.parametrize("which", ["demo", "stories260K", "wide"])
@pytest.mark.parametrize("mode", MODES)
def test_real_and_wide_models_in_every_mode(which, mode, monkeypatch, request):
    model, rows = _large(which, request), 64
    settings = {**SETTINGS, "max_num_seqs": rows, "prefill_sizes": (32, 128)}
    key = f"identity/{which}"
    cache = request.session.__dict__.setdefault("_identity", {})
    if key not in cache:
        requests = make_requests(200, model.config.vocab_size, longest=60)
        cache[key] = requests, alone(model, requests, **settings)
    requests, expected = cache[key]
    changes, happened = MODES[mode]
    scale = rows // SETTINGS["max_num_seqs"]
    room = {"num_pages": scale * changes.get("num_pages", ROOMY)}
    if "max_num_batched_tokens" in changes:
        room["max_num_batched_tokens"] = rows + settings["prefill_sizes"][-1]
    if mode.endswith("swapped"):
        monkeypatch.setattr("jaxinfer.engine.scheduling.pages.prefer_swap", lambda *_: True)
    monkeypatch.setattr(SequencePages, "place", functools.partialmethod(_place_eagerly, SequencePages.place))
    model = model if which == "demo" else model.replace(draft=model)
    check_mode(LLM(model, **{**settings, **changes, **room}), requests, expected, happened)


def _place_eagerly(
    pages: SequencePages, place: Callable[..., int | None], sequence: Sequence, slot: int, budget: int, _spare: int
) -> int | None:
    """Admit without spare pages for running sequences: otherwise preemption is rare with this many slots."""
    return place(pages, sequence, slot, budget, 0)


def _large(which: str, request: pytest.FixtureRequest) -> Model:
    from jaxinfer.loading import load_model

    if which == "wide":
        return medium_model("float32")
    name = "demo" if which == "demo" else str(request.getfixturevalue("test_data") / "models/stories260K/hf")
    return load_model(name, "float32", show_progress=False)
