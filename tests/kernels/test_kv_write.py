"""Writing keys and values into pages, against loops over tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import kv_write

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
    """Pages of the first lane end with its chunk; of the second one the middle page is out of range."""
    pool = random(8, PAGES, 2, 2, PAGE, 8, dtype=dtype)
    k, v = (random(seed, 2, chunk, 2, 8) for seed in (9, 10))
    pages = np.array([[3, 6, 1], [0, PAGES, 5]])[:, : -(-chunk // PAGE) + 1]
    got = jax.jit(kv_write.write_pages)(pool, k, v, jnp.array(pages), jnp.array(offsets))
    want = np.array(pool)
    for lane in range(2):
        for token in range(chunk):
            at = offsets[lane] + token
            if (page := pages[lane, at // PAGE]) < PAGES:
                want[page, 0, :, at % PAGE] = k[lane, token].astype(dtype)
                want[page, 1, :, at % PAGE] = v[lane, token].astype(dtype)
    np.testing.assert_array_equal(np.asarray(got), want)


def test_writes_stay_in_place():
    pool, k = jnp.zeros((400, 2, 2, PAGE, 8)), random(9, 2, 32, 2, 8)
    ints = jnp.zeros((2, 3), jnp.int32), jnp.zeros((2,), jnp.int32)
    program = jax.jit(kv_write.write_pages, donate_argnums=0).lower(pool, k, k, *ints).compile()
    assert program.memory_analysis().alias_size_in_bytes == pool.nbytes
    assert program.memory_analysis().temp_size_in_bytes < pool.nbytes // 4
