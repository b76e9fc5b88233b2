"""Thresholds are exact: against sorts, with ties, masked values and the ends of the float range."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxinfer.sampling.reductions import argmax, count, to_lanes, total
from jaxinfer.sampling.search import kth_largest, nucleus_floor
from tests.lowered import as_for_gpu

ROWS, VOCAB = 3, 200
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False)
LOGIT = st.one_of(FINITE, st.sampled_from([-np.inf, 0.0, -0.0, 1.0, np.float32(1 + 2**-23), 3.4e38, -3.4e38, 1.2e-38]))
EXAMPLES = settings(max_examples=150, deadline=None)


def rows_of(elements: st.SearchStrategy, dtype: type = np.float32) -> st.SearchStrategy[np.ndarray]:
    return hnp.arrays(dtype, (ROWS, VOCAB), elements=elements, fill=elements)


@jax.jit
def keep_k(values: jax.Array, k: jax.Array, on: jax.Array) -> jax.Array:
    """Compare on the device, where a threshold between 0 and the smallest normal number may count as 0."""
    return values >= kth_largest(to_lanes(values, -jnp.inf), k, on)[:, None]


@jax.jit
def find_floor(weights: jax.Array, top_p: jax.Array, on: jax.Array) -> jax.Array:
    return nucleus_floor(to_lanes(weights, 0), top_p, on)


keep_k_on_gpu = as_for_gpu(keep_k.__wrapped__)
find_floor_on_gpu = as_for_gpu(find_floor.__wrapped__)


@EXAMPLES
@given(rows_of(LOGIT), hnp.arrays(np.int32, ROWS, elements=st.integers(1, VOCAB)), hnp.arrays(np.bool_, ROWS))
def test_a_gpu_keeps_the_same_k(values: np.ndarray, k: np.ndarray, on: np.ndarray) -> None:
    np.testing.assert_array_equal(keep_k_on_gpu(values, k, on), keep_k(values, k, on))


@EXAMPLES
@given(rows_of(LOGIT), hnp.arrays(np.int32, ROWS, elements=st.integers(1, VOCAB)), hnp.arrays(np.bool_, ROWS))
def test_kth_largest_keeps_what_a_sort_keeps(values: np.ndarray, k: np.ndarray, on: np.ndarray) -> None:
    kept = np.asarray(keep_k(values, k, on))
    for row in range(ROWS):
        smallest = np.sort(values[row])[::-1][k[row] - 1] if on[row] else -np.inf
        np.testing.assert_array_equal(kept[row], values[row] >= smallest)


@EXAMPLES
@given(
    rows_of(st.integers(0, 1024), np.int64),
    hnp.arrays(np.int64, ROWS, elements=st.integers(1, 63)),
    hnp.arrays(np.bool_, ROWS),
)
def test_nucleus_of_exact_weights_is_exact(whole: np.ndarray, p: np.ndarray, on: np.ndarray) -> None:
    """Integers / 1024 and probabilities / 64: every sum and product is exact in float32."""
    weights, top_p = (whole / 1024).astype(np.float32), (p / 64).astype(np.float32)
    found = np.asarray(find_floor(weights, top_p, on))
    for row in range(ROWS):
        above = (whole[row][:, None] < whole[row]) @ whole[row]
        kept = (64 * above < p[row] * whole[row].sum()) | (not on[row])
        positive = whole[row] > 0
        np.testing.assert_array_equal((weights[row] >= found[row])[positive], kept[positive])


WEIGHT = st.one_of(st.floats(0, 1, width=32, allow_subnormal=False), st.sampled_from([0.0, 1.0, 0.5, 1e-30, 1e-7]))
TOP_P = st.one_of(st.floats(2**-20, 1 - 2**-20, width=32), st.sampled_from([1e-30, 1 - 2**-24, 0.5, 0.9]))


@EXAMPLES
@given(rows_of(WEIGHT), hnp.arrays(np.float32, ROWS, elements=TOP_P))
def test_nucleus_suffices_and_is_the_smallest(weights: np.ndarray, top_p: np.ndarray) -> None:
    """Up to float32 rounding, the kept mass reaches top_p, and does not without its smallest weight."""
    found = np.asarray(find_floor(weights, top_p, np.ones(ROWS, bool)))
    for row in range(ROWS):
        exact = weights[row].astype(np.float64)
        kept = exact[weights[row] >= found[row]]
        assert kept.sum() >= top_p[row] * exact.sum() * (1 - 1e-5)
        if kept.sum() > 0:
            assert kept[kept > kept.min()].sum() <= top_p[row] * exact.sum() * (1 + 1e-5)


@EXAMPLES
@given(rows_of(WEIGHT), hnp.arrays(np.float32, ROWS, elements=TOP_P), hnp.arrays(np.bool_, ROWS))
def test_a_gpu_keeps_the_same_nucleus(weights: np.ndarray, top_p: np.ndarray, on: np.ndarray) -> None:
    here, there = (np.asarray(find(weights, top_p, on))[:, None] for find in (find_floor, find_floor_on_gpu))
    positive = weights > 0
    np.testing.assert_array_equal((weights >= there) & positive, (weights >= here) & positive)


@pytest.mark.parametrize("k", [1, 128, 129, VOCAB - 2])
def test_a_gpu_tells_neighbours_apart(k: int) -> None:
    """Adjacent floats, with values at the ends of the range."""
    values = (1 + np.arange(VOCAB) * np.float64(2**-23)).astype(np.float32)[None].repeat(ROWS, axis=0)
    values[1, :2], values[2, :2] = (-np.inf, 3.4e38), (-3.4e38, np.inf)
    kept = np.asarray(keep_k_on_gpu(values, np.full(ROWS, k, np.int32), np.ones(ROWS, bool)))
    assert kept.sum(axis=1).tolist() == [k] * ROWS


@pytest.mark.parametrize("scale", [0.1, 1.0, 8.0])
def test_a_gpu_keeps_the_same_of_a_large_vocabulary(scale: float) -> None:
    """Sums over many weights round; both searches use the same sums."""
    logits = (np.random.default_rng(4).normal(size=(ROWS, 32_000)) * scale).astype(np.float32)
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    on = np.ones(ROWS, bool)
    for p in np.linspace(0.05, 0.9999, 12, dtype=np.float32):
        here, there = (np.asarray(find(weights, np.full(ROWS, p), on)) for find in (find_floor, find_floor_on_gpu))
        np.testing.assert_array_equal(weights >= there[:, None], weights >= here[:, None])
    for k in (1, 40, 127, 128, 129, 31_999):
        counts = np.full(ROWS, k, np.int32)
        np.testing.assert_array_equal(keep_k_on_gpu(logits, counts, on), keep_k(logits, counts, on))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1.0, 4.0, 12.0]), st.floats(0.05, 0.999))
def test_leaving_the_search_early_changes_nothing(seed: int, scale: float, p: float) -> None:
    """Adjacent softmax weights of random logits are separated as by 32 halvings."""
    logits = np.random.default_rng(seed).normal(size=(ROWS, VOCAB)) * scale
    weights = np.exp(logits - logits.max(axis=1, keepdims=True)).astype(np.float32)
    found = np.asarray(find_floor(weights, np.full(ROWS, p, np.float32), np.ones(ROWS, bool)))
    for row in range(ROWS):
        ordered = np.sort(weights[row].astype(np.float64))[::-1]
        mass = np.cumsum(ordered) / ordered.sum()
        at = int(np.searchsorted(mass, np.float32(p)))
        if min(abs(mass - np.float32(p))) > 1e-5:
            assert (weights[row] >= found[row]).sum() == at + 1


find_argmax = jax.jit(argmax)


def test_sums_that_round_more_than_a_weight_do_not_end_the_search() -> None:
    """Flat rows of 100,000 tokens: float32 sums are off by about the weights at the edge of the nucleus."""
    weights = np.random.default_rng(0).uniform(size=(ROWS, 100_000)).astype(np.float32) ** 6
    sum_from = jax.jit(lambda w, floor: total(jnp.where(ranks_of(w) >= floor[:, None, None], ranks_of(w), 0)))
    ordered = np.sort(weights, axis=1)
    for p in np.linspace(0.997, 0.9998, 30, dtype=np.float32):
        found = np.asarray(find_floor(weights, np.full(ROWS, p), np.ones(ROWS, bool)))
        edge = [int(np.searchsorted(ordered[row], found[row])) for row in range(ROWS)]
        whole, kept, fewer = (
            np.asarray(sum_from(weights, floor))
            for floor in (np.zeros(ROWS, np.float32), *(ordered[range(ROWS), np.add(edge, i)] for i in (0, 1)))
        )
        assert (kept >= p * whole).all()
        assert (fewer < p * whole).all()


def ranks_of(weights: jax.Array) -> jax.Array:
    return to_lanes(weights, 0)


@EXAMPLES
@given(rows_of(LOGIT))
def test_reductions_over_lanes(values: np.ndarray) -> None:
    peak, index = find_argmax(values)
    np.testing.assert_array_equal(peak, values.max(axis=1))
    np.testing.assert_array_equal(index, values.argmax(axis=1))
    positive = np.abs(np.clip(values, -1, 1))
    counted, summed = reduce_lanes(values, positive)
    np.testing.assert_array_equal(counted, (values > 0).sum(axis=1))
    np.testing.assert_allclose(summed, positive.astype(np.float64).sum(axis=1), rtol=1e-5)


@jax.jit
def reduce_lanes(values: jax.Array, positive: jax.Array) -> tuple[jax.Array, jax.Array]:
    return count(to_lanes(values, -jnp.inf) > 0), total(to_lanes(positive, 0))
