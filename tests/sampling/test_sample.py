"""A sampling step: a row's result depends only on its request, seed, sample index and position."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.sampling import Sampled, SlotParams, SlotState, guess, guess_scores, neutral_slots, new_state, sample
from jaxinfer.sampling.processors import process
from jaxinfer.sampling.sample import NOT_FINITE
from jaxinfer.sampling.select import weights_of
from jaxinfer.sampling_params import SamplingParams
from tests.lowered import as_for_gpu
from tests.sampling.reference import LIMITS, Row, slots_and_state

ROWS, VOCAB = 8, 3001
SAMPLE = jax.jit(sample, static_argnames="max_logprobs")
SAMPLE_ON_GPU = as_for_gpu(sample, static_argnums=6)
ON = np.ones(ROWS, bool)


def logits(row: int, scale: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(row).normal(size=VOCAB) * scale).astype(np.float32)


def asks(row: int = 0, history: dict[str, Any] | None = None, **asked: Any) -> Row:
    return Row(logits(row), SamplingParams(max_tokens=100, **({"seed": 11} | asked)), **(history or {}))


HISTORY = {"prompt": (5, 6, 7), "output": (8, 9, 9), "stop_ids": (1, 2), "bad_words": ((3,), (9, 4))}
EVERYTHING = {
    "temperature": 1.4,
    "top_k": 300,
    "top_p": 0.97,
    "min_p": 1e-4,
    "top_n_sigma": 3.0,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.3,
    "logit_bias": {10: 5.0},
    "min_tokens": 50,
    "logprobs": 5,
}
REQUESTS = {
    "greedy": asks(temperature=0),
    "greedy with logprobs": asks(temperature=0, logprobs=5),
    "temperature": asks(),
    "top_k": asks(top_k=50),
    "top_p": asks(top_p=0.9),
    "min_p": asks(min_p=0.01),
    "top_n_sigma": asks(top_n_sigma=1.5),
    "penalties": asks(history=HISTORY, presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.5),
    "bias": asks(logit_bias={7: 20.0}),
    "allowed": asks(allowed_token_ids=range(900, 2000)),
    "bad words": asks(history=HISTORY),
    "min_tokens": asks(history=HISTORY, min_tokens=10),
    "everything": asks(history=HISTORY, **EVERYTHING),
}
QUIET = asks(1, temperature=0)
LOUD = asks(2, history=HISTORY, **EVERYTHING)


def run(
    rows: list[Row], position: int = 9, active: np.ndarray = ON, *, by: Any = SAMPLE, **more: Any
) -> tuple[Sampled, SlotState]:
    slots, state = slots_and_state(rows, **more)
    generated = np.array([len(row.output) for row in rows], np.int32)
    batch = np.stack([row.logits for row in rows])
    return by(batch, slots, state, np.full(len(rows), position, np.int32), generated, active, LIMITS.max_logprobs)


def of(sampled: Sampled, slot: int) -> list[np.ndarray]:
    return [np.asarray(leaf)[slot] for leaf in jax.tree.leaves(sampled)]


def among(row: Row, slot: int, neighbour: Row) -> list[Row]:
    return [row if i == slot else neighbour for i in range(ROWS)]


@pytest.mark.parametrize("name", REQUESTS)
def test_a_row_is_the_same_in_every_slot_and_batch(name: str) -> None:
    """Tokens and logprobs are bitwise identical, whatever features other rows enable."""
    row = REQUESTS[name]
    for position in range(9, 15):
        alone = of(run(among(row, 0, QUIET), position)[0], 0)
        for slot, neighbour in [(0, QUIET), (0, LOUD), (5, QUIET), (7, LOUD)]:
            np.testing.assert_equal(of(run(among(row, slot, neighbour), position)[0], slot), alone)


@pytest.mark.parametrize("name", REQUESTS)
def test_logits_and_weights_have_the_same_bits_in_every_batch(name: str) -> None:
    def weights(rows: list[Row]) -> tuple[jax.Array, jax.Array]:
        slots, state = slots_and_state(rows)
        generated = np.array([len(row.output) for row in rows], np.int32)
        return JIT_WEIGHTS(np.stack([row.logits for row in rows]), slots, state, generated)

    row = REQUESTS[name]
    alone = [np.asarray(x)[0] for x in weights(among(row, 0, QUIET))]
    for slot, neighbour in [(0, LOUD), (6, QUIET), (6, LOUD)]:
        there = [np.asarray(x)[slot] for x in weights(among(row, slot, neighbour))]
        np.testing.assert_array_equal(np.stack(there[:1]).view(np.int32), np.stack(alone[:1]).view(np.int32))
        np.testing.assert_array_equal(there[1].view(np.int32), alone[1].view(np.int32))


@jax.jit
def JIT_WEIGHTS(  # noqa: N802
    raw: jax.Array, slots: SlotParams, state: SlotState, generated: jax.Array
) -> tuple[jax.Array, jax.Array]:
    processed = process(raw, slots, lambda: state, generated, jnp.asarray(ON))
    random = slots.temperature > 0
    return processed, weights_of(processed, processed.max(axis=1), slots, random)


def test_the_same_seed_twice_and_other_seeds() -> None:
    tokens = {}
    variants = itertools.product([0, 1, 2**32, 2**63, -1, 5], [9, 10], [0, 1])
    for seed, position, index in variants:
        for _ in range(2):
            drawn = run([asks(seed=seed)] * ROWS, position, indices=[index] * ROWS)[0].tokens
            assert len(set(np.asarray(drawn).tolist())) == 1
            assert tokens.setdefault((seed, position, index), int(drawn[0])) == int(drawn[0])
    assert len(set(tokens.values())) > 12
    seeds = [tuple(t for (s, *_), t in tokens.items() if s == seed) for seed in (0, 1, 2**32, 2**63, -1, 5)]
    assert len(set(seeds)) == 6


def test_a_negative_seed_is_its_64_bits() -> None:
    drawn = [run([asks(seed=seed)] * ROWS)[0].tokens for seed in (-1, 2**64 - 1)]
    np.testing.assert_array_equal(*drawn)


def test_samples_of_a_request_differ() -> None:
    tokens = run([asks()] * ROWS, indices=list(range(ROWS)))[0].tokens
    assert len(set(np.asarray(tokens).tolist())) > ROWS // 2


@pytest.mark.parametrize(
    ("same", "other"),
    [
        ({"top_k": VOCAB}, {}),
        ({"top_k": 10**12}, {}),
        ({"top_p": 1.0, "min_p": 0.0, "top_k": -1}, {}),
        ({"top_n_sigma": -0.5}, {}),
        ({"top_n_sigma": 1e300}, {}),
        ({"top_n_sigma": 1e-300}, {"temperature": 0}),
        ({"top_k": 1}, {"temperature": 0}),
        ({"min_p": 1.0}, {"temperature": 0}),
        ({"top_p": 1e-300}, {"temperature": 0}),
        ({"temperature": 1e-6}, {"temperature": 0}),
        ({"temperature": 2e-5}, {"temperature": 0}),
        ({"repetition_penalty": 1.0, "logit_bias": {}}, {}),
    ],
)
def test_limits_of_a_parameter(same: dict, other: dict) -> None:
    for position in range(5):
        here, there = (run([asks(**asked)] * ROWS, position)[0].tokens for asked in (same, other))
        np.testing.assert_array_equal(here, there)


@pytest.mark.parametrize("asked", [{"top_n_sigma": 2.0}, {"top_k": 5}])
def test_a_filter_is_computed_only_where_a_row_asks(asked: dict) -> None:
    """The loop of top-k and the square root of top-n-sigma are inside a branch."""
    slots, _ = slots_and_state([asks(**asked)])
    values = np.zeros((1, VOCAB), np.float32)
    jaxpr = jax.make_jaxpr(weights_of)(values, values[:, 0], slots, np.ones(1, bool)).jaxpr
    always = {equation.primitive.name for equation in jaxpr.eqns}
    assert "cond" in always
    assert not always & {"sqrt", "while", "reduce_sum"}
    assert "sqrt" in str(jaxpr)


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 1e300])
@pytest.mark.parametrize("penalty", [1e-300, 1.0, 1e300])
def test_masks_survive_extreme_values(temperature: float, penalty: float) -> None:
    row = asks(history=HISTORY, temperature=temperature, repetition_penalty=penalty, allowed_token_ids=[3, 9, 600, 700])
    row = dataclasses.replace(row, logits=np.where(np.arange(VOCAB) % 2, -3e38, 3e38).astype(np.float32))
    for position in range(4):
        assert set(np.asarray(run([row] * ROWS, position)[0].tokens).tolist()) <= {9, 600, 700}


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("places", [[VOCAB - 1], [0, 5], range(VOCAB)], ids=["last", "two", "all"])
@pytest.mark.parametrize("asked", [{"temperature": 0}, {}, {"top_k": 5, "top_p": 0.5}, {"allowed_token_ids": [3, 9]}])
def test_logits_that_are_not_finite_have_no_token_and_leave_other_rows_alone(
    wrong: float, places: Sequence[int], asked: dict
) -> None:
    good = asks(**asked)
    logits = good.logits.copy()
    logits[list(places)] = wrong
    rows = [dataclasses.replace(good, logits=logits) if row % 2 else good for row in range(ROWS)]
    want, got = (np.asarray(run(each)[0].tokens) for each in ([good] * ROWS, rows))
    np.testing.assert_array_equal(got, np.where(np.arange(ROWS) % 2, NOT_FINITE, want))
    assert (want >= 0).all()


def test_the_largest_finite_logits_have_a_token() -> None:
    row = dataclasses.replace(asks(), logits=np.where(np.arange(VOCAB) % 2, -3.4e38, 3.4e38).astype(np.float32))
    assert (np.asarray(run([row] * ROWS)[0].tokens) >= 0).all()


def test_a_guess_of_the_same_logits_is_what_is_sampled() -> None:
    rows = [*REQUESTS.values(), LOUD]
    slots, state = slots_and_state(rows)
    some, numbers = np.stack([row.logits for row in rows]), np.arange(len(rows), dtype=np.int32)
    active = np.ones(len(rows), bool)
    want, _ = SAMPLE(some, slots, state, numbers + 7, numbers, active, max_logprobs=0)
    guessed = jax.jit(guess)
    assert guessed(some, slots, state, numbers + 7, numbers, active).tolist() == want.tokens.tolist()
    assert guessed(some, slots, state, numbers + 8, numbers, active).tolist() != want.tokens.tolist()
    scores = np.asarray(jax.jit(guess_scores)(some, slots, state, numbers + 7, numbers, active))
    assert np.argmax(scores, axis=1).tolist() == want.tokens.tolist()


def test_guesses_that_a_filter_drops_come_after_the_others() -> None:
    rows = [asks(top_k=5), asks(top_k=5, temperature=0)]
    slots, state = slots_and_state(rows)
    some, zeros = np.stack([row.logits for row in rows]), np.zeros(2, np.int32)
    scores = np.asarray(jax.jit(guess_scores)(some, slots, state, zeros, zeros, np.ones(2, bool)))
    order = np.argsort(-scores, axis=1)
    assert set(order[0, :5]) == set(np.argsort(-some[0])[:5])
    assert order[0, :5].tolist() != np.argsort(-some[0])[:5].tolist()  # the noise is in them
    assert np.isfinite(scores).all()
    np.testing.assert_array_equal(scores[1], some[1])


def test_greedy_takes_the_first_of_equals() -> None:
    row = asks(temperature=0)
    row.logits[[40, 2000, 3000]] = 100
    assert set(np.asarray(run([row] * ROWS)[0].tokens).tolist()) == {40}


def test_only_active_rows_advance() -> None:
    active = np.arange(ROWS) % 3 != 0
    rows = [asks(i, history=HISTORY, seed=i) for i in range(ROWS)]
    before = slots_and_state(rows)[1]
    sampled, after = run(rows, active=active)
    tokens = np.asarray(sampled.tokens)
    expected = np.asarray(before.counts).copy()
    expected[np.arange(ROWS)[active], tokens[active]] += 1
    np.testing.assert_array_equal(after.counts, expected)
    for row in range(ROWS):
        recent = np.asarray(before.recent)[row]
        np.testing.assert_array_equal(
            np.asarray(after.recent)[row], [*recent[1:], tokens[row]] if active[row] else recent
        )
    np.testing.assert_array_equal(after.prompt, before.prompt)
    np.testing.assert_array_equal(after.bias, before.bias)


def test_state_builds_up_to_what_the_output_says() -> None:
    """Ten steps from admission: penalties and bad words see exactly the generated tokens."""
    row = asks(history=HISTORY | {"output": ()}, temperature=0, frequency_penalty=2.0, presence_penalty=1.0)
    slots, state = slots_and_state([row] * ROWS)
    for step in range(10):
        where, done = np.full(ROWS, 3 + step, np.int32), np.full(ROWS, step, np.int32)
        sampled, state = SAMPLE(np.stack([row.logits] * ROWS), slots, state, where, done, ON, LIMITS.max_logprobs)
        assert set(np.asarray(sampled.tokens).tolist()) == {int(np.argmax(row.probabilities()))}
        row = dataclasses.replace(row, output=(*row.output, int(sampled.tokens[0])))


def test_one_program_serves_every_request() -> None:
    run([QUIET] * ROWS)
    compiled = SAMPLE._cache_size()
    for row in REQUESTS.values():
        run([row] * ROWS)
    assert SAMPLE._cache_size() == compiled


def test_nothing_sorts_the_vocabulary() -> None:
    now = jnp.zeros(ROWS, jnp.int32)
    arguments = (neutral_slots(ROWS, LIMITS), new_state(ROWS, VOCAB, LIMITS), now, now, jnp.asarray(ON))
    text = jax.jit(sample, static_argnums=6).lower(jnp.zeros((ROWS, VOCAB)), *arguments, 5).as_text()
    assert "stablehlo.while" in text
    assert "stablehlo.sort" not in text


def test_on_a_gpu_nothing_sorts_or_loops() -> None:
    now = jnp.zeros(ROWS, jnp.int32)
    arguments = (neutral_slots(ROWS, LIMITS), new_state(ROWS, VOCAB, LIMITS), now, now, jnp.asarray(ON))
    here, there = (
        str(by.trace(jnp.zeros((ROWS, VOCAB)), *arguments, 5).jaxpr)
        for by in (jax.jit(sample, static_argnums=6), SAMPLE_ON_GPU)
    )
    for word in ("while[", " top_k["):
        assert (word in here, word in there) == (True, False)
    assert " sort[" not in there


def test_a_gpu_samples_the_same_tokens_and_logprobs() -> None:
    """All requests together: results and state are bitwise identical."""
    rows = list(REQUESTS.values())
    for position in range(9, 15):
        here, there = (run(rows, position, np.ones(len(rows), bool), by=by) for by in (SAMPLE, SAMPLE_ON_GPU))
        np.testing.assert_equal(*([np.asarray(leaf) for leaf in jax.tree.leaves(x)] for x in (there, here)))
