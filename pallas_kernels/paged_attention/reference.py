"""Reference of paged attention in jnp: oracle for the fast paths and checker of their arguments.

Everywhere: the pool of a layer is ``[pages, 2, kv_heads, page, head_dim]`` (keys at index 0, values at 1); a table
lists the pages of one sequence in order; query head ``h`` belongs to KV head ``h // (heads // kv_heads)``. Keys that a
query does not see may hold anything (NaN included), and table entries past a sequence's last page any number.

The other arguments, identical in every path: `options.AttentionOptions`. A uint8 pool holds the bits of float8_e4m3fn.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Num

from pallas_kernels import bits
from pallas_kernels.paged_attention.options import AttentionOptions

_LN_2 = math.log(2.0)


def dequantize(
    pool: Num[Array, "pages 2 kv_heads page head_dim"],
    scales: Float[Array, "pages 2 kv_heads *page"] | None,
    dtype: Any,
) -> Float[Array, "pages 2 kv_heads page head_dim"]:
    """Dequantize a pool."""
    pool = bits.numbers(pool).astype(dtype)
    if scales is None:
        return pool
    return pool * scales.astype(dtype).reshape(*scales.shape, *(1,) * (pool.ndim - scales.ndim))


def gather(
    pool: Float[Array, "pages 2 kv_heads page head_dim"], table: Int[Array, " width"]
) -> Float[Array, "2 kv_heads keys head_dim"]:
    """Gather the keys and values of one sequence into contiguous arrays."""
    pages, two, kv_heads, page, head_dim = pool.shape
    taken = jnp.moveaxis(pool[jnp.clip(table, 0, pages - 1)], 0, 2)
    return taken.reshape(two, kv_heads, table.shape[0] * page, head_dim)


def visible_keys(
    chunk: int,
    keys: int,
    start: Int[Array, ""],
    length: Int[Array, ""],
    window: int | None,
    tree: Bool[Array, "chunk chunk"] | None,
    ends: Int[Array, " chunk"] | None = None,
) -> Bool[Array, "chunk keys"]:
    """Return the mask of the sequence's first ``length`` keys for queries at ``start``, ``start + 1``, ..."""
    at, queries = jnp.arange(keys)[None, :], (start + jnp.arange(chunk))[:, None]
    seen = (at <= (queries if ends is None else jnp.maximum(queries, ends[:, None]))) & (at < length)
    if tree is not None:
        within = jnp.clip(at - start, 0, chunk - 1)
        own = jnp.take_along_axis(tree, jnp.broadcast_to(within, seen.shape), axis=1)
        seen = (at < length) & jnp.where(at < start, True, own & (at < start + chunk))
        queries = start + tree.sum(-1, keepdims=True) - 1
    return seen if window is None else seen & (at > queries - window)


