"""The meaning of a matrix product with quantised weights, and how weights are stored.

Storage, the contract for whoever loads a checkpoint; one for every path:

    weights   [n, k]: outputs by inputs, the inputs side by side; int4 (`jnp.int4`, two to a byte), int8 or
              float8_e4m3fn.
    scales    [k // group, n], or [n] where an output channel has one alone; float32, bfloat16 or float16.
    zeros     int8 [k // group, n], or None: the weight that stands for 0. float8_e4m3fn has none.

    weight = (weights - zeros) * scales

MXFP4 (OCP Microscaling Formats 1.0) is stored likewise, as ``e2m1``: int4 weights are places -7 to 7 in the order of
float4_e2m1fn (`E2M1`), and uint8 scales are the exponents of powers of two, as the bits of float8_e8m0fnu; -8 is no
place, 0 no scale.

    weight = sign(weights) * E2M1[|weights|] * 2 ** (scales - 127)

Four bits are signed, -8 to 7. Checkpoints that count from 0 to 15 (AWQ, GPTQ) are moved down by 8, their zero points
too, which changes no weight: `pack` does that. A tensor core takes the weights' rows from registers, with neighbours
along k side by side; and a program keeps four bits packed up to the registers only if they are `jnp.int4`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Integer, Num

__all__ = ["E2M1", "Packed", "dequantized", "group_size", "matmul", "pack", "placed"]

DTYPES = (jnp.int4, jnp.int8, jnp.float8_e4m3fn)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
OFFSET = 8  # four bits that count from 0, less this, are signed


class Packed(NamedTuple):
    """A weight as it is stored, see the module."""

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
    """The stored form of plain numbers.

    Args:
        numbers: integers within the range of ``dtype``, inputs by outputs; or floats that ``dtype`` holds.
        dtype: int4, int8 or float8_e4m3fn.
        unsigned: int4 only: ``numbers`` and ``zeros`` count from 0 to 15. Without ``zeros``, 8 stands for 0.

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
    """The places of float4_e2m1fn's codes, 0 to 15, of which the upper half is negative."""
    numbers = codes.astype(jnp.int8)
    return jnp.where(numbers < OFFSET, numbers, OFFSET - numbers).astype(jnp.int4)


def group_size(weights: Any, scales: Any, zeros: Any = None) -> int:
    """The number of neighbours along k that share a scale; all if a channel has one. Raises ValueError on misfits."""
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
    """The weights as plain numbers."""
    group = group_size(weights, scales, zeros)
    grouped = weights.reshape(weights.shape[0], -1, group)
    grouped = _float4(grouped, dtype) if e2m1 else grouped.astype(dtype)
    if e2m1:  # exponents are a float32's
        scales = jax.lax.bitcast_convert_type(scales.astype(jnp.int32) << 23, jnp.float32)
    if zeros is not None:
        grouped = grouped - zeros.T[:, :, None].astype(dtype)
    factors = scales.reshape(-1, weights.shape[0]).T[:, :, None].astype(dtype)
    return (grouped * factors).reshape(weights.shape)


def _float4(places: Int[Array, "*shape"], dtype: Any) -> Float[Array, "*shape"]:
    """Half of what E2M1 doubles to: a sum of steps, where a table would be a lookup for each number."""
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
    """``x @ weight.T``, computed in ``dtype`` and given in it.

    Raises:
        ValueError: shapes that do not fit each other.
    """
    if x.shape[-1] != weights.shape[1]:
        raise ValueError(f"x {x.shape} and weights {weights.shape} of [outputs, inputs] do not fit each other")
    weight = dequantized(weights, scales, zeros, e2m1=e2m1, dtype=dtype)
    return jnp.einsum("...k,nk->...n", x.astype(dtype), weight, precision="highest")
