"""Typical acceptance in whole engines: more drafts are accepted, outputs are likely enough, counts are right."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.engine.scheduling.drafts import DraftPlanner
from jaxinfer.engine.scheduling.plan import StepPlan
from jaxinfer.llm import LLM
from jaxinfer.models.model import Model
from jaxinfer.outputs import CompletionOutput, RequestOutput
from jaxinfer.sampling import HostSlots, SamplingLimits
from jaxinfer.sampling.select import select
from jaxinfer.sampling_params import RequestError, SamplingParams
from jaxinfer.types import Request
from tests.fakes import random_model
from tests.sampling.test_typical import bound

VOCAB = 97
SETTINGS: dict[str, Any] = {
    "max_num_seqs": 3,
    "max_model_len": 160,
    "page_size": 16,
    "prefill_sizes": (16, 64),
    "num_pages": 60,
    "max_logprobs": VOCAB,
    "speculative": "draft_model",
    "num_speculative_tokens": 4,
    "speculative_adaptive": False,
}
PROMPTS = [[(7 * number + place * place) % VOCAB for place in range(5 + 20 * number)] for number in range(3)]
TYPICAL = {"acceptance": "typical"}


@pytest.fixture(scope="module")
def model() -> Model:
    """Return a model with a noisy copy as its draft model: plausible drafts that rarely equal the sampled tokens."""
    large = random_model(gain=9.0)
    noise = random_model(gain=3.0, seed=1)
    mixed = jax.tree.map(lambda mine, other: mine + other if mine.ndim > 1 else mine, large.params, noise.params)
    return large.replace(draft=large.replace(params=mixed))


@pytest.fixture(scope="module")
def llm(model: Model) -> LLM:
    return LLM(model, **SETTINGS)


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 90, "seed": 3, "ignore_eos": True, **changes})


def accepted(llm: LLM, asked: SamplingParams) -> tuple[list[RequestOutput], float]:
    """Return the outputs and the share of accepted draft tokens."""
    before = llm.engine.stats()
    outputs = llm.generate(PROMPTS, asked)
    after = llm.engine.stats()
    drafted = after.draft_tokens - before.draft_tokens
    assert drafted > 100
    return outputs, (after.draft_accepted - before.draft_accepted) / drafted


def test_more_drafts_come_true(llm: LLM) -> None:
    exact, few = accepted(llm, params())
    lossy, many = accepted(llm, params(speculation=TYPICAL))
    assert many > few + 0.1
    assert [output.outputs[0].acceptance for output in (*exact, *lossy)] == [None] * 3 + ["typical"] * 3
    assert any(
        mine.outputs[0].token_ids != theirs.outputs[0].token_ids for mine, theirs in zip(exact, lossy, strict=True)
    )


def test_its_bound_is_a_setting(model: Model) -> None:
    """A bound of 0 accepts every draft that the sampler could draw."""
    for bounds in ({"typical_threshold": 0.0}, {"typical_alpha": 0.0}):
        assert accepted(LLM(model, **SETTINGS, **bounds), params(speculation=TYPICAL))[1] == 1.0


def distributions(output: CompletionOutput) -> np.ndarray:
    """Return the log probabilities of all tokens at each position."""
    assert output.logprobs is not None
    found = np.full((len(output.token_ids), VOCAB), -np.inf)
    for row, position in zip(found, output.logprobs, strict=True):
        for token, candidate in position.items():
            row[token] = candidate.logprob
    return found


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_every_token_is_the_draw_or_a_draft_that_is_likely_enough(
    llm: LLM, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafted: dict[tuple[int, int], int] = {}
    committed = DraftPlanner.committed

    def noted(self: DraftPlanner, plan: StepPlan, tokens: int) -> None:
        for draft in plan.drafts or ():
            for place, token in enumerate(draft.tokens[: draft.outcome()[0]]):
                drafted[len(draft.sequence.prompt), draft.start + place] = token
        committed(self, plan, tokens)

    monkeypatch.setattr(DraftPlanner, "committed", noted)
    asked = params(temperature=temperature, logprobs=VOCAB, speculation=TYPICAL)
    lossy = 0
    for output in llm.generate(PROMPTS, asked):
        made, prompt = output.outputs[0], len(output.prompt_token_ids)
        logprobs = distributions(made)
        drawn = draws(logprobs, asked, prompt)
        for place, token in enumerate(made.token_ids):
            draft = drafted.get((prompt, prompt + place))
            assert token in (drawn[place], draft)
            if token != drawn[place]:
                chances = np.exp(logprobs[place] / temperature)
                chances /= chances.sum()
                assert chances[token] > bound(chances, 0.09, 0.3) * (1 - 1e-4)
                lossy += 1
            assert made.logprobs is not None
            assert np.isclose(made.logprobs[place][token].logprob, logprobs[place, token])
    assert lossy > 10


def draws(logprobs: np.ndarray, asked: SamplingParams, prompt: int) -> list[int]:
    """Return the sampler's draws from these distributions, the first of which follows the prompt."""
    count = len(logprobs)
    host = HostSlots(count, SamplingLimits())
    for slot in range(count):
        host.set(slot, Request("r", (0,), asked))
    slots = jax.tree.map(jnp.asarray, host.snapshot())
    positions = jnp.arange(prompt, prompt + count, dtype=jnp.int32)
    tokens = jax.jit(select)(jnp.asarray(logprobs, jnp.float32), slots, positions, jnp.ones(count, bool))
    return np.asarray(tokens).tolist()


