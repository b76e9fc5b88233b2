"""Pools of latents: how a step writes and reads them, and export and import of their pages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.kv.pool import DecodeAttend, LayerPool, PrefillAttend, copy_pages, new_pools, no_kernel
from jaxinfer.kv.transfer import HostPages, export_pages, import_pages
from jaxinfer.layers.attention import causal_attend
from jaxinfer.types import CacheSpec, LayerSpec
from tests.kv.test_quantized_pool import KINDS, rounded

HEADS, RANK, LATENT, PAGE, LENGTH, PAGES = 3, 8, 12, 16, 75, 14
LAYER = LayerSpec(latent_rank=RANK)
SPEC = CacheSpec((LAYER, LAYER), 1, LATENT)
TABLE = np.array([3, 9, 1, 12, 5, 0], np.int32)


def tokens() -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.standard_normal((LENGTH, heads, LATENT), np.float32)) for heads in (HEADS, 1))


def pool(spec: CacheSpec = SPEC) -> LayerPool:
    return new_pools(spec, PAGES, PAGE, jnp.dtype("float32"))[0]


def prefilled(cuts: list[int], size: int = 40, spec: CacheSpec = SPEC) -> tuple[np.ndarray, LayerPool]:
    """Prefill the whole sequence in chunks that begin at ``cuts``; return outputs and pool."""
    cache, parts, tables = pool(spec), [], jnp.asarray(TABLE[None, None])
    for start, end in zip(cuts, [*cuts[1:], LENGTH], strict=True):
        attend = PrefillAttend(spec, tables, jnp.array([start]), jnp.array([end - start]))
        padding = ((0, size - end + start), (0, 0), (0, 0))
        q, k = (jnp.pad(x[start:end], padding, constant_values=9) for x in tokens())
        mixed, cache = attend(q, k, None, cache, LAYER, 0.3)
        parts.append(np.asarray(mixed)[: end - start])
    return np.concatenate(parts), cache


def written(cache: LayerPool) -> list[int]:
    return np.flatnonzero(np.asarray(cache.data).any(axis=(1, 2))).tolist()


@pytest.mark.parametrize("cuts", [[0, 32, 64], [0, 5, 45], [0, 16, 17, 50], [0, 40]])
def test_chunks_from_anywhere_give_contiguous_attention(cuts):
    got, cache = prefilled(cuts)
    want, _ = causal_attend(*tokens(), None, None, LAYER, 0.3)
    assert want.shape == (LENGTH, HEADS, RANK)
    np.testing.assert_allclose(got, want, atol=2e-6)
    assert written(cache) == sorted(TABLE[: -(-LENGTH // PAGE)])


@pytest.mark.parametrize(("length", "pages"), [(3, [3, 9]), (0, [])])
def test_padding_writes_nothing(length, pages):
    """A chunk starts at slot 14 of a page; tokens beyond its length are padding."""
    q, k = (x[:40] for x in tokens())
    attend = PrefillAttend(SPEC, jnp.asarray(TABLE[None, None]), jnp.array([14]), jnp.array([length]))
    _, cache = attend(q, k, None, pool(), LAYER, 0.3)
    data = np.asarray(cache.data)
    assert written(cache) == pages
    assert not data[3, :14].any()
    if length:
        np.testing.assert_array_equal(data[9, 0], k[2, 0])


def test_rows_of_one_sequence_see_one_another():
    """Four rows at positions p .. p+3 in one step give the bits of four steps, in any row order."""
    q, k = tokens()

    @jax.jit
    def step(q, k, positions, cache):
        tables = jnp.repeat(jnp.asarray(TABLE[None, None]), 6, axis=1)
        return DecodeAttend(SPEC, tables, positions)(q, k, None, cache, LAYER, 0.3)

    start, places = [30, 31, 32, 33], [3, 0, 5, 2]
    _, before = prefilled([0, 40])
    mixed, single = [], before
    for at in start:
        positions = np.array([at, -1, -1, -1, -1, -1], np.int32)
        one, single = step(*(jnp.broadcast_to(x[at], (6, *x.shape[1:])) for x in (q, k)), positions, single)
        mixed.append(one[0])
    want, _ = causal_attend(q, k, None, None, LAYER, 0.3)
    np.testing.assert_allclose(np.stack(mixed), want[np.array(start)], atol=2e-6)
    positions = np.full(6, -1, np.int32)
    positions[places] = start
    at = np.maximum(positions, 0)
    together, cache = step(q[at], k[at], positions, before)
    np.testing.assert_array_equal(np.asarray(together)[places], np.stack(mixed))
    np.testing.assert_array_equal(cache.data, single.data)


@pytest.mark.parametrize("layer", [LayerSpec(5, None, RANK), LayerSpec(None, 30.0, RANK)])
def test_what_attention_to_latents_lacks_is_refused(layer):
    with pytest.raises(ValueError, match="no window"):
        DecodeAttend(CacheSpec((layer,), 1, LATENT), jnp.zeros((1, 1, 1), jnp.int32), jnp.zeros((1,), jnp.int32))(
            jnp.zeros((1, HEADS, LATENT)), jnp.zeros((1, 1, LATENT)), None, pool(), layer, 0.3
        )


def test_pages_leave_come_back_and_are_copied():
    rng = np.random.default_rng(0)
    empty = new_pools(SPEC, PAGES, PAGE, jnp.dtype("float32"))
    pools = [one._replace(data=jnp.asarray(rng.standard_normal(one.data.shape, np.float32))) for one in empty]
    source, target = jnp.array([[1, 4]]), jnp.array([[5, PAGES]])
    host = HostPages(9)
    host.put([7, 2], export_pages(SPEC, pools, source))
    back = import_pages(SPEC, empty, host.take([7, 2]), target)
    assert (
        sum(page.nbytes for page in host.take([7, 2])) == 2 * SPEC.bytes_per_page(PAGE, 4) == 2 * 2 * PAGE * LATENT * 4
    )
    copied = copy_pages(SPEC, pools, source, target)
    for layer in range(2):
        own = np.array(pools[layer].data)
        want = np.zeros_like(own)
        want[5] = own[1]
        np.testing.assert_array_equal(back[layer].data, want)
        own[5] = own[1]
        np.testing.assert_array_equal(copied[layer].data, own)


def decoded(pools, q, k, tables, positions):
    attend, caches = DecodeAttend(SPEC, tables, positions), []
    for one in pools:
        mixed, cache = attend(q, k, None, one, LAYER, 0.3)
        q = jnp.pad(mixed, ((0, 0), (0, 0), (0, LATENT - RANK)))
        caches.append(cache)
    return caches, q


def prefilled_once(pools, q, k, tables, starts):
    attend = PrefillAttend(SPEC, tables, starts, starts + 4)
    return [attend(q, k, None, one, LAYER, 0.3) for one in pools]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("program", "shapes"),
    [
        (decoded, ((1, 8, 6), (8,))),
        (prefilled_once, ((1, 2, 6), (2,))),
        (lambda pools, q, k, source, target: copy_pages(SPEC, pools, source, target), ((1, 2), (1, 2))),
    ],
)
def test_pools_are_changed_in_place(program, shapes, dtype):
    """A donated pool aliases its result, and no temporary is nearly as large: no pool is copied or converted."""
    data = jax.ShapeDtypeStruct((4096, PAGE, LATENT), dtype)
    pools = [LayerPool(data)] * 2
    rows = [jax.ShapeDtypeStruct((8, heads, LATENT), dtype) for heads in (HEADS, 1)]
    numbers = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]
    memory = jax.jit(program, donate_argnums=0).lower(pools, *rows, *numbers).compile().memory_analysis()
    size = data.size * data.dtype.itemsize
    assert memory.alias_size_in_bytes >= 2 * size
    assert memory.temp_size_in_bytes < size // 8


def test_the_kernels_of_published_shapes_exist():
    deepseek = CacheSpec((LayerSpec(latent_rank=512),), 1, 576)
    assert no_kernel(deepseek, 64, jnp.dtype("bfloat16")) is None
    assert "float32" in (no_kernel(deepseek, 64, jnp.dtype("float32")) or "")
    assert "latent of 8" in (no_kernel(SPEC, 64, jnp.dtype("bfloat16")) or "")
    for kind in KINDS:
        assert "8" in (no_kernel(deepseek.stored_as(kind), 64, jnp.dtype("bfloat16")) or "")


# ---- 8 bits


@pytest.mark.parametrize("kind", KINDS)
def test_attention_in_8_bits_is_that_to_rounded_latents(kind):
    """Chunks and rows store the same bytes of a token, whatever the chunk boundaries."""
    spec, (q, k) = SPEC.stored_as(kind), tokens()
    halves = [rounded(part, kind) for part in jnp.split(k, [RANK], axis=-1)]
    want, _ = causal_attend(q, jnp.concatenate(halves, -1), None, None, LAYER, 0.3)
    exact, _ = causal_attend(q, k, None, None, LAYER, 0.3)
    assert np.abs(np.asarray(want) - np.asarray(exact)).max() > 1e-3
    whole, cache = prefilled([0, 40], spec=spec)
    cut, other = prefilled([0, 5, 45], spec=spec)
    _, rows = prefilled([0, 40], spec=spec)
    for got in (whole, cut):
        np.testing.assert_allclose(got, want, atol=1e-5)
    step = DecodeAttend(spec, jnp.asarray(TABLE[None, None]), jnp.array([70]))
    mixed, rows = step(q[70:71], k[70:71], None, rows._replace(data=rows.data.at[5].set(0)), LAYER, 0.3)
    assert mixed.shape == (1, HEADS, RANK)
    for one, another in zip(cache, other, strict=True):
        np.testing.assert_array_equal(one, another)
    np.testing.assert_array_equal(rows.data[5, 70 % PAGE], cache.data[5, 70 % PAGE])
    np.testing.assert_array_equal(rows.scales, cache.scales)


@pytest.mark.parametrize("kind", KINDS)
def test_pages_of_8_bits_move_with_both_scales(kind):
    spec, (_, cache) = SPEC.stored_as(kind), prefilled([0, 40], spec=SPEC.stored_as(kind))
    pools, empty = [cache] * 2, new_pools(spec, PAGES, PAGE, jnp.dtype("float32"))
    source, target, host = jnp.array([[3, 9]]), jnp.array([[5, PAGES]]), HostPages(9)
    host.put([7, 2], export_pages(spec, pools, source))
    back = import_pages(spec, empty, host.take([7, 2]), target)
    assert (
        sum(page.nbytes for page in host.take([7, 2]))
        == 2 * spec.bytes_per_page(PAGE, 4)
        == 2 * 2 * PAGE * (LATENT + 8)
    )
    assert spec.exact_per_token == 2 * 2
    copied = copy_pages(spec, pools, source, target)
    for own, moved in zip((*back, *copied), pools * 2, strict=True):
        for one, before in zip(own, moved, strict=True):
            np.testing.assert_array_equal(one[5], before[3])
