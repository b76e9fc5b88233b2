"""Operands that the Mosaic kernel supports, and suitable tiles: from shapes and dtypes alone."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.quant_matmul.reference import DTYPES
from pallas_kernels.quant_matmul.tile_keys import MATMUL, matmul_key
from pallas_kernels.quant_matmul.types import CHANNELS, CONSUMERS, DEPTHS, MOST_SPLITS, Shape, Tiles, bits_of
from pallas_kernels.thread_block import SHARED_BYTES
from pallas_kernels.tiles import pick

FEW_ROWS = 64  # a tile of them leaves registers for three consumers, and with 8-bit weights for four
_ROWS_OF_FOUR = {4: 56, 8: FEW_ROWS}  # by bits of a weight
MOST_ROWS = 128  # of a tile: twice as many float32 sums, of a span and in total, fill the registers of two consumers
SPAN = 32  # inputs of a swizzled tile of x: the smallest group
TILE_ROWS = 8
LINE = 128  # a copy to SMEM is a multiple of these bytes
# Bytes that a multiprocessor could read while a new CTA's pipeline fills: of an H100, used on every GPU, because the
# splits, which change bits of results, follow from it.
_WAVE_BYTES = 24_000
_WAVE_LINES = 64  # the same in rows or channels of a step, for many tiles
_SCALES = (jnp.float32, jnp.bfloat16, jnp.float16)


class Operands(NamedTuple):
    """Operands of a product: arrays, tracers or shapes.

    Attributes:
        x: [tiles, rows, inputs].
        weights: [experts, channels, inputs].
        scales: [inputs / group, experts, channels].
        zeros: [inputs / group, experts, channels], or None.
        e2m1: weights are indices in the order of float4_e2m1fn, see `reference`.
        grouped: tiles have an expert each.
    """

    x: Any
    weights: Any
    scales: Any
    zeros: Any
    e2m1: bool = False
    grouped: bool = False

    @property
    def group(self) -> int:
        return int(self.weights.shape[2] // self.scales.shape[0])


def of_rows(x: Any, weights: Any, scales: Any, zeros: Any = None, *, e2m1: bool = False) -> Operands:
    """Return the shapes of a product of rows [rows, k] with weights [n, k] without experts, rows cut into tiles."""
    flat = (scales.shape[0] if scales.ndim == 2 else 1, 1, weights.shape[0])
    return Operands(
        jax.ShapeDtypeStruct((*tiled(x.shape[0]), x.shape[1]), x.dtype),
        jax.ShapeDtypeStruct((1, *weights.shape), weights.dtype),
        jax.ShapeDtypeStruct(flat, scales.dtype),
        None if zeros is None else jax.ShapeDtypeStruct(flat, zeros.dtype),
        e2m1,
    )


def tiled(rows: int) -> tuple[int, int]:
    """Return the number of tiles of ``rows`` rows, and rows of each: a multiple of 8, with the least padding."""
    tiles = pl.cdiv(rows, MOST_ROWS)
    return tiles, pl.cdiv(pl.cdiv(rows, tiles), TILE_ROWS) * TILE_ROWS


def refusal(given: Operands, *, tiles: Tiles | None = None) -> str | None:
    """Return why the kernel does not support these shapes and dtypes, in one sentence; None if it does."""
    why = _dtype_refusal(given) or _shape_refusal(given)
    return why or (None if tiles is None else _tiles_refusal(given, tiles))


def _dtype_refusal(given: Operands) -> str | None:
    x, weights, scales = given.x.dtype, given.weights.dtype, given.scales.dtype
    if x not in (jnp.bfloat16, jnp.float16) or weights not in DTYPES:
        return f"{weights} weights times {x}: int4, int8 or float8_e4m3fn times bfloat16 or float16"
    if not given.e2m1:
        return None if scales in _SCALES else f"scales of {scales}: float32, bfloat16 or float16"
    if (x, weights, scales) != (jnp.bfloat16, jnp.int4, jnp.uint8) or given.zeros is not None:
        return f"{weights} places of {scales} scales times {x}: int4 of uint8 times bfloat16, without zeros"
    return None


def _shape_refusal(given: Operands) -> str | None:
    (tiles, rows, inputs), (experts, channels, width), group = given.x.shape, given.weights.shape, given.group
    if inputs != width:
        return f"x {given.x.shape} of [tiles, rows, inputs] does not fit weights {given.weights.shape}"
    if rows % TILE_ROWS or not TILE_ROWS <= rows <= MOST_ROWS or min(tiles, experts) < 1:
        return f"{tiles} tiles of {rows} rows: a multiple of {TILE_ROWS}, at most {MOST_ROWS}"
    if channels % CHANNELS or inputs < 64 or inputs % (SPAN if given.e2m1 else 64):
        return f"weights {given.weights.shape}: a multiple of {CHANNELS} outputs and of 64 inputs (MXFP4: {SPAN})"
    if given.e2m1 and group != SPAN:
        return f"a scale for {group} inputs: for {SPAN}"
    span = 128 if inputs % 128 == 0 else 64
    if group % SPAN or (group < span and span % group) or (group > span and group % span):
        return f"a scale for {group} inputs: for 32 or 64, or multiples of {span}"
    if group < 64 and bits_of(given.weights.dtype) > 4 and (given.grouped or rows > FEW_ROWS):
        return f"a scale for {group} inputs of 8 bits: with more than {FEW_ROWS} rows, and for experts, for 64 at least"
    if given.zeros is not None and channels % LINE and (group > 128 or inputs % (2 * group)):
        return f"zeros of {channels} channels for {group} inputs: they are copied {LINE} at a time"
    return None


def _tiles_refusal(given: Operands, tiles: Tiles) -> str | None:
    shape = shape_of(given, tiles)
    if shape.channels % shape.block_channels or (shape.overlap and (shape.inputs % 64 == 0 or tiles.depth > 64)):
        return f"{tiles} does not divide weights {given.weights.shape} of [experts, outputs, inputs]"
    uneven = shape.inputs % shape.grain or shape.grain % tiles.depth
    if tiles.splits > 1 and (given.grouped or uneven or tiles.splits > shape.inputs // shape.grain):
        return f"{tiles}: splits are of multiples of {shape.grain} inputs and of depth, and tiles of experts have none"
    if tiles.depth % shape.span or (tiles.depth % given.group and given.group % tiles.depth):
        return f"{tiles} and a scale for {given.group} inputs: neither of depth and group divides the other"
    if shape.zeros and shape.groups * shape.block_channels % LINE:
        return f"{tiles} has {shape.groups * shape.block_channels} zeros of a step: multiples of {LINE} can be copied"
    if tiles.consumers > (most := _most_consumers(given)):
        return f"{tiles}: {most} consumers have the registers for {shape.rows} rows of {given.weights.dtype}"
    if shape.smem_bytes > SHARED_BYTES:
        return f"{tiles} needs {shape.smem_bytes} bytes of shared memory: there are {SHARED_BYTES}"
    return None


def _most_consumers(given: Operands) -> int:
    """Return the consumers whose registers suffice, compiled for sm_90a: more consumers have fewer each."""
    rows, bits = given.x.shape[1], bits_of(given.weights.dtype)
    if rows > FEW_ROWS or (given.group < 64 and bits > 4):
        return 2
    return 3 if rows > _ROWS_OF_FOUR[bits] else 4


def best_tiles(given: Operands) -> Tiles:
    """Return the tuned tiles, else the heuristic's."""
    return pick(MATMUL, matmul_key(given), heuristic_tiles(given), lambda tiles: _tiles_refusal(given, tiles))


