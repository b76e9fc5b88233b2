"""The producer of `prefill`: one warpgroup that owns every copy of keys and values into SMEM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.layouts import row_layout
from pallas_kernels.paged_attention.hopper.prefill.types import (
    WARPGROUP_ROWS,
    Barriers,
    Gmem,
    Shape,
    Smem,
    Tile,
    slot_of,
)

_COLUMNS = 64  # columns of keys or values that a warpgroup converts or clears at a time
_FEW_ROWS = 16  # rows at a time, if it has few registers


class _Source(NamedTuple):
    """The source of one copy."""

    page: Any
    offset: Any  # first position within the page


def _halves(smem: Smem, barriers: Barriers) -> tuple[tuple[int, Any, Any, Any], ...]:
    """Return the index in the pool, the slots and their mbarriers, for keys and for values."""
    keys = (0, smem.keys, barriers.keys_ready, barriers.keys_free)
    return keys, (1, smem.values, barriers.values_ready, barriers.values_free)


def produce(shape: Shape, tile: Tile, gmem: Gmem, smem: Smem, barriers: Barriers) -> None:
    """Keep the slots full; drain the last arrivals, so that no mbarrier ends in the middle of a phase."""
    if shape.quantized:
        _produce_converted(shape, tile, gmem, smem, barriers)
    else:
        _produce_copied(shape, tile, gmem, smem, barriers)

    def drain(step: Any, _: None) -> None:
        plgpu.barrier_wait(barriers.keys_free.at[slot_of(shape, step)])
        plgpu.barrier_wait(barriers.values_free.at[slot_of(shape, step)])

    lax.fori_loop(jnp.maximum(tile.steps - shape.stages, 0), tile.steps, drain, None)


def _produce_copied(shape: Shape, tile: Tile, gmem: Gmem, smem: Smem, barriers: Barriers) -> None:
    def fill(step: Any, _: None) -> None:
        slot = slot_of(shape, step)
        sources = _sources(shape, tile, gmem, step)
        for half, target, ready, free in _halves(smem, barriers):
            _await_free(shape, step, free.at[slot])
            _copy(shape, tile, sources, half, gmem, target.at[slot], ready.at[slot])

    lax.fori_loop(0, tile.steps, fill, None)


def _await_free(shape: Shape, step: Any, free: Any) -> None:
    @pl.when(step >= shape.stages)
    def _reused() -> None:
        plgpu.barrier_wait(free)


def _sources(shape: Shape, tile: Tile, gmem: Gmem, step: Any) -> list[_Source]:
    return [_source(shape, tile, gmem, step, i) for i in range(shape.copies)]


def _source(shape: Shape, tile: Tile, gmem: Gmem, step: Any, i: Any) -> _Source:
    """Return the source of a copy. For keys past the last page, or past the table, any page of the pool will do."""
    key = tile.first_key(shape, step)
    if shape.width % shape.copies == 0 and shape.page <= shape.piece:
        # Blocks never straddle the table's end, so all pages of a block share one address, which needs few registers.
        first = jnp.minimum(lax.div(key, jnp.int32(shape.page)), shape.width - shape.copies)
        page, offset = gmem.tables[tile.sequence, first + i], jnp.int32(0)
    else:
        key += i * shape.piece
        index = lax.div(key, jnp.int32(shape.page))
        page = gmem.tables[tile.sequence, jnp.minimum(index, shape.width - 1)]
        offset = key - index * shape.page
    return _Source(jnp.clip(page, 0, gmem.pool.shape[0] - 1), offset)


def _copy(shape: Shape, tile: Tile, sources: list[_Source], half: int, gmem: Gmem, target: Any, ready: Any) -> None:
    for i, source in enumerate(sources):
        _copy_piece(shape, tile, source, half, gmem, target.at[pl.ds(i * shape.piece, shape.piece)], ready)


def _copy_in_turn(shape: Shape, tile: Tile, step: Any, half: int, gmem: Gmem, target: Any, ready: Any) -> None:
    """Copy as `_copy`, one source at a time, for a producer with few registers."""

    def copy(i: Any, _: None) -> None:
        rows = pl.ds(pl.multiple_of(i * shape.piece, shape.piece), shape.piece)
        _copy_piece(shape, tile, _source(shape, tile, gmem, step, i), half, gmem, target.at[rows], ready)

    lax.fori_loop(0, shape.copies, copy, None)


def _copy_piece(shape: Shape, tile: Tile, source: _Source, half: int, gmem: Gmem, target: Any, ready: Any) -> None:
    place = gmem.pool.at[source.page, half, tile.kv_head]
    if shape.page > shape.piece:
        place = place.at[pl.ds(pl.multiple_of(source.offset, shape.piece), shape.piece)]
    plgpu.copy_gmem_to_smem(place, target, ready)


def _produce_converted(shape: Shape, tile: Tile, gmem: Gmem, smem: Smem, barriers: Barriers) -> None:
    """Produce from a quantised pool: copies go to ``raw``; this warpgroup converts them to 16-bit numbers."""

    def raw_slot(half: int, step: Any) -> tuple[Any, Any]:
        slot = lax.rem(step, jnp.int32(shape.raw_slots))
        return smem.raw.at[half, slot], barriers.raw_ready.at[half * shape.raw_slots + slot]

    def fetch(half: int, step: Any) -> None:
        @pl.when(step < tile.steps)
        def _start() -> None:
            _copy_in_turn(shape, tile, step, half, gmem, *raw_slot(half, step))

    def fill(step: Any, _: None) -> None:
        slot = slot_of(shape, step)
        for half, target, ready, free in _halves(smem, barriers):
            raw, raw_ready = raw_slot(half, step)
            plgpu.barrier_wait(raw_ready)
            _await_free(shape, step, free.at[slot])
            _convert(shape, tile, gmem, step, half, raw, target.at[slot])
            plgpu.commit_smem()
            plgpu.barrier_arrive(ready.at[slot])
            fetch(half, step + shape.raw_slots)

    for step in range(shape.raw_slots):
        fetch(0, jnp.int32(step))
        fetch(1, jnp.int32(step))
    lax.fori_loop(0, tile.steps, fill, None)


def _convert(shape: Shape, tile: Tile, gmem: Gmem, step: Any, half: int, raw: Any, target: Any) -> None:
    """Multiply numbers by scales; zero what no query of the tile sees, as those scales are undefined."""
    start = tile.first_key(shape, step)

    def piece(rows: Any, columns: Any, layout: Any) -> None:
        numbers = plgpu.load(raw.at[rows, columns], layout=layout, optimized=False).astype(jnp.float32)
        first = start + rows.start
        if shape.options.scales:
            keys = pl.ds(pl.multiple_of(first, rows.size), rows.size)
            place = gmem.factors.at[tile.sequence, half, tile.kv_head, keys]
            factors = plgpu.load(place, layout=layout.reduce(1), optimized=False)
            numbers = numbers * lax.broadcast_in_dim(factors, numbers.shape, [0])
        kept = rows_between(numbers.shape, tile.low - first, tile.high - first, layout)
        target[rows, columns] = jnp.where(kept, numbers, 0.0).astype(shape.dtype)

    if shape.wide:
        _in_turn(shape, piece)
        return
    for rows, columns in pieces(shape):
        piece(rows, columns, plgpu.Layout.WGMMA)


def _in_turn(shape: Shape, piece: Callable[[Any, Any, Any], None]) -> None:
    """Process a slot in a loop over small tiles: registers suffice for one at a time."""
    layout, _ = row_layout(_FEW_ROWS, _COLUMNS, 8)

    def some_rows(index: Any, _: None) -> None:
        rows = pl.ds(pl.multiple_of(index * _FEW_ROWS, _FEW_ROWS), _FEW_ROWS)

        for column in range(0, shape.head_dim, _COLUMNS):
            piece(rows, pl.ds(column, _COLUMNS), layout)

    lax.fori_loop(0, shape.block_keys // _FEW_ROWS, some_rows, None)


def pieces(shape: Shape) -> list[tuple[Any, Any]]:
    """Return a slot's rows and columns in tiles that cost few registers: whole swizzled tiles, rows of a wgmma."""
    rows, columns = range(0, shape.block_keys, WARPGROUP_ROWS), range(0, shape.head_dim, _COLUMNS)
    widths = {column: min(_COLUMNS, shape.head_dim - column) for column in columns}
    return [(pl.ds(row, WARPGROUP_ROWS), pl.ds(column, widths[column])) for row in rows for column in columns]


def rows_between(dims: tuple[int, ...], low: Any, high: Any, layout: Any = plgpu.Layout.WGMMA) -> Any:
    """Return True in the rows [low, high) of a matrix."""
    index = plgpu.broadcasted_iota(jnp.int32, dims, 0, layout=layout)
    return (index >= low) & (index < high)
