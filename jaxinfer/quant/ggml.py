"""Block formats of ggml (llama.cpp): a few bytes that hold 32 to 256 neighbouring weights and their scales.

The layouts follow ``ggml-common.h`` and the arithmetic ``ggml-quants.c``, in the same order, so that float32 results
are bitwise identical if nothing is fused (outside of jit). This module has the kinds whose fields are numbers; kinds
whose fields are codebook indices are in ``ggml_indexed.py``, common steps in ``ggml_fields.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt8

from jaxinfer.quant import ggml_indexed
from jaxinfer.quant.ggml_fields import above, affine, half, less, looked_up, neighbours, planes, scaled, signed

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Values of the codes of IQ4_NL and IQ4_XS."""

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Values of the codes of MXFP4 and NVFP4 (OCP Microscaling Formats 1.0). ggml doubles them and halves scales."""

_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


@dataclasses.dataclass(frozen=True)
class BlockKind:
    """A kind of block.

    Attributes:
        elements: weights in a block.
        bytes: bytes of a block.
        dequantize: converts uint8 [..., bytes] to float32 [..., elements].
    """

    elements: int
    bytes: int
    dequantize: Callable[[Array], Array]


def _q1_0(blocks: UInt8[Array, "*blocks 18"]) -> Float[Array, "*blocks 128"]:
    """Dequantize: float16 scale; one bit per weight, neighbours in one byte: -1 or 1."""
    scale = half(blocks[..., :2])
    return jnp.where(neighbours(blocks[..., 2:], 1) == 1, scale, -scale)


def _q2_0(blocks: UInt8[Array, "*blocks 18"]) -> Float[Array, "*blocks 64"]:
    """Dequantize: float16 scale; two bits per weight, neighbours in one byte: -1 to 2."""
    return less(neighbours(blocks[..., 2:], 2), 1) * half(blocks[..., :2])


def _q4_0(blocks: UInt8[Array, "*blocks 18"]) -> Float[Array, "*blocks 32"]:
    return less(planes(blocks[..., 2:], 4, 16), 8) * half(blocks[..., :2])


def _q4_1(blocks: UInt8[Array, "*blocks 20"]) -> Float[Array, "*blocks 32"]:
    fields = planes(blocks[..., 4:], 4, 16).astype(jnp.float32)
    return fields * half(blocks[..., :2]) + half(blocks[..., 2:4])


def _q5_0(blocks: UInt8[Array, "*blocks 22"]) -> Float[Array, "*blocks 32"]:
    fields = above(planes(blocks[..., 6:], 4, 16), neighbours(blocks[..., 2:6], 1), 4)
    return less(fields, 16) * half(blocks[..., :2])


def _q5_1(blocks: UInt8[Array, "*blocks 24"]) -> Float[Array, "*blocks 32"]:
    fields = above(planes(blocks[..., 8:], 4, 16), neighbours(blocks[..., 4:8], 1), 4).astype(jnp.float32)
    return fields * half(blocks[..., :2]) + half(blocks[..., 2:4])


def _q8_0(blocks: UInt8[Array, "*blocks 34"]) -> Float[Array, "*blocks 32"]:
    return signed(blocks[..., 2:]) * half(blocks[..., :2])


def _q2_k(blocks: UInt8[Array, "*blocks 84"]) -> Float[Array, "*blocks 256"]:
    """Dequantize: 16 bytes (scale in the low nibble, minimum in the high one), 64 of fields, the scales of both."""
    scales = half(blocks[..., 80:82]) * (blocks[..., :16] & 15).astype(jnp.float32)
    minima = half(blocks[..., 82:84]) * (blocks[..., :16] >> 4).astype(jnp.float32)
    return affine(scales, planes(blocks[..., 16:80], 2, 32), minima)


def _q3_k(blocks: UInt8[Array, "*blocks 110"]) -> Float[Array, "*blocks 256"]:
    """Dequantize: 32 bytes of third bits (0: subtract 4), 64 of the low two, 16 6-bit scales, then their scale."""
    packed = blocks[..., 96:108]
    scales = above(planes(packed[..., :8], 4, 8), planes(packed[..., 8:], 2, 4), 4)
    fields = above(planes(blocks[..., 32:96], 2, 32), planes(blocks[..., :32], 1, 32), 2)
    return scaled(half(blocks[..., 108:110]) * less(scales, 32), less(fields, 4))


def _six_bit_pairs(packed: UInt8[Array, "*blocks 12"]) -> tuple[UInt8[Array, "*blocks 8"], UInt8[Array, "*blocks 8"]]:
    """Unpack 6-bit scales and minima: four in the low bits of 4 bytes each, whose top bits extend the other four."""
    scales, minima, rest = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    upper = [(part >> jnp.uint8(2)) & jnp.uint8(0x30) for part in (scales, minima)]
    return (
        jnp.concatenate([scales & 63, (rest & 15) | upper[0]], axis=-1),
        jnp.concatenate([minima & 63, (rest >> jnp.uint8(4)) | upper[1]], axis=-1),
    )


def _scales_and_minima(
    blocks: UInt8[Array, "*blocks bytes"],
) -> tuple[Float[Array, "*blocks 8"], Float[Array, "*blocks 8"]]:
    """Return scales and minima of Q4_K and Q5_K (16 bytes): a float16 for the scales, one for the minima, then both."""
    scales, minima = _six_bit_pairs(blocks[..., 4:16])
    return (
        half(blocks[..., :2]) * scales.astype(jnp.float32),
        half(blocks[..., 2:4]) * minima.astype(jnp.float32),
    )


def _q4_k(blocks: UInt8[Array, "*blocks 144"]) -> Float[Array, "*blocks 256"]:
    scales, minima = _scales_and_minima(blocks)
    return affine(scales, planes(blocks[..., 16:], 4, 32), minima)


def _q5_k(blocks: UInt8[Array, "*blocks 176"]) -> Float[Array, "*blocks 256"]:
    scales, minima = _scales_and_minima(blocks)
    fields = above(planes(blocks[..., 48:], 4, 32), planes(blocks[..., 16:48], 1, 32), 4)
    return affine(scales, fields, minima)


def _q6_k(blocks: UInt8[Array, "*blocks 210"]) -> Float[Array, "*blocks 256"]:
    """Dequantize: 128 bytes of low four bits, 64 of high two, 16 int8 scales, then their scale."""
    fields = above(planes(blocks[..., :128], 4, 64), planes(blocks[..., 128:192], 2, 32), 4)
    return scaled(half(blocks[..., 208:210]) * signed(blocks[..., 192:208]), less(fields, 32))


def _iq4_nl(blocks: UInt8[Array, "*blocks 18"]) -> Float[Array, "*blocks 32"]:
    return half(blocks[..., :2]) * looked_up(planes(blocks[..., 2:], 4, 16), IQ4_VALUES)


def _iq4_xs(blocks: UInt8[Array, "*blocks 136"]) -> Float[Array, "*blocks 256"]:
    """Dequantize: scale, 2 bytes of the eight scales' high two bits, 4 of their low four; 16 bytes hold 32 weights."""
    scales = above(neighbours(blocks[..., 4:8], 4), neighbours(blocks[..., 2:4], 2), 4)
    values = looked_up(planes(blocks[..., 8:], 4, 16), IQ4_VALUES)
    return scaled(half(blocks[..., :2]) * less(scales, 32), values)