def test_greedy_and_exact_requests_are_as_without_drafts(model: Model, llm: LLM) -> None:
    plain = LLM(model, **{**SETTINGS, "speculative": None, "max_num_seqs": 5})
    wanted = [params(temperature=0.0), params(), params(temperature=0.7, presence_penalty=1.0)]
    asked = [dataclasses.replace(wanted[0], speculation=TYPICAL), *wanted[1:]]
    exact = [output.outputs[0].token_ids for output in plain.generate(PROMPTS, wanted)]
    assert [output.outputs[0].token_ids for output in llm.generate(PROMPTS, asked)] == exact


@pytest.mark.parametrize("swap", [False, True])
def test_the_sampler_counts_what_came_out_also_after_preemptions(
    model: Model, swap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recomputed tokens need not equal fresh draws: the counts come from the committed tokens."""
    monkeypatch.setattr("jaxinfer.engine.scheduling.pages.prefer_swap", lambda *_: swap)
    llm = LLM(model, **{**SETTINGS, "max_num_seqs": 5, "num_pages": 11, "async_scheduling": False})
    asked = params(speculation=TYPICAL, presence_penalty=0.2, frequency_penalty=0.1)
    requests = llm._requests("prompts", PROMPTS, [asked] * len(PROMPTS))
    for request in requests:
        llm.engine.add(request)
    scheduler, executor = llm.engine._scheduler, llm.engine._executor
    back = seen = 0
    while llm.engine.has_work:
        llm.engine.step()
        counts = np.asarray(executor.microbatches[0].sampler.counts)
        for slot, sequence in scheduler._running.items():
            known = sequence.tokens[sequence.prompt_end + 1 :]
            if sequence.scheduled + 1 == len(sequence.tokens) and sequence.sampler_state is None:
                np.testing.assert_array_equal(counts[slot], np.bincount(known, minlength=VOCAB))
                seen += 1
    stats = llm.engine.stats()
    back = stats.preemptions.get("swap" if swap else "recompute", 0)
    assert back > 1
    assert seen > 50
    assert not stats.replay_mismatches


def test_it_is_refused_where_nothing_is_drafted(model: Model) -> None:
    plain = LLM(model, **{**SETTINGS, "speculative": None})
    with pytest.raises(RequestError, match=r"speculation\.acceptance='typical' needs drafts, and there are none"):
        plain.generate(PROMPTS, params(speculation=TYPICAL))
    plain.generate(PROMPTS[:1], params(speculation={"max_tokens": 3}, max_tokens=2))
