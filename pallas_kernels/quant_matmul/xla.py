"""Matrix product with quantised weights in XLA: for CPUs, other GPUs, and operands that the Mosaic kernel rejects.

One scale per channel multiplies the result: XLA fuses the conversion of the weights into its own matrix product. With
groups, a program for a GPU multiplies each group separately and scales the sums while rows are few, so that packed
weights are read once and only float32 sums are written; with many rows it dequantises chunks of output channels in
turn. On a CPU a few hundred channels at a time are dequantised, which stay in the cache. The whole dequantised weight
is never in memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Num

from pallas_kernels.choice import Target, lowering_target
from pallas_kernels.grouped_matmul.groups import Groups
from pallas_kernels.quant_matmul.reference import dequantized, group_size
from pallas_kernels.sums import dot

FEW_ROWS = 64  # sums of groups are written up to here
CPU_CHANNELS = 256  # channels dequantised at a time
GPU_PIECE = 1 << 25  # bytes of dequantised numbers at a time
_LINE = 64  # chunks are multiples of these channels: a line of a result, and a divisor of product tiles


def matmul(
    x: Float[Array, "rows k"],
    weights: Num[Array, "n k"],
    scales: Num[Array, "*groups n"],
    zeros: Int[Array, "groups n"] | None = None,
    *,
    e2m1: bool = False,
    target: Target | None = None,
) -> Float[Array, "rows n"]:
    """See `reference.matmul`; the result has the dtype of ``x``. float32 means float32: no TF32.

    Args:
        target: lowering target of the program; None: see `pallas_kernels.choice`.
    """
    group = group_size(weights, scales, zeros)

    def plain(codes: Any, own: slice) -> Array:
        factors = scales.reshape(-1, weights.shape[0])[:, own]
        return dequantized(codes[own], factors, None if zeros is None else zeros[:, own], e2m1=e2m1)

    if e2m1:
        return in_pieces(x, weights, weights.shape[0], plain)
    if (target or lowering_target()).platform == "cpu":
        return _by_channels(x, weights, scales.reshape(-1, weights.shape[0]), zeros)
    if group == weights.shape[1] and zeros is None:
        sums = dot(x, weights.astype(x.dtype), 1, jnp.float32)
        return (sums * scales.reshape(-1).astype(jnp.float32)).astype(x.dtype)
    if x.shape[0] <= FEW_ROWS:
        return _by_groups(x, weights, scales.reshape(-1, weights.shape[0]), zeros)
    return in_pieces(x, weights, weights.shape[0], plain)


def matmul_tiles(
    x: Float[Array, "tiles rows k"],
    weights: Num[Array, "experts n k"],
    scales: Num[Array, "groups experts n"],
    zeros: Int[Array, "groups experts n"] | None,
    groups: Groups,
    *,
    e2m1: bool = False,
    target: Target | None = None,
) -> Float[Array, "tiles rows n"]:
    """See `api.matmul_tiles`: a loop over the tiles, each of which is a product."""

    def tile(operands: tuple[Array, Any]) -> Array:
        rows, expert = operands
        own = scales[:, expert], None if zeros is None else zeros[:, expert]
        return matmul(rows, weights[expert], *own, e2m1=e2m1, target=target)

    experts = jnp.arange(x.shape[0]) if groups.experts is None else groups.experts
    return lax.map(tile, (x, experts))


def in_pieces(
    x: Float[Array, "rows k"], stored: Any, outputs: int, plain: Callable[[Any, slice], Num[Array, "n k"]]
) -> Float[Array, "rows outputs"]:
    """Multiply by chunks of output channels in turn; a dequantised chunk is small compared with a large weight.

    Args:
        stored: a tree of arrays from which weights are dequantised.
        plain: dequantises some channels of ``stored``.
    """
    size = max(1, GPU_PIECE // (x.shape[1] * x.dtype.itemsize * _LINE)) * _LINE
    parts: list[Array] = []
    for first in range(0, outputs, size):
        if parts:  # in turn: XLA would dequantise several chunks in one kernel
            stored, parts[-1] = lax.optimization_barrier((stored, parts[-1]))
        weights = plain(stored, slice(first, min(first + size, outputs)))
        parts.append(dot(x, weights.astype(x.dtype), 1, jnp.float32).astype(x.dtype))
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


def _precision(dtype: Any) -> lax.Precision:
    return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT


def _by_groups(x: Array, weights: Array, scales: Array, zeros: Array | None) -> Array:
    """Multiply by groups of scales; zero points times the sums of x are subtracted from the results."""
    groups, (rows, inputs) = scales.shape[0], x.shape
    grouped = x.reshape(rows, groups, inputs // groups)
    numbers = weights.reshape(weights.shape[0], groups, -1).astype(x.dtype)
    options: dict[str, Any] = {"precision": _precision(x.dtype), "preferred_element_type": jnp.float32}
    sums = jnp.einsum("mgk,ngk->gmn", grouped, numbers, **options)
    if zeros is not None:
        totals = grouped.astype(jnp.float32).sum(-1).T
        sums = sums - totals[:, :, None] * zeros[:, None, :].astype(jnp.float32)
    return (sums * scales[:, None, :].astype(jnp.float32)).sum(0).astype(x.dtype)


# --------------------------------------------------------------------------------------------------------------
# CPU.


def _by_channels(x: Array, weights: Array, scales: Array, zeros: Array | None) -> Array:
    channels = weights.shape[0]
    stored, numbers_of = _as_bytes(weights, pairs=weights.shape[1] // scales.shape[0] % 2 == 0)
    columns = (x[:, 0::2], x[:, 1::2]) if stored.shape != weights.shape else (x,)
    factors = (scales.T, None if zeros is None else zeros.T)

    def chunk(first: Any, size: int) -> Array:
        def cut(a: Array | None) -> Array | None:
            return None if a is None else lax.dynamic_slice_in_dim(a, first, size)

        return _few_channels(columns, numbers_of(cut(stored)), *map(cut, factors)).astype(x.dtype)

    size = min(CPU_CHANNELS, channels)
    whole = channels // size
    parts = lax.map(lambda i: chunk(i * size, size), jnp.arange(whole))
    result = jnp.moveaxis(parts, 0, 1).reshape(x.shape[0], whole * size)
    if channels % size:
        result = jnp.concatenate([result, chunk(whole * size, channels % size)], axis=1)
    return result


def _as_bytes(weights: Num[Array, "n k"], *, pairs: bool) -> tuple[Array, Callable[[Any], tuple[Array, ...]]]:
    """Return a view that XLA slices cheaply, and its decoder to numbers: all, or first and second of pairs.

    XLA:CPU slices an array of fewer than 8 bits, or of 8-bit floats, as a copy in a wider type.
    """
    n, k = weights.shape
    if weights.dtype == jnp.int4 and pairs:
        stored = lax.bitcast_convert_type(weights.reshape(n, k // 2, 2), jnp.int8)
        return stored, lambda a: ((a << 4) >> 4, a >> 4)
    if weights.dtype == jnp.float8_e4m3fn:
        return lax.bitcast_convert_type(weights, jnp.uint8), lambda a: (_float8(a),)
    return weights, lambda a: (a,)


def _float8(stored: Any) -> Array:
    """Decode float8_e4m3fn bits to float32. Via float16, with one more exponent bit: times 2**8."""
    bits = stored.astype(jnp.uint16)
    magnitude = lax.bitcast_convert_type((bits & 0x7F) << 7, jnp.float16).astype(jnp.float32) * 256
    number = jnp.where((bits & 0x7F) == 0x7F, jnp.nan, magnitude)
    return jnp.where(bits >= 0x80, -number, number)


def _few_channels(columns: tuple[Array, ...], numbers: tuple[Array, ...], scales: Any, zeros: Any) -> Array:
    """Multiply in float32: first numbers of pairs with the even columns of x, second ones with the odd columns."""
    times = numbers[0].shape[1] // scales.shape[1]
    factors = jnp.repeat(scales.astype(jnp.float32), times, axis=1)
    offsets = 0.0 if zeros is None else jnp.repeat(zeros.astype(jnp.float32), times, axis=1)
    sums = [
        dot(own.astype(jnp.float32), (one.astype(jnp.float32) - offsets) * factors, 1, jnp.float32)
        for own, one in zip(columns, numbers, strict=True)
    ]
    return functools.reduce(jnp.add, sums)
