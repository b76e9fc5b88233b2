"""Typical acceptance against Medusa's equation in float64 numpy, and state that it leaves unchanged."""

import dataclasses
import pathlib
from typing import Any

import jax
import numpy as np
import pytest

from jaxinfer.sampling import DraftRows, Sampled, SlotState, sample
from jaxinfer.sampling.sample import Typical, posterior
from jaxinfer.sampling_params import SamplingParams
from tests.sampling.reference import LIMITS, Row, slots_and_state

VOCAB, TRIALS = 61, 32
SAMPLE = jax.jit(sample, static_argnums=6)
POSTERIOR = jax.jit(posterior, static_argnums=4)
TYPICAL = {"acceptance": "typical"}
ASKED = {
    "plain": SamplingParams(),
    "cold": SamplingParams(temperature=0.4),
    "hot": SamplingParams(temperature=1.7),
    "cut": SamplingParams(temperature=1.3, top_k=9, top_p=0.8, min_p=0.02),
    "sigma": SamplingParams(temperature=1.3, top_n_sigma=1.2),
    "penalties": SamplingParams(presence_penalty=1.5, frequency_penalty=1.0, repetition_penalty=1.8),
    "bias": SamplingParams(logit_bias={3: 9.0, 5: -9.0}),
    "allowed": SamplingParams(allowed_token_ids=[1, 2, 3, 5, 7, 11]),
    "min_tokens": SamplingParams(min_tokens=10),
}


def bound(probabilities: np.ndarray, epsilon: float, delta: float) -> float:
    """Return Medusa's threshold (`evaluate_posterior`)."""
    entropy = -np.sum(probabilities * np.log(probabilities + 1e-5))
    return min(epsilon, delta * np.exp(-entropy))


def made_row(asked: SamplingParams, rng: np.random.Generator, **changes) -> Row:
    logits = rng.normal(scale=rng.uniform(0.5, 6), size=VOCAB).astype(np.float32)
    params = dataclasses.replace(asked, seed=int(rng.integers(2**32)), speculation=TYPICAL, **changes)
    return Row(logits, params, (1, 2, 4), (3, 3, 8), stop_ids=(6, 9), bad_words=((12,), (8, 13)))


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize(("epsilon", "delta"), [(0.09, 0.3), (0.3, 0.09)])
def test_the_rule_is_medusas(asked: str, epsilon: float, delta: float, seed: int) -> None:
    rng = np.random.default_rng([seed, 1])
    rows = [made_row(ASKED[asked], rng) for _ in range(TRIALS)]
    slots, _ = slots_and_state(rows)
    processed = np.stack([row.processed() for row in rows]).astype(np.float32)
    candidates = np.arange(VOCAB, dtype=np.int32)
    chances, least = POSTERIOR(processed, candidates, slots, np.ones(TRIALS, bool), Typical(epsilon, delta))
    kept = 0
    for row, mine, threshold in zip(rows, np.asarray(chances), np.asarray(least), strict=True):
        want = row.probabilities()
        np.testing.assert_allclose(mine, want, rtol=3e-4, atol=1e-7)
        np.testing.assert_allclose(threshold, bound(want, epsilon, delta), rtol=1e-3)
        sure = np.abs(want - bound(want, epsilon, delta)) > 1e-5
        np.testing.assert_array_equal((mine > threshold)[sure], (want > bound(want, epsilon, delta))[sure])
        kept += int((mine > threshold).sum())
    assert TRIALS <= kept < TRIALS * VOCAB / 2, "some tokens pass and most do not"


def with_drafts(rows: list[Row], tokens: np.ndarray) -> tuple[Sampled, SlotState]:
    """Run one step: slot rows, each followed by a row with input ``tokens`` at the next position."""
    count = len(rows)
    slots, state = slots_and_state(rows + rows)
    logits = np.stack([row.logits for row in rows + rows])
    at, made = len(rows[0].prompt) + len(rows[0].output) - 1, len(rows[0].output)
    ahead = np.arange(2 * count) // count
    fed = np.concatenate([np.full(count, -1), tokens]).astype(np.int32)
    active, positions = np.ones(2 * count, bool), (at + ahead).astype(np.int32)
    drafts = DraftRows((np.arange(2 * count) % count).astype(np.int32), fed, positions, active)
    generated = (made + ahead).astype(np.int32)
    sampled, after = SAMPLE(logits, slots, state, positions + 1, generated, active, LIMITS.max_logprobs, drafts)
    return jax.tree.map(np.asarray, sampled), jax.tree.map(np.asarray, after)


def exactly(rows: list[Row]) -> list[Row]:
    return [dataclasses.replace(row, params=dataclasses.replace(row.params, speculation=None)) for row in rows]


@pytest.mark.parametrize("asked", ASKED)
def test_a_draft_that_passes_is_what_the_row_says_and_one_that_fails_leaves_the_draw(asked: str, seed: int) -> None:
    rng = np.random.default_rng([seed, 2])
    rows = [made_row(ASKED[asked], rng, logprobs=0) for _ in range(TRIALS)]
    likely = [np.argsort(-row.probabilities(), kind="stable")[rng.integers(4)] for row in rows]
    tokens = np.where(rng.random(TRIALS) < 0.7, likely, rng.integers(VOCAB, size=TRIALS)).astype(np.int32)
    found, after = with_drafts(rows, tokens)
    drawn, _ = with_drafts(exactly(rows), tokens)
    changed = 0
    for index, (row, token) in enumerate(zip(rows, tokens, strict=True)):
        p = row.probabilities()
        passes = p[token] > bound(p, *Typical())
        assert found.tokens[index] == (token if passes else drawn.tokens[index])
        changed += int(passes and token != drawn.tokens[index])
        # The token is counted, as is the next row's token if the draft was accepted.
        counts = np.bincount([*row.output, found.tokens[index]], minlength=VOCAB)
        if found.tokens[index] == token:
            counts[found.tokens[TRIALS + index]] += 1
        np.testing.assert_array_equal(after.counts[index], counts)
        raw = row.logits.astype(np.float64)
        logprob = raw[found.tokens[index]] - raw.max() - np.log(np.exp(raw - raw.max()).sum())
        np.testing.assert_allclose(found.logprobs.logprob[index], logprob, rtol=1e-4, atol=1e-5)
    assert changed > 0, "else nothing was seen of it"


