"""The producer warpgroup of paged decode: owns every copy into SMEM. Also the order of units."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.hopper.decode import types
from pallas_kernels.paged_attention.hopper.decode.types import Barriers, Gmem, Shape, Smem
from pallas_kernels.paged_attention.spans import Span, span

FIRST = -1  # split number that represents the first split of the row


class Unit(NamedTuple):
    """A unit of work: one split of one KV head of one row. Traced scalars."""

    row: Any
    head: Any
    split: Any
    start: Any  # position of the row's first query
    keys: Span
    first: Any  # first key block
    steps: Any  # number of key blocks


class Place(NamedTuple):
    """The current position of a walk over units."""

    row: Any
    head: Any
    split: Any


def run_of(shape: Shape, block: Any, gmem: Gmem) -> tuple[Place, Any]:
    """Return the first unit of a CTA, and its number of units."""
    row, within, count = (gmem.plan[i, block] for i in range(3))
    keys = _span(shape, gmem, row)
    in_head = jnp.maximum(keys.last_split - keys.first_split + 1, 1)
    return Place(row, lax.div(within, in_head), keys.first_split + lax.rem(within, in_head)), count


def unit_at(shape: Shape, gmem: Gmem, place: Place) -> Unit:
    keys = _span(shape, gmem, place.row)
    split = jnp.where(place.split == FIRST, keys.first_split, place.split)
    per_split = shape.tiles.keys_per_split // shape.tiles.block_keys
    first = jnp.maximum(split * per_split, keys.first_block)
    end = jnp.minimum((split + 1) * per_split, keys.end_block)
    return Unit(place.row, place.head, split, gmem.starts[place.row], keys, first, jnp.maximum(end - first, 0))


def after(shape: Shape, unit: Unit) -> Place:
    """Return the next split, else head, else row (the last row's successor is never visited)."""
    row_ends = unit.split == unit.keys.last_split
    head = jnp.where(row_ends, unit.head + 1, unit.head)
    last_head = head == shape.kv_heads
    row = jnp.where(last_head, jnp.minimum(unit.row + 1, shape.rows - 1), unit.row)
    return Place(row, jnp.where(last_head, 0, head), jnp.where(row_ends, FIRST, unit.split + 1))


def _span(shape: Shape, gmem: Gmem, row: Any) -> Span:
    sizes = {"block_keys": shape.tiles.block_keys, "keys_per_split": shape.tiles.keys_per_split}
    return span(gmem.starts[row], gmem.lengths[row], **sizes, window=shape.options.window)


def slot_of(shape: Shape, step: Any) -> Any:
    return lax.rem(step, jnp.int32(shape.tiles.stages))


def query_slot(unit_index: Any) -> Any:
    return lax.rem(unit_index, jnp.int32(types.QUERY_SLOTS))


def query_row(shape: Shape, unit: Unit) -> tuple[Any, Any]:
    """Return the row of ``gmem.query`` where the tile with the unit's first query begins, and its offset in that."""
    row = (unit.row * shape.kv_heads + unit.head) * shape.queries
    offset = lax.rem(row, jnp.int32(types.TILE_ROWS))
    return pl.multiple_of(row - offset, types.TILE_ROWS), offset


def produce(shape: Shape, gmem: Gmem, smem: Smem, barriers: Barriers, block: Any) -> None:
    place, count = run_of(shape, block, gmem)

    def fill_unit(index: Any, carry: tuple[Place, Any]) -> tuple[Place, Any]:
        place, step = carry
        unit = unit_at(shape, gmem, place)
        _copy_query(shape, unit, index, gmem, smem, barriers)
        fill = functools.partial(_fill, shape, unit, step, gmem, smem, barriers)
        lax.fori_loop(0, unit.steps, fill, None)
        return after(shape, unit), step + unit.steps

    _, steps = lax.fori_loop(0, count, fill_unit, (place, jnp.int32(0)))
    _drain(barriers.slot_free, steps, shape.tiles.stages)
    _drain(barriers.query_free, count, types.QUERY_SLOTS)


def _drain(free: Any, used: Any, slots: int) -> None:
    """Wait for every arrival, so that no mbarrier ends in the middle of a phase."""

    def wait(index: Any, _: None) -> None:
        plgpu.barrier_wait(free.at[lax.rem(index, jnp.int32(slots))])

    lax.fori_loop(jnp.maximum(used - slots, 0), used, wait, None)


def _copy_query(shape: Shape, unit: Unit, index: Any, gmem: Gmem, smem: Smem, barriers: Barriers) -> None:
    slot = query_slot(index)

    @pl.when(index >= types.QUERY_SLOTS)
    def _reuse() -> None:
        plgpu.barrier_wait(barriers.query_free.at[slot])

    row, _ = query_row(shape, unit)
    plgpu.copy_gmem_to_smem(
        gmem.query.at[pl.ds(row, shape.columns)], smem.query.at[slot], barriers.query_ready.at[slot]
    )


def _columns(shape: Shape, width: int, any_scalar: Any) -> Any:
    """Return the first ``width`` columns of memory. TMA fills columns that are out of bounds with zeros."""
    return pl.ds(0 if width == shape.head_dim else pl.multiple_of(any_scalar * 0, width), width)


def _fill(shape: Shape, unit: Unit, done: Any, gmem: Gmem, smem: Smem, barriers: Barriers, index: Any, _: None) -> None:
    slot = slot_of(shape, done + index)

    @pl.when(done + index >= shape.tiles.stages)
    def _reuse() -> None:
        plgpu.barrier_wait(barriers.slot_free.at[slot])

    first = (unit.first + index) * shape.tiles.block_keys
    pages = [page_id(shape, gmem, unit.row, first + i * shape.piece) for i in range(shape.pieces)]
    # All keys first, so that the scores need not wait for the values.
    for half in (0, 1):
        if shape.gathered:
            _copy_gathered(shape, unit, half, first, slot, gmem, smem, barriers)
        for i, page in enumerate(pages):
            at = first + i * shape.piece
            wanted = (at < unit.keys.high) & (at + shape.piece > unit.keys.low)
            piece = _Piece(half, page, unit.head, pl.multiple_of(lax.rem(at, jnp.int32(shape.page)), shape.piece))
            copy = functools.partial(_copy_piece, shape, piece, i, slot, gmem, smem, barriers)
            skip = functools.partial(_skip_piece, shape, half, slot, barriers)
            lax.cond(wanted, copy, skip)


class _Piece(NamedTuple):
    """Keys (half 0) or values (half 1) of one head."""

    half: int
    page: Any
    head: Any
    first: Any  # row of the page


def page_id(shape: Shape, gmem: Gmem, row: Any, key: Any) -> Any:
    """Return the page, clipped to the pool: past the row's end or before its window the table may contain anything."""
    index = jnp.minimum(lax.div(key, jnp.int32(shape.page)), gmem.tables.shape[1] - 1)
    return jnp.clip(gmem.tables[row, index], 0, gmem.pool.shape[0] - 1)


def _copy_piece(shape: Shape, piece: _Piece, index: int, slot: Any, gmem: Gmem, smem: Smem, barriers: Barriers) -> None:
    target, ready = (smem.keys, barriers.keys_ready) if piece.half == 0 else (smem.values, barriers.values_ready)
    columns = _columns(shape, shape.key_dim if piece.half == 0 else shape.value_dim, piece.head)
    where, to = (piece.page, piece.half, piece.head, pl.ds(piece.first, shape.piece)), _rows(shape, index)
    plgpu.copy_gmem_to_smem(gmem.pool.at[(*where, columns)], target.at[slot, to], ready.at[slot])
    if _scaled_by_piece(shape):
        factors = smem.key_scales if piece.half == 0 else smem.value_scales
        plgpu.copy_gmem_to_smem(gmem.scales.at[where], factors.at[slot, to], ready.at[slot])


def _scaled_by_piece(shape: Shape) -> bool:
    return shape.scaled_by == "token" and not shape.gathered


def _copy_gathered(
    shape: Shape, unit: Unit, half: int, first: Any, slot: Any, gmem: Gmem, smem: Smem, barriers: Barriers
) -> None:
    """Copy the factors of a whole slot."""
    factors, ready = (smem.key_scales, barriers.keys_ready) if half == 0 else (smem.value_scales, barriers.values_ready)
    keys = pl.ds(pl.multiple_of(first, shape.tiles.block_keys), shape.tiles.block_keys)
    plgpu.copy_gmem_to_smem(gmem.scales.at[unit.row, half, unit.head, keys], factors.at[slot], ready.at[slot])


def _rows(shape: Shape, index: int) -> Any:
    return pl.ds(index * shape.piece, shape.piece)


def _skip_piece(shape: Shape, half: int, slot: Any, barriers: Barriers) -> None:
    """Arrive for a copy that no query sees: the slot's old contents are masked."""
    ready = barriers.keys_ready if half == 0 else barriers.values_ready
    for _ in range(2 if _scaled_by_piece(shape) else 1):
        plgpu.barrier_arrive(ready.at[slot])
