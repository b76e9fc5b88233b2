"""Dense product in XLA, with the epilogue steps of `reference`: runs on every platform.

XLA chooses the order of sums for each number of rows.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Num

from pallas_kernels.matmul.reference import check, finished
from pallas_kernels.matmul.types import NOTHING, Extras, Layout, outputs_of
from pallas_kernels.sums import dot


def matmul(
    x: Num[Array, "rows k"],
    weights: Num[Array, "..."],
    extras: Extras = NOTHING,
    *,
    layout: Layout = "in first",
    gated: bool = False,
    dtype: Any = None,
) -> Float[Array, "rows *n"]:
    """See `reference.matmul`. float32 means float32: no TF32.

    Args:
        dtype: dtype of the result; None: the dtype of ``x``, bfloat16 if that has 8 bits.

    Raises:
        ValueError: operands that do not fit each other.
    """
    check(x, weights, extras, layout, gated=gated)
    result = jnp.dtype(dtype or result_dtype(x))
    # As a matrix: with more than one output dimension XLA:CPU transposes [out, in] weights at every call.
    flat = weights if layout == "in first" else weights.reshape(-1, weights.shape[-1])
    flat = flat if x.dtype.itemsize == 1 else flat.astype(x.dtype)
    product = dot(x, flat, 0 if layout == "in first" else 1, _sums(x, result))
    product = product.reshape(-1, *outputs_of(weights, layout))
    if extras == NOTHING and not gated:
        return product.astype(result)
    product = lax.optimization_barrier(product)  # or XLA adds a bias within the product, before it is rounded

    def rounded(step: jax.Array) -> jax.Array:
        return step.astype(result)

    return finished(product, extras, gated=gated, wide=jnp.float32, rounded=rounded)


def result_dtype(x: Any) -> Any:
    """Return the default dtype of a product's result."""
    return jnp.bfloat16 if jnp.dtype(x.dtype).itemsize == 1 else x.dtype


def _sums(x: Any, result: Any) -> Any:
    """Return the dtype of the product's sums: sums of 8-bit numbers are scaled before they are rounded."""
    if x.dtype == jnp.int8:
        return jnp.int32
    return jnp.float32 if x.dtype.itemsize == 1 else result
