"""Rows times quantised weights, for Hopper GPUs, in Pallas Mosaic GPU: weights are dequantised in registers.

The operands are swapped: a wgmma's 64 rows are 64 output channels, whose numbers are loaded from SMEM to registers,
converted to bfloat16 (or float16) there and passed to the tensor core from there; its columns are the rows of x, 8 to
128. So few rows waste little, and dequantised weights are never written to memory.

More rows are cut into tiles. With ``groups`` each tile has an expert; experts and the number of non-empty tiles are
read from device memory, for mixtures of experts (`pallas_kernels.grouped_matmul`).

A unit of work is a tile, ``consumers`` x 64 output channels, and one of ``splits`` splits of k. The CTAs (one per
multiprocessor) take units in turns. Their warpgroups:

    producer (the last)                              consumers (one each for 64 channels)
    -------------------                              ------------------------------------
    per unit, per step of ``depth`` inputs:          per unit, per step:
      waits free (once the ring is full)       <-      arrive when the slot is read
      weights [channels, depth] packed
      x [rows, depth]                  -> ready ->     wait
      scales, zeros [groups, channels]                 per span: weights -> registers -> 16 bits (- zero)
                                                         part = weights . x, sums += part * scale

The TMA arrives at ``ready``, once per copy, and the consumers wait on it; ``free`` works the other way round, and the
producer drains its last arrivals, so that no mbarrier ends in the middle of a phase.

Integers times x are exact before they are scaled: a group's sum is scaled, not its weights, which costs less than
scaling the weights as soon as a group has more inputs than x has rows, and rounds nothing to 16 bits. float4_e2m1fn
times a power of two (MXFP4) is a bfloat16: there the weights are scaled, which rounds nothing either.

Splits have separate float32 sums, which are added in order: by XLA, fused into the next kernel, or, if tiles are many,
by the CTA that computes them one after the other. A row is bitwise independent of the other rows. The order of sums
(`Shape.span`, `Shape.grain`, the splits) follows from the weights' shape alone, and so do the bits, if a wgmma's column
does not depend on how many columns it has.

Swapped operands and weights upcast in registers: Frantar et al. 2024 (MARLIN, arXiv:2408.11743).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Num, UInt

from pallas_kernels import compat
from pallas_kernels.quant_matmul.fit import FEW_ROWS, TILE_ROWS
from pallas_kernels.quant_matmul.types import CHANNELS, Shape, bits_of
from pallas_kernels.thread_block import Split, split

PANEL = 16  # tiles whose rows are together in the L2 cache
_MATRIX = plgpu.Layout.WGMMA
_PER_CHANNEL = plgpu.Layout.WGMMA.reduce(1)


class _Gmem(NamedTuple):
    """Operands and result in device memory."""

    x: Any  # [tiles, rows, inputs]
    weights: Any  # [experts, channels, inputs]
    scales: Any  # [inputs / group, experts, channels]
    zeros: Any  # [inputs / group, experts, channels], or None
    experts: Any  # [tiles], or None
    occupied: Any  # [1], or None
    output: Any  # [tiles, rows, channels], or [splits, tiles, rows, channels] float32


class _Smem(NamedTuple):
    """Shared memory of one CTA."""

    x: Any  # [stages, rows, depth]
    weights: Any  # [stages, block_channels, depth]
    scales: Any  # [stages, groups, block_channels]
    zeros: Any
    totals: Any  # [consumers, 64, rows]: of the earlier splits
    upcast: Any  # [consumers, 64, span]: the interpreter's wgmma takes no registers


class _Slot(NamedTuple):
    """The slot and channels that a consumer reads in a step. Traced scalars."""

    number: Any
    own: Any  # channels of the consumer
    known: Any  # inputs that the previous step has already summed


class _Barriers(NamedTuple):
    ready: Any  # one mbarrier per slot
    free: Any


# --------------------------------------------------------------------------------------------------------------
# The launch.


def launcher(shape: Shape, names: tuple[str, ...], interpret: plgpu.InterpretGPUParams | None) -> Callable[..., Any]:
    """Return the kernel for a shape; its arguments are operands of these names (`_Gmem`)."""
    dims: tuple[int, ...] = (shape.tile_count, shape.rows, shape.channels)
    if shape.written > 1:
        dims = (shape.written, *dims)
    dtype = jnp.float32 if shape.written > 1 else shape.dtype
    return compat.kernel(
        functools.partial(_body, shape, (*names, "output")),
        out_type=(jax.ShapeDtypeStruct(dims, dtype),),
        scratch_types={"smem": _smem(shape), "barriers": _barriers(shape)},
        grid=(shape.blocks,),
        grid_names=("block",),
        num_threads=shape.tiles.consumers + 1,
        thread_name="warpgroup",
        kernel_name="quant_matmul",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        cost_estimate=_cost(shape),
        interpret=interpret,
    )


def _cost(shape: Shape) -> pl.CostEstimate:
    """Return the cost as if no tile were empty: which are empty is not known at compile time."""
    rows, experts = shape.tile_count * shape.rows, min(shape.experts, shape.tile_count)
    numbers = shape.channels * shape.inputs
    moved = experts * numbers * bits_of(shape.weight_dtype) // 8 + 2 * rows * (shape.inputs + shape.channels)
    return pl.CostEstimate(flops=2 * rows * numbers, transcendentals=0, bytes_accessed=moved)


def _smem(shape: Shape) -> _Smem:
    tiles, factors = shape.tiles, (shape.tiles.stages, shape.groups, shape.block_channels)
    least = min(shape.span, shape.group)
    return _Smem(
        x=_tiled((tiles.stages, shape.rows, tiles.depth), shape.dtype, within=least),
        weights=_weights(shape),
        scales=plgpu.SMEM(factors, shape.scale_dtype),
        zeros=plgpu.SMEM(factors, jnp.int8) if shape.zeros else (),
        totals=plgpu.SMEM((tiles.consumers, CHANNELS, shape.rows), jnp.float32) if shape.serial else (),
        upcast=_tiled((tiles.consumers, CHANNELS, least), shape.dtype) if shape.interpret else (),
    )


def _weights(shape: Shape) -> Any:
    dims = (shape.tiles.stages, shape.block_channels, shape.tiles.depth)
    # A tiled copy needs device memory in whole tiles.
    return plgpu.SMEM(dims, shape.weight_dtype) if shape.overlap else _tiled(dims, shape.weight_dtype)


def _tiled(dims: tuple[int, ...], dtype: Any, within: int = 256) -> Any:
    """Return rows in swizzled tiles of 8, as wgmma and TMA require, of at most ``within`` numbers each."""
    size = bits_of(dtype)
    swizzle = next(one for one in (128, 64, 32) if dims[-1] * size % (8 * one) == 0 and one * 8 <= within * size)
    tiling = plgpu.TilingTransform((TILE_ROWS, swizzle * 8 // size))
    return plgpu.SMEM(dims, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))


def _barriers(shape: Shape) -> _Barriers:
    stages = shape.tiles.stages
    return _Barriers(
        ready=plgpu.Barrier(num_arrivals=4 if shape.zeros else 3, num_barriers=stages),
        free=plgpu.Barrier(num_arrivals=shape.tiles.consumers, num_barriers=stages),
    )


# --------------------------------------------------------------------------------------------------------------
# The kernel: units.


class _Unit(NamedTuple):
    """A tile's product with channels from ``channel`` on, steps ``first`` to ``first + count``. Traced scalars."""

    tile: Any
    channel: Any
    split: Any
    first: Any
    count: Any


