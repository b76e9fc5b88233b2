"""Tenant isolation on a real engine: no request hits another tenant's pages or observes its work."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from jaxinfer.config import EngineConfig
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.execution.prepare import prepare
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.types import Request
from tests.fakes import random_model

SETTINGS: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 160, "page_size": 16, "prefill_sizes": (16, 64)}
MODES: dict[str, dict[str, Any]] = {
    "plain": {"num_pages": 200},
    # Adaptive drafting measures acceptance over all tenants, since they share the load.
    "drafts, on the host": {
        "speculative": "ngram",
        "speculative_adaptive": False,
        "num_pages": 14,
        "swap_space_gib": 0.1,
    },
    "drafts of earlier answers": {"speculative": "suffix", "speculative_adaptive": False, "num_pages": 200},
}
LENGTH = 100


@pytest.fixture(scope="module", params=MODES)
def engine(request: pytest.FixtureRequest) -> Engine:
    return Engine(prepare(random_model(), EngineConfig(**SETTINGS, **MODES[request.param]), "cpu"))


@dataclasses.dataclass(frozen=True)
class Seen:
    """Results of a request that its tenant sees, and the engine's steps and drafts for it."""

    cached: int
    would_be: int
    tokens: list[int]
    steps: int
    drafts: int


def prompt(number: int) -> tuple[int, ...]:
    """Return a prompt that repeats itself, so that drafters find matches."""
    own = np.random.default_rng(number).integers(1, 60, 20).tolist()
    return tuple((own * 6)[:LENGTH])


def ask(engine: Engine, number: int, scope: str, salt: str = "") -> Seen:
    params = SamplingParams(max_tokens=12, seed=number, temperature=0.0)
    request = Request(f"{scope}{salt}{number}", prompt(number), params, cache_scope=scope, cache_salt=salt)
    before, would_be, cached, tokens, steps = engine.stats(), engine.cached(request), 0, [], 0
    engine.add(request)
    while engine.has_work:
        steps += 1
        for delta in engine.step():
            cached, tokens = max(cached, delta.cached_tokens or 0), [*tokens, *delta.token_ids]
    return Seen(cached, would_be, tokens, steps, engine.stats().draft_tokens - before.draft_tokens)


def test_a_request_is_served_as_if_no_other_tenant_had_asked_it(engine: Engine) -> None:
    worlds = []
    for shift in (0, 100):  # the victim's prompts equal the attacker's, or differ
        engine.reset_prefix_cache()
        for number in range(4):
            ask(engine, number + shift, "tenant:victim")
        attackers = ("tenant:attacker", "group:victim", "")
        worlds.append([ask(engine, number, scope) for scope in attackers for number in range(4)])
        own = ask(engine, 3, attackers[-1])
        assert own.cached == own.would_be > 60, "its own it finds"
        engine.check()
    assert worlds[0] == worlds[1]
    assert {seen.cached for seen in worlds[0]} == {seen.would_be for seen in worlds[0]} == {0}
    assert engine.config.speculative is None or any(seen.drafts for seen in worlds[0])


def test_a_salt_parts_what_a_scope_would_share(engine: Engine) -> None:
    engine.reset_prefix_cache()
    found = [ask(engine, 1, *whose).cached for whose in (("a", "bc"), ("ab", "c"), ("a", ""), ("", "abc"))]
    assert found == [0] * 4
    assert ask(engine, 1, "", "abc").cached > 60
