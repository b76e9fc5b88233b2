"""Copies of pages within a pool, against the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import kv_copy
from pallas_kernels.kv_copy import reference

PAGES = 12


def pool(dtype: str = "float32") -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).standard_normal((PAGES, 2, 2, 4, 8), np.float32)).astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ([0, 3], [5, 6]),
        ([7, 7, 7], [1, 2, 3]),  # one page to several
        ([1, 2], [PAGES, 0]),  # a copy that is not meant
        ([4, PAGES, PAGES], [9, PAGES, PAGES]),
    ],
)
def test_copies_are_those_of_the_reference(source, target, dtype):
    before = pool(dtype)
    arguments = jnp.array(source), jnp.array(target)
    got = np.asarray(jax.jit(kv_copy.copy_pages)(before, *arguments))
    want = np.array(before)
    for one, other in zip(source, target, strict=True):
        if other < PAGES:
            want[other] = before[one]
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(reference.copy_pages(before, *arguments), want)


def test_sources_are_read_before_anything_is_written():
    before = pool()
    swapped = jax.jit(kv_copy.copy_pages)(before, jnp.array([2, 8]), jnp.array([8, 2]))
    np.testing.assert_array_equal(swapped[2], before[8])
    np.testing.assert_array_equal(swapped[8], before[2])


def test_copies_stay_in_place():
    large, ids = jnp.zeros((400, 2, 2, 16, 8)), jnp.zeros((8,), jnp.int32)
    program = jax.jit(kv_copy.copy_pages, donate_argnums=0).lower(large, ids, ids).compile()
    assert program.memory_analysis().alias_size_in_bytes == large.nbytes
    assert program.memory_analysis().temp_size_in_bytes < large.nbytes // 4
