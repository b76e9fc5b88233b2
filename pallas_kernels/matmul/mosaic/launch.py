"""Batch-invariant dense product for Hopper GPUs in Pallas Mosaic GPU: rows are bitwise independent of other rows.

Any number of rows is processed in groups of 64, the rows of a wgmma, padded with zeros (which cost no traffic: the TMA
does not read beyond an operand's end), and a sum is over the inputs in order, in float32, in one accumulator. Tiles
change how many groups of 64 rows and how many columns a CTA has, and which CTA loads which data: no bit. So one token
and a prompt of 8192 are bitwise identical, if a wgmma's element depends neither on its position nor on how many columns
the wgmma has.

The CTAs (one per multiprocessor) take units (a CTA's rows and columns) in turns, so that a unit's first copies overlap
the products and the epilogue of the previous unit. `kernel` has the code of a CTA.

Few rows: columns narrow enough to leave each multiprocessor a unit, whose time is that of reading its weights; CTAs of
a cluster multicast x. Many rows: 128 rows and 256 columns per CTA, and four CTAs multicast weights, because 128 x 256
of one CTA alone need more L2 bandwidth than there is. Row counts in between: two by two, both are multicast.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Num

from pallas_kernels import compat
from pallas_kernels.choice import lowering_target
from pallas_kernels.matmul.mosaic.kernel import COLUMN_AXIS, ROW_AXIS, Barriers, Smem, body
from pallas_kernels.matmul.reference import check
from pallas_kernels.matmul.tile_keys import MATMUL, matmul_key
from pallas_kernels.matmul.types import (
    CLUSTERS,
    COLUMNS,
    CONSUMERS,
    GROUP,
    LINE,
    NOTHING,
    PROMOTED,
    Extras,
    Layout,
    Shape,
    Tiles,
    inputs_of,
    outputs_of,
)
from pallas_kernels.matmul.xla import result_dtype
from pallas_kernels.rates import Rates, rates_of
from pallas_kernels.thread_block import SHARED_BYTES
from pallas_kernels.tiles import pick

__all__ = ["Extras", "Tiles", "heuristic_tiles", "matmul", "refusal", "tiles_of"]

WIDE, NARROW = (jnp.bfloat16, jnp.float16), (jnp.float8_e4m3fn, jnp.int8)
RESULTS = (jnp.bfloat16, jnp.float16, jnp.float32)
_BARRIER_BYTES = 1024
_TILE_ROWS = 8  # rows of a tile in SMEM: operands of more rows are padded to a multiple
_MOST_STAGES = 16
# Columns of all parts that a consumer's registers hold, by consumers; float8 holds its sums twice.
_MOST_COLUMNS = {1: 256, 2: 256, 4: 128}
_MOST_OF_INT8 = {1: 256, 2: 256, 4: 96}  # for gate and up, each of which has scales: compiled for sm_90a
# Model of a multiprocessor besides `rates`: bytes of SMEM, and multiply-adds, per cycle.
_SHARED_RATE, _PRODUCT_RATE = 128, 2048
_WRITE_RATE = 20  # results per cycle
_AS_FAST = 1.02
_PANEL = 16  # CTAs along rows, of 128 rows: as many rows as all CTAs that run together then have columns
_FILL_CYCLES = 2500  # until the first slot of a CTA is loaded


def matmul(
    x: Num[Array, "rows k"],
    weights: Num[Array, "..."],
    extras: Extras = NOTHING,
    *,
    layout: Layout = "in first",
    gated: bool = False,
    dtype: Any = None,
    tiles: Tiles | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Float[Array, "rows *n"]:
    """See `reference.matmul`. Products are exact, sums in float32 (int8: in int32).

    Args:
        dtype: dtype of the result; None: the dtype of ``x``, bfloat16 if that has 8 bits.
        tiles: tile sizes; None: those tuned for the device (`pallas_kernels.tiles`), else
            `heuristic_tiles`.
        interpret: run on a CPU (`compat.interpret_params`).

    Raises:
        ValueError: the operands are rejected, see `refusal`.
    """
    if (why := refusal(x, weights, extras, layout=layout, gated=gated, dtype=dtype, tiles=tiles)) is not None:
        raise ValueError(why)
    rows, (x, extras) = x.shape[0], _whole_tiles(x, extras)
    chosen = tiles or tiles_of(x, weights, extras, layout=layout, gated=gated, dtype=dtype)
    shape = _shape_of(x, weights, extras, layout, gated, dtype, chosen)
    given = {"x": x, "weights": _stacked(shape, weights), **_laid_out(shape, extras)}
    result: jax.Array = _launcher(shape, tuple(given), interpret)(*given.values())[0]
    outputs = outputs_of(weights, layout)
    return result[:rows].reshape(rows, *(outputs[1:] if gated else outputs))


def _whole_tiles(x: Any, extras: Extras) -> tuple[Any, Extras]:
    """Pad rows to what TMA can tile: up to 8 rows are unchanged, and so are multiples of 8."""
    missing = -x.shape[0] % _TILE_ROWS if x.shape[0] > _TILE_ROWS else 0
    if not missing:
        return x, extras

    def filled(array: Any) -> Any:
        return None if array is None else jnp.pad(array, ((0, missing), *((0, 0),) * (array.ndim - 1)))

    return filled(x), extras._replace(residual=filled(extras.residual))


def _stacked(shape: Shape, weights: Any) -> Any:
    if shape.layout == "in first":
        return weights.reshape(shape.inputs, shape.parts, shape.columns)
    return weights.reshape(shape.parts, shape.columns, shape.inputs)


def _laid_out(shape: Shape, extras: Extras) -> dict[str, Any]:
    """Return operands of the epilogue by name; those loaded without TMA are padded to whole CTAs."""
    given = {name: array for name, array in extras._asdict().items() if array is not None}
    for name in given.keys() & {"scales", "bias"}:
        parts = given[name].reshape(shape.parts, shape.columns)
        given[name] = jnp.pad(parts, ((0, 0), (0, shape.padded_columns - shape.columns)))
    if "x_scales" in given:
        missing = max(0, shape.padded_rows - given["x_scales"].shape[0])
        given["x_scales"] = jnp.pad(given["x_scales"], (0, missing))
    if "residual" in given:
        given["residual"] = given["residual"].reshape(shape.rows, shape.columns)
    return given


def refusal(
    x: Any,
    weights: Any,
    extras: Extras = NOTHING,
    *,
    layout: Layout = "in first",
    gated: bool = False,
    dtype: Any = None,
    tiles: Tiles | None = None,
) -> str | None:
    """Return why this kernel does not support these shapes and dtypes (of arrays or tracers); None if it does.

    It does not depend on the number of rows.
    """
    check(x, weights, extras, layout, gated=gated)
    why = _numbers_refusal(x, weights, extras, layout, dtype) or _lines_refusal(x, weights, layout, gated)
    if why is not None or tiles is None:
        return why
    return _tiles_refusal(_shape_of(x, weights, extras, layout, gated, dtype, tiles))


def _numbers_refusal(x: Any, weights: Any, extras: Extras, layout: Layout, dtype: Any) -> str | None:
    if x.dtype not in (*WIDE, *NARROW) or weights.dtype != x.dtype:
        return f"{weights.dtype} weights times {x.dtype}: both must be bfloat16, float16, float8_e4m3fn or int8"
    if x.dtype in NARROW and layout == "in first":
        return f"{weights.dtype} weights that lie as [in, out]: a tensor core wants the inputs side by side"
    if x.dtype in WIDE and (extras.x_scales is not None or extras.scales is not None):
        return f"scales of {weights.dtype} weights: of 8 bits only"
    result = jnp.dtype(dtype or result_dtype(x))
    if result not in RESULTS or (extras.residual is not None and extras.residual.dtype != result):
        return f"a result in {result}: bfloat16, float16 or float32, and what it is added to in the same"
    return None


def _lines_refusal(x: Any, weights: Any, layout: Layout, gated: bool) -> str | None:
    inputs, columns = inputs_of(weights, layout), math.prod(outputs_of(weights, layout)) // (2 if gated else 1)
    line, most = LINE // jnp.dtype(x.dtype).itemsize, GROUP // 2 if layout == "in first" else COLUMNS[0]
    if min(x.shape[0], inputs, columns) < 1 or inputs % line or columns % most:
        return f"{inputs} inputs and {columns} outputs: multiples of {line} and {most}"
    return None


def _tiles_refusal(shape: Shape) -> str | None:
    tiles = shape.tiles
    held = _MOST_OF_INT8 if shape.parts > 1 and shape.dtype == jnp.int8 else _MOST_COLUMNS
    if shape.parts * tiles.columns * (2 if shape.promoted else 1) > held[tiles.consumers]:
        return f"{tiles} and {shape.parts} x {tiles.columns} columns of {shape.dtype}: more than registers hold"
    if shape.layout == "in first" and (tiles.columns % shape.line or shape.columns % shape.line):
        return f"{tiles} and {shape.columns} outputs that lie as [in, out]: lines of {shape.line} do not divide both"
    if shape.layout == "in last" and tiles.columns % (_TILE_ROWS * tiles.row_blocks):
        return (
            f"{tiles}: {tiles.row_blocks} blocks cannot share weights of {tiles.columns} columns {_TILE_ROWS} at a time"
        )
    if tiles.depth * jnp.dtype(shape.dtype).itemsize % LINE or (shape.promoted and tiles.depth != PROMOTED):
        return f"{tiles} of {shape.dtype}: a slot has whole lines of {LINE} bytes"
    if (need := _bytes_of(shape)) > SHARED_BYTES:
        return f"{tiles} needs {need} bytes of shared memory: there are {SHARED_BYTES}"
    return None


def _bytes_of(shape: Shape) -> int:
    return shape.tiles.stages * shape.stage_bytes + shape.result_bytes + _BARRIER_BYTES


def _shape_of(x: Any, weights: Any, extras: Extras, layout: Layout, gated: bool, dtype: Any, tiles: Tiles) -> Shape:
    parts = 2 if gated else 1
    return Shape(
        rows=x.shape[0],
        inputs=inputs_of(weights, layout),
        columns=math.prod(outputs_of(weights, layout)) // parts,
        parts=parts,
        layout=layout,
        dtype=jnp.dtype(x.dtype),
        result=jnp.dtype(dtype or result_dtype(x)),
        extras=tuple(name for name, array in extras._asdict().items() if array is not None),
        tiles=tiles,
    )


# --------------------------------------------------------------------------------------------------------------
# Tiles.


def tiles_of(
    x: Any,
    weights: Any,
    extras: Extras = NOTHING,
    *,
    layout: Layout = "in first",
    gated: bool = False,
    dtype: Any = None,
) -> Tiles:
    """Return the tiles of the product of these operands: the tuned ones, else the heuristic's."""

    def refused(tiles: Tiles) -> str | None:
        return _tiles_refusal(_shape_of(x, weights, extras, layout, gated, dtype, tiles))

    untuned = heuristic_tiles(x, weights, extras, layout=layout, gated=gated, dtype=dtype)
    return pick(MATMUL, matmul_key(x, weights, layout=layout, gated=gated), untuned, refused)


