"""Products of a single row with 16-bit weights on a CPU.

XLA passes products to a library that packs the whole weight at every call, and products of a single 16-bit row not even
to that: its own loop is twenty times slower. Here the weight is cut into a few slices, which are multiplied and added
element by element: XLA compiles that to one loop, which reads each slice sequentially, vectorised and on all cores. The
remaining float32 numbers are summed by a product with ones, for which XLA has a fast loop. It reads a weight at the
rate of float32 weights, for half as many bytes. With more rows the library is faster.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.choice import lowering_target

_SLICES = 8  # of inputs first; with more, the loop has more streams than a processor prefetches
_FEWEST, _MOST, _LANES = 16, 80, 16  # slices of inputs last (fewest, most), and divisor of their length


def alone(x: Any, weights: Any) -> bool:
    """Return whether a product is one of a single row of 16-bit numbers on a CPU, and on one device."""
    narrow = math.prod(x.shape[:-1]) == 1 and jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize == 2
    here = narrow and x.dtype == weights.dtype and lowering_target().platform == "cpu"
    return here and jax.sharding.get_abstract_mesh().size <= 1


def slices(inputs: int, along: int) -> int | None:
    """Return the number of slices of weights whose inputs are the first (0) or last dimension; None: unsupported."""
    if along == 0:
        return _SLICES if inputs % _SLICES == 0 else None
    return next((count for count in range(_MOST, _FEWEST - 1, -1) if inputs % (count * _LANES) == 0), None)


def dot(x: Float[Array, "... k"], weights: Float[Array, "..."], along: int, count: int) -> Float[Array, "..."]:
    """Contract the last dimension of one row with dimension ``along`` of ``weights``, by ``count`` slices.

    Args:
        along: the first dimension (0) or the last.
    """
    length = x.shape[-1] // count
    parts = _wide(x).reshape(count, length)
    if along == 0:
        cut = weights.reshape(count, length, -1)
        sums = _added([_wide(cut[at]) * parts[at, :, None] for at in range(count)])
        product = lax.dot(jnp.ones((1, length), jnp.float32), sums, precision=lax.Precision.HIGHEST)
        outputs = weights.shape[1:]
    else:
        cut = weights.reshape(-1, count, length)
        sums = _added([_wide(cut[:, at]) * parts[at] for at in range(count)])
        product = lax.dot(sums, jnp.ones((length, 1), jnp.float32), precision=lax.Precision.HIGHEST)
        outputs = weights.shape[:-1]
    return product.astype(x.dtype).reshape(*x.shape[:-1], *outputs)


def _wide(slice_of: Array) -> Array:
    """Convert to float32, a slice at a time: else XLA materialises the whole weight."""
    return slice_of.astype(jnp.float32)


def _added(terms: list[Array]) -> Array:
    return functools.reduce(jnp.add, terms)
