"""Rows of drafts against the same tokens sampled one after the other, bit for bit."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxinfer.sampling import DraftRows, Sampled, SlotParams, SlotState, sample
from jaxinfer.sampling_params import SamplingParams
from tests.sampling.reference import LIMITS, Row, slots_and_state

VOCAB, SLOTS, DRAFTS = 17, 3, 3
ROWS = SLOTS * (1 + DRAFTS)
SAMPLE = jax.jit(sample, static_argnums=6)

ASKED = {
    "greedy": SamplingParams(temperature=0.0),
    "sampled": SamplingParams(temperature=1.5, top_k=9, top_p=0.9, min_p=0.01),
    "penalties": SamplingParams(presence_penalty=1.5, frequency_penalty=1.0, repetition_penalty=1.8),
    "bias": SamplingParams(logit_bias={3: 4.0, 5: -4.0}, temperature=1.3),
    "allowed": SamplingParams(allowed_token_ids=[1, 2, 3, 5, 7, 11], frequency_penalty=0.7),
    "min_tokens": SamplingParams(min_tokens=3, temperature=1.4),
    "logprobs": SamplingParams(logprobs=5, presence_penalty=0.5),
}


class Logits:
    """A model whose logits depend on slot and position alone, so that all that drafts could disturb is the sampler."""

    def __init__(self, seed: int) -> None:
        self._values = np.random.default_rng(seed).normal(scale=2, size=(SLOTS, 16, VOCAB)).astype(np.float32)

    def at(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return self._values[slots, positions]


def one_by_one(
    logits: Logits, slots: SlotParams, state: SlotState, steps: int
) -> tuple[list[Sampled], list[SlotState]]:
    """Each slot alone, ``steps`` times; the states after each step."""
    results, states, rows = list[Sampled](), [state], np.arange(SLOTS)
    for step in range(steps):
        at = np.full(SLOTS, step)
        result, state = SAMPLE(logits.at(rows, at), slots, state, at + 1, at, rows >= 0, LIMITS.max_logprobs)
        results.append(result)
        states.append(state)
    return results, states


def with_drafts(
    logits: Logits, slots: SlotParams, state: SlotState, tokens: np.ndarray, order: np.ndarray
) -> tuple[Sampled, SlotState]:
    """One step: rows of the slots themselves at position 0, and behind them ``tokens[slot]``, in rows by ``order``."""
    owners, fed, positions = np.arange(ROWS) % SLOTS, np.full(ROWS, -1), np.arange(ROWS) // SLOTS
    fed[SLOTS:] = tokens.T.reshape(-1)
    for column in (owners, fed, positions):
        column[SLOTS:] = column[SLOTS:][order]
    active = np.ones(ROWS, bool)
    drafts = DraftRows(*(column.astype(np.int32) for column in (owners, fed, positions)), active)
    wide = SlotParams(*(np.concatenate([x, *[x[:1]] * (ROWS - SLOTS)]) for x in map(np.asarray, slots)))
    state = SlotState(*(np.concatenate([x, *[x[:1]] * (ROWS - SLOTS)]) for x in map(np.asarray, state)))
    args = (logits.at(owners, positions), wide, state, positions + 1, positions, active, LIMITS.max_logprobs)
    sampled, state = SAMPLE(*args, drafts)
    places = {(owner, position): row for row, (owner, position) in enumerate(zip(owners, positions, strict=True))}
    rows = [places[slot, position] for position in range(1 + DRAFTS) for slot in range(SLOTS)]
    return jax.tree.map(lambda x: np.asarray(x)[rows].reshape(1 + DRAFTS, SLOTS, *x.shape[1:]), sampled), state


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("right", [0, 1, 2, DRAFTS])
def test_a_row_sees_the_state_as_if_the_drafts_before_it_were_accepted(asked: str, right: int, seed: int) -> None:
    rng = np.random.default_rng([seed, right])
    rows = [
        Row(
            np.zeros(VOCAB, np.float32),
            dataclasses.replace(ASKED[asked], seed=slot),
            prompt=(1, 2, 4),
            output=tuple(rng.integers(VOCAB, size=slot).tolist()),
            stop_ids=(6, 9),
            bad_words=((5,), (3, 7), (2, 3, 1)),
        )
        for slot in range(SLOTS)
    ]
    logits, (slots, state) = Logits(seed), slots_and_state(rows)
    alone, states = one_by_one(logits, slots, state, 1 + DRAFTS)
    tokens = np.stack([np.asarray(step.tokens) for step in alone[:-1]], axis=1)
    if right < DRAFTS:
        tokens[:, right] = (tokens[:, right] + 1) % VOCAB
    together, after = with_drafts(logits, slots, state, tokens, rng.permutation(SLOTS * DRAFTS))
    for step in range(right + 1):
        for mine, theirs in zip(jax.tree.leaves(together), jax.tree.leaves(alone[step]), strict=True):
            np.testing.assert_array_equal(mine[step], theirs)
    for name, mine, theirs in zip(SlotState._fields, after, states[right + 1], strict=True):
        np.testing.assert_array_equal(np.asarray(mine)[:SLOTS], theirs, err_msg=name)
        np.testing.assert_array_equal(
            np.asarray(mine)[SLOTS:], np.asarray(state.__getattribute__(name))[[0] * (ROWS - SLOTS)]
        )