def heuristic_tiles(
    x: Any,
    weights: Any,
    extras: Extras = NOTHING,
    *,
    layout: Layout = "in first",
    gated: bool = False,
    dtype: Any = None,
    multiprocessors: int = 132,
    rates: Rates | None = None,
) -> Tiles:
    """Return the tiles with the fewest estimated cycles, and all stages that fit. Not measured on a GPU.

    Args:
        rates: rates of the GPU; None: those of the lowering target.
    """
    known = rates or rates_of(lowering_target().device_kind)
    depth = 64 if jnp.dtype(x.dtype).itemsize == 2 else 128
    shapes = []
    for consumers, columns, (row_blocks, column_blocks) in itertools.product(CONSUMERS, COLUMNS, CLUSTERS):
        panel, blocks = min(8, _PANEL // row_blocks), max(multiprocessors, row_blocks * column_blocks)
        tiles = Tiles(consumers, columns, depth, 4, row_blocks, column_blocks, panel, blocks)
        shape = _shape_of(x, weights, extras, layout, gated, dtype, tiles)
        if _tiles_refusal(shape) is None and (row_blocks - 1) * tiles.rows < shape.rows:  # no CTA has padding rows only
            shapes.append(shape)
    cycles = {shape: _cycles(known, shape) for shape in shapes}
    least = min(cycles.values())
    return _fullest(min((shape for shape in shapes if cycles[shape] < _AS_FAST * least), key=_order))


def _order(shape: Shape) -> tuple[int, int, int]:
    """Return the sort key of equally fast tiles: smaller cluster, then wider columns, then fewer consumers."""
    return shape.tiles.cluster, -shape.tiles.columns, shape.tiles.consumers


def _cycles(rates: Rates, shape: Shape) -> float:
    """Estimate the cycles of the slowest multiprocessor, at least the time to read the weights from memory."""
    tiles, size = shape.tiles, jnp.dtype(shape.dtype).itemsize
    columns, rows = shape.parts * tiles.columns, min(tiles.rows, shape.rows)
    each = (  # per input of a unit: products, their SMEM reads, traffic from cache and from memory
        tiles.rows * columns / (_PRODUCT_RATE * 2 / size),
        tiles.consumers * (shape.parts * GROUP + columns) * size / _SHARED_RATE,
        (rows / tiles.column_blocks + columns / tiles.row_blocks) * size / rates.cache,
        columns / tiles.row_blocks * size / rates.own if shape.row_units == 1 else 0.0,
    )
    unit = shape.inputs * (0.9 * max(each) + 0.1 * sum(each)) + tiles.rows * tiles.columns / _WRITE_RATE
    waves = pl.cdiv(shape.row_units * shape.column_units, tiles.clusters)
    weights = shape.inputs * shape.columns * shape.parts * size / (rates.memory * tiles.blocks)
    return max(waves * unit, weights) + _FILL_CYCLES


def _fullest(shape: Shape) -> Tiles:
    """Return tiles with the deepest lines and the most stages that fit into SMEM; a few stages come first."""
    for depth, least in ((128, 6), (shape.tiles.depth, 2)):
        for stages in range(_MOST_STAGES, least - 1, -1):
            tiles = dataclasses.replace(shape.tiles, depth=depth, stages=stages)
            if _tiles_refusal(shape._replace(tiles=tiles)) is None:
                return tiles
    return shape.tiles


# --------------------------------------------------------------------------------------------------------------
# The launch.


def _launcher(shape: Shape, names: tuple[str, ...], interpret: plgpu.InterpretGPUParams | None) -> Callable[..., Any]:
    tiles = shape.tiles
    clusters = min(tiles.clusters, shape.row_units * shape.column_units)
    return compat.kernel(
        functools.partial(body, shape, (*names, "output")),
        out_type=(jax.ShapeDtypeStruct((shape.rows, shape.columns), shape.result),),
        scratch_types={"smem": _smem(shape), "barriers": _barriers(shape)},
        grid=(clusters,),
        grid_names=("block",),
        cluster=(tiles.row_blocks, tiles.column_blocks) if tiles.cluster > 1 else (),
        cluster_names=(ROW_AXIS, COLUMN_AXIS) if tiles.cluster > 1 else (),
        num_threads=tiles.consumers + 1,
        thread_name="warpgroup",
        kernel_name="matmul",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        cost_estimate=_cost(shape),
        interpret=interpret,
    )


def _cost(shape: Shape) -> pl.CostEstimate:
    outputs, size = shape.parts * shape.columns, jnp.dtype(shape.dtype).itemsize
    moved = (shape.rows + outputs) * shape.inputs * size + shape.rows * shape.columns * 2
    return pl.CostEstimate(
        flops=2 * shape.rows * outputs * shape.inputs,
        transcendentals=shape.rows * shape.columns * (shape.parts - 1),
        bytes_accessed=moved,
    )


def _smem(shape: Shape) -> Smem:
    tiles = shape.tiles
    weights = (tiles.depth, tiles.columns) if shape.layout == "in first" else (tiles.columns, tiles.depth)
    return Smem(
        x=_tiled((tiles.stages, tiles.rows, tiles.depth), shape.dtype, shape.swizzle),
        weights=_tiled((tiles.stages, shape.parts, *weights), shape.dtype, shape.swizzle),
        results=_tiled(
            (tiles.consumers, shape.slots, GROUP, shape.chunk),
            shape.result,
            shape.chunk * jnp.dtype(shape.result).itemsize,
        ),
    )


def _tiled(dims: tuple[int, ...], dtype: Any, swizzle: int) -> Any:
    """Return rows in swizzled tiles of 8, as wgmma and TMA require."""
    tiling = plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize))
    return plgpu.SMEM(dims, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))


def _barriers(shape: Shape) -> Barriers:
    tiles = shape.tiles
    free: dict[str, Any] = {"num_arrivals": tiles.consumers, "num_barriers": tiles.stages}
    alone, axes = tiles.cluster == 1, (ROW_AXIS, COLUMN_AXIS)
    return Barriers(
        ready=plgpu.Barrier(num_arrivals=1 + shape.parts, num_barriers=tiles.stages),
        free=plgpu.Barrier(**free) if alone else plgpu.ClusterBarrier(collective_axes=axes, **free),
        added=plgpu.Barrier(num_barriers=tiles.consumers * shape.slots) if "residual" in shape.extras else (),
    )
