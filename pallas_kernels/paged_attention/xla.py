"""Paged attention in plain XLA, for CPUs and for GPUs without a kernel.

The online softmax (Milakov & Gimelshein 2018) runs over fixed absolute blocks of keys up to the longest length in
the call. A block that a query does not see adds exact zeros, so neither the width of the tables nor the lengths of
neighbours change a single bit of a row's result.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

# Measured on a 2-core CPU at 32 rows, 500 keys, head_dim 64: 64 keys per block keep the gathered block in cache and
# are twice as fast as 128 or 256. A prefill chunk has enough queries to amortise larger blocks; all chunks have one
# block size, or a key's place in the sums would depend on the chunk that reads it.
DECODE_BLOCK = 64
PREFILL_BLOCK = 128
_LOG2_E = math.log2(math.e)
_MASKED = -1e30
_NEVER = jnp.iinfo(jnp.int32).max


class _Softmax(NamedTuple):
    """Running maximum, normaliser and weighted sum of the values, all float32. Scores are in powers of two.

    The maximum is rounded up to an integer, so that rescaling is exact: whether a compiler contracts the multiplication
    and the addition into one instruction, which differs from program to program, changes no bit.
    """

    top: jax.Array
    total: jax.Array
    mixed: jax.Array

    def add(self, scores: jax.Array, visible: jax.Array, weigh: Callable[[jax.Array], jax.Array]) -> _Softmax:
        """Fold in a block of scores (last axis: keys); ``weigh`` maps weights to the weighted sum of its values."""
        scores = jnp.where(visible, scores, -jnp.inf)
        top = jnp.maximum(self.top, jnp.ceil(scores.max(-1)))
        weights, decay = jnp.exp2(scores - top[..., None]), _power_of_two(self.top - top)
        mixed = self.mixed * decay[..., None] + weigh(weights)
        return _Softmax(top, self.total * decay + weights.sum(-1), mixed)

    def result(self) -> jax.Array:
        return self.mixed / jnp.where(self.total > 0, self.total, 1.0)[..., None]


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """Exactly 2**exponent of integers up to 0, by their bits; 0 where it would not be a normal number."""
    return lax.bitcast_convert_type((jnp.maximum(exponent, -127).astype(jnp.int32) + 127) << 23, jnp.float32)


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
    grouped = q.reshape(rows, kv_heads, heads // kv_heads, head_dim).astype(jnp.float32) * (scale * _LOG2_E)
    last = (lengths - 1)[:, None, None, None]

    def body(index: jax.Array, state: _Softmax) -> _Softmax:
        pages = lax.dynamic_slice_in_dim(tables, index * count, count, 1)
        # Two gathers: slicing keys and values out of one would copy both once more.
        keys, values = (_join_pages(pool[pages, side].astype(jnp.float32)) for side in (0, 1))
        scores = _einsum("rhgd,rhkd->rhgk", grouped, keys)
        visible = _visible(last, index * block + jnp.arange(block), window)
        return state.add(scores, visible, lambda weights: _einsum("rhgk,rhkd->rhgd", weights, values))

    first = _first_block(jnp.where(lengths > 0, lengths - 1, _NEVER), block, window)
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
    q: Float[Array, "lanes chunk heads head_dim"],
    pool: Float[Array, "pages 2 kv_heads page head_dim"],
    tables: Int[Array, "lanes width"],
    starts: Int[Array, " lanes"],
    lengths: Int[Array, " lanes"],
    *,
    scale: float,
    window: int | None = None,
) -> Float[Array, "lanes chunk heads head_dim"]:
    """See `reference.prefill`. One matrix product per lane, KV head and block of keys."""
    (lanes, chunk, heads, head_dim), (_, _, kv_heads, page, _) = q.shape, pool.shape
    group = heads // kv_heads
    count = _pages_per_block(PREFILL_BLOCK, page, tables.shape[1])
    tables, block = _pad_width(tables, count), count * page
    grouped = jnp.transpose(q.reshape(lanes, chunk, kv_heads, group, head_dim), (0, 2, 3, 1, 4))
    grouped = grouped.reshape(lanes, kv_heads, group * chunk, head_dim).astype(jnp.float32) * (scale * _LOG2_E)
    positions = jnp.tile(starts[:, None] + jnp.arange(chunk), group)[:, None, :, None]
    ends = lengths[:, None, None, None]

    def body(index: jax.Array, state: _Softmax) -> _Softmax:
        pages = lax.dynamic_slice_in_dim(tables, index * count, count, 1)
        keys, values = (_join_pages(pool[pages, side].astype(jnp.float32)) for side in (0, 1))
        at = index * block + jnp.arange(block)
        visible = _visible(positions, at, window) & (at < ends)
        scores = _einsum("lhqd,lhkd->lhqk", grouped, keys)
        return state.add(scores, visible, lambda weights: _einsum("lhqk,lhkd->lhqd", weights, values))

    first = _first_block(jnp.where(lengths > 0, starts, _NEVER), block, window)
    state = lax.fori_loop(first, _ceil_div(jnp.max(lengths), block), body, _start(*grouped.shape))
    mixed = state.result().reshape(lanes, kv_heads, group, chunk, head_dim)
    return jnp.transpose(mixed, (0, 3, 1, 2, 4)).reshape(q.shape).astype(q.dtype)