def _halved_e8m0(exponents: UInt8[Array, "*blocks n"]) -> Float[Array, "*blocks n"]:
    """Return 2**(e - 128); the two smallest are subnormal, which XLA may flush to 0."""
    exponents = exponents.astype(jnp.uint32)
    bits = jnp.where(exponents < 2, jnp.uint32(0x00200000) << exponents, (exponents - 1) << 23)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _mxfp4(blocks: UInt8[Array, "*blocks 17"]) -> Float[Array, "*blocks 32"]:
    values = looked_up(planes(blocks[..., 1:], 4, 16), _DOUBLED)
    return _halved_e8m0(blocks[..., :1]) * values


def _halved_e4m3(codes: UInt8[Array, "*blocks n"]) -> Float[Array, "*blocks n"]:
    """Return half the value of unsigned E4M3 in float32; like ggml, reads NaN as 0."""
    exponent, mantissa = (codes >> jnp.uint8(3)) & jnp.uint8(15), (codes & 7).astype(jnp.float32)
    power = lax.bitcast_convert_type((exponent.astype(jnp.uint32) + 120) << 23, jnp.float32)
    value = jnp.where(exponent == 0, mantissa * 2.0**-9, (1.0 + mantissa / 8.0) * power)
    return jnp.where((codes == 0) | (codes == 0x7F), 0.0, value * 0.5)


