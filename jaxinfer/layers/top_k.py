"""The largest of few numbers, such as a router's."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.choice import lowering_target


def top_k(x: Float[Array, "*batch n"], k: int) -> tuple[Float[Array, "*batch k"], Int[Array, "*batch k"]]:
    """`lax.top_k` of the last axis: the numbers and their places, the largest first, of equal ones the first.

    By counting on a GPU, where XLA sorts, in several launches: for some hundred numbers at most.
    """
    if lowering_target().platform != "cpu":
        return counted_top_k(x, k)
    numbers, places = lax.top_k(x, k)
    return numbers, places


def counted_top_k(x: Float[Array, "*batch n"], k: int) -> tuple[Float[Array, "*batch k"], Int[Array, "*batch k"]]:
    """`top_k` by comparing all with all, n * n comparisons. Beside NaN, places are within bounds and mean nothing."""
    at = jnp.arange(x.shape[-1], dtype=jnp.int32)
    mine, other = x[..., :, None], x[..., None, :]
    ahead = (other > mine) | ((other == mine) & (at[None, :] < at[:, None]))
    chosen = ahead.sum(-1, dtype=jnp.int32)[..., None, :] == jnp.arange(k)[:, None]
    return jnp.where(chosen, x[..., None, :], 0).sum(-1), jnp.where(chosen, at, 0).max(-1)