def attend(
    q: Float[Array, "queries heads head_dim"],
    keys: Float[Array, "kv_heads keys head_dim"],
    values: Float[Array, "kv_heads keys value_dim"],
    visible: Bool[Array, "queries keys"],
    options: AttentionOptions,
    weights_dtype: Any = None,
    score_grid: float | None = None,
) -> Float[Array, "queries heads value_dim"]:
    """Compute softmax attention in the dtype of the keys. A query that sees nothing gives zeros.

    Args:
        weights_dtype: dtype of a kernel's probabilities: they are rounded to it before they multiply values, while
            their sum is not. They are relative to any integer power of two, which does not affect the rounding.
        score_grid: grid of Hopper's kernels, which round scores, in powers of two, to multiples of it, and sum the
            rounded probabilities.
    """
    (heads, dtype), softcap, sinks = (q.shape[1], keys.dtype), options.softcap, options.sinks
    keys, values = (jnp.repeat(x, heads // x.shape[0], axis=0) for x in (keys, values))
    seen = visible.any(0)[None, :, None]
    keys, values = jnp.where(seen, keys, 0), jnp.where(seen, values, 0)
    scores = jnp.einsum("qhd,hkd->hqk", q.astype(dtype), keys, precision=lax.Precision.HIGHEST) * options.scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(visible, scores, -jnp.inf)
    sink = jnp.full((heads, 1, 1), -jnp.inf, dtype) if sinks is None else sinks.astype(dtype)[:, None, None]
    top = jnp.maximum(scores.max(-1, keepdims=True), sink)
    top = jnp.where(top > -jnp.inf, top, 0)
    top = top if weights_dtype is None else jnp.round(top / _LN_2) * _LN_2
    if score_grid is not None:
        scores, sink = (jnp.round(each / (_LN_2 * score_grid)) * (_LN_2 * score_grid) for each in (scores, sink))
    exact = jnp.exp(scores - top)
    weights = exact if weights_dtype is None else exact.astype(weights_dtype).astype(dtype)
    summed = exact if score_grid is None else weights
    total = summed.sum(-1, keepdims=True) + jnp.exp(sink - top)
    weights = weights / jnp.where(total > 0, total, 1)
    return jnp.einsum("hqk,hkd->qhd", weights, values, precision=lax.Precision.HIGHEST)


def decode(
    q: Float[Array, "rows heads head_dim"],
    pool: Num[Array, "pages 2 kv_heads page head_dim"],
    tables: Int[Array, "rows width"],
    lengths: Int[Array, " rows"],
    options: AttentionOptions,
    *,
    dtype: Any = jnp.float32,
    weights_dtype: Any = None,
    score_grid: float | None = None,
) -> Float[Array, "rows heads head_dim"]:
    """Attend with one query per sequence, at the last of its ``lengths`` positions; rows of length 0 give zeros.

    Args:
        dtype: dtype of computation; the result has the dtype of ``q`` unless this one is wider than float32.
        weights_dtype: see `attend`, as for ``score_grid``.
    """
    starts, rounded = jnp.maximum(lengths - 1, 0), {"weights_dtype": weights_dtype, "score_grid": score_grid}
    return prefill(q[:, None], pool, tables, starts, lengths, options, dtype=dtype, **rounded)[:, 0]


def prefill(
    q: Float[Array, "sequences chunk heads head_dim"],
    pool: Num[Array, "pages 2 kv_heads page head_dim"],
    tables: Int[Array, "sequences width"],
    starts: Int[Array, " sequences"],
    lengths: Int[Array, " sequences"],
    options: AttentionOptions,
    *,
    dtype: Any = jnp.float32,
    weights_dtype: Any = None,
    score_grid: float | None = None,
) -> Float[Array, "sequences chunk heads head_dim"]:
    """Attend with chunks from ``starts`` on; keys up to ``lengths`` are written. Length 0 gives zeros.

    A chunk's queries at ``lengths`` and beyond are padding: their results are meaningless (here: zeros). With a
    ``tree``, windows count from a token's depth in it.
    """
    numbers = dequantize(pool, options.scales, dtype)
    chunk, tree, ends = q.shape[1], options.tree, options.ends

    def sequence(
        q: jax.Array,
        table: jax.Array,
        start: jax.Array,
        length: jax.Array,
        tree: jax.Array | None,
        ends: jax.Array | None,
    ) -> jax.Array:
        keys, values = gather(numbers, table)
        visible = visible_keys(chunk, keys.shape[1], start, length, options.window, tree, ends)
        visible &= (start + jnp.arange(chunk) < length)[:, None]
        return attend(q, keys, values, visible, options, weights_dtype, score_grid)

    optional = (None if each is None else 0 for each in (tree, ends))
    mixed = jax.vmap(sequence, in_axes=(0, 0, 0, 0, *optional))(q, tables, starts, lengths, tree, ends)
    return mixed.astype(jnp.promote_types(q.dtype, dtype) if jnp.dtype(dtype).itemsize > 4 else q.dtype)
