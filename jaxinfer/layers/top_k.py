"""Top-k along the last axis, for scores of a router or of a vocabulary."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.choice import lowering_target

_FEW = 512  # largest row of which all pairs are compared
_MANY = 1 << 24  # most comparisons in total: XLA unrolls a larger fusion to thousands of registers, which takes minutes


def top_k(x: Float[Array, "*batch n"], k: int) -> tuple[Float[Array, "*batch k"], Int[Array, "*batch k"]]:
    """Return the k largest elements of the last axis and their indices, as `lax.top_k`: descending, ties by index.

    GPUs count instead: XLA sorts there in several launches, or by a library that no command buffer can hold.
    """
    if lowering_target().platform != "cpu":
        few = x.shape[-1] <= _FEW and x.size * x.shape[-1] <= _MANY
        return counted_top_k(x, k) if few else grouped_top_k(x, k)
    numbers, places = lax.top_k(x, k)
    return numbers, places


def counted_top_k(x: Float[Array, "*batch n"], k: int) -> tuple[Float[Array, "*batch k"], Int[Array, "*batch k"]]:
    """Compute `top_k` by comparing all pairs, n * n comparisons. With NaN, indices are in bounds but meaningless."""
    return _counted(x, jnp.arange(x.shape[-1], dtype=jnp.int32), k)


def grouped_top_k(x: Float[Array, "*batch n"], k: int) -> tuple[Float[Array, "*batch k"], Int[Array, "*batch k"]]:
    """Compute `top_k` of long rows in about 2 * n * k comparisons, with NaN as in `counted_top_k`.

    The k largest elements are in the k groups of neighbours with the largest maxima: any other element is preceded by k
    elements of at least its size, one from each of these groups.
    """
    n, size = x.shape[-1], _group_size(x.shape[-1], k)
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -n % size)], constant_values=-jnp.inf)
    groups = padded.reshape(*x.shape[:-1], -1, size)
    if not 0 < k < groups.shape[-2]:
        return counted_top_k(x, k)
    _, best = counted_top_k(groups.max(-1), k)
    candidates = jnp.take_along_axis(groups, best[..., None], axis=-2, mode="clip")
    places = best[..., None] * size + jnp.arange(size, dtype=jnp.int32)
    flat = (*x.shape[:-1], k * size)
    numbers, places = _counted(candidates.reshape(flat), places.reshape(flat), k)
    return numbers, jnp.minimum(places, n - 1)


def _group_size(n: int, k: int) -> int:
    """Return a power of two for which there are about as many groups as candidates."""
    return 1 << round(math.log2(n / max(k, 1)) / 2)


def _counted(
    x: Float[Array, "*batch n"], places: Int[Array, "*#batch n"], k: int
) -> tuple[Float[Array, "*batch k"], Int[Array, "*batch k"]]:
    """Return the k largest elements, with their indices from ``places``, which may be in any order."""
    mine, other = x[..., :, None], x[..., None, :]
    ahead = (other > mine) | ((other == mine) & (places[..., None, :] < places[..., :, None]))
    chosen = ahead.sum(-1, dtype=jnp.int32)[..., None, :] == jnp.arange(k)[:, None]
    return jnp.where(chosen, x[..., None, :], 0).sum(-1), jnp.where(chosen, places[..., None, :], 0).max(-1)
