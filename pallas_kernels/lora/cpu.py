"""LoRA shrink and expand on a CPU: products of rows with the low-rank arrays of each row's adapter.

A loop over tiles slices (copies) each tile's arrays, and makes a library call for each of its small products. If no
adapter has more than one tile, all are multiplied at once instead: a batch of the same products as in the loop, so that
both are bitwise identical.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.grouped_matmul import Groups

_ROWS_BY_ROWS = ((1,), (1,))
_LEAST_SHARE = 2  # at least one in this many slots must have rows, or else the loop has less work


class BySlot(NamedTuple):
    """Rows by slot instead of by tile.

    Attributes:
        entries: the row at each position; the number of rows if it is empty.
        places: the position of each row, counted over all slots; the number of positions if it has no adapter.
        suits: whether each slot has capacity for its rows, and enough slots have some.
    """

    entries: Int[Array, "slots places"]
    places: Int[Array, " rows"]
    suits: Bool[Array, ""]


def by_slot(groups: Groups, count: int) -> BySlot | None:
    """Arrange by slot the rows that `group` has put into tiles.

    Args:
        count: number of slots.
    """
    if groups.experts is None:
        return None
    (tiles, size), (rows,) = groups.entries.shape, groups.places.shape
    owners = jnp.where(jnp.arange(tiles) < groups.occupied, groups.experts, count)
    single = (jnp.zeros(count + 1, jnp.int32).at[owners].add(1)[:count] <= 1).all()
    owner = owners.at[groups.places // size].get(mode="fill", fill_value=count)
    places = jnp.where(owner < count, owner * size + groups.places % size, count * size)
    entries = jnp.full(count * size, rows, jnp.int32).at[places].set(jnp.arange(rows, dtype=jnp.int32), mode="drop")
    suits = single & (groups.occupied * _LEAST_SHARE >= count)
    return BySlot(entries.reshape(count, size), places, suits)


def low_rank(
    x: Float[Array, "rows k"],
    a: Float[Array, "slots rank k"],
    b: Float[Array, "slots n rank"],
    groups: Groups,
    slots: BySlot | None,
) -> Float[Array, "rows n"]:
    """Compute ``x a^T b^T`` with each row's slot, in the dtype of ``x``; zeros for rows without one.

    Args:
        groups: tiles of the rows.
        slots: result of `by_slot`; None: always loop over the tiles.
    """
    if slots is None:
        return _in_tiles(x, a, b, groups)
    return lax.cond(slots.suits, lambda: _at_once(x, a, b, slots), lambda: _in_tiles(x, a, b, groups))


def _at_once(x: jax.Array, a: jax.Array, b: jax.Array, slots: BySlot) -> jax.Array:
    held = x.at[slots.entries].get(mode="fill", fill_value=0)
    batch = ((0,), (0,))
    hidden = _dot(held, a, (((2,), (2,)), batch))
    delta = jnp.swapaxes(_dot(b, hidden, (((2,), (2,)), batch)), 1, 2)
    return _back(delta, slots.places)


def _in_tiles(x: jax.Array, a: jax.Array, b: jax.Array, groups: Groups) -> jax.Array:
    held = x.at[groups.entries].get(mode="fill", fill_value=0)
    owners = jnp.arange(held.shape[0]) if groups.experts is None else groups.experts

    def tile(index: jax.Array, result: jax.Array) -> jax.Array:
        rows, own_a, own_b = (
            lax.dynamic_index_in_dim(of, at, keepdims=False)
            for of, at in ((held, index), (a, owners[index]), (b, owners[index]))
        )
        hidden = _dot(rows, own_a, (_ROWS_BY_ROWS, ((), ())))
        delta = _dot(own_b, hidden, (_ROWS_BY_ROWS, ((), ())))
        return lax.dynamic_update_index_in_dim(result, delta.T, index, 0)

    start = jnp.zeros((*held.shape[:2], b.shape[1]), x.dtype)
    return _back(lax.fori_loop(0, groups.occupied, tile, start), groups.places)


def _back(delta: jax.Array, places: jax.Array) -> jax.Array:
    return delta.reshape(-1, delta.shape[-1]).at[places].get(mode="fill", fill_value=0)


def _dot(x: jax.Array, w: jax.Array, numbers: lax.DotDimensionNumbers) -> jax.Array:
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(x, w, numbers, precision=precision)
