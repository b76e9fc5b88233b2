"""Device code of a CTA: copies by a producer, products and epilogues by consumers of 64 rows each.

    producer (the last warpgroup)                    consumers (one each for 64 rows)
    -----------------------------                    --------------------------------
    per unit, per step of ``depth`` inputs:          per unit: the first of what is added -> shared memory
      waits free (once the ring is full)       <-      per step: arrive when the product before has read its slot
      x [rows, depth]
      weights [columns, depth], or two   -> ready ->   wait; sums += x . weights
                                                     per chunk: scaled, rounded, bias, silu x up, added
                                                       -> shared memory -> device memory

The TMA arrives at ``ready``, once per copy, and the consumers wait on it; ``free`` works the other way round. The CTAs
of a cluster are a rectangle: those with the same columns share weights, those with the same rows share x. Each copies a
slice of the shared operand into the SMEM of all that share it. So a slot is free for a CTA's producer once the
consumers of its row and of its column of the rectangle have read theirs: the cross of both axes, whose arrivals
``ClusterBarrier`` counts, without the CTA on the diagonal. The producer drains its last arrivals, so that no mbarrier
ends in the middle of a phase and no CTA exits while another one writes to it. ``added`` belongs to one consumer, for
each of its two result slots: the residual is copied there first.
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
from jaxtyping import Array, Float, Num

from pallas_kernels.matmul.types import GROUP, Extras, Shape
from pallas_kernels.thread_block import Split, split

_MATRIX = plgpu.Layout.WGMMA
_PER_ROW = _MATRIX.reduce(1)
_PER_COLUMN = _MATRIX.reduce(0)
_PRODUCER = 32  # registers: with 24 one of a cluster of 2 x 2 spills
# The axes of a cluster. A multicast copy along one is split among its CTAs by tiles of 8 lines of SMEM.
ROW_AXIS, COLUMN_AXIS = "row_block", "column_block"


class Gmem(NamedTuple):
    """Operands and result in device memory."""

    x: Any  # [rows, inputs]
    weights: Any  # [inputs, parts, columns], or [parts, columns, inputs]
    x_scales: Any  # [padded rows]
    scales: Any  # [parts, padded columns]
    bias: Any  # [parts, padded columns]
    residual: Any  # [rows, columns]
    output: Any  # [rows, columns]


class Smem(NamedTuple):
    """Shared memory of one CTA."""

    x: Any  # [stages, rows, depth]
    weights: Any  # [stages, parts, depth, columns], or [stages, parts, columns, depth]
    results: Any  # [consumers, slots, 64, chunk]


class Barriers(NamedTuple):
    ready: Any  # one mbarrier per slot
    free: Any
    added: Any  # one per consumer and result slot; () without a residual


class _Unit(NamedTuple):
    """A CTA's tile of the result: its first row and column. Traced scalars."""

    row: Any
    column: Any


def body(shape: Shape, names: tuple[str, ...], *refs: Any, smem: Smem, barriers: Barriers) -> None:
    gmem = Gmem(**(dict.fromkeys(Gmem._fields) | dict(zip(names, refs, strict=True))))
    warpgroup, consumers = lax.axis_index("warpgroup"), shape.tiles.consumers
    pl.when(warpgroup < consumers)(functools.partial(_consume, shape, warpgroup, gmem, smem, barriers))
    pl.when(warpgroup == consumers)(functools.partial(_produce, shape, gmem, smem, barriers))


def _each_unit(shape: Shape, work: Callable[[_Unit, Any], None]) -> Any:
    """Call ``work`` with each unit of this CTA and the steps before it; return the number of all steps."""
    cluster, clusters = lax.axis_index("block"), lax.axis_size("block")
    tiles = shape.tiles
    row_member = lax.axis_index(ROW_AXIS) if tiles.row_blocks > 1 else 0
    column_member = lax.axis_index(COLUMN_AXIS) if tiles.column_blocks > 1 else 0
    count = lax.div(shape.row_units * shape.column_units - cluster + clusters - 1, jnp.int32(clusters))

    def one(index: Any, done: Any) -> Any:
        work(unit_at(shape, cluster + index * clusters, row_member, column_member), done)
        return done + shape.steps

    return lax.fori_loop(0, count, one, jnp.int32(0))


def unit_at(shape: Shape, number: Any, row_member: Any, column_member: Any) -> _Unit:
    """Return the unit of a CTA in a cluster: all rows of a panel for some columns, then the next columns."""
    tiles = shape.tiles
    panel = lax.div(number, jnp.int32(tiles.panel * shape.column_units))
    first, within = panel * tiles.panel, number - panel * tiles.panel * shape.column_units
    size = jnp.minimum(shape.row_units - first, tiles.panel)
    row = (first + lax.rem(within, size)) * tiles.row_blocks + row_member
    column = lax.div(within, size) * tiles.column_blocks + column_member
    return _Unit(row * tiles.rows, column * tiles.columns)


def _registers(shape: Shape) -> Split | None:
    """Split registers between warpgroups if a consumer needs more than at launch: 168 with two, 96 with four."""
    return split(shape.tiles.consumers, _PRODUCER) if shape.tiles.consumers > 1 else None