def test_a_barred_token_is_never_taken(seed: int) -> None:
    rng = np.random.default_rng([seed, 3])
    for barred, changes in {
        12: {},  # a bad word
        13: {},  # the end of a bad word that has begun
        6: {"min_tokens": 10},
        30: {"allowed_token_ids": list(range(30))},
    }.items():
        rows = [made_row(SamplingParams(), rng, **changes) for _ in range(TRIALS)]
        rows = [dataclasses.replace(row, logits=row.logits + 50 * (np.arange(VOCAB) == barred)) for row in rows]
        rows = [dataclasses.replace(row, logits=row.logits.astype(np.float32)) for row in rows]
        found, _ = with_drafts(rows, np.full(TRIALS, barred, np.int32))
        assert not (found.tokens[:TRIALS] == barred).any()


def test_who_is_greedy_gets_no_other_token(seed: int) -> None:
    rng = np.random.default_rng([seed, 4])
    rows = [made_row(SamplingParams(temperature=0), rng) for _ in range(TRIALS)]
    second = np.array([np.argsort(-row.processed())[1] for row in rows], np.int32)
    found, _ = with_drafts(rows, second)
    want, _ = with_drafts(exactly(rows), second)
    np.testing.assert_array_equal(found.tokens, want.tokens)
    assert not (found.tokens[:TRIALS] == second).any()


@pytest.mark.parametrize("temperature", [0.0, 1e-6])
def test_of_two_likeliest_tokens_who_is_greedy_has_the_first(temperature: float) -> None:
    row = made_row(SamplingParams(temperature=temperature), np.random.default_rng(0))
    row = dataclasses.replace(row, logits=np.where(np.isin(np.arange(VOCAB), (20, 40)), 9, -9).astype(np.float32))
    found, _ = with_drafts([row], np.array([40], np.int32))
    assert found.tokens[0] == 20


def test_rows_that_do_not_ask_keep_their_bits(seed: int) -> None:
    rng = np.random.default_rng([seed, 5])
    rows = [made_row(asked, rng, logprobs=3) for asked in (*ASKED.values(), *ASKED.values())]
    tokens = np.array([np.argmax(row.probabilities()) for row in rows], np.int32)
    mixed = [row if index % 2 else exactly([row])[0] for index, row in enumerate(rows)]
    some, after = with_drafts(mixed, tokens)
    none, before = with_drafts(exactly(rows), tokens)
    every, _ = with_drafts(rows, tokens)
    assert (every.tokens != none.tokens).any()
    plain = np.arange(2 * len(rows)) % 2 == 0
    for mine, theirs in zip(jax.tree.leaves(some), jax.tree.leaves(none), strict=True):
        np.testing.assert_array_equal(mine[plain], theirs[plain])
    for mine, theirs in zip(after, before, strict=True):
        np.testing.assert_array_equal(mine[: len(rows)][plain[: len(rows)]], theirs[: len(rows)][plain[: len(rows)]])


def primitives(jaxpr: Any) -> set[str]:
    """Return the primitives that are always computed, not those inside a cond."""
    found = set()
    for equation in jaxpr.eqns:
        found.add(equation.primitive.name)
        if equation.primitive.name != "cond":
            for inner in equation.params.values():
                found |= primitives(inner.jaxpr) if hasattr(inner, "jaxpr") else set()
    return found


def test_nothing_is_computed_where_nobody_asks() -> None:
    slots, state = slots_and_state([made_row(SamplingParams(), np.random.default_rng(0))])
    zeros, yes = np.zeros(1, np.int32), np.ones(1, bool)
    drafts = DraftRows(zeros, zeros, zeros, yes)
    args = (np.zeros((1, VOCAB), np.float32), slots, state, zeros, zeros, yes, LIMITS.max_logprobs, drafts)
    always = primitives(jax.make_jaxpr(sample, static_argnums=6)(*args).jaxpr)
    assert "cond" in always
    assert not always & {"log", "exp", "argmax"}


@pytest.mark.parametrize("which", [0, 1])
def test_what_medusas_own_program_accepts_is_accepted(which: int, repo: pathlib.Path) -> None:
    with np.load(repo / "tests/goldens/heads/typical.npz", allow_pickle=False) as file:
        answers = dict(file)
    (epsilon, delta), tokens = answers["thresholds"][which], answers["tokens"].astype(np.int32)
    params = SamplingParams(temperature=float(answers["temperature"]), seed=1, speculation=TYPICAL)
    rows = [Row(logits, params, (1,), (2,)) for logits in answers["logits"]]
    slots, _ = slots_and_state(rows)
    asks = np.ones(len(rows), bool)
    chances, least = POSTERIOR(answers["logits"], tokens, slots, asks, Typical(float(epsilon), float(delta)))
    accepted = np.diagonal(np.asarray(chances)) > np.asarray(least)
    np.testing.assert_array_equal(accepted, answers["accepted"][which])
    assert 0 < accepted.sum() < len(rows)
