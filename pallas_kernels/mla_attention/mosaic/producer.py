"""The producer warpgroup of the MLA kernel: owns every copy into SMEM."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mla_attention.mosaic.operands import ROPE, SLOTS, TILE, Barriers, Gmem, Latent, Shape, Smem
from pallas_kernels.mla_attention.mosaic.units import Place, Unit, after, run_of, unit_at


def produce(shape: Shape, gmem: Gmem, smem: Smem, barriers: Barriers) -> None:
    """Keep both slots full across units; drain the last arrivals, so that no mbarrier ends in mid-phase."""
    place, count = run_of(shape, gmem)

    def fill_unit(index: Any, carry: tuple[Place, Any]) -> tuple[Place, Any]:
        place, done = carry
        unit = unit_at(shape, gmem, place)
        pl.when(index > 0)(lambda: plgpu.barrier_wait(barriers.query_free))
        _copy_queries(shape, unit, gmem, smem, barriers)
        lax.fori_loop(0, unit.steps, functools.partial(_fill_pair, shape, unit, done, gmem, smem, barriers), None)
        return after(shape, unit), done + unit.steps

    _, done = lax.fori_loop(0, count, fill_unit, (place, jnp.int32(0)))
    pl.when(count > 0)(lambda: plgpu.barrier_wait(barriers.query_free))

    @pl.when(done > 0)
    def _drain() -> None:
        for slot in range(SLOTS):
            for free in barriers.free:
                plgpu.barrier_wait(free.at[slot])


def _columns(shape: Shape) -> Latent:
    half = shape.half
    return Latent(pl.ds(0, half), pl.ds(half, half), pl.ds(shape.rank, ROPE))


def _copy_queries(shape: Shape, unit: Unit, gmem: Gmem, smem: Smem, barriers: Barriers) -> None:
    queries, _ = smem.query
    rows = pl.ds(pl.multiple_of(unit.tile * shape.tile_rows, shape.tile_rows), shape.tile_rows)
    for columns, target in zip(_columns(shape), queries, strict=True):
        source = gmem.query.at[unit.sequence, rows, columns]
        plgpu.copy_gmem_to_smem(source, target.at[0, pl.ds(0, shape.tile_rows)], barriers.query_ready)


def _fill_pair(
    shape: Shape, unit: Unit, done: Any, gmem: Gmem, smem: Smem, barriers: Barriers, index: Any, _: None
) -> None:
    for slot in range(SLOTS):
        key = ((unit.first + index) * SLOTS + slot) * TILE
        pages = [_page_id(shape, gmem, unit.sequence, key + i * shape.piece) for i in range(shape.pieces)]
        for part, columns in enumerate(_columns(shape)):
            _await_free(barriers.free[part].at[slot], done + index > 0)
            target, ready = smem.slots[part].at[slot], barriers.ready[part].at[slot]
            for i, page in enumerate(pages):
                _copy_piece(shape, unit, gmem, key + i * shape.piece, page, columns, target, i, ready)


def _await_free(free: Any, used: Any) -> None:
    """Wait until a slot is free; before its first use it is."""
    pl.when(used)(lambda: plgpu.barrier_wait(free))


def _page_id(shape: Shape, gmem: Gmem, sequence: Any, key: Any) -> Any:
    """Return the page of a key, clipped to the pool: past the sequence's end the table may contain anything."""
    index = jnp.minimum(lax.div(key, jnp.int32(shape.page)), shape.width - 1)
    return jnp.clip(gmem.tables[sequence, index], 0, gmem.pool.shape[0] - 1)


def _copy_piece(
    shape: Shape, unit: Unit, gmem: Gmem, key: Any, page: Any, columns: Any, target: Any, index: int, ready: Any
) -> None:
    def copy() -> None:
        offset = pl.multiple_of(lax.rem(key, jnp.int32(shape.page)), shape.piece)
        source = gmem.pool.at[page, pl.ds(offset, shape.piece), columns]
        plgpu.copy_gmem_to_smem(source, target.at[pl.ds(index * shape.piece, shape.piece)], ready)

    # No query sees the other keys: the slot's old contents are masked, and cleared before use as values.
    lax.cond(key < unit.high, copy, lambda: plgpu.barrier_arrive(ready))
