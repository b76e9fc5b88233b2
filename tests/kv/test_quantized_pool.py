"""8-bit pools: stored values of a token, values that attention reads, and moves of scales with their elements."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxinfer.kv.pool import DecodeAttend, LayerPool, PrefillAttend, copy_pages, new_pools, no_kernel
from jaxinfer.kv.transfer import HostPages, export_pages, import_pages
from jaxinfer.layers.attention import causal_attend
from jaxinfer.types import KV_CACHE_DTYPES, CacheSpec, LayerSpec

HEADS, KV_HEADS, DIM, PAGE, LENGTH = 4, 2, 8, 16, 75
GROUPS = (LayerSpec(), LayerSpec(20))
TABLES = np.array([[3, 9, 1, 12, 5, 0], [8, 2, 13, 4, 7, 11]], np.int32)  # one sequence, by group
PAGES, CHUNK = 14, 48
LIMITS = {"int8": 127.0, "fp8": 448.0}
KINDS = {"int8": np.dtype(np.int8), "fp8": np.dtype(ml_dtypes.float8_e4m3fn)}


def spec_of(kind: str, *layers: LayerSpec) -> CacheSpec:
    return CacheSpec(layers or GROUPS, KV_HEADS, DIM).stored_as(kind)


def tokens(dtype: str = "float32") -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return queries, keys and values; keys and values have very different magnitudes by head and token."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((LENGTH, HEADS, DIM), np.float32)
    k, v = rng.standard_normal((2, LENGTH, KV_HEADS, DIM), np.float32)
    k *= np.array([1.0, 4.0])[None, :, None]
    v *= np.exp2(np.arange(LENGTH) % 7 - 3)[:, None, None]
    return tuple(jnp.asarray(x, jnp.float32).astype(dtype) for x in (q, k, v))


def rounded(x: jax.Array, kind: str) -> np.ndarray:
    """Quantise and dequantise each head of a token in numpy; its largest magnitude maps to the format's limit."""
    exact = np.asarray(x, np.float32)
    scales = np.abs(exact).max(-1, keepdims=True) / np.float32(LIMITS[kind])
    numbers = (exact * (1 / scales)).clip(-LIMITS[kind], LIMITS[kind])
    numbers = np.round(numbers) if kind == "int8" else numbers
    return numbers.astype(KINDS[kind]).astype(np.float32) * scales


def soiled(kind: str) -> LayerPool:
    """Return a pool with leftovers of other sequences."""
    rng, (empty,) = np.random.default_rng(1), new_pools(spec_of(kind, LayerSpec()), PAGES, PAGE, jnp.dtype("float32"))
    data = jnp.asarray(rng.integers(0, 100, empty.data.shape)).astype(empty.data.dtype)
    return LayerPool(data, jnp.asarray(rng.random(empty.scales.shape, np.float32)))


def prefilled(
    kind: str, layer: LayerSpec, cuts: list[int], dtype: str = "float32", cache: LayerPool | None = None
) -> tuple[np.ndarray, LayerPool]:
    """Prefill the whole sequence in chunks that begin at ``cuts``; return outputs and pool."""
    (empty,), parts = new_pools(spec_of(kind, LayerSpec()), PAGES, PAGE, jnp.dtype(dtype)), []
    cache = cache or empty
    for start, end in zip(cuts, [*cuts[1:], LENGTH], strict=True):
        mixed, cache = chunk(*tokens(dtype), start, end, cache, kind, layer)
        parts.append(mixed)
    return np.concatenate(parts), cache


def chunk(
    q: jax.Array, k: jax.Array, v: jax.Array, start: int, end: int, cache: LayerPool, kind: str, layer: LayerSpec
) -> tuple[np.ndarray, LayerPool]:
    padding = ((0, CHUNK - end + start), (0, 0), (0, 0))
    padded = [jnp.pad(x[start:end], padding, constant_values=9) for x in (q, k, v)]
    mixed, cache = _chunk(*padded, np.array([start]), np.array([end - start]), cache, kind=kind, layer=layer)
    return np.asarray(mixed, np.float32)[: end - start], cache


@functools.partial(jax.jit, static_argnames=("kind", "layer"))
def _chunk(q, k, v, starts, lengths, cache, kind, layer):
    return PrefillAttend(spec_of(kind), jnp.asarray(TABLES[:, None]), starts, lengths)(q, k, v, cache, layer, 0.3)


@functools.partial(jax.jit, static_argnames=("kind", "layer"))
def row(q, k, v, positions, cache, kind, layer):
    tables = jnp.asarray(np.repeat(TABLES[:, None], len(positions), axis=1))
    return DecodeAttend(spec_of(kind), tables, positions)(q, k, v, cache, layer, 0.3)


def stored(cache: LayerPool, layer: LayerSpec) -> bytes:
    """Return all bytes of the sequence in the pool, page by page."""
    table = TABLES[spec_of("int8").group(layer)]
    taken = [np.moveaxis(np.asarray(array)[table], 3, 1) for array in cache]
    return b"".join(array.reshape(-1, *array.shape[2:])[:LENGTH].tobytes() for array in taken)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layer", GROUPS)
