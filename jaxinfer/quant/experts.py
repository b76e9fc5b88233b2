"""Grouped matrix product of a mixture of experts (`pallas_kernels.grouped_matmul`) with quantised weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.choice import lowering_target
from pallas_kernels.grouped_matmul import Groups


def grouped_product(
    x: Float[Array, "tiles rows k"], weights: Any, groups: Groups, product: Callable[[Any, Any], jax.Array]
) -> Float[Array, "tiles rows *n"]:
    """Multiply each tile's rows by the weights of the tile's expert, dequantized in chunks.

    On a CPU only occupied tiles are computed.

    Args:
        weights: a `Quantized` or `Split` of ``[experts, *n, k]``.
        product: the product of rows with one expert's weights.
    """

    def tile(index: Any) -> jax.Array:
        expert = index if groups.experts is None else groups.experts[index]
        return product(lax.dynamic_index_in_dim(x, index, keepdims=False), weights.expert(expert))

    tiles, rows = x.shape[:2]
    if groups.experts is None or lowering_target().platform != "cpu":
        return lax.map(tile, jnp.arange(tiles))

    def fill(index: Any, result: jax.Array) -> jax.Array:
        return lax.dynamic_update_index_in_dim(result, tile(index), index, 0)

    return lax.fori_loop(0, groups.occupied, fill, jnp.zeros((tiles, rows, *weights.shape[1:-1]), x.dtype))
