"""Log probabilities are those of the raw logits."""

import jax
import numpy as np
import pytest
import scipy.special

from jaxinfer.sampling import prompt_logprobs, sample
from jaxinfer.sampling_params import SamplingParams
from tests.lowered import as_for_gpu
from tests.sampling.reference import LIMITS, Row, slots_and_state

ROWS, VOCAB, TOP = 6, 700, LIMITS.max_logprobs
PROMPT = jax.jit(prompt_logprobs, static_argnums=2)
SAMPLE = jax.jit(sample, static_argnames="max_logprobs")


def make(vocab: int = VOCAB) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(3)
    return (random.normal(size=(ROWS, vocab)) * 4).astype(np.float32), random.integers(vocab, size=ROWS).astype(
        np.int32
    )


def test_against_float64() -> None:
    logits, tokens = make()
    got = PROMPT(logits, tokens, TOP)
    exact = scipy.special.log_softmax(logits.astype(np.float64), axis=1)
    order = np.argsort(-exact, axis=1, kind="stable")
    np.testing.assert_allclose(got.logprob, exact[np.arange(ROWS), tokens], atol=3e-6)
    np.testing.assert_array_equal(got.rank, 1 + np.argmax(order == tokens[:, None], axis=1))
    np.testing.assert_array_equal(got.top_ids, order[:, :TOP])
    np.testing.assert_allclose(got.top_logprobs, np.take_along_axis(exact, order[:, :TOP], axis=1), atol=3e-6)


def test_the_chosen_token_has_the_bits_of_its_place_among_the_top() -> None:
    logits, _ = make()
    for place in range(TOP):
        tokens = np.argsort(-logits, axis=1)[:, place].astype(np.int32)
        got = PROMPT(logits, tokens, TOP)
        np.testing.assert_array_equal(got.logprob, np.asarray(got.top_logprobs)[:, place])
        np.testing.assert_array_equal(got.rank, place + 1)


def test_ties_share_a_rank_and_come_by_id() -> None:
    logits = np.zeros((1, 200), np.float32)
    logits[0, [150, 20]] = 1
    got = PROMPT(logits, np.array([150], np.int32), TOP)
    assert int(got.rank[0]) == 1
    assert np.asarray(got.top_ids)[0].tolist() == [20, 150, 0, 1, 2]
    assert int(PROMPT(logits, np.array([7], np.int32), TOP).rank[0]) == 3


def test_a_vocabulary_smaller_than_top() -> None:
    logits, tokens = make(3)
    got = PROMPT(logits, tokens, TOP)
    np.testing.assert_array_equal(np.asarray(got.top_ids)[:, 3:], -1)
    np.testing.assert_array_equal(np.asarray(got.top_logprobs)[:, 3:], -np.inf)
    np.testing.assert_allclose(np.exp(np.asarray(got.top_logprobs, np.float64)).sum(axis=1), 1, rtol=1e-5)


def test_masked_and_extreme_logits() -> None:
    logits = np.full((1, 200), -np.inf, np.float32)
    logits[0, :3] = 3e38, -3e38, 0
    got = PROMPT(logits, np.array([0], np.int32), TOP)
    assert float(got.logprob[0]) == 0
    np.testing.assert_array_equal(got.top_logprobs, np.array([[0, -3e38, -np.inf, -np.inf, -np.inf]], np.float32))
    assert np.asarray(got.top_ids)[0, :3].tolist() == [0, 2, 1]


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_sampled_rows_report_raw_logprobs_only_if_asked(temperature: float) -> None:
    logits, _ = make()
    processed = {"temperature": temperature, "top_k": 3, "logit_bias": {9: 50.0}, "repetition_penalty": 1.5}
    rows = [Row(logits[i], SamplingParams(logprobs=2 if i % 2 else None, seed=i, **processed)) for i in range(ROWS)]
    slots, state = slots_and_state(rows)
    now = np.zeros(ROWS, np.int32)
    got = SAMPLE(logits, slots, state, now, now, np.arange(ROWS) != 3, TOP)[0]
    raw = PROMPT(logits, np.asarray(got.tokens), TOP)
    for have, want in zip(got.logprobs, raw, strict=True):
        for row in range(ROWS):
            expected = np.asarray(want)[row] if row in (1, 5) else np.zeros_like(np.asarray(want)[row])
            np.testing.assert_array_equal(np.asarray(have)[row], expected)


@pytest.mark.parametrize("vocab", [3, 700, 32_001])
def test_a_gpu_reports_the_same(vocab: int) -> None:
    """The GPU path groups instead of sorting; half of the tokens tie."""
    logits, tokens = make(vocab)
    logits[:, ::2] = np.round(logits[:, ::2])
    for have, want in zip(
        as_for_gpu(prompt_logprobs, static_argnums=2)(logits, tokens, 20), PROMPT(logits, tokens, 20), strict=True
    ):
        np.testing.assert_array_equal(have, want)