def _slot(shape: Shape, step: Any) -> Any:
    return lax.rem(step, jnp.int32(shape.tiles.stages))


# --------------------------------------------------------------------------------------------------------------
# The producer.


def _produce(shape: Shape, gmem: Gmem, smem: Smem, barriers: Barriers) -> None:
    stages = shape.tiles.stages
    if shares := _registers(shape):
        plgpu.set_max_registers(shares.producer, action="decrease")

    def await_free(step: Any, _: Any = None) -> None:
        plgpu.barrier_wait(barriers.free.at[_slot(shape, step)])

    def fill(unit: _Unit, done: Any) -> None:
        def step(index: Any, _: Any) -> None:
            pl.when(done + index >= stages)(functools.partial(await_free, done + index))
            _copy_step(shape, unit, index, _slot(shape, done + index), gmem, smem, barriers)

        lax.fori_loop(0, shape.steps, step, None)

    steps = _each_unit(shape, fill)
    lax.fori_loop(jnp.maximum(steps - stages, 0), steps, await_free, None)


def _copy_step(shape: Shape, unit: _Unit, index: Any, slot: Any, gmem: Gmem, smem: Smem, barriers: Barriers) -> None:
    """Copy the inputs of a step. TMA does not read beyond an operand's end, and fills in zeros."""
    tiles, ready = shape.tiles, barriers.ready.at[slot]
    inputs = pl.ds(pl.multiple_of(index * tiles.depth, tiles.depth), tiles.depth)
    columns = pl.ds(pl.multiple_of(unit.column, tiles.columns), tiles.columns)
    rows = pl.ds(pl.multiple_of(unit.row, GROUP), tiles.rows)
    shared = ROW_AXIS if tiles.row_blocks > 1 else None
    for part in range(shape.parts):
        own = (inputs, part, columns) if shape.layout == "in first" else (part, columns, inputs)
        plgpu.copy_gmem_to_smem(gmem.weights.at[own], smem.weights.at[slot, part], ready, collective_axes=shared)
    shared = COLUMN_AXIS if tiles.column_blocks > 1 else None
    plgpu.copy_gmem_to_smem(gmem.x.at[rows, inputs], smem.x.at[slot], ready, collective_axes=shared)


# --------------------------------------------------------------------------------------------------------------
# The consumers.


def _consume(shape: Shape, warpgroup: Any, gmem: Gmem, smem: Smem, barriers: Barriers) -> None:
    if shares := _registers(shape):
        plgpu.set_max_registers(shares.consumer, action="increase")

    def multiply(unit: _Unit, done: Any) -> None:
        own = unit._replace(row=pl.multiple_of(unit.row + warpgroup * GROUP, GROUP))
        writer = _Writer(shape, own, warpgroup, gmem, smem, barriers)
        writer.fetch_first()
        writer.write((_promoted_sums if shape.promoted else _sums)(shape, done, warpgroup, smem, barriers))

    _each_unit(shape, multiply)
    plgpu.wait_smem_to_gmem(0)


def _multiply(shape: Shape, slot: Any, warpgroup: Any, smem: Smem, accumulators: tuple[Any, ...]) -> None:
    """Begin the products of a slot."""
    own = pl.ds(pl.multiple_of(warpgroup * GROUP, GROUP), GROUP)
    for part, accumulator in enumerate(accumulators):
        weights = smem.weights.at[slot, part]
        right = weights if shape.layout == "in first" else weights.transpose((1, 0))
        plgpu.wgmma(accumulator, smem.x.at[slot, own], right)


def _accumulators(shape: Shape) -> list[Any]:
    return [plgpu.ACC((GROUP, shape.tiles.columns), shape.sums_dtype)] * shape.parts


def _sums(
    shape: Shape, done: Any, warpgroup: Any, smem: Smem, barriers: Barriers
) -> tuple[Num[Array, "64 columns"], ...]:
    """Compute the sums of a unit, over the inputs in order. A slot is free once the next one's products have begun."""

    def release(step: Any) -> None:
        plgpu.barrier_arrive(barriers.free.at[_slot(shape, step)])

    def multiply(*accumulators: Any) -> tuple[Any, ...]:
        def step(index: Any, _: Any) -> None:
            slot = _slot(shape, done + index)
            plgpu.barrier_wait(barriers.ready.at[slot])
            _multiply(shape, slot, warpgroup, smem, accumulators)
            plgpu.wgmma_wait(shape.parts)  # all products but these
            pl.when(index > 0)(functools.partial(release, done + index - 1))

        lax.fori_loop(0, shape.steps, step, None)
        sums = tuple(accumulator[...] for accumulator in accumulators)
        release(done + shape.steps - 1)
        return sums

    result: tuple[Any, ...] = pl.run_scoped(multiply, *_accumulators(shape))
    return result


