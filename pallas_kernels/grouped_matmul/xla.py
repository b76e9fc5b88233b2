"""Grouped matrix product in XLA.

On a CPU a loop runs over the non-empty tiles. It slices the weights of a tile's expert in chunks that stay in the
cache: an inactive expert costs nothing, and stacked weights are never copied as a whole. A program for a GPU must not
fetch the trip count from the device: with few rows it multiplies all experts at once, which reads each weight once;
with many it loops over all possible tiles.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.choice import Target, lowering_target
from pallas_kernels.grouped_matmul.groups import Groups

CPU_PIECE = 1 << 20  # bytes of weights at a time: two chunks fit into the second-level cache


def matmul(
    x: Float[Array, "tiles rows k"],
    weights: Float[Array, "experts n k"],
    groups: Groups,
    *,
    target: Target | None = None,
) -> Float[Array, "tiles rows n"]:
    """See `api.matmul`.

    Args:
        target: lowering target of the program; None: see `pallas_kernels.choice`.
    """
    cpu = (target or lowering_target()).platform == "cpu"
    if cpu and x.shape[1] == 1 and x.dtype.itemsize == 2:  # a second row makes it faster, see `pallas_kernels.one_row`
        return _matmul(cpu, jnp.pad(x, ((0, 0), (0, 1), (0, 0))), weights, groups)[:, :1]
    return _matmul(cpu, x, weights, groups)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(cpu: bool, x: jax.Array, weights: jax.Array, groups: Groups) -> jax.Array:
    if groups.experts is None:
        return _dot(x, weights, (((2,), (2,)), ((0,), (0,))))
    return (_occupied_tiles if cpu else _all_tiles)(x, weights, groups)


def _dot(x: Any, weights: Any, numbers: Any) -> jax.Array:
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(x, weights.astype(x.dtype), numbers, precision=precision)


_ROWS_BY_ROWS = (((1,), (1,)), ((), ()))


def _occupied_tiles(x: jax.Array, weights: jax.Array, groups: Groups) -> jax.Array:
    (tiles, rows, k), n = x.shape, weights.shape[1]
    assert groups.experts is not None
    experts = groups.experts
    size = min(n, max(1, CPU_PIECE // (k * weights.dtype.itemsize)))
    wide = jnp.float32 if x.dtype == jnp.float16 else x.dtype  # see `pallas_kernels.float16`

    def piece(index: Any, tile: Any, result: jax.Array) -> jax.Array:
        first = jnp.minimum(index * size, n - size)  # the last two chunks may overlap
        own = lax.dynamic_slice(weights, (experts[tile], first, 0), (1, size, k))[0]
        part = _dot(lax.dynamic_index_in_dim(x, tile, keepdims=False).astype(wide), own, _ROWS_BY_ROWS)
        return lax.dynamic_update_slice(result, part[None].astype(x.dtype), (tile, 0, first))

    def tile(index: Any, result: jax.Array) -> jax.Array:
        return lax.fori_loop(0, math.ceil(n / size), lambda part, result: piece(part, index, result), result)

    return lax.fori_loop(0, groups.occupied, tile, jnp.zeros((tiles, rows, n), x.dtype))


def _all_tiles(x: jax.Array, weights: jax.Array, groups: Groups) -> jax.Array:
    def tile(own: tuple[jax.Array, jax.Array]) -> jax.Array:
        rows, expert = own
        return _dot(rows, lax.dynamic_index_in_dim(weights, expert, keepdims=False), _ROWS_BY_ROWS)

    return lax.map(tile, (x, groups.experts))


# --------------------------------------------------------------------------------------------------------------
# Gradients: a loop with a dynamic trip count has no gradient in JAX.


def _forward(cpu: bool, x: jax.Array, weights: jax.Array, groups: Groups) -> tuple[jax.Array, Any]:
    return _matmul(cpu, x, weights, groups), (x, weights, groups)


def _backward(cpu: bool, saved: Any, change: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x, weights, groups = saved
    of_x = _matmul(cpu, change, jnp.swapaxes(weights, 1, 2), groups)
    return of_x, _of_weights(change, x, weights, groups), None


def _of_weights(change: jax.Array, x: jax.Array, weights: jax.Array, groups: Groups) -> jax.Array:
    """Return the gradient of the weights. Empty rows are zeros in ``x``, so their cotangents do not matter."""
    if groups.experts is None:
        return _dot(change, x, (((1,), (1,)), ((0,), (0,)))).astype(weights.dtype)

    def add(total: jax.Array, tile: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        rows_change, rows, expert = tile
        return total.at[expert].add(_dot(rows_change, rows, (((0,), (0,)), ((), ())))), None

    start = jnp.zeros(weights.shape, x.dtype)
    return lax.scan(add, start, (change, x, groups.experts))[0].astype(weights.dtype)


_matmul.defvjp(_forward, _backward)
