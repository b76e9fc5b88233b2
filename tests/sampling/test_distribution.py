"""Each processor and filter samples from the distribution of the float64 reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.sampling import sample
from jaxinfer.sampling_params import SamplingParams
from tests.sampling.reference import LIMITS, Row, p_value, repeated

ROWS, STEPS = 1024, 20
SAMPLE = jax.jit(sample, static_argnames="max_logprobs")


def logits(vocab: int, scale: float = 2.0, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=vocab) * scale).astype(np.float32)


def case(vocab: int = 300, scale: float = 2.0, *, given: dict | None = None, **asked: object) -> Row:
    return Row(logits(vocab, scale), SamplingParams(max_tokens=100, **asked), **(given or {}))


LIKELY = tuple(np.argsort(logits(300))[::-1][:12].tolist())
UNLIKELY = tuple(np.argsort(logits(300))[:40].tolist())
SEEN = {"prompt": LIKELY[:4], "output": LIKELY[2:8] + LIKELY[6:8] * 2}

CASES = {
    "plain": case(),
    "one block": case(30),
    "wide and flat": case(1000, 0.5),
    "peaked": case(300, 8.0),
    "cold": case(temperature=0.4),
    "hot": case(temperature=2.5),
    "top_k": case(top_k=7),
    "top_k 1": case(top_k=1),
    "top_p": case(top_p=0.6),
    "top_p after top_k": case(top_k=20, top_p=0.8),
    "min_p": case(min_p=0.1),
    "top_n_sigma": case(top_n_sigma=1.0),
    "top_n_sigma of flat logits": case(1000, 0.5, top_n_sigma=2.0, temperature=3.0),
    "top_n_sigma of what is allowed": case(top_n_sigma=0.8, allowed_token_ids=[3, *UNLIKELY[:30], 299, 128]),
    "top_n_sigma with penalties": case(given=SEEN, top_n_sigma=1.2, presence_penalty=1.5, repetition_penalty=1.8),
    "top_p after top_n_sigma": case(top_n_sigma=1.5, top_p=0.6, temperature=2.0),
    "all filters": case(temperature=1.7, min_p=0.02, top_k=60, top_p=0.9, top_n_sigma=2.2),
    "presence": case(given=SEEN, presence_penalty=1.5),
    "presence negative": case(given=SEEN, presence_penalty=-1.0),
    "frequency": case(given=SEEN, frequency_penalty=0.7),
    "repetition": case(given=SEEN, repetition_penalty=1.8),
    "repetition below 1": case(given={"prompt": UNLIKELY[:1], "output": UNLIKELY}, repetition_penalty=0.1),
    "all penalties": case(given=SEEN, presence_penalty=0.3, frequency_penalty=0.5, repetition_penalty=1.3),
    "logit_bias": case(logit_bias={LIKELY[0]: -3, 7: 4, 299: 6.5, LIKELY[1]: -100}),
    "allowed": case(allowed_token_ids=[3, 1, 299, 128]),
    "allowed and biased": case(allowed_token_ids=[3, 1, 299, 128], logit_bias={299: 2, 5: 50}),
    "bad words": case(given={"bad_words": ((LIKELY[0],), (LIKELY[1], LIKELY[2])), "output": (4, LIKELY[1])}),
    "bad words not begun": case(given={"bad_words": ((LIKELY[1], LIKELY[2]),), "output": (LIKELY[1], 4)}),
    "bad words of three": case(given={"bad_words": ((8, 9, LIKELY[0]), (7, 9, LIKELY[1])), "output": (8, 9)}),
    "bad words before any output": case(given={"bad_words": ((8, LIKELY[0]),)}),
    "min_tokens not reached": case(min_tokens=3, given={"stop_ids": LIKELY[:3], "output": (1, 2)}),
    "min_tokens reached": case(min_tokens=2, given={"stop_ids": LIKELY[:3], "output": (1, 2)}),
    "everything": case(
        temperature=1.3,
        top_k=40,
        top_p=0.95,
        min_p=0.005,
        top_n_sigma=2.0,
        presence_penalty=0.2,
        frequency_penalty=0.4,
        repetition_penalty=1.2,
        logit_bias={LIKELY[3]: 1.5},
        min_tokens=20,
        given=SEEN | {"stop_ids": LIKELY[:1], "bad_words": ((LIKELY[5],),)},
    ),
}


def draws(row: Row, dtype: object = jnp.float32) -> np.ndarray:
    """Draw at ROWS seeds and STEPS positions each."""
    slots, state = repeated(row, ROWS)
    batch = jnp.broadcast_to(jnp.asarray(row.logits, dtype), (ROWS, len(row.logits)))
    generated, active = np.full(ROWS, len(row.output), np.int32), np.ones(ROWS, bool)
    tokens = [
        SAMPLE(batch, slots, state, np.full(ROWS, 7 + step, np.int32), generated, active, LIMITS.max_logprobs)[0].tokens
        for step in range(STEPS)
    ]
    return np.concatenate(tokens)


@pytest.mark.parametrize("name", CASES)
def test_draws_follow_the_reference(name: str) -> None:
    drawn = draws(CASES[name])
    assert len(drawn) >= 20_000
    assert p_value(drawn, CASES[name].probabilities()) > 1e-3


@pytest.mark.parametrize("name", ["plain", "everything"])
def test_greedy_follows_the_reference(name: str) -> None:
    row = CASES[name]
    greedy = Row(row.logits, SamplingParams(**(vars(row.params) | {"temperature": 0})), **_history(row))
    assert set(draws(greedy).tolist()) == {int(np.argmax(greedy.probabilities()))}


def test_bfloat16_logits_are_sampled_in_float32() -> None:
    rounded = np.asarray(jnp.asarray(logits(300), jnp.bfloat16).astype(jnp.float32))
    row = Row(rounded, SamplingParams(top_p=0.9))
    assert p_value(draws(row, jnp.bfloat16), row.probabilities()) > 1e-3


def test_the_chi_square_notices_a_small_error() -> None:
    row, wrong = CASES["plain"], case(temperature=1.05)
    assert p_value(draws(row), wrong.probabilities()) < 1e-3


def _history(row: Row) -> dict:
    return {"prompt": row.prompt, "output": row.output, "stop_ids": row.stop_ids, "bad_words": row.bad_words}
