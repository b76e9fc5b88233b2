"""Quantisation of new values in the layout of a stored weight, by rounding to nearest."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxinfer.quant.layouts import Codebook, Grouped, Parts
from jaxinfer.quant.make.codebooks import FP4, NF4
from jaxinfer.quant.make.grid import IntegerGrid
from jaxinfer.quant.make.rtn import codebook, float8, integers, mxfp4
from jaxinfer.quant.storage import Quantized, Split

_BITS = {"int4": 4, "int8": 8}
_BLOCK = 128  # outputs that share the scale of a block of float8


class LayoutError(ValueError):
    """Error for a layout in which no new values can be stored; the message is a clause with the reason."""


def quantized_again[Stored: Quantized | Split](like: Stored, weight: Float[Array, "*out k"]) -> Stored:
    """Return new values of a weight in the layout of ``like``, whose arrays may be specs.

    Raises:
        LayoutError: values in this layout are made from statistics, or by another program.
    """
    made: Any = _split(like, weight) if isinstance(like, Split) else _quantized(like, weight)
    return made


def _split(like: Split, weight: Float[Array, "*out k"]) -> Split:
    ends = np.cumsum([piece.shape[like.axis] for piece in like.pieces])[:-1]
    parts = zip(like.pieces, jnp.split(weight, ends, axis=like.axis), strict=True)
    dtype = next(piece.dtype for piece in like.pieces if isinstance(piece, Quantized))
    pieces = (_quantized(like, part) if isinstance(like, Quantized) else part.astype(dtype) for like, part in parts)
    return dataclasses.replace(like, pieces=tuple(pieces))


def _quantized(like: Quantized, weight: Float[Array, "*out k"]) -> Quantized:
    parts = _made(like, weight.reshape(-1, weight.shape[-1]))
    arrays = {name: parts[name].reshape(*weight.shape[:-1], -1) for name in like.arrays}
    dtypes = {name: part.dtype for name, part in like.layout.parts(like.inputs).items()}
    return like.rebuilt({name: array.astype(dtypes[name]) for name, array in arrays.items()})


def _made(like: Quantized, weight: Float[Array, "out k"]) -> Parts:
    layout, inputs = like.layout, weight.shape[-1]
    if isinstance(layout, Codebook) and not layout.divided:
        kinds = {tuple(map(float, table)): kind for kind, table in (("nf4", NF4), ("fp4", FP4))}
        made = (
            codebook(weight, kinds[layout.table], nested=layout.nested > 0) if layout.table in kinds else mxfp4(weight)
        )
        if made.layout == layout:
            return made.parts
    if isinstance(layout, Grouped) and _is_rounded(layout):
        if layout.codes in _BITS:
            grid = IntegerGrid(_BITS[layout.codes], math.gcd(layout.group, inputs), not layout.zeros, layout.scales)
            return integers(weight, grid).parts
        if layout.codes == "float8_e4m3fn":
            block = (_BLOCK, layout.group) if layout.group < inputs else None
            return float8(weight, block, layout.scales).parts
    raise LayoutError(f"{type(layout).__name__} values of this checkpoint are not made by rounding to nearest")


def _is_rounded(layout: Grouped) -> bool:
    return not (layout.ordered or layout.biased or layout.static or layout.groups_first) and layout.factor == 1.0