def _body(shape: Shape, names: tuple[str, ...], *refs: Any, smem: _Smem, barriers: _Barriers) -> None:
    gmem = _Gmem(**(dict.fromkeys(_Gmem._fields) | dict(zip(names, refs, strict=True))))
    warpgroup, consumers = lax.axis_index("warpgroup"), shape.tiles.consumers
    pl.when(warpgroup < consumers)(functools.partial(_consume, shape, warpgroup, gmem, smem, barriers))
    pl.when(warpgroup == consumers)(functools.partial(_produce, shape, gmem, smem, barriers))


def _each_unit(shape: Shape, gmem: _Gmem, work: Callable[[_Unit, Any], None]) -> Any:
    """Call ``work`` with each unit of this CTA and the steps before it; return the number of all steps."""
    block, blocks, units = lax.axis_index("block"), shape.blocks, shape.tile_count * shape.parts
    occupied = jnp.clip(gmem.occupied[0], 0, shape.tile_count) if shape.grouped else shape.tile_count

    def one(index: Any, done: Any) -> Any:
        unit = _unit_at(shape, occupied, block + index * blocks)
        work(unit, done)
        return done + unit.count

    return lax.fori_loop(0, lax.div(units - block + blocks - 1, jnp.int32(blocks)), one, jnp.int32(0))


