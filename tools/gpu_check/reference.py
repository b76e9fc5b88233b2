"""Paged decode attention in numpy float64, and operands that punish a kernel for reading what it must not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np


class Case(NamedTuple):
    """Host operands of one decode call: q [rows, heads, head_dim], pool [pages, 2, kv_heads, page, head_dim]."""

    q: np.ndarray
    pool: np.ndarray
    tables: np.ndarray
    lengths: np.ndarray


def poisoned_case(
    lengths: Sequence[int],
    *,
    page: int,
    dtype: Any,
    kv_heads: int = 2,
    group: int = 4,
    head_dim: int = 64,
    width: int | None = None,
    spread: float = 1.0,
) -> Case:
    """Random operands in which every pool position and table entry that no row may read is poison (NaN, wild ids).

    ``spread`` scales the queries: large ones make the softmax sharp.
    """
    rng = np.random.default_rng(0)
    rows, width = len(lengths), width or -(-max(lengths) // page)
    tables = rng.permutation(rows * width).astype(np.int32).reshape(rows, width)
    pool = rng.normal(size=(rows * width, 2, kv_heads, page, head_dim)).astype(np.float32)
    for row, length in enumerate(lengths):
        past_end = np.arange(width * page).reshape(width, page) >= length
        pages = np.moveaxis(pool[tables[row]], 3, 1)
        pages[past_end] = np.nan
        pool[tables[row]] = np.moveaxis(pages, 1, 3)
        tables[row, -(-length // page) :] = rng.choice([-7, 10**6])
    q = rng.normal(size=(rows, kv_heads * group, head_dim)) * spread
    return Case(q.astype(dtype), pool.astype(dtype), tables, np.asarray(lengths, np.int32))


def float64_decode(case: Case, scale: float) -> np.ndarray:
    """``softmax(q . keys * scale) . values`` of each row over its first ``length`` keys; rows of length 0 give 0."""
    q, pool = np.asarray(case.q, np.float64), np.asarray(case.pool, np.float64)
    out = np.zeros(q.shape)
    for row, length in enumerate(case.lengths):
        if length:
            out[row] = _attend(q[row], pool, case.tables[row], int(length), scale)
    return out


def _attend(q: np.ndarray, pool: np.ndarray, table: np.ndarray, length: int, scale: float) -> np.ndarray:
    (heads, dim), (kv_heads, page) = q.shape, pool.shape[2:4]
    used = pool[table[: -(-length // page)]]
    keys, values = (used[:, half].swapaxes(0, 1).reshape(kv_heads, -1, dim)[:, :length] for half in (0, 1))
    scores = np.einsum("hgd,htd->hgt", q.reshape(kv_heads, -1, dim), keys) * scale
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = np.einsum("hgt,htd->hgd", weights / weights.sum(-1, keepdims=True), values)
    return mixed.reshape(heads, dim)
