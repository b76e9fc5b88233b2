"""Pools of latents with index keys: the tokens that a step selects and attends to; export and import of keys."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.kv.pool import DecodeAttend, LayerPool, PrefillAttend, copy_pages, new_pools, no_kernel
from jaxinfer.kv.transfer import HostPages, export_pages, import_pages
from jaxinfer.layers.attention import ChoosingAttend, causal_attend, causal_choice
from jaxinfer.types import CacheSpec, LayerSpec
from pallas_kernels.token_index import Index
from tests.kv.test_quantized_pool import KINDS, rounded

HEADS, RANK, LATENT, INDEX_HEADS, DIM = 3, 8, 12, 5, 6
PAGE, LENGTH, PAGES, TOP = 16, 75, 14, 20
LAYER = LayerSpec(latent_rank=RANK, index_topk=TOP, index_dim=DIM)
SPEC = CacheSpec((LAYER, LAYER), 1, LATENT + DIM)
TABLE = np.array([3, 9, 1, 12, 5, 0], np.int32)
AUTO = "auto"


def tokens() -> tuple[jax.Array, jax.Array, Index]:
    """Return queries, latents and indexer outputs; index keys have very different magnitudes."""
    rng = np.random.default_rng(0)
    shapes = ((HEADS, LATENT), (1, LATENT), (INDEX_HEADS, DIM), (INDEX_HEADS,), (DIM,))
    q, k, index_q, weights, key = (jnp.asarray(rng.standard_normal((LENGTH, *s), np.float32)) for s in shapes)
    return q, k, Index(index_q, weights, key * jnp.exp2(jnp.arange(LENGTH) % 5)[:, None])


def attended(attend: Any, rows: Any, cache: LayerPool, layer: LayerSpec = LAYER) -> tuple[jax.Array, LayerPool]:
    mixed, _, cache = attend.choosing(*rows, cache, layer, 0.3)
    return mixed, cache


@functools.partial(jax.jit, static_argnums=0)
def chunk_step(spec: CacheSpec, start: jax.Array, length: jax.Array, rows: Any, cache: LayerPool) -> Any:
    return attended(PrefillAttend(spec, jnp.asarray(TABLE[None, None]), start[None], length[None]), rows, cache)


@functools.partial(jax.jit, static_argnums=0)
def row_step(spec: CacheSpec, positions: jax.Array, rows: Any, cache: LayerPool) -> Any:
    tables = jnp.repeat(jnp.asarray(TABLE[None, None]), positions.size, axis=1)
    return attended(DecodeAttend(spec, tables, positions), rows, cache)


def prefilled(cuts: list[int], spec: CacheSpec = SPEC, size: int = 40) -> tuple[np.ndarray, LayerPool]:
    """Prefill the whole sequence in chunks that begin at ``cuts``; return outputs and pool."""
    cache, parts = new_pools(spec, PAGES, PAGE, jnp.dtype("float32"))[0], []
    for start, end in zip(cuts, [*cuts[1:], LENGTH], strict=True):
        rows = jax.tree.map(
            lambda x, start=start, end=end: jnp.pad(
                x[start:end], [(0, size - end + start), *[(0, 0)] * (x.ndim - 1)], constant_values=9
            ),
            tokens(),
        )
        mixed, cache = chunk_step(spec, jnp.array(start), jnp.array(end - start), rows, cache)
        parts.append(np.asarray(mixed)[: end - start])
    return np.concatenate(parts), cache


def contiguous(kind: str = AUTO, layer: LayerSpec = LAYER) -> np.ndarray:
    """Return attention over the whole sequence at once, with keys rounded by numpy."""
    q, k, index = tokens()
    if kind != AUTO:
        k = jnp.concatenate([rounded(part, kind) for part in jnp.split(k, [RANK], axis=-1)], -1)
        index = index._replace(k=jnp.asarray(rounded(index.k, kind)))
    return np.asarray(causal_attend(q, k, None, None, layer, 0.3, chosen=causal_choice(index, layer))[0])


def spec_of(kind: str) -> CacheSpec:
    return SPEC.stored_as(kind)


def test_an_attend_with_index_keys_is_known():
    assert isinstance(DecodeAttend(SPEC, jnp.zeros((1, 1, 1), jnp.int32), jnp.zeros(1, jnp.int32)), ChoosingAttend)
    assert not isinstance(causal_attend, ChoosingAttend)


@pytest.mark.parametrize("kind", [AUTO, *KINDS])
def test_chunks_and_rows_give_contiguous_attention(kind):
    """Selection uses the stored (rounded) keys; stored bytes do not depend on the chunk boundaries."""
    want, spec = contiguous(kind), spec_of(kind)
    dense = contiguous(kind, LayerSpec(latent_rank=RANK))
    assert np.abs(want[:TOP] - dense[:TOP]).max() < 1e-6
    assert (np.abs(want[TOP:] - dense[TOP:]).max((1, 2)) > 1e-3).mean() > 0.9
    (whole, cache), (cut, other) = prefilled([0, 40], spec), prefilled([0, 5, 45], spec)
    for got in (whole, cut):
        np.testing.assert_allclose(got, want, atol=1e-5)
    for one, another in zip(jax.tree.leaves(cache), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(one, another)
    gone = cache._replace(data=cache.data.at[5].set(0))
    rows = jax.tree.map(lambda x: x[70:74], tokens())
    gone = row_step(spec, jnp.arange(64, 68), jax.tree.map(lambda x: x[64:68], tokens()), gone)[1]
    gone = row_step(spec, jnp.array([68, 69, -1, -1]), jax.tree.map(lambda x: x[68:72], tokens()), gone)[1]
    mixed, gone = row_step(spec, jnp.arange(70, 74), rows, gone)
    np.testing.assert_allclose(mixed, want[70:74], atol=1e-5)
    np.testing.assert_array_equal(gone.data[5, :10], cache.data[5, :10])


def test_rows_have_the_bits_of_rows_alone():
    _, cache = prefilled([0, 40])
    at, idle = np.array([3, 19, 20, 21, 74, 50]), jnp.full(6, -1)
    together, _ = row_step(SPEC, jnp.asarray(at), jax.tree.map(lambda x: x[at], tokens()), cache)
    for place, position in enumerate(at):
        rows = jax.tree.map(lambda x, own=position: jnp.broadcast_to(x[own], (6, *x.shape[1:])), tokens())
        alone, _ = row_step(SPEC, idle.at[5 - place].set(position), rows, cache)
        np.testing.assert_array_equal(alone[5 - place], together[place])


def test_no_choice_is_made_where_no_sequence_is_longer():
    """The pool contents are the same with and without selection."""
    layer = LayerSpec(latent_rank=RANK, index_topk=TABLE.size * PAGE, index_dim=DIM)
    rows = jax.tree.map(lambda x: x[:40], tokens())
    attend = PrefillAttend(SPEC, jnp.asarray(TABLE[None, None]), jnp.array([0]), jnp.array([40]))
    empty = new_pools(SPEC, PAGES, PAGE, jnp.dtype("float32"))[0]
    _, chosen, cache = attend.choosing(*rows, empty, layer, 0.3)
    assert chosen is None
    _, some, other = attend.choosing(*rows, empty, LAYER, 0.3)
    assert (some.shape, some.dtype) == ((1, 40, 128), bool)
    np.testing.assert_array_equal(cache.data, other.data)
    np.testing.assert_array_equal(cache.data[3, :, -DIM:], rows[2].k[:PAGE])
    assert causal_choice(rows[2], layer) is None


@pytest.mark.parametrize("kind", [AUTO, *KINDS])
def test_a_layer_that_shares_a_choice_has_no_index_keys(kind):
    rows = jax.tree.map(lambda x: x[:40], tokens())
    attend = PrefillAttend(spec_of(kind), jnp.asarray(TABLE[None, None]), jnp.array([0]), jnp.array([40]))
    empty = new_pools(spec_of(kind), PAGES, PAGE, jnp.dtype("float32"))[0]
    want, chosen, own = attend.choosing(*rows, empty, LAYER, 0.3)
    got, other = attend(*rows[:2], None, empty, LAYER, 0.3, chosen=chosen)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(other.data[..., :LATENT], own.data[..., :LATENT])
    assert not np.asarray(other.data[..., LATENT:]).any()
    assert np.asarray(own.data[..., LATENT:]).any()


@pytest.mark.parametrize("kind", [AUTO, *KINDS])
def test_pages_move_with_their_index_keys(kind):
    spec, (_, cache) = spec_of(kind), prefilled([0, 40], spec_of(kind))
    pools, empty = [cache] * 2, new_pools(spec, PAGES, PAGE, jnp.dtype("float32"))
    source, target, host = jnp.array([[3, 9]]), jnp.array([[5, PAGES]]), HostPages(9)
    host.put([7, 2], export_pages(spec, pools, source))
    back = import_pages(spec, empty, host.take([7, 2]), target)
    row = (LATENT + DIM) * 4 if kind == AUTO else LATENT + DIM + 3 * 4
    assert sum(page.nbytes for page in host.take([7, 2])) == 2 * spec.bytes_per_page(PAGE, 4) == 2 * 2 * PAGE * row
    copied = copy_pages(spec, pools, source, target)
    for own, moved in zip((*back, *copied), pools * 2, strict=True):
        for one, before in zip(jax.tree.leaves(own), jax.tree.leaves(moved), strict=True):
            np.testing.assert_array_equal(one[5], before[3])


def decoded(pools: list[LayerPool], q: Any, k: Any, index: Index, tables: Any, positions: Any) -> Any:
    attend, caches, found = DecodeAttend(SPEC, tables, positions), [], []
    for one in pools:
        mixed, cache = attended(attend, (q, k, index), one)
        caches.append(cache)
        found.append(mixed)
    return caches, found


def test_pools_are_changed_in_place():
    """In place although a step writes part of a row twice, with a read in between."""
    data = jax.ShapeDtypeStruct((4096, PAGE, LATENT + DIM), "float32")
    rows = [jax.ShapeDtypeStruct((8, *x.shape[1:]), x.dtype) for x in jax.tree.leaves(tokens())]
    numbers = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1, 8, 6), (8,))]
    operands = ([LayerPool(data)] * 2, *rows[:2], Index(*rows[2:]), *numbers)
    memory = jax.jit(decoded, donate_argnums=0).lower(*operands).compile().memory_analysis()
    size = data.size * data.dtype.itemsize
    assert memory.alias_size_in_bytes >= 2 * size
    assert memory.temp_size_in_bytes < size // 8


def test_there_is_no_kernel():
    published = CacheSpec((LayerSpec(latent_rank=512, index_topk=2048, index_dim=128),), 1, 704)
    assert "index keys" in (no_kernel(published, 64, jnp.dtype("bfloat16")) or "")
    assert published.bytes_per_page(64, 2) == 64 * 704 * 2
    assert published.stored_as("fp8").bytes_per_page(64, 2) == 64 * (704 + 12)
