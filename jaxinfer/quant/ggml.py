"""Blocks of ggml (llama.cpp): a few bytes that hold 32 or 256 neighbouring weights, with scales of their own.

The layouts are those of ``ggml-quants.c``; each function does its arithmetic in ggml's own order, so that float32
results are equal to the last bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, UInt8


@dataclasses.dataclass(frozen=True)
class BlockKind:
    """One kind of block.

    Attributes:
        elements: weights in a block.
        bytes: of a block.
        dequantise: uint8 [..., bytes] to float32 [..., elements].
    """

    elements: int
    bytes: int
    dequantise: Callable[[Array], Array]


def _half(low_high: UInt8[Array, "*blocks 2"]) -> Float[Array, "*blocks 1"]:
    """A little-endian float16."""
    return lax.bitcast_convert_type(low_high, jnp.float16)[..., None].astype(jnp.float32)


def _q8_0(blocks: UInt8[Array, "*blocks 34"]) -> Float[Array, "*blocks 32"]:
    return lax.bitcast_convert_type(blocks[..., 2:], jnp.int8).astype(jnp.float32) * _half(blocks[..., :2])


KINDS: Mapping[str, BlockKind] = MappingProxyType({"Q8_0": BlockKind(32, 34, _q8_0)})
