"""Tiles of rows times the weights of each tile's expert, for Hopper GPUs, in Pallas Mosaic GPU.

The kernel reads the expert of each tile and the number of non-empty tiles from device memory: one program serves every
routing, and inactive experts are not read. A unit of work is a tile and ``consumers`` x 64 output channels. The CTAs
(one per multiprocessor) take units in turns, so that a unit's first copies overlap the products of the previous unit.

The operands are swapped: a wgmma's 64 rows are 64 output channels, its columns the rows of a tile, 8 to 128, so that a
few rows waste little. Warpgroups of a CTA:

    producer (the last)                              consumers (one each for 64 channels)
    -------------------                              ------------------------------------
    per unit, per step of ``depth`` inputs:          per unit, per step:
      waits free (once the ring is full)       <-      arrive when the product before has read its slot
      weights [channels, depth] of the expert
      x [rows, depth] of the tile        -> ready ->   wait; sums += weights . x
                                                     results -> shared memory, transposed -> device memory

The TMA arrives at ``ready``, once per copy, and the consumers wait on it; ``free`` works the other way round, and the
producer drains its last arrivals, so that no mbarrier ends in the middle of a phase. Each consumer has its own SMEM for
results, which it copies out during its next unit's products.

Order: all tiles of a panel for some channels, then the next channels. Meanwhile a panel's rows stay in the L2 cache,
and tiles of one expert, which are neighbours, read its weights at the same time. Empty tiles come last: zeros are
written, nothing is read.

A sum is over the inputs in order, in float32, whatever the tiles: results are bitwise independent of tile sizes and of
other rows.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels import compat
from pallas_kernels.grouped_matmul.groups import KERNEL_ROWS, Groups
from pallas_kernels.grouped_matmul.tile_keys import MATMUL, matmul_key
from pallas_kernels.thread_block import SHARED_BYTES, Split, split
from pallas_kernels.tiles import pick

__all__ = ["MOST_ROWS", "TILE_ROWS", "Tiles", "heuristic_tiles", "matmul", "refusal"]

TILE_ROWS, MOST_ROWS = KERNEL_ROWS  # columns of a wgmma: multiples of 8
CHANNELS = 64  # output channels of one consumer: the rows of a wgmma
CONSUMERS = (1, 2, 3, 4)
PANEL = 16  # tiles whose rows are together in the L2 cache: 17 MB at 4096 inputs
_SPAN = 64  # 16-bit numbers in a swizzled line
_RESULT_ROWS = 64  # rows that a consumer copies out at a time
_BARRIER_BYTES = 1024


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Tile sizes, tuned for speed; results are bitwise independent of them.

    Attributes:
        consumers: warpgroups that compute, each for 64 output channels: 1 to 4.
        depth: inputs of one pipeline slot: 64 or 128.
        stages: pipeline slots, 2 at least: one is multiplied while all others are being loaded.
        blocks: CTAs, which share the work.

    Raises:
        ValueError: unsupported values.
    """

    consumers: int = 2
    depth: int = 64
    stages: int = 4
    blocks: int = 132

    def __post_init__(self) -> None:
        if self.consumers not in CONSUMERS or self.depth not in (_SPAN, 2 * _SPAN):
            raise ValueError(f"consumers must be 1 to 4, and depth 64 or 128: {self}")
        if self.stages < 2 or self.blocks < 1:  # a slot is free once the next one's product has begun
            raise ValueError(f"there are at least two stages and one block: {self}")


class _Shape(NamedTuple):
    """The static parameters of one launch."""

    tile_count: int
    rows: int
    experts: int
    channels: int
    inputs: int
    dtype: Any
    tiles: Tiles

    @property
    def block_channels(self) -> int:
        return self.tiles.consumers * CHANNELS

    @property
    def parts(self) -> int:
        """Units of a tile."""
        return self.channels // self.block_channels

    @property
    def steps(self) -> int:
        return self.inputs // self.tiles.depth

    @property
    def result_rows(self) -> int:
        return self.rows if self.rows % _RESULT_ROWS else _RESULT_ROWS

    @property
    def smem_bytes(self) -> int:
        stage = (self.block_channels + self.rows) * self.tiles.depth
        return 2 * (self.tiles.stages * stage + self.block_channels * self.result_rows) + _BARRIER_BYTES


class _Gmem(NamedTuple):
    """Operands and result in device memory."""

    x: Any  # [tiles, rows, inputs]
    weights: Any  # [experts, channels, inputs]
    experts: Any  # [tiles]
    occupied: Any  # [1]
    output: Any  # [tiles, rows, channels]


