"""Operands of paged attention with poison where a kernel must not read, and their float64 results."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention import reference
from pallas_kernels.paged_attention.options import AttentionOptions


@dataclasses.dataclass(frozen=True)
class Case:
    """Host operands of one call. Decode has no ``starts`` and queries ``[rows, heads, head_dim]``.

    ``arrays`` and ``options`` are the arguments of a path of the op: ``decode(*case.arrays, case.options)``.
    """

    q: np.ndarray  # [rows, heads, head_dim] or [sequences, chunk, heads, head_dim]
    pool: np.ndarray  # [pages, 2, kv_heads, page, head_dim]
    tables: np.ndarray  # [rows, width]
    lengths: np.ndarray  # [rows]
    starts: np.ndarray | None  # [sequences]
    options: AttentionOptions

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        middle = () if self.starts is None else (self.starts,)
        return tuple(jnp.asarray(x) for x in (self.q, self.pool, self.tables, *middle, self.lengths))

    def expected(self, weights_dtype: Any = None, score_grid: float | None = None) -> np.ndarray:
        """Return float64 results of `reference`, rounding weights likewise. Length 0 and padding give zeros."""
        with jax.enable_x64(True):
            path = reference.decode if self.starts is None else reference.prefill
            rounded = {"weights_dtype": weights_dtype, "score_grid": score_grid}
            equation = jax.jit(functools.partial(path, options=self.options, dtype=jnp.float64, **rounded))
            return np.asarray(equation(*self.arrays))


def attention_case(
    lengths: Sequence[int],
    *,
    counts: Sequence[int] | None = None,
    chunk: int | None = None,
    page: int = 16,
    kv_heads: int = 2,
    group: int = 4,
    head_dim: int = 64,
    dtype: Any = jnp.bfloat16,
    pool_dtype: Any = None,
    scales: str | None = None,
    width: int | None = None,
    spread: float = 1.0,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    tree: bool = False,
    seed: int = 0,
) -> Case:
    """Make random operands with poison (NaN, invalid ids) in every pool slot and table entry that no row may read.

    Args:
        lengths: keys of each row, including those of the queries.
        counts: queries of each sequence (prefill), at most ``chunk``, at its last keys; None makes a decode case.
        scales: "head" or "token" for a pool of numbers with scales (int8, float8_e4m3fn).
        spread: scales the queries: large ones make the softmax sharp.
        tree: a random tree over each chunk's tokens (each sees itself, its ancestors and all before the chunk).
    """
    rng = np.random.default_rng(seed)
    rows, width = len(lengths), width or max(1, -(-max(lengths) // page))
    shape = (rows * width, 2, kv_heads, page, head_dim)
    tables = rng.permutation(rows * width).astype(np.int32).reshape(rows, width)
    pool, factors = _pool(rng, shape, pool_dtype or dtype, scales)
    for row, length in enumerate(lengths):
        _poison(pool, factors, tables[row], length, page)
        tables[row, -(-length // page) :] = rng.choice([-7, 10**6])
    heads = kv_heads * group
    of_heads = jnp.asarray(rng.normal(size=heads), jnp.float32) if sinks else None
    query_shape: tuple[int, ...] = (rows, heads, head_dim)
    starts = seen = None
    if counts is not None:
        chunk = chunk or max(counts)
        query_shape = (rows, chunk, heads, head_dim)
        starts = np.asarray(lengths, np.int32) - np.asarray(counts, np.int32)
        seen = jnp.asarray(np.stack([_tree(rng, chunk) for _ in lengths])) if tree else None
    of_pool = None if factors is None else jnp.asarray(factors)
    options = AttentionOptions(scale or head_dim**-0.5, window, softcap, of_heads, of_pool, seen)
    q = (rng.normal(size=query_shape) * spread).astype(dtype)
    return Case(q, pool, tables, np.asarray(lengths, np.int32), starts, options)


def _pool(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: Any, scales: str | None
) -> tuple[np.ndarray, np.ndarray | None]:
    numbers = rng.normal(size=shape).astype(np.float32)
    if scales is None:
        return numbers.astype(dtype), None
    factors = rng.uniform(0.5, 1.5, size=shape[:3] if scales == "head" else shape[:4]).astype(np.float32)
    if jnp.issubdtype(dtype, jnp.integer):
        return np.clip(np.round(numbers * 30), -127, 127).astype(dtype), factors / 30
    return numbers.astype(dtype), factors


def _poison(pool: np.ndarray, factors: np.ndarray | None, table: np.ndarray, length: int, page: int) -> None:
    """Write NaN after a row's last key. Integers have no NaN: in their pools the scales of unused slots are NaN."""
    past_end = np.arange(table.size * page).reshape(table.size, page) >= length
    for at, gone in zip(table, past_end, strict=True):
        if jnp.issubdtype(pool.dtype, jnp.integer):
            pool[at][:, :, gone] = 127
        else:
            pool[at][:, :, gone] = np.nan
        if factors is None:
            continue
        if factors.ndim == 4:
            factors[at][:, :, gone] = np.nan
        elif gone.all():
            factors[at] = np.nan


def _tree(rng: np.random.Generator, chunk: int) -> np.ndarray:
    """Draw a token tree: the parent of a token is an earlier one; the first is the root."""
    seen = np.eye(chunk, dtype=bool)
    for token in range(1, chunk):
        seen[token] |= seen[rng.integers(token)]
    return seen
