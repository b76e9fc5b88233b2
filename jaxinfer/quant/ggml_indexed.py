"""ggml blocks whose fields are indices into a codebook: IQ1, IQ2 and IQ3, all of 256 weights.

A block has a float16 scale, and small odd multipliers for 16 or 32 weights each. IQ2 and IQ3 store signs separately;
with seven sign bits the eighth makes the number of minus signs even. Scale, multiplier and entry have less than 24 bits
together: no product is rounded, in any order of multiplication.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt, UInt8, UInt32

from jaxinfer.quant import codebooks
from jaxinfer.quant.ggml_fields import half, neighbours, scaled, words


def _entries(kind: str, low: UInt[Array, "*blocks n"], high: UInt[Array, "*blocks n"] | None = None) -> Array:
    """Look up codebook entries by indices of 8 bits or more: float32 [*blocks, weights]."""
    index = low.astype(jnp.int32)
    if high is not None:
        index = index | (high.astype(jnp.int32) << 8)
    found = jnp.take(jnp.asarray(codebooks.entries(kind)), index, axis=0, mode="clip")
    return found.reshape(*low.shape[:-1], -1).astype(jnp.float32)


def _odd(scale: Float[Array, "*blocks 1"], fields: UInt[Array, "*blocks n"], unit: float) -> Float[Array, "*blocks n"]:
    """Return ``scale`` times 1, 3, 5, ... units."""
    return scale * (2 * fields.astype(jnp.float32) + 1) * unit


def _with_signs(values: Float[Array, "*blocks n"], signs: UInt8[Array, "*blocks bytes"]) -> Float[Array, "*blocks n"]:
    """Apply signs; a set bit is a minus."""
    return jnp.where(neighbours(signs, 1) == 1, -values, values)


def _eighth_sign(seven: UInt[Array, "*blocks n"]) -> UInt8[Array, "*blocks n"]:
    odd = lax.population_count(seven) & 1
    return (seven | (odd << 7)).astype(jnp.uint8)


def _signs_and_fields(
    packed: UInt32[Array, "*blocks 8"],
) -> tuple[UInt8[Array, "*blocks 32"], UInt32[Array, "*blocks 8"]]:
    """Unpack words of four times seven sign bits, and four scale bits."""
    return _eighth_sign(neighbours(packed, 7, 4)), packed >> 28


def _iq2_xxs(blocks: UInt8[Array, "*blocks 66"]) -> Float[Array, "*blocks 256"]:
    """Dequantize: float16 scale; eight times four bytes of indices, and a word of signs and scale."""
    groups = blocks[..., 2:].reshape(*blocks.shape[:-1], 8, 8)
    signs, fields = _signs_and_fields(words(groups[..., 4:], jnp.uint32)[..., 0])
    values = _with_signs(_entries("IQ2_XXS", groups[..., :4].reshape(*blocks.shape[:-1], 32)), signs)
    return scaled(_odd(half(blocks[..., :2]), fields, 1 / 8), values)


def _iq2_xs(blocks: UInt8[Array, "*blocks 74"]) -> Float[Array, "*blocks 256"]:
    """Dequantize: float16 scale; 32 words of nine index bits and seven sign bits; 16 4-bit scales."""
    packed = words(blocks[..., 2:66], jnp.uint16)
    values = _with_signs(_entries("IQ2_XS", packed & 511), _eighth_sign(packed >> 9))
    return scaled(_odd(half(blocks[..., :2]), neighbours(blocks[..., 66:], 4), 1 / 8), values)


def _iq2_s(blocks: UInt8[Array, "*blocks 82"]) -> Float[Array, "*blocks 256"]:
    """Dequantize: float16 scale, 32 bytes of indices, 32 of signs, 8 of high two index bits; 16 4-bit scales."""
    values = _entries("IQ2_S", blocks[..., 2:34], neighbours(blocks[..., 66:74], 2))
    scales = _odd(half(blocks[..., :2]), neighbours(blocks[..., 74:], 4), 1 / 8)
    return scaled(scales, _with_signs(values, blocks[..., 34:66]))


def _iq3_xxs(blocks: UInt8[Array, "*blocks 98"]) -> Float[Array, "*blocks 256"]:
    """Dequantize: float16 scale, 64 bytes of indices; 8 words of signs and a scale."""
    signs, fields = _signs_and_fields(words(blocks[..., 66:], jnp.uint32))
    values = _with_signs(_entries("IQ3_XXS", blocks[..., 2:66]), signs)
    return scaled(_odd(half(blocks[..., :2]), fields, 1 / 4), values)


def _iq3_s(blocks: UInt8[Array, "*blocks 110"]) -> Float[Array, "*blocks 256"]:
    """Dequantize: float16 scale, 64 bytes of indices, 8 of their high bits, 32 of signs; 8 4-bit scales."""
    values = _entries("IQ3_S", blocks[..., 2:66], neighbours(blocks[..., 66:74], 1))
    scales = _odd(half(blocks[..., :2]), neighbours(blocks[..., 106:], 4), 1.0)
    return scaled(scales, _with_signs(values, blocks[..., 74:106]))


def _moved(values: Float[Array, "*blocks n"], down: Int[Array, "*blocks groups"]) -> Float[Array, "*blocks n"]:
    """Shift values of -1, 0 and 1 by an eighth, downwards where ``down`` is 1; groups of neighbours share it."""
    groups = values.reshape(*down.shape, -1)
    return (groups + jnp.where(down == 1, -0.125, 0.125)[..., None]).reshape(values.shape)


def _iq1_s(blocks: UInt8[Array, "*blocks 50"]) -> Float[Array, "*blocks 256"]:
    """Dequantize: float16 scale, 32 bytes of indices; 8 words: high three index bits, a 3-bit scale, direction."""
    packed = words(blocks[..., 34:], jnp.uint16)
    values = _entries("IQ1_S", blocks[..., 2:34], neighbours(packed, 3, 4))
    scales = _odd(half(blocks[..., :2]), (packed >> 12) & 7, 1.0)
    return scaled(scales, _moved(values, (packed >> 15).astype(jnp.int32)))


def _iq1_m(blocks: UInt8[Array, "*blocks 56"]) -> Float[Array, "*blocks 256"]:
    """Dequantize: 32 bytes of indices, 16 of their high three bits and the shift direction; 4 words: four 3-bit scales,
    and four bits of the float16 scale."""
    upper, packed = neighbours(blocks[..., 32:48], 4), words(blocks[..., 48:], jnp.uint16)
    quarters = (packed >> 12) << jnp.arange(0, 16, 4, dtype=jnp.uint16)
    scale = lax.bitcast_convert_type(quarters.sum(-1, keepdims=True, dtype=jnp.uint16), jnp.float16)
    values = _entries("IQ1_M", blocks[..., :32], upper & 7)
    scales = _odd(scale.astype(jnp.float32), neighbours(packed, 3, 4), 1.0)
    return scaled(scales, _moved(values, (upper >> 3).astype(jnp.int32)))


DEQUANTIZE = {
    "IQ1_S": (50, _iq1_s),
    "IQ1_M": (56, _iq1_m),
    "IQ2_XXS": (66, _iq2_xxs),
    "IQ2_XS": (74, _iq2_xs),
    "IQ2_S": (82, _iq2_s),
    "IQ3_XXS": (98, _iq3_xxs),
    "IQ3_S": (110, _iq3_s),
}
"""Bytes of a block and dequantizing function, by kind."""
