"""The sums of a consumer of paged decode, in wgmma layouts, and their merge over splits."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.hopper.decode.types import Shape
from pallas_kernels.paged_attention.hopper.softmax import LOWEST

MATRIX = plgpu.Layout.WGMMA
PER_COLUMN, PER_ROW = MATRIX.reduce(0), MATRIX.reduce(1)


class Sums(NamedTuple):
    """Softmax state over some of the keys: ``mixed / total`` is the weighted mean of their values."""

    mixed: Any  # [value_dim, columns]
    top: Any  # [columns]: the integer that scores are relative to
    total: Any  # [columns]; [ONES_ROWS, columns] within a split if it is a product (`Shape.total_by_ones`)


def nothing(shape: Shape) -> Sums:
    dims = (shape.columns,)
    return Sums(
        plgpu.layout_cast(jnp.zeros((shape.value_dim, *dims), jnp.float32), MATRIX),
        plgpu.layout_cast(jnp.full(dims, LOWEST, jnp.float32), PER_COLUMN),
        plgpu.layout_cast(jnp.zeros(dims, jnp.float32), PER_COLUMN),
    )


def pick_sums(condition: Any, yes: Sums, no: Sums) -> Sums:
    """Select by one scalar; not by multiplication with 0, or one row's NaN would reach the next."""
    number = condition.astype(jnp.int32)
    return Sums(*(jnp.where(jnp.broadcast_to(number, a.shape) != 0, a, b) for a, b in zip(yes, no, strict=True)))


def across(shape: tuple[int, ...], of_columns: Any) -> Any:
    return as_matrix(lax.broadcast_in_dim(of_columns, shape, [1]))


def merge(a: Sums, b: Sums) -> Sums:
    """Merge sums. Rescaling by powers of two is exact; merging with nothing leaves sums bitwise unchanged."""
    top = jnp.maximum(a.top, b.top)
    share_a, share_b = jnp.exp2(a.top - top), jnp.exp2(b.top - top)
    mixed = a.mixed * across(a.mixed.shape, share_a) + b.mixed * across(b.mixed.shape, share_b)
    return Sums(mixed, top, a.total * share_a + b.total * share_b)


def as_matrix(x: Any) -> Any:
    return plgpu.layout_cast(x, MATRIX)


def per_column(x: Any) -> Any:
    """Cast to the per-column layout. Explicit layouts spare the compiler a search that takes minutes."""
    return plgpu.layout_cast(x, PER_COLUMN)
