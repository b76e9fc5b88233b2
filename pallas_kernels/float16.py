"""Products of float16 numbers on a CPU, in float32.

XLA:CPU has no float16 product: it widens the whole weight in memory at every call, in an order that it cannot vectorise
(1.5 GB/s). A loop here widens a chunk that stays in the cache, and multiplies by that.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.choice import lowering_target

_PIECE = 1 << 19  # numbers
_FEWEST = 128  # inputs of a chunk: with fewer, the sums of all outputs would go through memory too often
_LEAST = 16  # fewest inputs of a chunk if no larger number divides all inputs


def slow(x: Any, weights: Any, along: int) -> bool:
    """Return whether XLA would widen the weight of a product: on a CPU, and on one device."""
    here = x.dtype == weights.dtype == jnp.float16 and along in (0, weights.ndim - 1)
    return here and lowering_target().platform == "cpu" and jax.sharding.get_abstract_mesh().size <= 1


def dot(x: Float[Array, "*rows k"], weights: Float[Array, "..."], along: int) -> Float[Array, "..."]:
    """Contract the last dimension of ``x`` with the first (0) or the last dimension of ``weights``; in float32."""
    inputs, rows = x.shape[-1], x.astype(jnp.float32).reshape(-1, x.shape[-1])
    if along == 0:
        product, outputs = _by_inputs(rows, weights.reshape(inputs, -1)), weights.shape[1:]
    else:
        product, outputs = _by_outputs(rows, weights.reshape(-1, inputs)), weights.shape[:-1]
    return product.reshape(*x.shape[:-1], *outputs)


def _by_inputs(x: Float[Array, "rows k"], weights: Float[Array, "k n"]) -> Float[Array, "rows n"]:
    """Multiply by equal chunks of the inputs, and add up their products one after the other."""
    (rows, inputs), outputs = x.shape, weights.shape[1]
    most = min(inputs, max(_FEWEST, _PIECE // outputs))
    length = next((each for each in range(most, _LEAST - 1, -1) if inputs % each == 0), inputs)
    if length == inputs:
        return _product(x, weights, 0)

    def add(total: Array, piece: tuple[Array, Array]) -> tuple[Array, None]:
        return total + _product(*piece, 0), None

    pieces = jnp.moveaxis(x.reshape(rows, -1, length), 1, 0), weights.reshape(-1, length, outputs)
    return lax.scan(add, jnp.zeros((rows, outputs), jnp.float32), pieces)[0]


def _by_outputs(x: Float[Array, "rows k"], weights: Float[Array, "n k"]) -> Float[Array, "rows n"]:
    outputs, inputs = weights.shape
    length = min(outputs, max(1, _PIECE // inputs))
    if length == outputs:
        return _product(x, weights, 1)

    def piece(index: Any, result: Array) -> Array:
        first = jnp.minimum(index * length, outputs - length)  # the last two chunks may overlap
        part = _product(x, lax.dynamic_slice_in_dim(weights, first, length), 1)
        return lax.dynamic_update_slice_in_dim(result, part, first, 1)

    start = jnp.zeros((x.shape[0], outputs), jnp.float32)
    return lax.fori_loop(0, math.ceil(outputs / length), piece, start)


def _product(x: Array, weights: Array, along: int) -> Array:
    contracted: Any = (((1,), (along,)), ((), ()))
    return lax.dot_general(x, weights.astype(jnp.float32), contracted, precision=lax.Precision.HIGHEST)
