import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxinfer.layers.top_k import counted_top_k, top_k


@pytest.mark.parametrize("levels", [3, 40, None])
def test_counting_finds_what_sorting_finds(levels: int | None):
    """With few levels most numbers have equals, of which the first are taken."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(5, 7, 60)) if levels is None else rng.integers(0, levels, (5, 7, 60))
    x = jnp.asarray(x, jnp.float32).at[:, :, 10:40].set(-jnp.inf)
    for k in (1, 6, 60):
        for found, expected in zip(counted_top_k(x, k), lax.top_k(x, k), strict=True):
            np.testing.assert_array_equal(found, expected)


def test_places_beside_nan_are_within_bounds():
    x = jnp.full((3, 9), jnp.nan).at[1, 4].set(2.0)
    places = counted_top_k(x, 4)[1]
    assert bool(((places >= 0) & (places < 9)).all())


def test_gradients_reach_what_was_chosen():
    x = jnp.asarray([0.5, 3.0, 2.0, -1.0])
    gradient = jax.grad(lambda x: (counted_top_k(x, 2)[0] * jnp.asarray([1.0, 10.0])).sum())(x)
    assert gradient.tolist() == [0.0, 1.0, 10.0, 0.0]


def test_a_cpu_sorts():
    assert "top_k" in str(jax.make_jaxpr(lambda x: top_k(x, 2))(jnp.zeros(8)))