def heuristic_tiles(given: Operands, *, multiprocessors: int = 132) -> Tiles:
    """Return tiles that keep most multiprocessors busy, with little traffic besides the weights.

    ``splits`` follow from the weights alone, as for few rows. Nothing here was measured on a GPU.
    """
    few = _few_rows_tiles(given, multiprocessors)
    if given.grouped:
        few = dataclasses.replace(few, splits=1)
    if given.grouped or given.x.shape[0] > 1 or given.x.shape[1] > FEW_ROWS:
        few = dataclasses.replace(few, consumers=_consumers(given, multiprocessors))
    counts = dict.fromkeys((*range(few.consumers, 0, -1), 2))  # two: zeros of one consumer may be too few for a copy
    others = (dataclasses.replace(few, consumers=consumers) for consumers in counts)
    choices = next(filter(None, (_of_all_depths(given, tiles) for tiles in others)))
    return next((tiles for tiles in choices if tiles.stages >= 3), choices[0])


def _of_all_depths(given: Operands, tiles: Tiles) -> list[Tiles]:
    """Return the supported tiles of each depth, with all stages that fit; the best depth first."""
    depths = [depth for depth in reversed(DEPTHS) if _tiles_refusal(given, _one_stage(tiles, depth)) is None]
    if given.x.shape[1] > FEW_ROWS or bits_of(given.weights.dtype) > 4:
        depths = [depth for depth in depths if depth <= 128] or depths
    return [_fullest(given, _one_stage(tiles, depth)) for depth in depths]


