"""Rounding to nearest: quantisation without input statistics."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxinfer.quant.ggml import E2M1_VALUES
from jaxinfer.quant.layouts import Codebook, Grouped, Parts
from jaxinfer.quant.make.codebooks import DYNAMIC, FP4, NF4
from jaxinfer.quant.make.grid import IntegerGrid, Made

FP8_MAX = 448.0  # E4M3 without infinities (Micikevicius et al. 2022)
BLOCK = 64  # values that share a scale in bitsandbytes' formats
NESTED = 256  # scales that share a nested scale in bitsandbytes' formats
MX_BLOCK = 32  # OCP Microscaling Formats 1.0
_TABLES = {"nf4": NF4, "fp4": FP4}


@functools.partial(jax.jit, static_argnames=("grid",))
def _integers(weight: Array, grid: IntegerGrid) -> tuple[Array, Array, Array]:
    out, inputs = weight.shape
    groups = weight.astype(jnp.float32).reshape(out, -1, grid.width(inputs))
    scales, zeros = grid.fit(groups)
    return grid.code(groups, scales[..., None], zeros[..., None]).reshape(out, inputs), scales, zeros


def integers(weight: Float[Array, "out k"], grid: IntegerGrid, activations: str = "") -> Made:
    """Return codes of ``grid.bits`` with a scale for each group of inputs.

    Args:
        activations: see `Grouped`.

    Raises:
        ValueError: groups do not divide the inputs.
    """
    codes, scales, zeros = _integers(weight, grid)
    return grid.made(codes, scales, zeros, activations=activations)


def float8(
    weight: Float[Array, "out k"],
    block: tuple[int, int] | None = None,
    scale_dtype: str = "float32",
    activations: str = "",
) -> Made:
    """Return E4M3 with a scale for each output, or for blocks of outputs by inputs, such that the largest value is 448.

    Block scales are repeated for each output, as `Grouped` requires.

    Raises:
        ValueError: blocks do not divide the inputs. The last block of outputs may be partial.
    """
    inputs = weight.shape[1]
    rows, columns = block or (1, inputs)
    if inputs % columns:
        raise ValueError(f"blocks of {columns} do not divide {inputs} inputs")
    codes, scales = _float8(weight, rows, columns, scale_dtype)
    group = 128 if block else 0
    layout = Grouped("float8_e4m3fn", columns, scale_dtype, activations=activations, activation_group=group)
    return Made(layout, {"codes": codes, "scales": scales})


@functools.partial(jax.jit, static_argnames=("rows", "columns", "scale_dtype"))
def _float8(weight: Array, rows: int, columns: int, scale_dtype: str) -> tuple[Array, Array]:
    out, inputs = weight.shape
    padded = jnp.pad(weight.astype(jnp.float32), ((0, -out % rows), (0, 0)))
    blocks = padded.reshape(-1, rows, inputs // columns, columns)
    scales = IntegerGrid(scale_dtype=scale_dtype).storable(jnp.abs(blocks).max(axis=(1, 3), keepdims=True) / FP8_MAX)
    # a scale rounded to bfloat16 may be smaller: values beyond 448 would then become NaN
    codes = jnp.clip(blocks / scales, -FP8_MAX, FP8_MAX).astype(jnp.float8_e4m3fn).reshape(padded.shape)[:out]
    each = jnp.broadcast_to(scales, (scales.shape[0], rows, scales.shape[2], 1)).reshape(padded.shape[0], -1)[:out]
    return codes, each.astype(scale_dtype)


@dataclasses.dataclass(frozen=True)
class MadeCodebook:
    """A weight in a `Codebook` layout.

    Attributes:
        kind: "nf4", "fp4" or "mxfp4".
    """

    kind: str
    layout: Codebook
    parts: Parts

    def dequantize(self) -> Float[Array, "out k"]:
        return self.layout.dequantize(self.parts)


def codebook(weight: Float[Array, "out k"], kind: str, nested: bool = False) -> MadeCodebook:
    """Return NF4 or FP4 with a scale for 64 neighbours, their largest absolute value (Dettmers et al. 2023).

    Args:
        nested: round the scales to 8 bits after subtracting their mean, with a scale for 256 of them.

    Blocks are those of the flattened weight: if 64 does not divide the inputs they cross rows.
    """
    out, inputs = weight.shape
    table = tuple(float(value) for value in _TABLES[kind])
    group = math.gcd(inputs, BLOCK)
    flat = _block_scales(weight)
    # codes use the scales before these are rounded, as in bitsandbytes
    codes = _table_codes(weight, _by_rows(flat, weight.shape, group, BLOCK), table)
    if not nested:
        parts = {"codes": codes, "scales": _by_rows(flat, weight.shape, group, BLOCK)}
        return MadeCodebook(kind, Codebook(table, group), parts)
    scale_codes, outer, offset = _nested(flat)
    step = math.gcd(inputs, BLOCK * NESTED)
    layout = Codebook(table, group, "uint8", nested=step, scale_table=tuple(float(v) for v in DYNAMIC))
    parts = {
        "codes": codes,
        "scales": _by_rows(scale_codes, weight.shape, group, BLOCK),
        "nested_scales": _by_rows(outer, weight.shape, step, BLOCK * NESTED),
        "offset": jnp.broadcast_to(offset, (out, 1)),
    }
    return MadeCodebook(kind, layout, parts)


def _by_rows(flat: Array, shape: tuple[int, ...], group: int, block: int) -> Array:
    """Expand a value for each block of the flattened weight to one for each ``group`` inputs of a row."""
    return flat[np.arange(0, math.prod(shape), group) // block].reshape(shape[0], -1)


@jax.jit
def _block_scales(weight: Array) -> Array:
    flat = jnp.abs(weight.astype(jnp.float32)).reshape(-1)
    return jnp.pad(flat, (0, -flat.size % BLOCK)).reshape(-1, BLOCK).max(axis=-1)


@functools.partial(jax.jit, static_argnames=("table",))
def _table_codes(weight: Array, scales: Array, table: tuple[float, ...]) -> Array:
    blocks = weight.astype(jnp.float32).reshape(*scales.shape, -1)
    relative = blocks / jnp.where(scales > 0, scales, 1.0)[..., None]
    return _nearest(relative, np.asarray(table, np.float32)).astype(jnp.uint4).reshape(weight.shape)


def _nearest(values: Array, table: np.ndarray) -> Array:
    """Return the index of the nearest entry of an unsorted table; of two equal entries, the first."""
    ranks = np.argsort(table, kind="stable")
    sorted_table = table[ranks].astype(np.float64)
    borders = ((sorted_table[1:] + sorted_table[:-1]) / 2).astype(np.float32)
    return jnp.asarray(ranks)[jnp.searchsorted(jnp.asarray(borders), values, side="left", method="compare_all")]


@jax.jit
def _nested(scales: Array) -> tuple[Array, Array, Array]:
    """Return the codes of all scales, the nested scale of 256 each, and the subtracted mean."""
    offset = scales.mean()
    flat = scales - offset
    blocks = jnp.pad(flat, (0, -flat.size % NESTED)).reshape(-1, NESTED)
    outer = jnp.abs(blocks).max(axis=1)
    relative = blocks / jnp.where(outer > 0, outer, 1.0)[:, None]
    codes = _nearest_by_search(relative)
    return codes.reshape(-1)[: flat.size].astype(jnp.uint8), outer, offset


def _nearest_by_search(values: Array) -> Array:
    table = DYNAMIC.astype(np.float64)
    borders = ((table[1:] + table[:-1]) / 2).astype(np.float32)
    return jnp.searchsorted(jnp.asarray(borders), values, side="left")


def mxfp4(weight: Float[Array, "out k"]) -> MadeCodebook:
    """Return E2M1 with a power of two for 32 neighbours: floor(log2(largest)) - 2 (OCP Microscaling Formats 1.0, 6.3).

    Raises:
        ValueError: blocks of 32 do not divide the inputs.
    """
    if weight.shape[1] % MX_BLOCK:
        raise ValueError(f"blocks of {MX_BLOCK} do not divide {weight.shape[1]} inputs")
    codes, scales = _mxfp4(weight)
    layout = Codebook(E2M1_VALUES, MX_BLOCK, "float8_e8m0fnu")
    return MadeCodebook("mxfp4", layout, {"codes": codes, "scales": scales})


@jax.jit
def _mxfp4(weight: Array) -> tuple[Array, Array]:
    blocks = weight.astype(jnp.float32).reshape(weight.shape[0], -1, MX_BLOCK)
    largest = jnp.abs(blocks).max(axis=-1)
    # frexp: largest = fraction * 2^exponent with a fraction of at least 1/2
    exponent = jnp.clip(jnp.where(largest > 0, jnp.frexp(largest)[1] - 3, 0), -126, 127)
    scales = jnp.ldexp(jnp.float32(1.0), exponent)
    magnitudes = jnp.asarray([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], jnp.float32)
    relative = blocks / scales[..., None]
    size = jnp.searchsorted(magnitudes, jnp.abs(relative), side="left", method="compare_all")
    codes = size + 8 * (relative < 0)
    return codes.astype(jnp.uint4).reshape(weight.shape), scales.astype(jnp.float8_e8m0fnu)
