"""The sparse indexer against numpy, with poison in all memory that must not be read."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import mla_attention, token_index
from pallas_kernels.choice import HOPPER, Target
from pallas_kernels.mla_attention import LatentOptions, reference, xla
from pallas_kernels.token_index.reference import places

HEADS, DIM, PAGE, WIDTH, TOP = 4, 16, 16, 20, 40  # page rows hold latents and index keys
RANK, LATENT = 24, 32


def chosen_by_numpy(scores: np.ndarray, visible: np.ndarray, k: int) -> np.ndarray:
    """Select the top k visible keys by stable sort: of equal scores the first."""
    result = np.zeros(scores.shape, bool)
    for at in np.ndindex(scores.shape[:-1]):
        seen = np.flatnonzero(visible[at])
        result[at][seen[np.argsort(-scores[at][seen], kind="stable")[:k]]] = True
    return result


@pytest.mark.parametrize("k", [1, 7, 63, 64, 200])
def test_the_highest_are_chosen_and_of_equal_ones_the_first(k):
    rng = np.random.default_rng(k)
    scores = rng.standard_normal((6, 64)).astype(np.float32)
    scores[1] = rng.integers(-2, 3, 64)  # ties everywhere
    scores[2] = 0.0
    scores[3, ::2], scores[3, 1::2] = 0.0, -0.0  # zeros of both signs are ties
    scores[4, :5] = [np.inf, -np.inf, 3e38, -3e38, 1e-45]
    visible = rng.random((6, 64)) < 0.8
    poisoned = np.where(visible, scores, np.nan)
    got = np.asarray(jax.jit(token_index.top_keys, static_argnums=2)(poisoned, visible, k))
    np.testing.assert_array_equal(got, chosen_by_numpy(scores, visible, k))


def test_what_lies_behind_the_last_key_changes_no_choice():
    scores = jnp.asarray(np.random.default_rng(0).standard_normal((3, 50)), jnp.float32)
    visible = jnp.arange(50) < jnp.array([[50], [20], [0]])
    longer = jnp.pad(scores, ((0, 0), (0, 14)), constant_values=9.0), jnp.pad(visible, ((0, 0), (0, 14)))
    np.testing.assert_array_equal(token_index.top_keys(*longer, 30)[:, :50], token_index.top_keys(scores, visible, 30))


def test_places_ascend():
    chosen = jnp.zeros((2, 9), bool).at[0, jnp.array([7, 2, 5])].set(True)
    np.testing.assert_array_equal(places(chosen, 4), [[2, 5, 7, 9], [9, 9, 9, 9]])


def test_scores_are_weighed_sums_of_rectified_products():
    rng = np.random.default_rng(1)
    q, weights, keys = (rng.standard_normal(shape) for shape in ((3, HEADS, DIM), (3, HEADS), (9, DIM)))
    want = (np.maximum(np.einsum("qhd,kd->qhk", q, keys), 0) * weights[..., None]).sum(1)
    got = token_index.scores(*(jnp.asarray(x, jnp.float32) for x in (q, weights, keys)))
    np.testing.assert_allclose(got, want, atol=1e-5)


@dataclasses.dataclass(frozen=True)
class Case:
    """Sequences in a pool, and queries at the end of each. All other pool contents are poison."""

    index: tuple[jax.Array, jax.Array]
    q: jax.Array
    pool: jax.Array
    tables: jax.Array
    lengths: jax.Array
    scales: jax.Array | None


def make_case(lengths: list[int], chunk: int, *, quantised: bool = False) -> Case:
    rng = np.random.default_rng(0)
    rows = len(lengths)
    pool = rng.standard_normal((rows * WIDTH + 3, PAGE, LATENT + DIM)).astype(np.float32)
    scales = rng.uniform(0.01, 0.02, (*pool.shape[:2], 3)).astype(np.float32) if quantised else None
    numbers = np.round(pool * 30).astype(np.int8) if quantised else pool
    tables = rng.permutation(rows * WIDTH).astype(np.int32).reshape(rows, WIDTH)
    for table, length in zip(tables, lengths, strict=True):
        foreign = np.arange(WIDTH * PAGE).reshape(WIDTH, PAGE) >= length
        for at, gone in zip(table, foreign, strict=True):
            if not quantised:
                numbers[at][gone] = np.nan
            else:
                scales[at][gone] = np.nan
        table[-(-length // PAGE) :] = rng.choice([-7, 10**6])
    index = rng.standard_normal((rows, chunk, HEADS, DIM)), rng.standard_normal((rows, chunk, HEADS))
    q = rng.standard_normal((rows, chunk, 3, LATENT))
    arrays = [jnp.asarray(x, jnp.float32) for x in (*index, q)]
    parts = (jnp.asarray(numbers), jnp.asarray(tables), jnp.asarray(lengths, jnp.int32))
    return Case((arrays[0], arrays[1]), arrays[2], *parts, None if scales is None else jnp.asarray(scales))


def choice(case: Case, row: int, start: int) -> np.ndarray:
    """Return the mask [chunk, keys] of one sequence, by numpy from scores of contiguous keys."""
    length, table = int(case.lengths[row]), np.clip(case.tables[row], 0, case.pool.shape[0] - 1)
    keys = np.asarray(case.pool, np.float32)[table, :, -DIM:]
    if case.scales is not None:
        keys = keys * np.asarray(case.scales)[table, :, -1:]
    keys = np.where((np.arange(WIDTH * PAGE) < length)[:, None], keys.reshape(-1, DIM), 0)
    scores = np.asarray(token_index.scores(case.index[0][row], case.index[1][row], jnp.asarray(keys)))
    at = start + np.arange(scores.shape[0])
    visible = (np.arange(WIDTH * PAGE) <= at[:, None]) & (np.arange(WIDTH * PAGE) < length)
    return chosen_by_numpy(scores, visible, TOP)


@pytest.mark.parametrize("quantised", [False, True])
def test_rows_choose_among_their_own_keys(quantised):
    lengths = [1, 39, 40, 41, 127, 0, WIDTH * PAGE, 200]
    case = make_case(lengths, 1, quantised=quantised)
    arrays = (case.index[0][:, 0], case.index[1][:, 0], case.pool, case.scales, case.tables, case.lengths)
    got = np.asarray(jax.jit(token_index.decode, static_argnums=6)(*arrays, TOP))
    for row, length in enumerate(lengths):
        want = np.flatnonzero(choice(case, row, length - 1)[0]) if length else []
        np.testing.assert_array_equal(got[row, : min(TOP, length)], want)
        assert (got[row, min(TOP, length) :] >= WIDTH * PAGE).all()


@pytest.mark.parametrize("quantised", [False, True])
def test_chunks_choose_what_each_of_their_queries_sees(quantised):
    lengths, chunk = [33, 12, 0, 170], 12
    case = make_case(lengths, chunk, quantised=quantised)
    starts = jnp.maximum(case.lengths - chunk, 0)
    arrays = (*case.index, case.pool, case.scales, case.tables, starts, case.lengths)
    got = np.asarray(jax.jit(token_index.prefill, static_argnums=7)(*arrays, TOP))[..., : WIDTH * PAGE]
    for row in range(len(lengths)):
        np.testing.assert_array_equal(got[row], choice(case, row, int(starts[row])))


@pytest.mark.parametrize(("quantised", "together"), [(False, 2), (True, 8)])
def test_rows_attend_to_chosen_tokens_alone(quantised, together):
    case = make_case([1, 39, 40, 41, 127, 0, WIDTH * PAGE, 200], 1, quantised=quantised)
    arrays = (case.index[0][:, 0], case.index[1][:, 0], case.pool, case.scales, case.tables, case.lengths)
    options = LatentOptions(0.2, RANK, case.scales, token_index.decode(*arrays, TOP))
    operands = (case.q[:, 0], case.pool, case.tables, case.lengths, options)
    got = xla.decode(*operands, together=together)
    np.testing.assert_allclose(got, reference.decode(*operands), atol=1e-5)
    dense = xla.decode(*operands[:-1], dataclasses.replace(options, chosen=None), together=together)
    # A row no longer than top-k is bitwise identical to dense attention.
    np.testing.assert_array_equal(got[:3], dense[:3])
    assert (np.abs(got[3:5] - dense[3:5]).max((1, 2)) > 1e-3).all()


@pytest.mark.parametrize("quantised", [False, True])
def test_chunks_attend_to_chosen_tokens_alone(quantised):
    case = make_case([33, 12, 0, 170], 12, quantised=quantised)
    starts = jnp.maximum(case.lengths - 12, 0)
    arrays = (*case.index, case.pool, case.scales, case.tables, starts, case.lengths)
    options = LatentOptions(0.2, RANK, case.scales, token_index.prefill(*arrays, TOP))
    operands = (case.q, case.pool, case.tables, starts, case.lengths, options)
    got = xla.prefill(*operands)
    np.testing.assert_allclose(got, reference.prefill(*operands), atol=1e-5)
    dense = xla.prefill(*operands[:-1], dataclasses.replace(options, chosen=None))
    np.testing.assert_array_equal(got[:3], dense[:3])
    assert (np.abs(got[3] - dense[3]).max((1, 2)) > 1e-3).all()


def test_the_kernel_leaves_it_to_xla():
    q, tables, lengths = jnp.zeros((1, 4, 576), jnp.bfloat16), jnp.zeros((1, 1), jnp.int32), jnp.zeros(1, jnp.int32)
    target = Target("gpu", HOPPER)
    rows = [jnp.zeros((2, 64, width), jnp.bfloat16) for width in (576, 704)]
    chosen = mla_attention.explain(q, rows[1], tables, lengths, LatentOptions(1.0), target=target)
    assert (chosen.path, "index keys" in chosen.why) == ("xla", True)
    assert mla_attention.explain(q, rows[0], tables, lengths, LatentOptions(1.0), target=target).path == "mosaic"
    with pytest.raises(ValueError, match="index keys"):
        mla_attention.explain(q, rows[1], tables, lengths, LatentOptions(1.0), path="mosaic", target=target)
