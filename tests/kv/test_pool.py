"""Pool reads and writes of a step: groups, chunks that start inside a page, several rows of one sequence."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.kv.pool import DecodeAttend, LayerPool, PrefillAttend, new_pools, no_kernel
from jaxinfer.layers.attention import causal_attend
from jaxinfer.types import CacheSpec, LayerSpec

HEADS, KV_HEADS, DIM, PAGE, WIDTH = 4, 2, 8, 16, 6
LENGTH = 75
GROUPS = (LayerSpec(), LayerSpec(20))
SPEC = CacheSpec(GROUPS, KV_HEADS, DIM)
TABLES = np.array([[3, 9, 1, 12, 5, 0], [8, 2, 13, 4, 7, 11]], np.int32)  # one sequence, by group


def tokens(seed: int = 0) -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(seed)
    return tuple(
        jnp.asarray(rng.standard_normal((LENGTH, heads, DIM), np.float32)) for heads in (HEADS, KV_HEADS, KV_HEADS)
    )


def pool() -> LayerPool:
    return new_pools(CacheSpec((LayerSpec(),), KV_HEADS, DIM), 14, PAGE, jnp.dtype("float32"))[0]


def prefilled(
    layer: LayerSpec, cuts: list[int], size: int = 40, ends: np.ndarray | None = None
) -> tuple[np.ndarray, LayerPool]:
    """Prefill the whole sequence in chunks that begin at ``cuts``; return outputs and pool."""
    cache, parts = pool(), []
    q, k, v = tokens()
    for start, end in zip(cuts, [*cuts[1:], LENGTH], strict=True):
        last = None if ends is None else jnp.asarray(np.resize(ends[start:end], (1, size)))
        attend = PrefillAttend(
            SPEC, jnp.asarray(TABLES[:, None]), jnp.array([start]), jnp.array([end - start]), ends=last
        )
        padded = [
            jnp.pad(x[start:end], ((0, size - end + start), (0, 0), (0, 0)), constant_values=9) for x in (q, k, v)
        ]
        mixed, cache = attend(*padded, cache, layer, 0.3)
        parts.append(np.asarray(mixed)[: end - start])
    return np.concatenate(parts), cache


@pytest.mark.parametrize("layer", GROUPS)
@pytest.mark.parametrize("cuts", [[0, 32, 64], [0, 5, 45], [0, 16, 17, 50], [0, 40]])
def test_chunks_from_anywhere_give_contiguous_attention(layer, cuts):
    got, _ = prefilled(layer, cuts)
    want, _ = causal_attend(*tokens(), None, layer, 0.3)
    np.testing.assert_allclose(got, want, atol=2e-6)


@pytest.mark.parametrize("layer", GROUPS)
@pytest.mark.parametrize("cuts", [[0, 40], [0, 5, 45], [0, 34, 38]])
def test_chunks_that_split_no_image_give_attention_in_both_directions_within_it(layer, cuts):
    """Images are at 6 .. 33 and 48 .. 59; padding rows may name any position."""
    ends = np.arange(LENGTH, dtype=np.int32)
    ends[6:34], ends[48:60] = 33, 59
    got, _ = prefilled(layer, cuts, ends=ends)
    want, _ = causal_attend(*tokens(), None, layer, 0.3, ends=jnp.asarray(ends))
    np.testing.assert_allclose(got, want, atol=2e-6)


def test_text_has_the_same_bits_where_images_may_be():
    plain, _ = prefilled(GROUPS[1], [0, 40])
    got, _ = prefilled(GROUPS[1], [0, 40], ends=np.arange(LENGTH, dtype=np.int32))
    np.testing.assert_array_equal(got, plain)


def test_each_group_has_its_own_pages():
    for group, layer in enumerate(GROUPS):
        _, cache = prefilled(layer, [0, 40])
        written = np.flatnonzero(np.asarray(cache.data).any(axis=(1, 2, 3, 4)))
        assert sorted(written) == sorted(TABLES[group, : -(-LENGTH // PAGE)])


def test_padding_rows_write_on_no_page_of_others():
    """A chunk of 3 tokens from slot 14 of a page ends on the next one; 37 more rows are padding."""
    q, k, v = (jnp.pad(x[:3], ((0, 37), (0, 0), (0, 0)), constant_values=9) for x in tokens())
    attend = PrefillAttend(SPEC, jnp.asarray(TABLES[:, None]), jnp.array([14]), jnp.array([3]))
    _, cache = attend(q, k, v, pool(), GROUPS[0], 0.3)
    data = np.asarray(cache.data)
    assert set(np.flatnonzero(data.any(axis=(1, 2, 3, 4)))) == {3, 9}
    assert not data[3, :, :, :14].any()
    np.testing.assert_array_equal(data[9, 0, :, 0], k[2])


def test_a_chunk_of_length_0_writes_nothing():
    q, k, v = (x[:40] for x in tokens())
    attend = PrefillAttend(SPEC, jnp.asarray(TABLES[:, None]), jnp.array([5]), jnp.array([0]))
    _, cache = attend(q, k, v, pool(), GROUPS[0], 0.3)
    assert not np.asarray(cache.data).any()


@pytest.mark.parametrize("layer", GROUPS)
def test_rows_of_one_sequence_see_one_another(layer):
    """Four rows at positions p .. p+3 in one step give the bits of four steps, in any row order."""
    q, k, v = tokens()
    step = jax.jit(
        lambda q, k, v, tables, positions, cache: DecodeAttend(SPEC, tables, positions)(q, k, v, cache, layer, 0.3)
    )
    rows = 6
    tables = np.repeat(TABLES[:, None], rows, axis=1)
    start = [30, 31, 32, 33]
    _, before = prefilled(layer, [0, 40])
    mixed, single = [], before
    for at in start:
        positions = np.full(rows, -1, np.int32)
        positions[0] = at
        one, single = step(
            *(jnp.broadcast_to(x[at], (rows, *x.shape[1:])) for x in (q, k, v)), tables, positions, single
        )
        mixed.append(one[0])
    want, _ = causal_attend(*tokens(), None, layer, 0.3)
    np.testing.assert_allclose(np.stack(mixed), want[np.array(start)], atol=2e-6)
    places, positions = [3, 0, 5, 2], np.full(rows, -1, np.int32)
    positions[places] = start
    at = np.maximum(positions, 0)
    together, cache = step(q[at], k[at], v[at], tables, positions, before)
    np.testing.assert_array_equal(np.asarray(together)[places], np.stack(mixed))
    np.testing.assert_array_equal(cache.data, single.data)


def test_a_layer_without_keys_reads_those_that_another_has_stored():
    """The layer writes nothing, in chunks or in rows."""
    _, cache = prefilled(LayerSpec(), [0, 32, 64])
    q, k, v = tokens()
    want, stored = causal_attend(q, k, v, None, LayerSpec(), 0.3)
    reading = LayerSpec(source=0)
    alone, _ = causal_attend(q, None, None, stored, reading, 0.3)
    np.testing.assert_array_equal(alone, want)
    chunk = PrefillAttend(SPEC, jnp.asarray(TABLES[:, None]), jnp.array([LENGTH - 11]), jnp.array([11]))
    row = DecodeAttend(SPEC, jnp.asarray(TABLES[:, None]), jnp.array([LENGTH - 1]))
    for attend, queries in ((chunk, q[-11:]), (row, q[-1:])):
        got, left = attend(queries, None, None, cache, reading, 0.3)
        np.testing.assert_allclose(got, want[-len(queries) :], atol=2e-6)
        assert left is cache


def test_kernels_must_take_the_pools_of_all_layers():
    layers = (LayerSpec(8), LayerSpec(head_dim=512))
    spec, dtype = CacheSpec(layers, kv_heads=8, head_dim=128), jnp.dtype("bfloat16")
    assert no_kernel(dataclasses.replace(spec, layers=layers[:1]), 64, dtype) is None
    assert "512" in (no_kernel(spec, 64, dtype) or "")
