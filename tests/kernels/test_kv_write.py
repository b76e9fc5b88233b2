"""Writes of keys and values into pages, against loops over tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.layers.rope import rotate as layers_rotate
from pallas_kernels import bits, kv_write
from pallas_kernels.choice import Target
from pallas_kernels.kv_write import reference, static_scales
from pallas_kernels.paged_attention.reference import dequantize

PAGES, PAGE = 9, 16


def random(seed: int, *shape: int, dtype: str = "float32") -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32)).astype(dtype)


def test_write_rows_and_drop():
    pool = random(8, PAGES, 2, 2, PAGE, 8)
    k, v = random(9, 3, 2, 8), random(10, 3, 2, 8)
    got = kv_write.write_rows(pool, k, v, jnp.array([2, PAGES, 0]), jnp.array([15, 3, 1]))
    want = np.array(pool)
    for row, (page, offset) in ((0, (2, 15)), (2, (0, 1))):
        want[page, 0, :, offset], want[page, 1, :, offset] = k[row], v[row]
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("chunk", [8, 16, 32])
@pytest.mark.parametrize("offsets", [(0, 0), (0, 15), (5, 9)])
def test_write_pages_is_a_loop_over_tokens(chunk, offsets, dtype):
    """The first sequence's pages end with its chunk; the middle page of the second one is out of range."""
    pool = random(8, PAGES, 2, 2, PAGE, 8, dtype=dtype)
    k, v = (random(seed, 2, chunk, 2, 8) for seed in (9, 10))
    pages = np.array([[3, 6, 1], [0, PAGES, 5]])[:, : -(-chunk // PAGE) + 1]
    got = jax.jit(kv_write.write_pages)(pool, k, v, jnp.array(pages), jnp.array(offsets))
    want = np.array(pool)
    for sequence in range(2):
        for token in range(chunk):
            at = offsets[sequence] + token
            if (page := pages[sequence, at // PAGE]) < PAGES:
                want[page, 0, :, at % PAGE] = k[sequence, token].astype(dtype)
                want[page, 1, :, at % PAGE] = v[sequence, token].astype(dtype)
    np.testing.assert_array_equal(np.asarray(got), want)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("written", [[[2], [PAGES], [0], [-1]], [[3, 6], [0, PAGES], [8, 1], [-5, 7]]])
def test_latents_are_written_like_keys(written, dtype):
    """Write one token per sequence on one page, or chunks over two pages; some pages are out of range."""
    chunk, offsets = (1, 16)[len(written[0]) - 1], jnp.array([15, 3, 0, 9])
    pool, latents = random(8, PAGES, PAGE, 12, dtype=dtype), random(9, 4, chunk, 12)
    got = jax.jit(kv_write.write_latents)(pool, latents, jnp.array(written), offsets)
    np.testing.assert_array_equal(got, reference.write_latents(pool, latents, jnp.array(written), offsets))
    want = np.array(pool)
    for sequence, token in np.ndindex(4, chunk):
        at = int(offsets[sequence]) + token
        if 0 <= (page := written[sequence][at // PAGE]) < PAGES:
            want[page, at % PAGE] = latents[sequence, token].astype(dtype)
    np.testing.assert_array_equal(got, want)


def test_latents_are_the_first_numbers_of_a_longer_row():
    pool, latents = random(8, PAGES, PAGE, 15), random(9, 2, 6, 12)
    operands = (jnp.array([[2, 5], [PAGES, 1]]), jnp.array([13, 3]))
    got = jax.jit(kv_write.write_latents)(pool, latents, *operands)
    np.testing.assert_array_equal(got, reference.write_latents(pool, latents, *operands))
    np.testing.assert_array_equal(got[..., 12:], pool[..., 12:])
    np.testing.assert_array_equal(got[2, 13:, :12], latents[0, :3])


def test_of_a_longer_row_the_last_scale_stays():
    data, scales = jnp.zeros((PAGES, PAGE, 15), jnp.int8), jnp.full((PAGES, PAGE, 3), 7.0)
    at, row = (jnp.array([[3]]), jnp.array([0])), random(9, 1, 4, 15)
    whole = kv_write.write_scaled_latents(data, scales, row, *at, borders=(8, 12))
    short = kv_write.write_scaled_latents(data, scales, row[..., :12], *at, borders=(8,))
    np.testing.assert_array_equal(whole[0][..., :12], short[0][..., :12])
    np.testing.assert_array_equal(whole[1][..., :2], short[1][..., :2])
    np.testing.assert_allclose(whole[1][3, :4, 2], np.abs(row[0, :, 12:]).max(-1) / 127, rtol=1e-6)
    assert (np.asarray(short[1][..., 2]) == 7.0).all()


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "uint8"])
def test_latents_of_8_bits_have_a_scale_for_each_part(dtype):
    """The rotated key, 100 times the latent, has a separate scale; chunk boundaries change no bit of a token."""
    rank, limit = 8, 127 if dtype == "int8" else 448
    latents = random(9, 1, 20, 12) * jnp.where(jnp.arange(12) < rank, 1.0, 100.0)
    empty = jnp.zeros((PAGES, PAGE, 12), dtype), jnp.full((PAGES, PAGE, 2), jnp.nan)
    scaled = kv_write.write_scaled_latents
    whole = scaled(*empty, latents, jnp.array([[3, 5]]), jnp.array([0]), borders=(rank,))
    first = scaled(*empty, latents[:, :7], jnp.array([[3]]), jnp.array([0]), borders=(rank,))
    cut = scaled(*first, latents[:, 7:], jnp.array([[3, 5]]), jnp.array([7]), borders=(rank,))
    for one, other in zip(whole, cut, strict=True):
        np.testing.assert_array_equal(one, other)
    numbers, scales = (np.asarray(x, np.float32)[[3, 5]] for x in (bits.numbers(whole[0]), whole[1]))
    exact = np.asarray(latents[0])
    scales = scales.reshape(-1, 2)[:20]
    for side, part in enumerate((slice(None, rank), slice(rank, None))):
        np.testing.assert_allclose(scales[:, side], np.abs(exact[:, part]).max(-1) / limit, rtol=1e-6)
    numbers = numbers.reshape(-1, 12)[:20] * np.repeat(scales, (rank, 4), axis=1)
    step = np.repeat(scales, (rank, 4), axis=1) if dtype == "int8" else np.abs(exact) / 8 + 1e-2
    assert (np.abs(numbers - exact) <= 0.501 * step).all()
    assert np.isnan(np.asarray(whole[1])[5, 4:]).all()  # nothing is written beyond the chunk


def test_writes_stay_in_place():
    pool, k = jnp.zeros((400, 2, 2, PAGE, 8)), random(9, 2, 32, 2, 8)
    ints = jnp.zeros((2, 3), jnp.int32), jnp.zeros((2,), jnp.int32)
    program = jax.jit(kv_write.write_pages, donate_argnums=0).lower(pool, k, k, *ints).compile()
    assert program.memory_analysis().alias_size_in_bytes == pool.nbytes
    assert program.memory_analysis().temp_size_in_bytes < pool.nbytes // 4


# ----------------------------------------------------------------------------------------------------------------------
# Options.


def operands(dtype="float32", *, sequences=2, chunk=5, half=4, pool_dtype=None, scales=None, heads=0):
    """Return operands: sequence 0 crosses from page 4 to page 1, sequence 1's second page is out of range."""
    pool = random(0, PAGES, 2, 2, PAGE, 16).astype(pool_dtype or dtype)
    k, v = (3 * random(seed, sequences, chunk, 2, 16, dtype=dtype) for seed in (1, 2))
    angles = random(3, sequences, chunk, half)
    options = {"rope": (jnp.cos(angles), jnp.sin(angles)) if half else None}
    options["q"] = random(4, sequences, chunk, heads, 16, dtype=dtype) if heads else None
    shape = {None: None, "head": pool.shape[:3], "token": pool.shape[:4]}[scales]
    options["scales"] = None if shape is None else jnp.abs(random(5, *shape)) / 10 + 0.03
    return (pool, k, v, jnp.array([[4, 1], [2, PAGES]]), jnp.array([PAGE - 2, PAGE - 3])), options


@pytest.mark.parametrize(("half", "interleaved"), [(0, False), (8, False), (4, True)])
@pytest.mark.parametrize(
    ("dtype", "pool_dtype", "scales"),
    [
        ("float32", None, None),
        ("bfloat16", None, None),
        ("bfloat16", "int8", "token"),
        ("float32", "int8", "head"),
        ("float16", "float8_e4m3fn", "token"),
        ("float32", "float8_e4m3fn", "head"),
    ],
)
def test_options_are_those_of_the_reference(dtype, pool_dtype, scales, half, interleaved):
    arrays, options = operands(dtype, half=half, pool_dtype=pool_dtype, scales=scales, heads=3)
    got = jax.jit(kv_write.write, static_argnames="interleaved")(*arrays, **options, interleaved=interleaved)
    expected = jax.jit(reference.write, static_argnames="interleaved")(*arrays, **options, interleaved=interleaved)
    step = {"float32": 1e-6, "bfloat16": 2**-8, "float16": 2**-11}[dtype]
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        one, other = one.astype(jnp.float32), other.astype(jnp.float32)
        tolerance = {"int8": 1, "float8_e4m3fn": 32}.get(pool_dtype, 0) if one.shape == arrays[0].shape else 0
        np.testing.assert_allclose(one, other, rtol=step, atol=max(tolerance, step))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rotation_is_that_of_the_models(dtype):
    x, angles = random(0, 3, 2, 16, dtype=dtype), random(1, 3, 8)
    rope = jnp.cos(angles), jnp.sin(angles)
    got = jax.jit(lambda x, *rope: reference.rotate(x, *rope).astype(x.dtype))(x, *rope)
    np.testing.assert_array_equal(got, jax.jit(layers_rotate)(x, *rope))


@pytest.mark.parametrize("scales", ["token", "head"])
@pytest.mark.parametrize("pool_dtype", ["int8", "float8_e4m3fn"])
def test_a_quantized_pool_stands_for_what_was_written(pool_dtype, scales):
    (pool, k, v, _, _), _ = operands(chunk=PAGE, sequences=1, pool_dtype=pool_dtype)
    factors = jnp.full(pool.shape[:4], jnp.nan) if scales == "token" else static_scales(pool, jnp.full((2, 2), 12.0))
    got = kv_write.write(pool, k, v, jnp.array([[3]]), jnp.array([0]), scales=factors)
    numbers = dequantize(got.pool, got.scales, jnp.float32)[3]
    exact = jnp.stack([k[0], v[0]]).swapaxes(1, 2)
    largest = jnp.abs(exact).max(-1, keepdims=True) if scales == "token" else 12.0
    # Half a step: int8 has 127 equal steps up to the largest magnitude; e4m3 3 mantissa bits (subnormal: 2**-9 of 448).
    step = largest / 254 if pool_dtype == "int8" else jnp.maximum(jnp.abs(exact) / 16, largest / 448 * 2**-10)
    assert bool((jnp.abs(numbers - exact) <= step * 1.001).all())
    if scales == "head":
        np.testing.assert_array_equal(got.scales, factors)


@pytest.mark.parametrize("scales", ["token", "head"])
def test_how_a_prompt_is_cut_changes_no_bit_of_a_quantized_pool(scales):
    (pool, k, v, _, _), options = operands(sequences=1, chunk=30, pool_dtype="int8", scales=scales)
    table, write = [4, 1, 6], jax.jit(kv_write.write)

    def written(cuts):
        current, factors, start = pool, options["scales"], 0
        for end in (*cuts, 30):
            own = jnp.array([[*table[start // PAGE :], PAGES, PAGES]])
            at, angles = jnp.array([start % PAGE]), tuple(x[:, start:end] for x in options["rope"])
            done = write(current, k[:, start:end], v[:, start:end], own, at, scales=factors, rope=angles)
            current, factors, start = done.pool, done.scales, end
        return current, factors

    for one, other in zip(written([]), written([9, 20]), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_head_of_zeros_stays_zero():
    (pool, k, v, pages, offsets), options = operands(pool_dtype="int8", scales="token", half=0)
    got = kv_write.write(pool, k * 0, v * 0, pages, offsets, scales=options["scales"])
    assert not np.asarray(got.pool[4, :, :, PAGE - 2 :]).any()
    assert np.isfinite(got.scales).all()


@pytest.mark.parametrize("page", [-1, PAGES, 10**6, -(10**6)])
def test_pages_out_of_range_on_either_side_are_dropped(page):
    pool, k = random(8, PAGES, 2, 2, PAGE, 8), random(9, 1, 2, 8)
    np.testing.assert_array_equal(kv_write.write_rows(pool, k, k, jnp.array([page]), jnp.array([0])), pool)


def test_quantized_writes_stay_in_place():
    pool, k = jnp.zeros((400, 2, 2, PAGE, 8), jnp.int8), random(9, 2, 32, 2, 8)
    scales, ints = jnp.zeros(pool.shape[:4]), (jnp.zeros((2, 3), jnp.int32), jnp.zeros((2,), jnp.int32))

    def write(pool, scales, k, *ints):
        return kv_write.write(pool, k, k, *ints, scales=scales)

    program = jax.jit(write, donate_argnums=(0, 1)).lower(pool, scales, k, *ints).compile()
    assert program.memory_analysis().alias_size_in_bytes == pool.nbytes + scales.nbytes


def test_explains_the_path():
    (pool, k, v, _, _), _ = operands("bfloat16")
    hopper, ampere = Target("gpu", (9, 0)), Target("gpu", (8, 0))
    assert kv_write.explain(pool, k, v).path == "xla"
    assert "platform cpu" in kv_write.explain(pool, k, v).why
    assert kv_write.explain(pool, k, v, target=hopper).path == "mosaic"
    assert kv_write.explain(pool, k, v, target=ampere).path == "mosaic"
    small = kv_write.explain(pool[..., :8], k[..., :8], v[..., :8], target=hopper)
    assert (small.path, "head_dim 8" in small.why) == ("xla", True)
    float8 = pool.astype(jnp.float8_e4m3fn)
    scaled = kv_write.explain(float8, k, v, scales=jnp.zeros(pool.shape[:3]), target=ampere)
    assert (scaled.path, "8.9 to 9.0" in scaled.why) == ("xla", True)
    with pytest.raises(ValueError, match="head_dim 8"):
        kv_write.explain(pool[..., :8], k[..., :8], v[..., :8], path="mosaic")
