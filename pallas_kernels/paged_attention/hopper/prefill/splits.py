"""Sums over splits of the keys in `prefill`. Registers hold one split: sums over earlier splits are in memory, those of
values in SMEM and the others in device memory. Each thread reads only what it has written itself."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat
from pallas_kernels.paged_attention.hopper.prefill.rows import Rows, per_row, spread, zeros
from pallas_kernels.paged_attention.hopper.prefill.types import TOTALS, WARPGROUP_ROWS, Shape, Smem
from pallas_kernels.paged_attention.hopper.softmax import LOWEST


class Sums(NamedTuple):
    """Sums over the keys of a split, relative to two to the power of the maximum."""

    mixed: Any  # [WARPGROUP_ROWS, head_dim]: weighted values
    total: Any  # [WARPGROUP_ROWS, TOTALS]: weights, the same in all columns; None if the softmax has them


def no_sums(shape: Shape) -> Sums:
    return Sums(zeros(shape.head_dim), zeros(TOTALS) if shape.like_decode else None)


def _where(rows: Rows) -> tuple[Any, ...]:
    tile = rows.tile
    return tile.sequence, tile.index, lax.div(tile.head, jnp.int32(rows.shape.block_heads)), rows.warpgroup


def _put_stats(rows: Rows, top: Any, total: Any) -> None:
    for i, value in enumerate((top, total)):
        compat.store(rows.gmem.stats.at[(*_where(rows), i)], value)


def begin_splits(rows: Rows, smem: Smem) -> None:
    """Store sums over nothing, if there will be several splits."""
    if not rows.shape.splits:
        return

    @pl.when(rows.tile.several_splits(rows.shape))
    def _begin() -> None:
        compat.store(smem.earlier.at[rows.warpgroup + rows.zero], zeros(rows.shape.head_dim))
        _put_stats(rows, per_row(LOWEST), per_row(0.0))


def total_with_earlier(rows: Rows, total: Any, top: Any) -> tuple[Any, Any]:
    """Return the factor of earlier splits, relative to ``top``, and the sum of all weights so far."""
    load = functools.partial(plgpu.load, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
    old_top, old_total = (load(rows.gmem.stats.at[(*_where(rows), i)]) for i in range(2))
    share = jnp.exp2(old_top - top)
    return share, old_total * share + total


def with_earlier(rows: Rows, smem: Smem, columns: Any, share: Any, mixed: Any) -> Any:
    """Add earlier splits to some columns of the sums over a split."""
    place = smem.earlier.at[rows.warpgroup + rows.zero].at[:, columns]
    earlier = plgpu.load(place, layout=plgpu.Layout.WGMMA, optimized=False)
    return earlier * spread(share, columns.size) + mixed


def end_split(rows: Rows, smem: Smem, sums: Sums, top: Any) -> Sums:
    """Add a split's sums to the earlier ones, some columns at a time to save registers, and return zero sums."""
    share, total = total_with_earlier(rows, of_rows(sums.total), top)
    for columns in column_pieces(rows.shape):
        whole = with_earlier(rows, smem, columns, share, columns_of(sums.mixed, columns))
        compat.store(smem.earlier.at[rows.warpgroup + rows.zero].at[:, columns], whole)
    _put_stats(rows, top, total)
    return no_sums(rows.shape)


def column_pieces(shape: Shape) -> list[Any]:
    return [pl.ds(at, min(64, shape.head_dim - at)) for at in range(0, shape.head_dim, 64)]


def columns_of(matrix: Any, columns: Any) -> Any:
    return lax.slice(matrix, (0, columns.start), (WARPGROUP_ROWS, columns.start + columns.size))


def of_rows(total: Any) -> Any:
    """Return one of the columns, which are all the same."""
    return total.max(axis=1)
