"""Reference of copies within a pool, one after the other.

A pool is one array or a tree of arrays ``[pages, ...]``: the numbers of one or more pools and their scales, per page
and head or per token. A copy whose target is out of range, above or below, is dropped, whatever its source. All sources
are read before anything is written: a slot that is source and target is read with its earlier contents. Nothing may be
the target of two copies. Arrays of size zero are placeholders for scales that a pool does not have.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


def each[Pool](change: Callable[..., jax.Array], pool: Pool, *others: Pool) -> Pool:
    """Apply ``change`` to every array that is not empty."""
    return jax.tree.map(lambda array, *rest: change(array, *rest) if array.size else array, pool, *others)


def copy_pages[Pool](pool: Pool, source: Int[Array, " copies"], target: Int[Array, " copies"]) -> Pool:
    """Copy page ``source[i]`` to page ``target[i]``."""

    def copied(array: jax.Array) -> jax.Array:
        result = array
        for i in range(source.shape[0]):
            meant = (jnp.arange(array.shape[0]) == target[i]).reshape(-1, *(1,) * (array.ndim - 1))
            result = jnp.where(meant, array[jnp.clip(source[i], 0, array.shape[0] - 1)], result)
        return result

    return each(copied, pool)


def move_rows[Pool](
    pool: Pool,
    source_pages: Int[Array, " moves"],
    source_slots: Int[Array, " moves"],
    target_pages: Int[Array, " moves"],
    target_slots: Int[Array, " moves"],
) -> Pool:
    """Move slot ``source_slots[i]`` of page ``source_pages[i]``, all heads' keys and values, to another slot.

    Arrays are ``[pages, 2, kv_heads, page, ...]``: accepted tokens of a draft tree move up to the slots of a chain.
    Scales per page and head (``[pages, 2, kv_heads]``) stay: they must be the same on both pages.
    """

    def moved(array: jax.Array) -> jax.Array:
        if array.ndim < 4:
            return array
        result = array
        pages, slots = jnp.arange(array.shape[0])[:, None], jnp.arange(array.shape[3])
        for i in range(source_pages.shape[0]):
            row = array[jnp.clip(source_pages[i], 0, array.shape[0] - 1), :, :, source_slots[i]]
            meant = ((pages == target_pages[i]) & (slots == target_slots[i]))[:, None, None]
            meant = meant.reshape(meant.shape + (1,) * (array.ndim - 4))
            result = jnp.where(meant, row[None, :, :, None], result)
        return result

    return each(moved, pool)
