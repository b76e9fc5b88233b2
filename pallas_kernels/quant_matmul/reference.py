"""Reference of the matrix product with quantised weights, and the storage format of weights.

The storage format, which checkpoint loaders must produce; one for every path:

    weights   [n, k]: outputs by inputs, inputs contiguous; int4 (`jnp.int4`, two to a byte), int8 or
              float8_e4m3fn.
    scales    [k // group, n], or [n] with one per output channel; float32, bfloat16 or float16.
    zeros     int8 [k // group, n], or None: the code of weight 0. float8_e4m3fn has none.

    weight = (weights - zeros) * scales

MXFP4 (OCP Microscaling Formats 1.0) is stored in the same way, as ``e2m1``: int4 weights are indices -7 to 7 in the
order of float4_e2m1fn (`E2M1`), and uint8 scales are the exponents of powers of two, as the bits of float8_e8m0fnu; -8
is not a valid index, 0 not a valid scale.

    weight = sign(weights) * E2M1[|weights|] * 2 ** (scales - 127)

Four bits are signed, -8 to 7. `pack` subtracts 8 from unsigned checkpoints (0 to 15: AWQ, GPTQ), and from their zero
points, which changes no weight. A tensor core takes the weights' rows from registers, with neighbours along k adjacent;
and a program keeps four bits packed up to the registers only if they are `jnp.int4`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Integer, Num

__all__ = ["E2M1", "Packed", "dequantized", "group_size", "matmul", "pack", "placed"]

DTYPES = (jnp.int4, jnp.int8, jnp.float8_e4m3fn)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
OFFSET = 8  # offset of unsigned 4-bit numbers


class Packed(NamedTuple):
    """A stored weight, see the module."""

    weights: jax.Array
    scales: jax.Array
    zeros: jax.Array | None = None


def pack(
    numbers: Num[Array, "k n"],
    scales: Float[Array, "*groups n"],
    zeros: Int[Array, "groups n"] | None = None,
    *,
    dtype: Any = jnp.int4,
    unsigned: bool = False,
) -> Packed:
    """Return the stored form of numbers.

    Args:
        numbers: integers within the range of ``dtype``, inputs by outputs; or floats that ``dtype`` holds.
        dtype: int4, int8 or float8_e4m3fn.
        unsigned: int4 only: ``numbers`` and ``zeros`` are 0 to 15. Without ``zeros``, 8 represents 0.

    Raises:
        ValueError: shapes that do not fit each other, another dtype, or numbers that are unsigned and not int4.
    """
    if dtype not in DTYPES or (unsigned and dtype != jnp.int4):
        raise ValueError(f"{'unsigned ' if unsigned else ''}{jnp.dtype(dtype)} weights are not stored")
    offset = OFFSET if unsigned else 0
    weights = (numbers.T - offset if offset else numbers.T).astype(dtype)
    stored = Packed(weights, scales, None if zeros is None else (zeros - offset).astype(jnp.int8))
    group_size(*stored)
    return stored


def placed(codes: Integer[Array, "*shape"]) -> Int[Array, "*shape"]:
    """Convert codes of float4_e2m1fn, 0 to 15 with a negative upper half, to indices."""
    numbers = codes.astype(jnp.int8)
    return jnp.where(numbers < OFFSET, numbers, OFFSET - numbers).astype(jnp.int4)


def group_size(weights: Any, scales: Any, zeros: Any = None) -> int:
    """Return the group size: neighbours along k that share a scale; k for one scale per channel. Raises ValueError."""
    n, k = weights.shape
    groups = scales.shape[0] if scales.ndim == 2 else 1
    if scales.shape != (*((groups,) if scales.ndim == 2 else ()), n) or not groups or k % groups:
        raise ValueError(f"scales {scales.shape} do not fit weights {weights.shape} of [outputs, inputs]")
    if zeros is not None and (zeros.shape != (groups, n) or weights.dtype == jnp.float8_e4m3fn):
        raise ValueError(f"zeros {zeros.shape} of {weights.dtype} weights: [{groups}, {n}], and of integers only")
    return int(k // groups)


def dequantized(
    weights: Num[Array, "n k"],
    scales: Num[Array, "*groups n"],
    zeros: Int[Array, "groups n"] | None = None,
    *,
    e2m1: bool = False,
    dtype: Any = jnp.float32,
) -> Float[Array, "n k"]:
    """Dequantize the weights."""
    group = group_size(weights, scales, zeros)
    grouped = weights.reshape(weights.shape[0], -1, group)
    grouped = _float4(grouped, dtype) if e2m1 else grouped.astype(dtype)
    if e2m1:  # exponents of a float32
        scales = jax.lax.bitcast_convert_type(scales.astype(jnp.int32) << 23, jnp.float32)
    if zeros is not None:
        grouped = grouped - zeros.T[:, :, None].astype(dtype)
    factors = scales.reshape(-1, weights.shape[0]).T[:, :, None].astype(dtype)
    return (grouped * factors).reshape(weights.shape)


def _float4(places: Int[Array, "*shape"], dtype: Any) -> Float[Array, "*shape"]:
    """Decode as half of twice E2M1: a sum of steps instead of a table lookup for each number."""
    size = jnp.abs(places.astype(jnp.int8))
    steps = size + jnp.maximum(size - 4, 0) + 2 * jnp.maximum(size - 6, 0)
    return jnp.where(places < 0, -steps, steps).astype(dtype) / 2


def matmul(
    x: Float[Array, "*rows k"],
    weights: Num[Array, "n k"],
    scales: Num[Array, "*groups n"],
    zeros: Int[Array, "groups n"] | None = None,
    *,
    e2m1: bool = False,
    dtype: Any = jnp.float32,
) -> Float[Array, "*rows n"]:
    """Compute ``x @ weight.T`` in ``dtype`` and return it in ``dtype``.

    Raises:
        ValueError: shapes that do not fit each other.
    """
    if x.shape[-1] != weights.shape[1]:
        raise ValueError(f"x {x.shape} and weights {weights.shape} of [outputs, inputs] do not fit each other")
    weight = dequantized(weights, scales, zeros, e2m1=e2m1, dtype=dtype)
    return jnp.einsum("...k,nk->...n", x.astype(dtype), weight, precision="highest")
