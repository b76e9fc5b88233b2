"""Products whose sums XLA would split, and pad with zeros if the parts are uneven.

A product of few outputs has too few tiles for all multiprocessors of a GPU. XLA splits its sum, into a power of two of
parts that begin at multiples of 16 bytes. If those do not divide the inputs, it first copies both operands with zero
padding: the weight, again in each step. Such a sum is divided here, into another number of equal parts, which XLA does
not split further. The number of XLA's parts is its estimate; ours is near it, for a GPU of 132 multiprocessors.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType
from jaxtyping import Array, Num

from pallas_kernels import float16, one_row
from pallas_kernels.choice import lowering_target

_MULTIPROCESSORS, _TILE = 132, 192
_MOST, _INPUTS = 32, 128  # most parts, and fewest inputs of one
_BYTES = 16


def dot(x: Num[Array, "*rows k"], weights: Num[Array, "..."], along: int, dtype: Any = None) -> Num[Array, "..."]:
    """Contract the last dimension of ``x`` with dimension ``along`` of ``weights``. float32 means float32: no TF32.

    Args:
        dtype: dtype of the result; None: the dtype of ``x``.
    """
    if one_row.alone(x, weights):  # by the library, which does not support a single row of 16 bits
        both = x.reshape(1, -1)
        product = dot(jnp.concatenate([both, jnp.zeros_like(both)]), weights, along, dtype)
        return product[0].reshape(*x.shape[:-1], *product.shape[1:])
    if float16.slow(x, weights, along):
        return float16.dot(x, weights, along).astype(dtype or x.dtype)
    last = x.ndim - 1
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    count = _parts_of(x, weights)
    contracted: Any
    if count == 1:
        contracted = (((last,), (along,)), ((), ()))
        return lax.dot_general(x, weights, contracted, precision=precision, preferred_element_type=dtype)
    own = x.reshape(*x.shape[:-1], count, -1)
    cut = weights.reshape(*weights.shape[:along], count, -1, *weights.shape[along + 1 :])
    by_part = (((last + 1,), (along + 1,)), ((last,), (along,)))
    wide = jnp.int32 if jnp.issubdtype(x.dtype, jnp.integer) else jnp.float32
    sums = lax.dot_general(own, cut, by_part, precision=precision, preferred_element_type=wide)
    return sums.sum(0).astype(dtype or x.dtype)


def _parts_of(x: Array, weights: Array) -> int:
    """Return the number of parts; 1 on a CPU, and on several devices, which may share inputs outside a shard_map."""
    mesh = jax.sharding.get_abstract_mesh()
    if lowering_target().platform == "cpu" or (mesh.size > 1 and AxisType.Manual not in mesh.axis_types):
        return 1
    aligned = _BYTES // min(x.dtype.itemsize, weights.dtype.itemsize)
    return parts(math.prod(x.shape[:-1]), x.shape[-1], weights.size // x.shape[-1], aligned)


def parts(rows: int, inputs: int, outputs: int, aligned: int = 8) -> int:
    """Return the number of equal parts of a sum; 1: there are many outputs, or XLA's parts divide the inputs.

    Args:
        aligned: XLA's parts are a multiple of these inputs, and so are ours, unless rows of ``inputs`` are none either.
    """
    tiles = max(1, -(-rows // _TILE) * -(-outputs // _TILE))
    most = min(_MULTIPROCESSORS // tiles, inputs // _INPUTS, _MOST)
    if most < 2 or inputs % (aligned << (most - 1).bit_length()) == 0:
        return 1
    aligned = math.gcd(aligned, inputs)
    return next(count for count in range(most, 0, -1) if count == 1 or inputs % (aligned * count) == 0)
