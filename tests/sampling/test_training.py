"""Outputs for training of a sampling step, compared with the float64 reference."""

from typing import Any

import jax
import numpy as np
import pytest

from jaxinfer.sampling import Sampled, sample
from jaxinfer.sampling.training import asks_of
from jaxinfer.sampling_params import LOGPROBS_MODES, SamplingParams
from tests.sampling.reference import LIMITS, Row, slots_and_state
from tests.sampling.test_sample import EVERYTHING, HISTORY, VOCAB, logits

SAMPLE = jax.jit(sample, static_argnames=("max_logprobs", "whole"))
FILTERS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "greedy with filters": {"temperature": 0, "min_p": 0.5, "top_k": 3, "top_p": 0.5},
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 50, "temperature": 1.3},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.01},
    "allowed": {"allowed_token_ids": range(900, 920)},
    "everything": EVERYTHING,
}


def row(number: int = 0, **params: Any) -> Row:
    return Row(logits(number), SamplingParams(max_tokens=100, **({"seed": 3} | params)), **HISTORY)


def run(rows: list[Row], masks: np.ndarray | None = None) -> Sampled:
    slots, state = slots_and_state(rows)
    generated = np.array([len(each.output) for each in rows], np.int32)
    active, positions = np.ones(len(rows), bool), np.full(len(rows), 9, np.int32)
    asks = np.stack([asks_of(each.params) for each in rows])
    batch = np.stack([each.logits for each in rows])
    given = (batch, slots, state, positions, generated, active, LIMITS.max_logprobs)
    return jax.device_get(SAMPLE(*given, None, masks, asks, whole=True)[0])


def bits(words: np.ndarray) -> np.ndarray:
    return np.unpackbits(words.view(np.uint8), bitorder="little")[:VOCAB].astype(bool)


def log_softmax(values: np.ndarray) -> np.ndarray:
    return values - values.max() - np.log(np.exp(values - values.max()).sum())


def wanted(each: Row) -> tuple[np.ndarray, np.ndarray]:
    """Return the values of a row's mode, and the probabilities of the same distribution."""
    mode, heat = each.params.logprobs_mode, each.params.temperature or 1
    raw = each.logits.astype(np.float64)
    if mode == "raw_logits":
        return raw, np.exp(log_softmax(raw))
    if mode == "raw_logprobs":
        return log_softmax(raw), np.exp(log_softmax(raw))
    chances = each.probabilities() if each.params.temperature else np.exp(log_softmax(each.processed()))
    scaled = np.where(chances > 0, each.processed() / heat, -np.inf)
    with np.errstate(divide="ignore"):
        return scaled if mode == "processed_logits" else np.log(chances), chances


@pytest.mark.parametrize("mode", LOGPROBS_MODES)
@pytest.mark.parametrize("name", FILTERS)
def test_values_are_those_of_the_reference(name: str, mode: str) -> None:
    each = row(**FILTERS[name] | {"logprobs": 5, "logprobs_mode": mode})
    each = Row(each.logits, SamplingParams(**vars(each.params) | {"logprobs": -1, "return_entropy": True}), **HISTORY)
    quiet = row(1, temperature=0)
    sampled = run([quiet, each])
    values, chances = wanted(each)
    found, token = sampled.extras.whole[1], sampled.tokens[1]
    assert np.array_equal(np.isfinite(found), np.isfinite(values))
    np.testing.assert_allclose(found, values, rtol=2e-5, atol=2e-5)
    assert sampled.logprobs.logprob[1] == pytest.approx(values[token], abs=2e-5)
    assert sampled.logprobs.rank[1] == 1 + (found > found[token]).sum()
    assert sorted(sampled.logprobs.top_logprobs[1].tolist(), reverse=True) == np.sort(found)[::-1][:5].tolist()
    assert found[sampled.logprobs.top_ids[1]].tolist() == sampled.logprobs.top_logprobs[1].tolist()
    likely = chances[chances > 0]
    assert sampled.extras.entropy[1] == pytest.approx(-(likely * np.log(likely)).sum(), abs=1e-4)


@pytest.mark.parametrize("name", FILTERS)
def test_the_mask_has_what_could_be_drawn(name: str) -> None:
    each = row(**FILTERS[name] | {"return_sampling_mask": True})
    sampled = run([row(1, temperature=0), each])
    kept = bits(sampled.extras.kept[1])
    assert np.array_equal(np.flatnonzero(kept), np.flatnonzero(each.probabilities() > 0))
    assert kept[sampled.tokens[1]]


def test_ties_are_kept() -> None:
    tied = np.zeros(VOCAB, np.float32)
    tied[[5, 17, 40, 2999]] = 4
    params = SamplingParams(top_k=2, seed=1, return_sampling_mask=True)
    assert np.flatnonzero(bits(run([Row(tied, params)]).extras.kept[0])).tolist() == [5, 17, 40, 2999]


@pytest.mark.parametrize("mode", LOGPROBS_MODES)
def test_chosen_ids_have_the_bits_of_the_whole_vocabulary(mode: str) -> None:
    ids = [7, 0, VOCAB - 1, 7]
    each = row(top_p=0.9, logprobs=-1, logprobs_mode=mode, logprob_token_ids=ids)
    extras = run([each]).extras
    assert extras.ids[0, : len(ids)].tobytes() == extras.whole[0, ids].tobytes()


@pytest.mark.parametrize("mode", LOGPROBS_MODES)
def test_a_forced_row_has_the_values_of_a_free_one(mode: str) -> None:
    terms = {"top_p": 0.9, "logprobs": -1, "logprobs_mode": mode, "return_sampling_mask": True, "return_entropy": True}
    free, forced = row(**terms), row(**terms, forced_token_ids=[77])
    masks = np.full((2, -(-VOCAB // 32)), -1, np.int32)
    masks[1] = 0
    masks[1, 77 // 32] = 1 << (77 % 32)
    sampled = run([free, forced], masks)
    assert sampled.tokens[1] == 77 != sampled.tokens[0]
    given = [leaf for leaf in sampled.extras if leaf is not None]  # there are no experts
    for one, other in zip(*([leaf[i] for leaf in given] for i in (0, 1)), strict=True):
        assert one.tobytes() == other.tobytes()
    assert sampled.logprobs.logprob[1] == sampled.extras.whole[0, 77]


def test_rows_that_ask_for_nothing_are_unchanged() -> None:
    quiet = [row(number, top_p=0.8, logprobs=3) for number in range(3)]
    alone = run(quiet)
    loud = row(5, top_p=0.9, logprobs_mode="processed_logprobs", return_entropy=True, return_sampling_mask=True)
    together = run([*quiet[:2], loud])
    for one, other in zip(
        jax.tree.leaves((alone.tokens, alone.logprobs)),
        jax.tree.leaves((together.tokens, together.logprobs)),
        strict=True,
    ):
        assert one[:2].tobytes() == other[:2].tobytes()
    assert not alone.extras.entropy.any()
