from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxinfer.layers.top_k import counted_top_k, grouped_top_k, top_k
from tests.lowered import as_for_gpu


@pytest.mark.parametrize("levels", [3, 40, None])
def test_counting_finds_what_sorting_finds(levels: int | None):
    """Few levels give most numbers ties, of which the first are taken."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(5, 7, 60)) if levels is None else rng.integers(0, levels, (5, 7, 60))
    x = jnp.asarray(x, jnp.float32).at[:, :, 10:40].set(-jnp.inf)
    for k in (1, 6, 60):
        for found, expected in zip(counted_top_k(x, k), lax.top_k(x, k), strict=True):
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("levels", [2, 3, 40, None])
@pytest.mark.parametrize("n", [9, 1345, 5000])
def test_groups_find_what_sorting_finds(levels: int | None, n: int):
    rng = np.random.default_rng(n)
    x = rng.normal(size=(3, n)) if levels is None else rng.integers(0, levels, (3, n))
    x = jnp.asarray(x, jnp.float32).at[0].set(-jnp.inf).at[1, n // 3 :].set(-jnp.inf)
    for k in (0, 6, min(n, 200)):
        for found, expected in zip(jax.jit(grouped_top_k, static_argnums=1)(x, k), lax.top_k(x, k), strict=True):
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("largest", [counted_top_k, grouped_top_k])
@pytest.mark.parametrize("n", [9, 1001])
def test_places_beside_nan_are_within_bounds(largest: Callable[..., Any], n: int):
    x = jnp.full((3, n), jnp.nan).at[1, 4].set(2.0).at[2, 5].set(1.0)
    places = largest(x, 4)[1]
    assert bool(((places >= 0) & (places < n)).all())


def test_gradients_reach_what_was_chosen():
    x = jnp.asarray([0.5, 3.0, 2.0, -1.0])
    gradient = jax.grad(lambda x: (counted_top_k(x, 2)[0] * jnp.asarray([1.0, 10.0])).sum())(x)
    assert gradient.tolist() == [0.0, 1.0, 10.0, 0.0]


def test_a_cpu_sorts():
    assert "top_k" in str(jax.make_jaxpr(lambda x: top_k(x, 2))(jnp.zeros(8)))


@pytest.mark.parametrize("n", [8, 2000])
def test_a_gpu_does_not(n: int):
    text = as_for_gpu(top_k, static_argnums=1).lower(jnp.zeros((2, n)), 2).as_text()
    assert "chlo.top_k" not in text
    assert "stablehlo.sort" not in text


def test_many_rows_are_not_compared_all_with_all():
    """XLA takes minutes to compile it for 4,096 tokens and 256 experts, and unrolls it to thousands of registers."""
    lowered = as_for_gpu(top_k, static_argnums=1)
    assert "4096x256x256" not in lowered.lower(jnp.zeros((4096, 256)), 8).as_text()
    assert "64x256x256" in lowered.lower(jnp.zeros((64, 256)), 8).as_text()
    x = jax.random.normal(jax.random.key(0), (2000, 128))
    for found, expected in zip(lowered(x, 8), lax.top_k(x, 8), strict=True):
        np.testing.assert_array_equal(found, expected)