def test_attention_is_that_of_the_rounded_keys_and_values(kind, layer):
    q, k, v = tokens()
    want, _ = causal_attend(q, jnp.asarray(rounded(k, kind)), jnp.asarray(rounded(v, kind)), None, layer, 0.3)
    float_want, _ = causal_attend(q, k, v, None, layer, 0.3)
    for cuts in ([0, 32, 64], [0, 5, 45]):
        got, _ = prefilled(kind, layer, cuts, cache=soiled(kind))
        np.testing.assert_allclose(got, want, atol=1e-5)
    assert np.abs(np.asarray(want) - np.asarray(float_want)).max() > 1e-3  # larger than the tolerance


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layer", GROUPS)
def test_decode_rows_read_and_write_the_same_numbers(kind, layer):
    """Rows after a prefilled prefix attend to rounded values and store the bytes that a chunk would store."""
    q, k, v = tokens()
    start, rows = 30, 3
    _, whole = prefilled(kind, layer, [0, 40])
    _, cache = chunk(q, k, v, 0, start, soiled(kind), kind, layer)
    want, _ = causal_attend(q, jnp.asarray(rounded(k, kind)), jnp.asarray(rounded(v, kind)), None, layer, 0.3)
    mixed = []
    for at in range(start, LENGTH):
        positions = np.array([-1, at, -1], np.int32)
        copies = (jnp.broadcast_to(x[at], (rows, *x.shape[1:])) for x in (q, k, v))
        one, cache = row(*copies, positions, cache, kind=kind, layer=layer)
        mixed.append(one[1])
    np.testing.assert_allclose(np.stack(mixed), want[start:], atol=1e-5)
    assert stored(cache, layer) == stored(whole, layer)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_stored_of_a_token_depends_on_that_token_alone(kind):
    """The stored bytes depend neither on chunk boundaries nor on old page contents."""
    layer = GROUPS[0]
    want = stored(prefilled(kind, layer, [0, 40])[1], layer)
    for cuts in ([0, 5, 45], [0, 16, 17, 50]):
        assert stored(prefilled(kind, layer, cuts, cache=soiled(kind))[1], layer) == want


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_numbers_are_within_half_a_step(kind, dtype):
    _, cache = prefilled(kind, GROUPS[0], [0, 40], dtype)
    assert cache.scales.dtype == jnp.float32
    held = np.asarray(cache.data).view(KINDS[kind]), np.asarray(cache.scales)
    taken = [np.moveaxis(array[TABLES[0]], 3, 1) for array in held]
    data, scales = (array.reshape(-1, *array.shape[2:])[:LENGTH].astype(np.float32) for array in taken)
    for side, x in enumerate(tokens(dtype)[1:]):
        exact = np.asarray(x, np.float32)
        # int8 has uniform steps of one scale; e4m3 has three mantissa bits.
        step = scales[:, side, :, None] if kind == "int8" else np.maximum(np.abs(exact) / 8, scales[:, side, :, None])
        assert (np.abs(data[:, side] * scales[:, side, :, None] - exact) <= 0.501 * step).all()
        np.testing.assert_allclose(scales[:, side], np.abs(exact).max(-1) / LIMITS[kind], rtol=1e-6)


@pytest.mark.parametrize("layer", GROUPS)
def test_a_cpus_bytes_are_the_bits_of_float8(layer):
    """GPUs store float8 itself: writes and reads are identical."""
    pools = [
        new_pools(spec_of("fp8", LayerSpec()), PAGES, PAGE, jnp.dtype("float32"), platform=platform)[0]
        for platform in ("cpu", "gpu")
    ]
    assert [pool.data.dtype for pool in pools] == [jnp.uint8, jnp.float8_e4m3fn]
    (mixed, bits), (want, float8) = (prefilled("fp8", layer, [0, 40], cache=pool) for pool in pools)
    np.testing.assert_array_equal(mixed, want)
    assert stored(bits, layer) == stored(float8, layer)
    q, k, v = (x[:1] for x in tokens())
    one, other = (row(q, k, v, np.array([LENGTH - 1]), cache, kind="fp8", layer=layer)[0] for cache in (bits, float8))
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("kind", KINDS)
def test_idle_chunks_and_rows_write_no_scale(kind):
    before, layer = soiled(kind), GROUPS[0]
    _, after = chunk(*tokens(), 5, 5, before, kind, layer)
    _, again = row(*(x[:1] for x in tokens()), np.array([-1], np.int32), after, kind=kind, layer=layer)
    for got, want in zip(jax.tree.leaves((after, again)), [*before, *before], strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_and_what_nobody_wrote_are_finite(kind):
    """A head of zeros has no magnitude to divide by; unwritten slots share its page."""
    (empty,) = new_pools(spec_of(kind, LayerSpec()), PAGES, PAGE, jnp.dtype("bfloat16"))
    assert not any(np.asarray(array, np.float32).any() for array in empty)
    zeros = jnp.zeros((1, KV_HEADS, DIM))
    mixed, cache = row(tokens()[0][:1], zeros, zeros, np.array([2], np.int32), empty, kind=kind, layer=GROUPS[0])
    assert not np.asarray(mixed).any()
    assert np.isfinite(np.asarray(cache.data, np.float32)).all()
    assert np.isfinite(cache.scales).all()


# ---- page moves

MOVED = (LayerSpec(), LayerSpec(5), LayerSpec())  # layers 0 and 2 share a group


def filled(kind: str) -> list[LayerPool]:
    rng = np.random.default_rng(0)

    def noise(shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32) * 20).astype(dtype)

    pools = new_pools(spec_of(kind, *MOVED), 6, PAGE, jnp.dtype("bfloat16"))
    return [LayerPool(*(noise(array.shape, array.dtype) for array in pool)) for pool in pools]


