"""Expert products row by row, as in a mixture of experts: sort rows by expert, multiply, and restore their order.

Weights are unquantized, for grouped_matmul, or with ``scales`` MXFP4, for quant_matmul.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import jax

from pallas_kernels import quant_matmul
from pallas_kernels.grouped_matmul import group
from pallas_kernels.grouped_matmul import mosaic as kernel
from pallas_kernels.grouped_matmul import xla as plain
from pallas_kernels.grouped_matmul.mosaic import Tiles
from pallas_kernels.quant_matmul.mosaic import launch as stored_kernel

__all__ = ["Tiles", "mosaic", "xla"]


def mosaic(
    x: jax.Array,
    weights: jax.Array,
    experts: jax.Array,
    scales: jax.Array | None = None,
    *,
    most: int | None = None,
    **options: Any,
) -> jax.Array:
    """Multiply ``x[i]`` by the weights of ``experts[i]`` with the Mosaic kernel.

    Args:
        most: most rows of one expert; None: all rows.
        options: options of the kernel.
    """
    if scales is None:
        return _by_tiles("mosaic", x, weights, experts, most, functools.partial(kernel.matmul, **options))

    def product(rows: jax.Array, weights: jax.Array, groups: Any) -> jax.Array:
        return stored_kernel.matmul_tiles(rows, weights, scales, None, groups, e2m1=True, **options)

    return _by_tiles("mosaic", x, weights, experts, most, product)


def xla(
    x: jax.Array, weights: jax.Array, experts: jax.Array, scales: jax.Array | None = None, *, most: int | None = None
) -> jax.Array:
    """Multiply ``x[i]`` by the weights of ``experts[i]`` with XLA."""
    if scales is None:
        return _by_tiles("xla", x, weights, experts, most, plain.matmul)

    def product(rows: jax.Array, weights: jax.Array, groups: Any) -> jax.Array:
        return quant_matmul.matmul_tiles(rows, weights, scales, None, groups, e2m1=True, path="xla")

    return _by_tiles("xla", x, weights, experts, most, product)


def _by_tiles(
    path: Literal["mosaic", "xla"], x: jax.Array, weights: jax.Array, experts: jax.Array, most: int | None, product: Any
) -> jax.Array:
    groups = group(experts, weights.shape[0], most or x.shape[0], path=path)
    rows = x.at[groups.entries].get(mode="fill", fill_value=0)
    results: jax.Array = product(rows, weights, groups).reshape(-1, weights.shape[1])
    return results.at[groups.places].get(mode="fill", fill_value=0)
