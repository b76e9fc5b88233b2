"""Unpacking of numbers from the bytes of ggml blocks: steps shared by block kinds.

"Planes" result from ggml's shifts: the fields of one byte are not adjacent, but as many elements apart as a plane has
bytes. "Neighbours" are adjacent.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, UInt, UInt8


def half(low_high: UInt8[Array, "*blocks 2"]) -> Float[Array, "*blocks 1"]:
    """Decode a little-endian float16."""
    return lax.bitcast_convert_type(low_high, jnp.float16)[..., None].astype(jnp.float32)


def words(data: UInt8[Array, "*blocks n"], dtype: Any) -> UInt[Array, "*blocks words"]:
    """Decode little-endian unsigned integers of a few bytes each."""
    size = jnp.dtype(dtype).itemsize
    return lax.bitcast_convert_type(data.reshape(*data.shape[:-1], -1, size), dtype)


def signed(data: UInt8[Array, "*blocks n"]) -> Float[Array, "*blocks n"]:
    return lax.bitcast_convert_type(data, jnp.int8).astype(jnp.float32)


def planes(data: UInt8[Array, "*blocks n"], bits: int, width: int) -> UInt8[Array, "*blocks fields"]:
    """Unpack fields of ``bits``: for each ``width`` bytes, all lowest fields first, then the next higher."""
    count = 8 // bits
    shifts = jnp.arange(0, 8, bits, dtype=jnp.uint8)[:, None]
    groups = data.reshape(*data.shape[:-1], -1, 1, width)
    fields = (groups >> shifts) & jnp.uint8(2**bits - 1)
    return fields.reshape(*data.shape[:-1], data.shape[-1] * count)


def neighbours(data: UInt[Array, "*blocks n"], bits: int, count: int | None = None) -> UInt[Array, "*blocks fields"]:
    """Unpack ``count`` fields of ``bits`` from each byte or word, lowest bits first; None: as many as fit."""
    count = data.dtype.itemsize * 8 // bits if count is None else count
    shifts = jnp.arange(0, count * bits, bits, dtype=data.dtype)
    fields = (data[..., None] >> shifts) & jnp.asarray(2**bits - 1, data.dtype)
    return fields.reshape(*data.shape[:-1], data.shape[-1] * count)


def above(low: UInt8[Array, "*blocks n"], high: UInt8[Array, "*blocks n"], bits: int) -> UInt8[Array, "*blocks n"]:
    """Combine ``high`` as the bits above low fields of ``bits``."""
    return low | (high << jnp.uint8(bits))


def less(fields: UInt8[Array, "*blocks n"], offset: int) -> Float[Array, "*blocks n"]:
    return (fields.astype(jnp.int8) - jnp.int8(offset)).astype(jnp.float32)


def looked_up(
    fields: UInt8[Array, "*blocks n"], table: tuple[float, ...] | tuple[int, ...]
) -> Float[Array, "*blocks n"]:
    return jnp.take(jnp.asarray(table, jnp.float32), fields.astype(jnp.int32), mode="clip")


def scaled(scales: Float[Array, "*blocks groups"], values: Float[Array, "*blocks n"]) -> Float[Array, "*blocks n"]:
    """Multiply neighbours by the scale that they share."""
    groups = values.reshape(*scales.shape, -1)
    return (scales[..., None] * groups).reshape(values.shape)


def affine(
    scales: Float[Array, "*blocks groups"], fields: UInt8[Array, "*blocks n"], minima: Float[Array, "*blocks groups"]
) -> Float[Array, "*blocks n"]:
    groups = fields.astype(jnp.float32).reshape(*scales.shape, -1)
    return (scales[..., None] * groups - minima[..., None]).reshape(fields.shape)
