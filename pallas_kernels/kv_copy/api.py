"""API of kv_copy: one Mosaic kernel for Ampere, Ada and Hopper GPUs, XLA everywhere else."""

from __future__ import annotations

from typing import Any

from jaxtyping import Array, Int

from pallas_kernels.choice import AMPERE, HOPPER, Choice, Target, Wish, choose
from pallas_kernels.kv_copy import mosaic, xla
from pallas_kernels.kv_copy.xla import gather_pages, scatter_pages
from pallas_kernels.launches import noted

__all__ = ["copy_pages", "explain", "gather_pages", "move_rows", "scatter_pages"]

_OP = "kv_copy"


def explain(pool: Any, source: Any, *, path: Wish = "auto", target: Target | None = None) -> Choice:
    """Return the path of copies within ``pool`` from ``source`` pages, and why, from shapes and dtypes alone.

    `gather_pages` and `scatter_pages` always use XLA: one kernel each, which a Mosaic kernel would not improve.

    Args:
        path: "mosaic" and "xla" force one.
        target: lowering target of the program; None: see `pallas_kernels.choice`.

    Raises:
        ValueError: the Mosaic kernel is forced and does not support these operands.
    """
    return choose(_OP, path, mosaic.refusal(pool, source), least=AMPERE, most=HOPPER, target=target)


def copy_pages[Pool](
    pool: Pool, source: Int[Array, " copies"], target: Int[Array, " copies"], *, path: Wish = "auto"
) -> Pool:
    """Copy page ``source[i]`` to page ``target[i]``, of one array ``[pages, ...]`` or of a tree of them, in place.

    All sources are read before anything is written; a copy to a page out of range is dropped; see `reference`.
    """
    chosen = explain(pool, source, path=path)
    return noted(_OP, chosen.path, mosaic.copy_pages, xla.copy_pages)(pool, source, target)


def move_rows[Pool](
    pool: Pool,
    source_pages: Int[Array, " moves"],
    source_slots: Int[Array, " moves"],
    target_pages: Int[Array, " moves"],
    target_slots: Int[Array, " moves"],
    *,
    path: Wish = "auto",
) -> Pool:
    """Move tokens to other slots, of one array ``[pages, 2, kv_heads, page, ...]`` or of a tree of them, in place.

    All sources are read before anything is written; a move to a page or slot out of range is dropped; see `reference`.
    """
    chosen = explain(pool, source_pages, path=path)
    rows = (source_pages, source_slots, target_pages, target_slots)
    return noted(_OP, chosen.path, mosaic.move_rows, xla.move_rows)(pool, *rows)