def _nvfp4(blocks: UInt8[Array, "*blocks 36"]) -> Float[Array, "*blocks 64"]:
    """Dequantize: four scales, each for 8 bytes that hold 16 weights."""
    return scaled(_halved_e4m3(blocks[..., :4]), looked_up(planes(blocks[..., 4:], 4, 8), _DOUBLED))


def _ternary(data: UInt8[Array, "*blocks n"], digits: int, width: int) -> Int[Array, "*blocks fields"]:
    """Return base-3 digits of a byte as a fraction of 256: the first is the overflow of 3 times the byte."""
    powers = jnp.asarray([3**digit for digit in range(digits)], jnp.uint8)[:, None]
    groups = data.reshape(*data.shape[:-1], -1, 1, width)
    first = ((groups * powers).astype(jnp.int32) * 3) >> 8
    return first.reshape(*data.shape[:-1], -1)


def _tq1_0(blocks: UInt8[Array, "*blocks 54"]) -> Float[Array, "*blocks 256"]:
    """Dequantize: five weights per byte (four in each of the last four bytes), then the scale."""
    parts = (_ternary(blocks[..., :32], 5, 32), _ternary(blocks[..., 32:48], 5, 16), _ternary(blocks[..., 48:52], 4, 4))
    return half(blocks[..., 52:]) * (jnp.concatenate(parts, axis=-1) - 1).astype(jnp.float32)


def _tq2_0(blocks: UInt8[Array, "*blocks 66"]) -> Float[Array, "*blocks 256"]:
    return half(blocks[..., 64:]) * less(planes(blocks[..., :64], 2, 32), 1)


KINDS: Mapping[str, BlockKind] = MappingProxyType(
    {
        "Q1_0": BlockKind(128, 18, _q1_0),
        "Q2_0": BlockKind(64, 18, _q2_0),
        "Q4_0": BlockKind(32, 18, _q4_0),
        "Q4_1": BlockKind(32, 20, _q4_1),
        "Q5_0": BlockKind(32, 22, _q5_0),
        "Q5_1": BlockKind(32, 24, _q5_1),
        "Q8_0": BlockKind(32, 34, _q8_0),
        "Q2_K": BlockKind(256, 84, _q2_k),
        "Q3_K": BlockKind(256, 110, _q3_k),
        "Q4_K": BlockKind(256, 144, _q4_k),
        "Q5_K": BlockKind(256, 176, _q5_k),
        "Q6_K": BlockKind(256, 210, _q6_k),
        "IQ4_NL": BlockKind(32, 18, _iq4_nl),
        "IQ4_XS": BlockKind(256, 136, _iq4_xs),
        "MXFP4": BlockKind(32, 17, _mxfp4),
        "NVFP4": BlockKind(64, 36, _nvfp4),
        "TQ1_0": BlockKind(256, 54, _tq1_0),
        "TQ2_0": BlockKind(256, 66, _tq2_0),
        **{kind: BlockKind(256, size, dequantize) for kind, (size, dequantize) in ggml_indexed.DEQUANTIZE.items()},
    }
)
