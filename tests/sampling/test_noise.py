"""Noise of draws: exponential down to rare tokens, unrelated across tokens, rows and seeds, shared by two models."""

import math

import jax
import numpy as np
import pytest
import scipy.special
import scipy.stats

from jaxinfer.sampling.noise import _mixed, exponentials, random_words
from jaxinfer.sampling.reductions import LANES
from jaxinfer.sampling.select import draw
from tests.lowered import as_for_gpu
from tests.sampling.reference import neutral, p_value

NOISE, WORDS = jax.jit(exponentials, static_argnums=(1, 2)), jax.jit(random_words, static_argnums=3)
MIX, DRAW, DRAW_ON_GPU = jax.jit(_mixed), jax.jit(draw), as_for_gpu(draw)
LARGE = 2**18  # tokens of the largest vocabularies
MASK = 0xFFFFFFFF  # 32 bits


def words(rows: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(2**32, size=(rows, 2), dtype=np.uint32)


def noise(rows: int, tokens: int, seed: int = 0) -> np.ndarray:
    return np.asarray(NOISE(words(rows, seed), tokens // LANES, LANES)).reshape(rows, tokens)


def mixed(word: int) -> int:
    word = (word ^ word >> 16) * 0x21F0AAAD & MASK
    word = (word ^ word >> 15) * 0x735A2D97 & MASK
    return word ^ word >> 15


def test_each_number_is_that_of_its_row_and_token() -> None:
    """In Python's integers, and the logarithm in float64."""
    found, keys = noise(5, 3 * LANES), words(5)
    for row, token in [(0, 0), (1, 1), (2, 127), (3, 128), (4, 383)]:
        first, second = map(int, keys[row])
        uniform = (mixed(mixed(token ^ first) ^ second) + ((mixed(first) >> 8) + 0.5) / 2**24) / 2**32
        assert found[row, token] == pytest.approx(-math.log1p(-uniform), rel=1e-6)


def test_it_is_exponential_from_the_smallest_numbers_on() -> None:
    found = np.sort(noise(16, LARGE).ravel().astype(np.float64))
    assert found[0] > 0
    assert found[-1] < 17
    bins = np.concatenate([[0], 2.0 ** np.arange(-20, 4)])
    expected = np.diff(np.concatenate([-np.expm1(-bins), [1]]))
    seen = np.diff(np.concatenate([np.searchsorted(found, bins), [len(found)]]))
    assert scipy.stats.chisquare(seen, expected * len(found)).pvalue > 1e-3


def test_the_first_of_a_large_vocabulary_is_exact() -> None:
    """The smallest of 2**18 numbers: of 24 bits they would be one of some 64 values, and the first token would often
    win a tie."""
    least = np.concatenate([np.sort(noise(32, LARGE, seed), axis=1)[:, :2] for seed in range(4)]).astype(np.float64)
    assert (least[:, 0] < least[:, 1]).all()
    assert scipy.stats.kstest(least[:, 0] * LARGE, "expon").pvalue > 1e-3


@pytest.mark.parametrize("weight", [1e-10, 1e-12])
def test_the_rarest_tokens_have_their_share(weight: float) -> None:
    """Below the smallest hash, numbers are spread evenly. One row in 2**32 has it: its key is made by inversion."""
    first = words(2**16)[:, 0]
    keys = np.stack([first, np.asarray(MIX(first))], axis=1)  # the hash of token 0 is that of 0, which is 0
    found = np.asarray(NOISE(keys, 1, LANES))[:, 0, 0].astype(np.float64)
    assert found.max() <= 2.0**-32
    assert (found < weight).mean() / 2**32 == pytest.approx(weight, rel=0.2)


def test_a_hash_is_a_permutation() -> None:
    """So the tokens of a row differ."""
    some = np.asarray(MIX(np.arange(2**20, dtype=np.uint32) * np.uint32(4093)))
    assert len(np.unique(some)) == len(some)


def test_numbers_are_unrelated() -> None:
    """Of neighbours in tokens, positions, samples and seeds, and of keys that differ in a bit."""
    seed, index, position = np.zeros((4, 2), np.uint32), np.zeros(4, np.int32), np.full(4, 7, np.int32)
    seed[1, 1], index[2], position[3] = 1, 1, 8
    rows = np.asarray(WORDS(seed, index, position, 0))
    flipped = rows[0] ^ (np.uint32(1) << np.array([[31, 0], [0, 31], [5, 0], [0, 5], [5, 5]], np.uint32))
    flipped[0, 1], flipped[2, 1] = rows[0, 1], rows[0, 1]
    flipped[1, 0], flipped[3, 0] = rows[0, 0], rows[0, 0]
    found = np.asarray(NOISE(np.concatenate([rows, flipped]), LARGE // LANES, LANES)).reshape(9, -1)
    ranks = -np.expm1(-found.astype(np.float64)) - 0.5
    related = np.corrcoef(np.concatenate([ranks, np.roll(ranks[:1], 1), np.roll(ranks[:1], LANES)]))
    assert np.abs(related - np.eye(11)).max() < 5 / math.sqrt(LARGE)


def acceptance(p: np.ndarray, q: np.ndarray) -> float:
    """Return the probability that two distributions draw the same token: that of token i is
    1 / sum(max(p / p[i], q / q[i]))."""
    both = np.flatnonzero((p > 0) & (q > 0))
    return float((1 / np.maximum(p / p[both, None], q / q[both, None]).sum(1)).sum())


@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0])
def test_two_models_agree_as_often_as_the_race_says(scale: float) -> None:
    rng, rows = np.random.default_rng(3), 4096
    logits = rng.normal(size=300) * 3
    p, q = (scipy.special.softmax(each) for each in (logits, logits + rng.normal(size=300) * scale))
    q[p < 1e-4] = 0
    q /= q.sum()
    slots = neutral(rows)._replace(seed=words(rows))
    positions, random, none = np.arange(rows, dtype=np.int32), np.ones(rows, bool), np.full(rows, -1, np.int32)
    padded = [np.pad(each / each.max(), (0, -len(each) % LANES)).astype(np.float32) for each in (p, q)]
    weights = [np.tile(each.reshape(-1, LANES), (rows, 1, 1)) for each in padded]
    drawn = [np.asarray(DRAW(each, slots, positions, random, none)) for each in weights]
    assert min(p_value(tokens, each) for tokens, each in zip(drawn, (p, q), strict=True)) > 1e-3
    expected, best = acceptance(p, q), np.minimum(p, q).sum()
    assert best / (2 - best) <= expected <= best
    assert abs((drawn[0] == drawn[1]).mean() - expected) < 4 * math.sqrt(expected * (1 - expected) / rows)
    np.testing.assert_array_equal(DRAW_ON_GPU(weights[0], slots, positions, random, none), drawn[0])


def test_of_equal_tokens_the_first_is_drawn_and_of_weight_zero_none() -> None:
    """The weights are such that many tokens arrive at the same time."""
    rows = 64
    keys = words(rows)
    slots, positions = neutral(rows)._replace(seed=keys), np.arange(rows, dtype=np.int32)
    made = np.asarray(NOISE(WORDS(slots.seed, slots.sample_index, positions, 0), 2, LANES))
    weights = (made * 2.0**-5).astype(np.float32)
    weights[:, :, :3] = weights[32:] = 0
    weights[40, 1, 7] = 1e-30
    for by in (DRAW, DRAW_ON_GPU):
        drawn = np.asarray(by(weights, slots, positions, np.arange(rows) != 5, np.full(rows, -1, np.int32)))
        assert set(drawn[:32].tolist()) == {3, -1}
        assert drawn[5] == -1
        assert drawn[40] == LANES + 7
        assert set(drawn[[32, 39, 41, 63]].tolist()) == {-1}
