"""Sums over keys, and the one way in which those of several segments of a row become its result.

A *segment* is ``keys_per_split`` keys at absolute positions. Whoever goes through a row's keys, one thread block for
each segment (decode) or one for all of them (prefill), begins each segment with `nothing`, lets `fold` add them up from
the first to the last and ends with `finished`: so a position's bits are the same in both.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat

LOWEST = -1e30  # stands for minus infinity where inf - inf would give NaN
_ROUND = 1.5 * 2**23  # added and subtracted, it rounds a float32 to the nearest integer


class Sums(NamedTuple):
    """Of the keys that each column has seen; a column is what `mma` makes of one query, whatever its neighbours."""

    mixed: Any  # [head_dim, columns]
    top: Any  # [columns]: an integer, to whose power of two the others are relative
    total: Any  # [columns]


def layout(dtype: Any) -> Any:
    return plgpu.Layout.MMA_ACC(dtype)


def zeros(dims: tuple[int, ...], dtype: Any) -> Any:
    return plgpu.layout_cast(jnp.zeros(dims, jnp.float32), layout(dtype))


def across(per_column: Any, rows: int) -> Any:
    return lax.broadcast_in_dim(per_column, (rows, per_column.shape[0]), [1])


def rounded(numbers: Any) -> Any:
    return (numbers + _ROUND) - _ROUND


def nothing(dims: tuple[int, int], dtype: Any) -> Sums:
    """The sums of no keys: folded with others, they leave those as they are."""

    def per_column(value: float) -> Any:
        return plgpu.layout_cast(jnp.full(dims[1:], value, jnp.float32), layout(dtype).reduce(0))

    return Sums(zeros(dims, dtype), per_column(LOWEST), per_column(0.0))


def load(mixed: Any, stats: Any, dtype: Any) -> Sums:
    """What `store` left in device memory."""
    top, total = (load_columns(stats.at[row], dtype) for row in (0, 1))
    return Sums(plgpu.load(mixed, layout=layout(dtype), optimized=False), top, total)


def load_columns(numbers: Any, dtype: Any) -> Any:
    return plgpu.load(numbers, layout=layout(dtype).reduce(0), optimized=False)


def store(mixed: Any, stats: Any, sums: Sums) -> None:
    compat.store(mixed, sums.mixed)
    compat.store(stats.at[0], sums.top)
    compat.store(stats.at[1], sums.total)


def fold(before: Sums, segment: Sums) -> Sums:
    """Sums of a row's segments up to and with this one. Shares are powers of two: one rounding, contracted or not."""
    top = jnp.maximum(before.top, segment.top)
    old, new = jnp.exp2(before.top - top), jnp.exp2(segment.top - top)
    rows = before.mixed.shape[0]
    mixed = before.mixed * across(old, rows) + segment.mixed * across(new, rows)
    return Sums(mixed, top, before.total * old + segment.total * new)


def finished(sums: Sums, sinks: Any | None) -> Any:
    """The attention of all keys; zeros where a column saw none. [head_dim, columns]

    Args:
        sinks: of each column, in powers of two.
    """
    mixed, top, total = sums
    if sinks is not None:
        higher = jnp.maximum(top, rounded(sinks))
        share = jnp.exp2(top - higher)
        mixed, total = mixed * across(share, mixed.shape[0]), total * share + jnp.exp2(sinks - higher)
    return mixed * across(1.0 / jnp.where(total > 0, total, 1.0), mixed.shape[0])