def _one_stage(tiles: Tiles, depth: int) -> Tiles:
    return dataclasses.replace(tiles, depth=depth, stages=1)


def _few_rows_tiles(given: Operands, multiprocessors: int) -> Tiles:
    """Return consumers and splits for up to 64 rows; their splits apply to any number of rows."""
    (_, channels, inputs), dtype = given.weights.shape, given.weights.dtype
    grain = shape_of(given, Tiles()).grain
    fitting = [one for one in (1, 2, 4) if channels % (one * CHANNELS) == 0]
    most = 1 if inputs % grain else min(MOST_SPLITS, inputs // grain)
    choices = itertools.product(fitting, range(1, most + 1))

    def cost(choice: tuple[int, int]) -> float:
        consumers, splits = choice
        waves = pl.cdiv(channels // (consumers * CHANNELS) * splits, multiprocessors)
        step = consumers * CHANNELS * grain * bits_of(dtype) // 8
        share = pl.cdiv(inputs // grain, splits) * step * _traffic(consumers, splits, inputs, dtype)
        return waves * (share + _WAVE_BYTES)

    consumers, splits = min(choices, key=cost)
    return Tiles(consumers, 64, 1, splits, multiprocessors)


def _traffic(consumers: int, splits: int, inputs: int, dtype: Any, rows: int = 16) -> float:
    """Return bytes moved over bytes of weights; x and the splits' sums, in the L2 cache, count a third."""
    width = bits_of(dtype) / 8
    x = rows * 2 / (consumers * CHANNELS * width)
    sums = splits * rows * 8 / (inputs * width) if splits > 1 else 0.0
    return 1 + (x + sums) / 3


def _consumers(given: Operands, multiprocessors: int) -> int:
    """Return consumers for few waves of units with little traffic each, for many tiles."""
    (tiles, rows, _), channels = given.x.shape, given.weights.shape[1]
    most = _most_consumers(given)
    fitting = [one for one in CONSUMERS if one <= most and channels % (one * CHANNELS) == 0]

    def cost(consumers: int) -> tuple[int, int]:
        units = tiles * (channels // (consumers * CHANNELS))
        return pl.cdiv(units, multiprocessors) * (consumers * CHANNELS + rows + _WAVE_LINES), -consumers

    return min(fitting, key=cost)


def _fullest(given: Operands, tiles: Tiles) -> Tiles:
    """Return tiles with as many stages as fit into SMEM, up to 8, and no more than there are steps."""
    steps = max(2, pl.cdiv(shape_of(given, tiles).steps, tiles.splits))
    each = [dataclasses.replace(tiles, stages=stages) for stages in range(min(8, steps), 1, -1)]
    return next((one for one in each if _tiles_refusal(given, one) is None), tiles)


def shape_of(given: Operands, tiles: Tiles) -> Shape:
    """Return the shape of the launch with these tiles; not interpreted."""
    tile_count, rows, _ = given.x.shape
    experts, channels, inputs = given.weights.shape
    return Shape(
        tile_count=tile_count,
        rows=rows,
        experts=experts,
        channels=channels,
        inputs=inputs,
        group=given.group,
        dtype=jnp.dtype(given.x.dtype),
        weight_dtype=jnp.dtype(given.weights.dtype),
        scale_dtype=jnp.dtype(given.scales.dtype),
        zeros=given.zeros is not None,
        grouped=given.grouped,
        e2m1=given.e2m1,
        tiles=tiles,
        interpret=False,
    )