@pytest.mark.parametrize("kind", KINDS)
def test_copies_take_scales_along(kind):
    pools, spec = filled(kind), spec_of(kind, *MOVED)
    source, target = jnp.array([[1, 4], [2, 0]]), jnp.array([[5, 6], [1, 3]])
    got = jax.jit(lambda pools: copy_pages(spec, pools, source, target))(pools)
    for layer, moves in enumerate([[(1, 5)], [(2, 1), (0, 3)], [(1, 5)]]):
        for array, before in zip(got[layer], pools[layer], strict=True):
            want = np.array(before)
            for one, other in moves:
                want[other] = before[one]
            np.testing.assert_array_equal(array, want)


@pytest.mark.parametrize("kind", KINDS)
def test_pages_come_back_from_the_host_with_their_scales(kind):
    pools, spec = filled(kind), spec_of(kind, *MOVED)
    empty = new_pools(spec, 6, PAGE, jnp.dtype("bfloat16"))
    source, target = jnp.array([[1, 4], [2, 0]]), jnp.array([[5, 3], [1, 6]])
    host = HostPages(9)
    host.put([7, 2], jax.jit(lambda pools: export_pages(spec, pools, source))(pools))
    taken = host.take([7, 2])
    assert sum(page.nbytes for page in taken) == 2 * spec.bytes_per_page(PAGE, 2)
    back = jax.jit(lambda empty, taken: import_pages(spec, empty, taken, target))(empty, taken)
    for layer, (sources, targets) in enumerate([([1, 4], [5, 3]), ([2], [1]), ([1, 4], [5, 3])]):
        for array, before in zip(back[layer], pools[layer], strict=True):
            want = np.zeros_like(np.asarray(before))
            want[targets] = np.asarray(before)[sources]
            np.testing.assert_array_equal(array, want)


# ---- arithmetic


@pytest.mark.parametrize("kind", KV_CACHE_DTYPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_of_a_page_are_those_that_its_arrays_take(kind, dtype):
    spec = CacheSpec((LayerSpec(),) * 3, KV_HEADS, 64).stored_as(kind)
    pools = new_pools(spec, PAGES, PAGE, jnp.dtype(dtype))
    held = sum(array.nbytes for array in jax.tree.leaves(pools))
    assert held == PAGES * spec.bytes_per_page(PAGE, jnp.dtype(dtype).itemsize)
    assert spec.part(slice(0, 1)).bytes_per_page(PAGE, 2) * 3 == spec.bytes_per_page(PAGE, 2)
    assert spec.bytes_per_page(PAGE, 2, devices=2) * 2 == spec.bytes_per_page(PAGE, 2)


def test_8_bits_are_nearly_half_of_16():
    """Scales are 4 of 132 bytes at head_dim 128."""
    spec = CacheSpec((LayerSpec(),) * 32, 8, 128)
    assert spec.bytes_per_page(64, 2) == 32 * 2 * 8 * 64 * 256
    for kind in KINDS:
        assert spec.stored_as(kind).bytes_per_page(64, 2) == 32 * 2 * 8 * 64 * 132
        assert spec.stored_as(kind).bytes_per_page(64, 4) == spec.stored_as(kind).bytes_per_page(64, 2)
    assert spec.stored_as("fp8") == spec.stored_as("fp8_e4m3")
    assert spec.stored_as("auto") == spec


def test_last_bits_show_in_scales_alone():
    """The probe (`engine.execution.probe`) may count only these for bitwise identity: rounding hides element bits."""
    spec = CacheSpec((LayerSpec(),) * 3, 8, 128)
    assert spec.exact_per_token == 3 * 2 * 8 * 128
    assert spec.stored_as("int8").exact_per_token == 3 * 2 * 8
    assert CacheSpec((LayerSpec(latent_rank=512),), 1, 576).exact_per_token == 576


@pytest.mark.parametrize("kind", KINDS)
def test_gpu_kernels_do_8_bits(kind):
    assert no_kernel(CacheSpec((LayerSpec(),), 8, 128).stored_as(kind), 64, jnp.dtype("bfloat16")) is None
