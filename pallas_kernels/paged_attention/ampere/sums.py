"""Sums over keys, and the single procedure that folds the sums of a row's segments into its result.

A *segment* is ``keys_per_split`` keys at absolute positions. Decode (one CTA per segment) and prefill (one CTA for all)
begin each segment with `nothing`, `fold` the segments from the first to the last and end with `finished`: so a position
is bitwise identical in both.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat

LOWEST = -1e30  # represents minus infinity where inf - inf would give NaN
_ROUND = 1.5 * 2**23  # added and subtracted, it rounds a float32 to the nearest integer


class Sums(NamedTuple):
    """Sums over the keys that each column has seen; `mma` computes a column independently of other columns."""

    mixed: Any  # [head_dim, columns]
    top: Any  # [columns]: an integer; sums are relative to its power of two
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
    """Return the sums of no keys: folding them leaves other sums unchanged."""

    def per_column(value: float) -> Any:
        return plgpu.layout_cast(jnp.full(dims[1:], value, jnp.float32), layout(dtype).reduce(0))

    return Sums(zeros(dims, dtype), per_column(LOWEST), per_column(0.0))


def load(mixed: Any, stats: Any, dtype: Any) -> Sums:
    """Load what `store` wrote to device memory."""
    top, total = (load_columns(stats.at[row], dtype) for row in (0, 1))
    return Sums(plgpu.load(mixed, layout=layout(dtype), optimized=False), top, total)


def load_columns(numbers: Any, dtype: Any) -> Any:
    return plgpu.load(numbers, layout=layout(dtype).reduce(0), optimized=False)


def store(mixed: Any, stats: Any, sums: Sums) -> None:
    compat.store(mixed, sums.mixed)
    compat.store(stats.at[0], sums.top)
    compat.store(stats.at[1], sums.total)


def fold(before: Sums, segment: Sums) -> Sums:
    """Fold a row's next segment. Factors are powers of two: one rounding, contracted to FMA or not."""
    top = jnp.maximum(before.top, segment.top)
    old, new = jnp.exp2(before.top - top), jnp.exp2(segment.top - top)
    rows = before.mixed.shape[0]
    mixed = before.mixed * across(old, rows) + segment.mixed * across(new, rows)
    return Sums(mixed, top, before.total * old + segment.total * new)


def finished(sums: Sums, sinks: Any | None) -> Any:
    """Return the attention over all keys; zeros for columns that saw none. [head_dim, columns]

    Args:
        sinks: of each column, in powers of two.
    """
    mixed, top, total = sums
    if sinks is not None:
        higher = jnp.maximum(top, rounded(sinks))
        share = jnp.exp2(top - higher)
        mixed, total = mixed * across(share, mixed.shape[0]), total * share + jnp.exp2(sinks - higher)
    return mixed * across(1.0 / jnp.where(total > 0, total, 1.0), mixed.shape[0])
