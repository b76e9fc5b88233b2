"""Copies within a pool in XLA: a gather, then a scatter in place (under donation)."""

from __future__ import annotations

import jax
from jaxtyping import Array, Int

from pallas_kernels.kv_copy.reference import each


def copy_pages[Pool](pool: Pool, source: Int[Array, " copies"], target: Int[Array, " copies"]) -> Pool:
    """See `reference.copy_pages`."""

    def copied(array: jax.Array) -> jax.Array:
        return array.at[target].set(array.at[source].get(mode="clip"), mode="drop", wrap_negative_indices=False)

    return each(copied, pool)


def move_rows[Pool](
    pool: Pool,
    source_pages: Int[Array, " moves"],
    source_slots: Int[Array, " moves"],
    target_pages: Int[Array, " moves"],
    target_slots: Int[Array, " moves"],
) -> Pool:
    """See `reference.move_rows`."""

    def moved(array: jax.Array) -> jax.Array:
        if array.ndim < 4:  # scales per page and head
            return array
        rows = array.at[source_pages, :, :, source_slots].get(mode="clip")
        return array.at[target_pages, :, :, target_slots].set(rows, mode="drop", wrap_negative_indices=False)

    return each(moved, pool)


def gather_pages[Pool](pool: Pool, pages: Int[Array, " staged"]) -> Pool:
    """Gather pages into contiguous memory, to be swapped out or exported: ``[staged, ...]`` of every array."""
    return each(lambda array: array.at[pages].get(mode="clip"), pool)


def scatter_pages[Pool](pool: Pool, pages: Int[Array, " staged"], staged: Pool) -> Pool:
    """Write the result of `gather_pages` into ``pages``; a page out of range is dropped."""

    def put(array: jax.Array, own: jax.Array) -> jax.Array:
        return array.at[pages].set(own, mode="drop", wrap_negative_indices=False)

    return each(put, pool, staged)
