"""Paged attention in plain XLA, for CPUs and for GPUs without a kernel.

The online softmax (Milakov & Gimelshein 2018) runs over fixed absolute blocks of keys up to the longest length in
the call. A block that a query does not see adds exact zeros, so neither the width of the tables nor the lengths of
neighbours change a single bit of a row's result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

# Measured on a 2-core CPU at 32 rows, 500 keys, head_dim 64: 64 keys per block keep the gathered block in cache and
# are twice as fast as 128 or 256. A prefill chunk has enough queries to amortise larger blocks, but none larger than
# itself: a short prompt would score keys that are not there.
DECODE_BLOCK = 64
PREFILL_BLOCK = 256
_MASKED = -1e30


class _Softmax(NamedTuple):
    """Running maximum, normaliser and weighted sum of the values, all float32."""

    top: jax.Array
    total: jax.Array
    mixed: jax.Array

    def add(self, scores: jax.Array, visible: jax.Array, weigh: Callable[[jax.Array], jax.Array]) -> _Softmax:
        """Fold in a block of scores (last axis: keys); ``weigh`` maps weights to the weighted sum of its values."""
        scores = jnp.where(visible, scores, -jnp.inf)
        top = jnp.maximum(self.top, scores.max(-1))
        weights, decay = jnp.exp(scores - top[..., None]), jnp.exp(self.top - top)
        mixed = self.mixed * decay[..., None] + weigh(weights)
        return _Softmax(top, self.total * decay + weights.sum(-1), mixed)

    def result(self) -> jax.Array:
        return self.mixed / jnp.where(self.total > 0, self.total, 1.0)[..., None]


def _start(*shape: int) -> _Softmax:
    lead = shape[:-1]
    return _Softmax(jnp.full(lead, _MASKED, jnp.float32), jnp.zeros(lead, jnp.float32), jnp.zeros(shape, jnp.float32))


def _pages_per_block(block: int, page: int, width: int) -> int:
    return min(max(1, block // page), width)


def _pad_width(tables: jax.Array, multiple: int) -> jax.Array:
    """Blocks are read whole: the table's last block is filled up with page 0, whose keys lengths mask."""
    extra = -tables.shape[-1] % multiple
    return jnp.pad(tables, [(0, 0)] * (tables.ndim - 1) + [(0, extra)])


def _visible(query: jax.Array, keys: jax.Array, window: int | None) -> jax.Array:
    seen = keys <= query
    return seen if window is None else seen & (keys > query - window)


def _einsum(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(spec, a, b, precision=lax.Precision.HIGHEST)


def decode(
    q: Float[Array, "rows heads head_dim"],
    pool: Float[Array, "pages 2 kv_heads page head_dim"],
    tables: Int[Array, "rows width"],
    lengths: Int[Array, " rows"],
    *,
    scale: float,
    window: int | None = None,
) -> Float[Array, "rows heads head_dim"]:
    """See `reference.decode`. Reads all rows' pages block by block, nothing beyond the longest row."""
    (rows, heads, head_dim), (_, _, kv_heads, page, _) = q.shape, pool.shape
    count = _pages_per_block(DECODE_BLOCK, page, tables.shape[1])
    tables, block = _pad_width(tables, count), count * page
    grouped = q.reshape(rows, kv_heads, heads // kv_heads, head_dim).astype(jnp.float32) * scale
    last = (lengths - 1)[:, None, None, None]

    def body(index: jax.Array, state: _Softmax) -> _Softmax:
        pages = lax.dynamic_slice_in_dim(tables, index * count, count, 1)
        # Two gathers: slicing keys and values out of one would copy both once more.
        keys, values = (_join_pages(pool[pages, side].astype(jnp.float32)) for side in (0, 1))
        scores = _einsum("rhgd,rhkd->rhgk", grouped, keys)
        visible = _visible(last, index * block + jnp.arange(block), window)
        return state.add(scores, visible, lambda weights: _einsum("rhgk,rhkd->rhgd", weights, values))

    first = _first_block(jnp.where(lengths > 0, lengths - 1, jnp.iinfo(jnp.int32).max), block, window)
    blocks = _ceil_div(jnp.max(lengths), block)
    state = lax.fori_loop(first, blocks, body, _start(*grouped.shape))
    return state.result().reshape(q.shape).astype(q.dtype)


def _join_pages(x: jax.Array) -> jax.Array:
    """[rows, pages, heads, page, dim] -> [rows, heads, keys, dim]."""
    rows, pages, heads, page, dim = x.shape
    return x[:, 0] if pages == 1 else jnp.swapaxes(x, 1, 2).reshape(rows, heads, pages * page, dim)


def _first_block(queries: jax.Array, block: int, window: int | None) -> jax.Array:
    """The first block that any of the queries (positions) sees."""
    return jnp.int32(0) if window is None else jnp.maximum(jnp.min(queries) - window + 1, 0) // block


def _ceil_div(a: jax.Array, b: int) -> jax.Array:
    return (a + b - 1) // b


def prefill(
    q: Float[Array, "chunk heads head_dim"],
    pool: Float[Array, "pages 2 kv_heads page head_dim"],
    table: Int[Array, " width"],
    start: Int[Array, ""],
    length: Int[Array, ""],
    *,
    scale: float,
    window: int | None = None,
) -> Float[Array, "chunk heads head_dim"]:
    """See `reference.prefill`. One matrix product per KV head and block of keys."""
    (chunk, heads, head_dim), (_, _, kv_heads, page, _) = q.shape, pool.shape
    group = heads // kv_heads
    count = _pages_per_block(min(PREFILL_BLOCK, chunk), page, table.shape[0])
    table, block = _pad_width(table, count), count * page
    grouped = jnp.transpose(q.reshape(chunk, kv_heads, group, head_dim), (1, 2, 0, 3))
    grouped = grouped.reshape(kv_heads, group * chunk, head_dim).astype(jnp.float32) * scale
    positions = jnp.tile(start + jnp.arange(chunk), group)

    def body(index: jax.Array, state: _Softmax) -> _Softmax:
        pages = lax.dynamic_slice_in_dim(table, index * count, count, 0)[None]
        keys, values = (_join_pages(pool[pages, side].astype(jnp.float32))[0] for side in (0, 1))
        at = index * block + jnp.arange(block)
        visible = _visible(positions[:, None], at, window) & (at < length)
        scores = _einsum("hqd,hkd->hqk", grouped, keys)
        return state.add(scores, visible, lambda weights: _einsum("hqk,hkd->hqd", weights, values))

    first = _first_block(start, block, window)
    state = lax.fori_loop(first, _ceil_div(length, block), body, _start(*grouped.shape))
    mixed = state.result().reshape(kv_heads, group, chunk, head_dim)
    return jnp.transpose(mixed, (2, 0, 1, 3)).reshape(q.shape).astype(q.dtype)
