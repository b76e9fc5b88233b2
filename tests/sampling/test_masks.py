"""Grammar masks in the sampler: sampled tokens, and unchanged bits of unconstrained rows."""

from typing import Any

import jax
import numpy as np
import pytest

from jaxinfer.sampling import Sampled, SlotState, neutral_slots, new_state, sample
from jaxinfer.sampling_params import SamplingParams
from tests.sampling.reference import LIMITS, Row, slots_and_state
from tests.sampling.test_sample import LOUD, ON, QUIET, ROWS, SAMPLE, VOCAB, asks, logits, of

WORDS = -(-VOCAB // 32)
CONSTRAINED: dict[str, Any] = {"structured_outputs": {"regex": "a"}}


def packed(allowed: np.ndarray) -> np.ndarray:
    bits = np.zeros((len(allowed), 32 * WORDS), bool)
    bits[:, :VOCAB] = allowed
    return np.packbits(bits, axis=1, bitorder="little").view(np.int32)


def run(rows: list[Row], masks: np.ndarray | None, active: np.ndarray = ON) -> tuple[Sampled, SlotState]:
    slots, state = slots_and_state(rows)
    generated = np.array([len(row.output) for row in rows], np.int32)
    positions = np.full(len(rows), 9, np.int32)
    batch = np.stack([row.logits for row in rows])
    return SAMPLE(batch, slots, state, positions, generated, active, LIMITS.max_logprobs, None, masks)


def some(seed: int) -> np.ndarray:
    """Return a random mask that bars nine of ten tokens."""
    return np.random.default_rng(seed).random((ROWS, VOCAB)) < 0.1


def test_a_step_without_processors_copies_logits_once():
    """XLA copies the unchanged output of a cond: all processors, grammar masks included, share one."""
    slots, state = neutral_slots(ROWS, LIMITS), new_state(ROWS, VOCAB, LIMITS)
    now, words = np.zeros(ROWS, np.int32), packed(some(1))
    given = (np.zeros((ROWS, VOCAB), np.float32), slots, state, now, now, ON)
    jaxpr = jax.jit(sample, static_argnums=6).trace(*given, 2, None, words).jaxpr
    choices = [equation for equation in jaxpr.eqns if equation.primitive.name == "cond"]
    assert sum(one.outvars[0].aval.shape == (ROWS, VOCAB) for one in choices) == 1


@pytest.mark.parametrize("asked", [{"temperature": 0.0}, {"temperature": 1.5}, {"temperature": 1.0, "top_k": 7}])
def test_only_allowed_tokens_are_drawn(asked):
    rows = [Row(logits(i), SamplingParams(max_tokens=100, seed=i, **asked, **CONSTRAINED)) for i in range(ROWS)]
    allowed = some(1)
    tokens = np.asarray(run(rows, packed(allowed))[0].tokens)
    assert allowed[np.arange(ROWS), tokens].all()
    if asked["temperature"] == 0.0:
        best = np.where(allowed, np.stack([row.logits for row in rows]), -np.inf).argmax(axis=1)
        assert tokens.tolist() == best.tolist()


def test_the_others_keep_their_bits():
    """Unconstrained rows keep their bits next to rows with masks."""
    held = Row(logits(5), SamplingParams(max_tokens=100, seed=5, **CONSTRAINED))
    for free in (QUIET, LOUD, asks(temperature=0.7, logprobs=3)):
        rows = [held if i % 2 else free for i in range(ROWS)]
        with_masks, plain = run(rows, packed(some(2)))[0], run([free] * ROWS, None)[0]
        for slot in range(0, ROWS, 2):
            for have, want in zip(of(with_masks, slot), of(plain, slot), strict=True):
                np.testing.assert_array_equal(have, want)


def test_a_mask_of_all_tokens_changes_nothing():
    rows = [asks(7, logprobs=3), *[QUIET] * (ROWS - 1)]
    held = [asks(7, logprobs=3, **CONSTRAINED), *[QUIET] * (ROWS - 1)]
    everything = np.full((ROWS, WORDS), -1, np.int32)
    for have, want in zip(of(run(held, everything)[0], 0), of(run(rows, None)[0], 0), strict=True):
        np.testing.assert_array_equal(have, want)


def test_other_processors_choose_among_what_is_allowed():
    allowed = np.zeros((ROWS, VOCAB), bool)
    allowed[:, [7, 9]] = True
    for asked, token in (({"logit_bias": {9: 100.0}}, 9), ({"logit_bias": {7: 100.0}}, 7)):
        rows = [asks(temperature=0.0, **asked, **CONSTRAINED)] * ROWS
        assert set(np.asarray(run(rows, packed(allowed))[0].tokens).tolist()) == {token}


def test_the_grammar_wins_where_others_leave_nothing():
    allowed = np.zeros((ROWS, VOCAB), bool)
    allowed[:, [7, 9]] = True
    rows = [asks(temperature=1.0, allowed_token_ids=[11], **CONSTRAINED)] * ROWS
    assert set(np.asarray(run(rows, packed(allowed))[0].tokens).tolist()) <= {7, 9}


def test_log_probabilities_are_under_the_raw_logits():
    rows = [asks(temperature=0.0, logprobs=5, **CONSTRAINED)] * ROWS
    free = [asks(temperature=0.0, logprobs=5)] * ROWS
    held, plain = run(rows, packed(some(3)))[0].logprobs, run(free, None)[0].logprobs
    names = [name for name in held._fields if "top" in name]
    assert names
    for name in names:
        np.testing.assert_array_equal(getattr(held, name), getattr(plain, name))
