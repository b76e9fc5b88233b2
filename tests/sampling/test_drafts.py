"""Rows of drafts are bitwise identical to the same tokens sampled one after the other."""

import dataclasses
from typing import NamedTuple

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
    "sigma": SamplingParams(temperature=1.5, top_n_sigma=1.0),
    "penalties": SamplingParams(presence_penalty=1.5, frequency_penalty=1.0, repetition_penalty=1.8),
    "bias": SamplingParams(logit_bias={3: 4.0, 5: -4.0}, temperature=1.3),
    "allowed": SamplingParams(allowed_token_ids=[1, 2, 3, 5, 7, 11], frequency_penalty=0.7),
    "min_tokens": SamplingParams(min_tokens=3, temperature=1.4),
    "logprobs": SamplingParams(logprobs=5, presence_penalty=0.5),
}


class Logits:
    """A model whose logits depend only on slot and position, so that drafts can only disturb the sampler."""

    def __init__(self, seed: int) -> None:
        self._values = np.random.default_rng(seed).normal(scale=2, size=(SLOTS, 16, VOCAB)).astype(np.float32)

    def at(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return self._values[slots, positions]


def one_by_one(
    logits: Logits, slots: SlotParams, state: SlotState, steps: int
) -> tuple[list[Sampled], list[SlotState]]:
    """Sample each slot ``steps`` times without drafts; return results and states of each step. Extra rows are idle."""
    count = len(slots.temperature)
    results, states, rows = list[Sampled](), [state], np.arange(count)
    for step in range(steps):
        at = np.full(count, step)
        given = logits.at(rows % SLOTS, at)
        result, state = SAMPLE(given, slots, state, at + 1, at, rows < SLOTS, LIMITS.max_logprobs)
        results.append(result)
        states.append(state)
    return results, states


def with_drafts(
    logits: Logits, slots: SlotParams, state: SlotState, tokens: np.ndarray, order: np.ndarray
) -> tuple[Sampled, SlotState]:
    """Run one step: slot rows at position 0, then rows of ``tokens[slot]`` as drafts, permuted by ``order``."""
    owners, fed, positions = np.arange(ROWS) % SLOTS, np.full(ROWS, -1), np.arange(ROWS) // SLOTS
    fed[SLOTS:] = tokens.T.reshape(-1)
    for column in (owners, fed, positions):
        column[SLOTS:] = column[SLOTS:][order]
    active = np.ones(ROWS, bool)
    drafts = DraftRows(*(column.astype(np.int32) for column in (owners, fed, positions)), active)
    wide, state = padded(slots, state, ROWS)
    args = (logits.at(owners, positions), wide, state, positions + 1, positions, active, LIMITS.max_logprobs)
    sampled, state = SAMPLE(*args, drafts)
    places = {(owner, position): row for row, (owner, position) in enumerate(zip(owners, positions, strict=True))}
    rows = [places[slot, position] for position in range(1 + DRAFTS) for slot in range(SLOTS)]
    return jax.tree.map(lambda x: np.asarray(x)[rows].reshape(1 + DRAFTS, SLOTS, *x.shape[1:]), sampled), state


def padded(slots: SlotParams, state: SlotState, count: int) -> tuple[SlotParams, SlotState]:
    """Pad slots and state to a program of ``count`` rows."""
    filled = [[np.concatenate([x, *[x[:1]] * (count - SLOTS)]) for x in map(np.asarray, all)] for all in (slots, state)]
    return SlotParams(*filled[0]), SlotState(*filled[1])


def rows_of(asked: str, rng: np.random.Generator) -> list[Row]:
    """Return slots in the middle of requests, each one token longer than the one before."""
    return [
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


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("right", [0, 1, 2, DRAFTS])
def test_a_row_sees_the_state_as_if_the_drafts_before_it_were_accepted(asked: str, right: int, seed: int) -> None:
    rng = np.random.default_rng([seed, right])
    rows = rows_of(asked, rng)
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


class Planned(NamedTuple):
    """A row of a step: its slot, path, input token and position."""

    owner: int
    branch: int
    fed: int
    position: int


def paths_of(truth: list[int], slot: int, rng: np.random.Generator) -> list[list[int]]:
    """Return draft paths of a slot: some follow the truth equally deep, one further than the main path, others not."""
    wrong = [(token + 1 + slot) % VOCAB for token in truth]
    paths = [[truth[0], wrong[1]], [truth[0], truth[1], wrong[2]], [wrong[0]], truth[: 1 + slot], [truth[0], wrong[1]]]
    main, others = paths[:1], paths[1:]
    rng.shuffle(others)
    return main + others


def planned_rows(paths: list[list[list[int]]], rng: np.random.Generator) -> list[Planned]:
    """Return the rows of paths by slot: slot rows first, all others shuffled."""
    own, others = [Planned(slot, 0, -1, 0) for slot in range(SLOTS)], list[Planned]()
    for slot, several in enumerate(paths):
        names = [0, *(7 + rng.permutation(9)[: len(several) - 1]).tolist()]  # distinct, unordered
        for name, path in zip(names, several, strict=True):
            others += [Planned(slot, name, 0, 0)] if name else []  # the sampler ignores the input token of a copy
            others += [Planned(slot, name, token, 1 + depth) for depth, token in enumerate(path)]
    return own + [others[place] for place in rng.permutation(len(others))]


@pytest.mark.parametrize("asked", ASKED)
def test_of_several_paths_each_is_seen_alone_and_each_token_counts_once(asked: str, seed: int) -> None:
    rng = np.random.default_rng([seed, 9])
    count = SLOTS + 42
    logits, given = Logits(seed), slots_and_state(rows_of(asked, rng))
    slots, before = padded(*given, count)
    alone, states = one_by_one(logits, slots, before, 1 + DRAFTS)
    truths = np.stack([np.asarray(step.tokens) for step in alone], axis=1)[:SLOTS].tolist()
    paths = [paths_of(truth, slot, rng) for slot, truth in enumerate(truths)]
    rows = planned_rows(paths, rng)
    owners, branches, fed, positions = np.array(rows, np.int32).T
    assert len(rows) == count
    active = np.ones(count, bool)
    drafts = DraftRows(owners, fed, positions, active, branches)
    args = (logits.at(owners, positions), slots, before, positions + 1, positions, active, LIMITS.max_logprobs)
    sampled, after = SAMPLE(*args, drafts)

    longest = [0] * SLOTS
    for place, row in enumerate(rows):
        path = [other.fed for other in sorted(rows, key=lambda other: other.position) if other[:2] == row[:2]]
        path = path[1 : 1 + row.position]
        if path == truths[row.owner][: row.position]:  # the row occurs in the run without drafts
            longest[row.owner] = max(longest[row.owner], row.position)
            for mine, theirs in zip(jax.tree.leaves(sampled), jax.tree.leaves(alone[row.position]), strict=True):
                np.testing.assert_array_equal(np.asarray(mine)[place], np.asarray(theirs)[row.owner])
    assert longest == [2, 2, 3]
    for name, mine in zip(SlotState._fields, after, strict=True):
        for slot in range(SLOTS):
            theirs = getattr(states[longest[slot] + 1], name)
            np.testing.assert_array_equal(np.asarray(mine)[slot], np.asarray(theirs)[slot], err_msg=f"{name} {slot}")
        np.testing.assert_array_equal(np.asarray(mine)[SLOTS:], np.asarray(getattr(before, name))[SLOTS:])