class _Smem(NamedTuple):
    """Shared memory of one CTA."""

    x: Any  # [stages, rows, depth]
    weights: Any  # [stages, block_channels, depth]
    results: Any  # [consumers, result_rows, 64]


class _Barriers(NamedTuple):
    ready: Any  # one mbarrier per slot
    free: Any


def matmul(
    x: Float[Array, "tiles rows k"],
    weights: Float[Array, "experts n k"],
    groups: Groups,
    *,
    tiles: Tiles | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Float[Array, "tiles rows n"]:
    """See `api.matmul`; empty tiles give zeros. Products are exact, sums in float32, rounded once.

    Args:
        tiles: tile sizes; None: those tuned for the device (`pallas_kernels.tiles`), else
            `heuristic_tiles`.
        interpret: run on a CPU (`compat.interpret_params`).

    Raises:
        ValueError: the operands are rejected, see `refusal`.
    """
    if (why := refusal(x, weights, groups, tiles=tiles)) is not None:
        raise ValueError(why)
    assert groups.experts is not None
    shape = _shape_of(x, weights, tiles or _best_tiles(x, weights))
    owners, occupied = groups.experts.astype(jnp.int32), groups.occupied.reshape(1).astype(jnp.int32)
    result: jax.Array = _launcher(shape, interpret)(x, weights, owners, occupied)[0]
    return result


def refusal(x: Any, weights: Any, groups: Groups | None = None, *, tiles: Tiles | None = None) -> str | None:
    """Return why this kernel does not support these shapes and dtypes (of arrays or tracers); None if it does."""
    if groups is not None and groups.experts is None:
        return "every expert has a tile of its own: the kernel is for tiles that have an expert each"
    if x.ndim != 3 or weights.ndim != 3 or x.shape[2] != weights.shape[2]:
        return f"x {x.shape} of [tiles, rows, inputs] and weights {weights.shape} of [experts, outputs, inputs]"
    if x.dtype not in (jnp.bfloat16, jnp.float16) or weights.dtype != x.dtype:
        return f"{weights.dtype} weights times {x.dtype}: both must be bfloat16, or float16"
    if x.shape[1] % TILE_ROWS or not TILE_ROWS <= x.shape[1] <= MOST_ROWS:
        return f"tiles of {x.shape[1]} rows: a multiple of {TILE_ROWS}, at most {MOST_ROWS}"
    if min(x.shape[0], *weights.shape) < 1 or weights.shape[1] % CHANNELS or weights.shape[2] % _SPAN:
        return f"{x.shape[0]} tiles, weights {weights.shape}: a multiple of {CHANNELS} outputs and of {_SPAN} inputs"
    return None if tiles is None else _tiles_refusal(x, weights, tiles)


def _tiles_refusal(x: Any, weights: Any, tiles: Tiles) -> str | None:
    shape = _shape_of(x, weights, tiles)
    if shape.channels % shape.block_channels or shape.inputs % tiles.depth:
        return f"{tiles} does not divide weights {weights.shape} of [experts, outputs, inputs]"
    if shape.smem_bytes > SHARED_BYTES:
        return f"{tiles} needs {shape.smem_bytes} bytes of shared memory: there are {SHARED_BYTES}"
    return None


def _best_tiles(x: Any, weights: Any) -> Tiles:
    """Return the tuned tiles, else the heuristic's."""
    untuned = heuristic_tiles(x, weights)
    return pick(MATMUL, matmul_key(x, weights), untuned, lambda tiles: _tiles_refusal(x, weights, tiles))


def heuristic_tiles(x: Any, weights: Any, *, multiprocessors: int = 132) -> Tiles:
    """Return tiles for few waves of units with little traffic each, and all stages that fit. Not measured on a GPU."""
    channels, inputs = weights.shape[1:]
    fitting = [one for one in CONSUMERS if channels % (one * CHANNELS) == 0]

    def cost(consumers: int) -> tuple[int, int]:
        units = x.shape[0] * (channels // (consumers * CHANNELS))
        return pl.cdiv(units, multiprocessors) * (consumers * CHANNELS + x.shape[1]), -consumers

    consumers = min(fitting, key=cost)
    depths = [depth for depth in (2 * _SPAN, _SPAN) if inputs % depth == 0]
    choices = [_fullest(x, weights, Tiles(consumers, depth, 2, multiprocessors)) for depth in depths]
    return next((tiles for tiles in choices if tiles.stages >= 4), choices[-1])


def _fullest(x: Any, weights: Any, tiles: Tiles) -> Tiles:
    """Return tiles with as many stages as fit into SMEM, up to 8."""
    each = [dataclasses.replace(tiles, stages=stages) for stages in range(8, 2, -1)]
    return next((one for one in each if _shape_of(x, weights, one).smem_bytes <= SHARED_BYTES), tiles)


def _shape_of(x: Any, weights: Any, tiles: Tiles) -> _Shape:
    experts, channels, inputs = weights.shape
    return _Shape(x.shape[0], x.shape[1], experts, channels, inputs, jnp.dtype(x.dtype), tiles)


# --------------------------------------------------------------------------------------------------------------
# The launch.


def _launcher(shape: _Shape, interpret: plgpu.InterpretGPUParams | None) -> Callable[..., Any]:
    return compat.kernel(
        functools.partial(_body, shape),
        out_type=(jax.ShapeDtypeStruct((shape.tile_count, shape.rows, shape.channels), shape.dtype),),
        scratch_types={"smem": _smem(shape), "barriers": _barriers(shape)},
        grid=(min(shape.tiles.blocks, shape.tile_count * shape.parts),),
        grid_names=("block",),
        num_threads=shape.tiles.consumers + 1,
        thread_name="warpgroup",
        kernel_name="grouped_matmul",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        cost_estimate=_cost(shape),
        interpret=interpret,
    )


def _cost(shape: _Shape) -> pl.CostEstimate:
    """Return the cost as if no tile were empty: which are empty is not known at compile time."""
    rows, experts = shape.tile_count * shape.rows, min(shape.experts, shape.tile_count)
    moved = experts * shape.channels * shape.inputs + rows * (shape.inputs + shape.channels)
    return pl.CostEstimate(flops=2 * rows * shape.channels * shape.inputs, transcendentals=0, bytes_accessed=2 * moved)


def _smem(shape: _Shape) -> _Smem:
    tiles = shape.tiles
    return _Smem(
        x=_tiled((tiles.stages, shape.rows, tiles.depth), shape.dtype),
        weights=_tiled((tiles.stages, shape.block_channels, tiles.depth), shape.dtype),
        results=_tiled((tiles.consumers, shape.result_rows, CHANNELS), shape.dtype),
    )


def _tiled(dims: tuple[int, ...], dtype: Any) -> Any:
    """Return rows in swizzled tiles of 8 by 128 bytes, as wgmma and TMA require."""
    transforms = (plgpu.TilingTransform((TILE_ROWS, _SPAN)), plgpu.SwizzleTransform(128))
    return plgpu.SMEM(dims, dtype, transforms=transforms)


def _barriers(shape: _Shape) -> _Barriers:
    stages = shape.tiles.stages
    return _Barriers(
        ready=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        free=plgpu.Barrier(num_arrivals=shape.tiles.consumers, num_barriers=stages),
    )


# --------------------------------------------------------------------------------------------------------------
# The kernel.


class _Unit(NamedTuple):
    """A tile and some output channels, with ``steps`` over the inputs, 0 for an empty tile. Traced scalars."""

    tile: Any
    channel: Any
    steps: Any


def _body(shape: _Shape, *refs: Any, smem: _Smem, barriers: _Barriers) -> None:
    gmem, warpgroup, consumers = _Gmem(*refs), lax.axis_index("warpgroup"), shape.tiles.consumers
    pl.when(warpgroup < consumers)(functools.partial(_consume, shape, warpgroup, gmem, smem, barriers))
    pl.when(warpgroup == consumers)(functools.partial(_produce, shape, gmem, smem, barriers))


def _each_unit(shape: _Shape, gmem: _Gmem, work: Callable[[_Unit, Any], None]) -> Any:
    """Call ``work`` with each unit of this CTA and the steps before it; return the number of all steps."""
    block, blocks, units = lax.axis_index("block"), lax.axis_size("block"), shape.tile_count * shape.parts
    occupied = jnp.clip(gmem.occupied[0], 0, shape.tile_count)

    def one(index: Any, done: Any) -> Any:
        unit = _unit_at(shape, occupied, block + index * blocks)
        work(unit, done)
        return done + unit.steps

    return lax.fori_loop(0, lax.div(units - block + blocks - 1, jnp.int32(blocks)), one, jnp.int32(0))


def _unit_at(shape: _Shape, occupied: Any, number: Any) -> _Unit:
    """Return the unit of a number: panels one after the other; the last non-empty panel may be smaller."""
    panel = lax.div(number, jnp.int32(PANEL * shape.parts))
    first = panel * PANEL
    size = jnp.clip(occupied - first, 1, PANEL)
    within = number - first * shape.parts
    empty = number >= occupied * shape.parts
    tile = jnp.where(empty, lax.div(number, jnp.int32(shape.parts)), first + lax.rem(within, size))
    part = jnp.where(empty, lax.rem(number, jnp.int32(shape.parts)), lax.div(within, size))
    return _Unit(tile, part * shape.block_channels, jnp.where(empty, 0, shape.steps))


def _registers(shape: _Shape) -> Split | None:
    """Split registers between warpgroups if those of the launch are too few for a consumer: 96 with four."""
    return split(4) if shape.tiles.consumers == 4 else None


def _slot(shape: _Shape, step: Any) -> Any:
    return lax.rem(step, jnp.int32(shape.tiles.stages))


def _produce(shape: _Shape, gmem: _Gmem, smem: _Smem, barriers: _Barriers) -> None:
    stages = shape.tiles.stages
    if shares := _registers(shape):
        plgpu.set_max_registers(shares.producer, action="decrease")

    def await_free(step: Any, _: Any = None) -> None:
        plgpu.barrier_wait(barriers.free.at[_slot(shape, step)])

    def fill(unit: _Unit, done: Any) -> None:
        expert = jnp.clip(gmem.experts[unit.tile], 0, shape.experts - 1)

        def step(index: Any, _: Any) -> None:
            pl.when(done + index >= stages)(functools.partial(await_free, done + index))
            _copy_step(shape, unit, expert, index, _slot(shape, done + index), gmem, smem, barriers)

        lax.fori_loop(0, unit.steps, step, None)

    steps = _each_unit(shape, gmem, fill)
    lax.fori_loop(jnp.maximum(steps - stages, 0), steps, await_free, None)


def _copy_step(
    shape: _Shape, unit: _Unit, expert: Any, index: Any, slot: Any, gmem: _Gmem, smem: _Smem, barriers: _Barriers
) -> None:
    inputs = pl.ds(pl.multiple_of(index * shape.tiles.depth, shape.tiles.depth), shape.tiles.depth)
    channels = pl.ds(pl.multiple_of(unit.channel, CHANNELS), shape.block_channels)
    ready = barriers.ready.at[slot]
    plgpu.copy_gmem_to_smem(gmem.weights.at[expert, channels, inputs], smem.weights.at[slot], ready)
    plgpu.copy_gmem_to_smem(gmem.x.at[unit.tile, :, inputs], smem.x.at[slot], ready)


def _consume(shape: _Shape, warpgroup: Any, gmem: _Gmem, smem: _Smem, barriers: _Barriers) -> None:
    if shares := _registers(shape):
        plgpu.set_max_registers(shares.consumer, action="increase")

    def multiply(unit: _Unit, done: Any) -> None:
        sums = _sums(shape, unit, done, warpgroup, smem, barriers)
        _write(shape, unit, warpgroup, sums, gmem, smem)

    _each_unit(shape, gmem, multiply)
    plgpu.wait_smem_to_gmem(0)


def _sums(
    shape: _Shape, unit: _Unit, done: Any, warpgroup: Any, smem: _Smem, barriers: _Barriers
) -> Float[Array, "64 rows"]:
    own = pl.ds(pl.multiple_of(warpgroup * CHANNELS, CHANNELS), CHANNELS)

    def release(step: Any) -> None:
        plgpu.barrier_arrive(barriers.free.at[_slot(shape, step)])

    def multiply(accumulator: Any) -> Any:
        def step(index: Any, _: Any) -> None:
            slot = _slot(shape, done + index)
            plgpu.barrier_wait(barriers.ready.at[slot])
            plgpu.wgmma(accumulator, smem.weights.at[slot, own], smem.x.at[slot].transpose((1, 0)))
            plgpu.wgmma_wait(1)  # all products but this one
            pl.when(index > 0)(functools.partial(release, done + index - 1))

        lax.fori_loop(0, unit.steps, step, None)
        sums = accumulator[...]
        pl.when(unit.steps > 0)(functools.partial(release, done + unit.steps - 1))
        return sums

    return pl.run_scoped(multiply, plgpu.ACC((CHANNELS, shape.rows), jnp.float32))


def _write(shape: _Shape, unit: _Unit, warpgroup: Any, sums: Any, gmem: _Gmem, smem: _Smem) -> None:
    """Write the results; the transpose on the way to SMEM makes a row's channels contiguous."""
    channels = pl.ds(pl.multiple_of(unit.channel + warpgroup * CHANNELS, CHANNELS), CHANNELS)
    mine = smem.results.at[warpgroup]
    for first in range(0, shape.rows, shape.result_rows):
        some = sums[:, first : first + shape.result_rows].astype(shape.dtype)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # earlier copies out have been read
        mine.transpose((1, 0))[...] = plgpu.layout_cast(some, plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.commit_smem()
        target = gmem.output.at[unit.tile, pl.ds(first, shape.result_rows), channels]
        plgpu.copy_smem_to_gmem(mine, target)