def _unit_at(shape: Shape, occupied: Any, number: Any) -> _Unit:
    """Return the unit of a number: panels one after the other; the last non-empty panel may be smaller."""
    parts = jnp.int32(shape.parts)
    first = lax.div(number, PANEL * parts) * PANEL
    size = jnp.clip(occupied - first, 1, PANEL)
    within = number - first * parts
    empty = number >= occupied * parts
    tile = jnp.where(empty, lax.div(number, parts), first + lax.rem(within, size))
    part = jnp.where(empty, lax.rem(number, parts), lax.div(within, size))
    written = jnp.int32(shape.written)
    split = lax.rem(part, written)
    start, end = (0, shape.steps) if shape.serial else (_first_step(shape, split), _first_step(shape, split + 1))
    channel = lax.div(part, written) * shape.block_channels
    return _Unit(tile, channel, split, start, jnp.where(empty, 0, end - start))


def _first_step(shape: Shape, split: Any) -> Any:
    """Return the step at which a split begins: a multiple of ``grain`` inputs, for any depth of a step."""
    if shape.tiles.splits == 1:
        return split * shape.steps
    grains = shape.inputs // shape.grain
    return lax.div(split * grains, jnp.int32(shape.tiles.splits)) * (shape.grain // shape.tiles.depth)


def _slot(shape: Shape, step: Any) -> Any:
    return lax.rem(step, jnp.int32(shape.tiles.stages))


def _registers(shape: Shape) -> Split | None:
    """Split registers between warpgroups if those of the launch are too few for a consumer."""
    consumers = shape.tiles.consumers
    crowded = consumers > 2 or (consumers == 2 and shape.rows > FEW_ROWS)
    return split(consumers) if crowded else None


# --------------------------------------------------------------------------------------------------------------
# The kernel: the producer.


def _produce(shape: Shape, gmem: _Gmem, smem: _Smem, barriers: _Barriers) -> None:
    stages = shape.tiles.stages
    if shares := _registers(shape):
        plgpu.set_max_registers(shares.producer, action="decrease")

    def await_free(step: Any, _: Any = None) -> None:
        plgpu.barrier_wait(barriers.free.at[_slot(shape, step)])

    def fill(unit: _Unit, done: Any) -> None:
        expert = jnp.clip(gmem.experts[unit.tile], 0, shape.experts - 1) if shape.grouped else 0

        def step(index: Any, _: Any) -> None:
            pl.when(done + index >= stages)(functools.partial(await_free, done + index))
            _copy_step(shape, unit, expert, unit.first + index, _slot(shape, done + index), gmem, smem, barriers)

        lax.fori_loop(0, unit.count, step, None)

    steps = _each_unit(shape, gmem, fill)
    lax.fori_loop(jnp.maximum(steps - stages, 0), steps, await_free, None)


def _copy_step(
    shape: Shape, unit: _Unit, expert: Any, step: Any, slot: Any, gmem: _Gmem, smem: _Smem, barriers: _Barriers
) -> None:
    depth = shape.tiles.depth
    start = step * depth
    start = jnp.minimum(start, shape.inputs - depth) if shape.overlap else pl.multiple_of(start, depth)
    inputs, channels = pl.ds(start, depth), pl.ds(pl.multiple_of(unit.channel, CHANNELS), shape.block_channels)
    groups = pl.ds(lax.div(start, jnp.int32(shape.group)), shape.groups)
    ready = barriers.ready.at[slot]
    plgpu.copy_gmem_to_smem(gmem.weights.at[expert, channels, inputs], smem.weights.at[slot], ready)
    plgpu.copy_gmem_to_smem(gmem.x.at[unit.tile, :, inputs], smem.x.at[slot], ready)
    plgpu.copy_gmem_to_smem(gmem.scales.at[groups, expert, channels], smem.scales.at[slot], ready)
    if shape.zeros:
        plgpu.copy_gmem_to_smem(gmem.zeros.at[groups, expert, channels], smem.zeros.at[slot], ready)


# --------------------------------------------------------------------------------------------------------------
# The kernel: a consumer.


def _consume(shape: Shape, warpgroup: Any, gmem: _Gmem, smem: _Smem, barriers: _Barriers) -> None:
    if shares := _registers(shape):
        plgpu.set_max_registers(shares.consumer, action="increase")

    def multiply(unit: _Unit, done: Any) -> None:
        if shape.serial:
            _sum_splits(shape, done, warpgroup, smem, barriers)
            sums = plgpu.load(smem.totals.at[warpgroup], layout=_MATRIX, optimized=False)
        else:
            sums = _sums(shape, done, unit.count, warpgroup, smem, barriers)
        _write(shape, unit, warpgroup, sums, gmem)

    _each_unit(shape, gmem, multiply)


def _sum_splits(shape: Shape, done: Any, warpgroup: Any, smem: _Smem, barriers: _Barriers) -> None:
    """Add up the splits' sums in order; each thread reads what it wrote itself."""
    mine = smem.totals.at[warpgroup]

    def add(split: Any, _: Any) -> None:
        first = _first_step(shape, split)
        count = _first_step(shape, split + 1) - first
        sums = _sums(shape, done + first, count, warpgroup, smem, barriers)

        def add_to_former() -> None:
            compat.store(mine, plgpu.load(mine, layout=_MATRIX, optimized=False) + sums)

        pl.when(split == 0)(functools.partial(compat.store, mine, sums))
        pl.when(split > 0)(add_to_former)

    lax.fori_loop(0, shape.tiles.splits, add, None)


def _sums(
    shape: Shape, done: Any, count: Any, warpgroup: Any, smem: _Smem, barriers: _Barriers
) -> Float[Array, "64 rows"]:
    """Return the sums over ``count`` steps, the first of them in the slot of step ``done``."""
    own = pl.ds(pl.multiple_of(warpgroup * CHANNELS, CHANNELS), CHANNELS)

    def step(index: Any, sums: Any) -> Any:
        slot = _Slot(_slot(shape, done + index), own, jnp.where(index == shape.steps - 1, shape.overlap, 0))
        plgpu.barrier_wait(barriers.ready.at[slot.number])
        packed = _packed(shape, smem.weights.at[slot.number, own])
        for first in range(0, shape.tiles.depth, shape.span):
            sums = sums + _span_sums(shape, packed, first, slot, warpgroup, smem)
        plgpu.barrier_arrive(barriers.free.at[slot.number])
        return sums

    nothing = plgpu.layout_cast(jnp.zeros((CHANNELS, shape.rows), jnp.float32), _MATRIX)
    return lax.fori_loop(0, count, step, nothing)


def _packed(shape: Shape, ref: Any) -> Any:
    """Load numbers of 64 channels, shuffled while still packed into the register layout of wgmma."""
    narrow = plgpu.Layout.WGMMA_UPCAST_4X if bits_of(shape.weight_dtype) == 4 else plgpu.Layout.WGMMA_UPCAST_2X
    return plgpu.layout_cast(plgpu.load(ref, layout=narrow, optimized=not shape.overlap), _MATRIX)


def _span_sums(
    shape: Shape, packed: Any, first: int, slot: _Slot, warpgroup: Any, smem: _Smem
) -> Float[Array, "64 rows"]:
    """Return the sums over a span's inputs, times their scale."""
    dims, size = (CHANNELS, shape.rows), min(shape.span, shape.group)
    scales = None if shape.e2m1 else _factors(smem.scales, slot, first // shape.group).astype(jnp.float32)

    def multiply(accumulator: Any) -> Any:
        for start in range(first, first + shape.span, size):
            left = _upcast(shape, lax.slice(packed, (0, start), (CHANNELS, start + size)), start, slot, smem)
            if shape.interpret:
                plgpu.wgmma_wait(0)
                smem.upcast[warpgroup] = left
                plgpu.commit_smem()
                left = smem.upcast.at[warpgroup]
            plgpu.wgmma(accumulator, left, smem.x.at[slot.number, :, pl.ds(start, size)].transpose((1, 0)))
        return accumulator[...]

    sums = pl.run_scoped(multiply, plgpu.ACC(dims, jnp.float32))
    return sums if scales is None else sums * lax.broadcast_in_dim(scales, dims, [0])


def _upcast(shape: Shape, numbers: Any, first: int, slot: _Slot, smem: _Smem) -> Any:
    """Convert to the dtype of x, exactly, by conversions with short code in Mosaic GPU."""
    group = first // shape.group
    if shape.weight_dtype == jnp.int4 and shape.dtype == jnp.float16:
        numbers = numbers.astype(jnp.bfloat16).astype(jnp.float32)
    if shape.weight_dtype == jnp.float8_e4m3fn and shape.dtype == jnp.bfloat16:
        numbers = numbers.astype(jnp.float16).astype(jnp.float32)
    numbers = numbers.astype(shape.dtype)
    if shape.e2m1:
        powers = _power(_factors(smem.scales, slot, group))
        if shape.overlap:
            powers = powers * jnp.where(first >= slot.known, 1.0, 0.0).astype(shape.dtype)
        return _float4(numbers) * _across(powers, numbers)
    if shape.zeros:
        return numbers - _across(_factors(smem.zeros, slot, group).astype(shape.dtype), numbers)
    return numbers


def _float4(places: Float[Array, "64 k"]) -> Float[Array, "64 k"]:
    """Decode indices -7 to 7 in the order of float4_e2m1fn: piecewise linear, with bends at 4 and at 6."""

    def within(most: float) -> Any:
        return jnp.minimum(jnp.maximum(places, jnp.bfloat16(-most)), jnp.bfloat16(most))

    return jnp.bfloat16(2) * places - jnp.bfloat16(0.5) * within(4) - within(6)


def _power(exponents: UInt[Array, " 64"]) -> Float[Array, " 64"]:
    """Return two to the power of float8_e8m0fnu exponents, which are those of float32; the smallest becomes 0."""
    return lax.bitcast_convert_type(exponents.astype(jnp.int32) << 23, jnp.float32).astype(jnp.bfloat16)


def _across(factors: Float[Array, " 64"], numbers: Float[Array, "64 k"]) -> Float[Array, "64 k"]:
    return lax.broadcast_in_dim(factors, numbers.shape, [0])


def _factors(ref: Any, slot: _Slot, group: int) -> Num[Array, " 64"]:
    return plgpu.load(ref.at[slot.number, group, slot.own], layout=_PER_CHANNEL, optimized=False)


def _write(shape: Shape, unit: _Unit, warpgroup: Any, sums: Any, gmem: _Gmem) -> None:
    """Write from registers: pairs of channels are adjacent once the matrix is transposed."""
    result = plgpu.layout_cast(sums.astype(gmem.output.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
    own = pl.ds(pl.multiple_of(unit.channel + warpgroup * CHANNELS, CHANNELS), CHANNELS)
    place = (unit.split, unit.tile) if shape.written > 1 else (unit.tile,)
    compat.store(gmem.output.at[*place, :, own].transpose((1, 0)), result)