def _promoted_sums(
    shape: Shape, done: Any, warpgroup: Any, smem: Smem, barriers: Barriers
) -> tuple[Float[Array, "64 columns"], ...]:
    """Compute the sums of a unit, adding those of each slot in float32, in order: see `Shape.promoted`."""

    def step(index: Any, sums: tuple[Any, ...]) -> tuple[Any, ...]:
        slot = _slot(shape, done + index)
        plgpu.barrier_wait(barriers.ready.at[slot])

        def multiply(*accumulators: Any) -> tuple[Any, ...]:
            _multiply(shape, slot, warpgroup, smem, accumulators)
            return tuple(accumulator[...] for accumulator in accumulators)

        some = pl.run_scoped(multiply, *_accumulators(shape))
        plgpu.barrier_arrive(barriers.free.at[slot])
        return tuple(one + other for one, other in zip(sums, some, strict=True))

    nothing = plgpu.layout_cast(jnp.zeros((GROUP, shape.tiles.columns), jnp.float32), _MATRIX)
    result: tuple[Any, ...] = lax.fori_loop(0, shape.steps, step, (nothing,) * shape.parts)
    return result


class _Writer(NamedTuple):
    """A consumer's epilogue of one unit, one chunk of columns after the other, through two slots of SMEM."""

    shape: Shape
    unit: _Unit  # its row is the first row of the consumer
    warpgroup: Any
    gmem: Gmem
    smem: Smem
    barriers: Barriers

    @property
    def chunks(self) -> int:
        return self.shape.tiles.columns // self.shape.chunk

    def fetch_first(self) -> None:
        """Start to copy the residual of the first chunks, overlapping the unit's products."""
        if self.gmem.residual is None:
            return
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for chunk in range(self.shape.slots):
            self._fetch(chunk)

    def write(self, sums: tuple[Num[Array, "64 columns"], ...]) -> None:
        last = self.shape.slots - 1  # copies out that may be in flight
        for chunk in range(self.chunks):
            result = self._finished(sums, chunk)
            mine = self._mine(chunk)
            if self.gmem.residual is not None:
                plgpu.barrier_wait(self._added(chunk))
                result = self._rounded(result + plgpu.load(mine, layout=_MATRIX).astype(jnp.float32))
            else:
                plgpu.wait_smem_to_gmem(last if chunk else 0, wait_read_only=True)
            mine[...] = result.astype(self.shape.result)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(mine, self._place(self.gmem.output, chunk))
            if self.gmem.residual is not None and 1 <= chunk < self.chunks - 1:
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # all but this one: the slot of the next is free
                self._fetch(chunk + 1)

    def _fetch(self, chunk: int) -> None:
        plgpu.copy_gmem_to_smem(self._place(self.gmem.residual, chunk), self._mine(chunk), self._added(chunk))

    def _mine(self, chunk: int) -> Any:
        return self.smem.results.at[self.warpgroup, chunk % self.shape.slots]

    def _added(self, chunk: int) -> Any:
        return self.barriers.added.at[self.warpgroup * self.shape.slots + chunk % self.shape.slots]

    def _place(self, ref: Any, chunk: int) -> Any:
        return ref.at[pl.ds(self.unit.row, GROUP), self._columns(chunk)]

    def _columns(self, chunk: int) -> Any:
        size = self.shape.chunk
        return pl.ds(pl.multiple_of(self.unit.column + chunk * size, size), size)

    def _finished(self, sums: tuple[Num[Array, "64 columns"], ...], chunk: int) -> Float[Array, "64 chunk"]:
        """Return a chunk of the result without the residual, rounded step by step as in `reference.finished`."""
        first = chunk * self.shape.chunk
        parts = [self._scaled(one[:, first : first + self.shape.chunk], chunk, part) for part, one in enumerate(sums)]
        if self.shape.parts == 1:
            return parts[0]
        gate, up = parts
        return self._rounded(self._rounded(jax.nn.silu(gate)) * up)

    def _scaled(self, sums: Num[Array, "64 chunk"], chunk: int, part: int) -> Float[Array, "64 chunk"]:
        result, extras = sums.astype(jnp.float32), Extras(*(getattr(self.gmem, name) for name in Extras._fields))
        if extras.x_scales is not None:
            result = result * self._spread(extras.x_scales.at[pl.ds(self.unit.row, GROUP)], _PER_ROW, 0)
        if extras.scales is not None:
            result = result * self._spread(extras.scales.at[part, self._columns(chunk)], _PER_COLUMN, 1)
        result = self._rounded(result)
        if extras.bias is not None:
            bias = self._rounded(self._spread(extras.bias.at[part, self._columns(chunk)], _PER_COLUMN, 1))
            result = self._rounded(result + bias)
        return result

    def _spread(self, ref: Any, layout: Any, dim: int) -> Float[Array, "64 chunk"]:
        """Broadcast a number for each row (dim 0) or column over the chunk."""
        numbers = plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)
        return lax.broadcast_in_dim(numbers, (GROUP, self.shape.chunk), [dim])

    def _rounded(self, numbers: Float[Array, "64 chunk"]) -> Float[Array, "64 chunk"]:
        return numbers.astype(self.shape.result).astype(jnp.float32)
