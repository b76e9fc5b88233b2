"""The equation of paged attention in plain jnp: oracle for the fast paths and checker of their arguments.

Everywhere: the pool of a layer is ``[pages, 2, kv_heads, page, head_dim]`` (keys at index 0, values at 1); a table
lists the pages of one sequence in order; query head ``h`` belongs to KV head ``h // (heads // kv_heads)``.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


def gather(
    pool: Float[Array, "pages 2 kv_heads page head_dim"], table: Int[Array, " width"]
) -> Float[Array, "2 kv_heads keys head_dim"]:
    """The keys and values of one sequence, contiguous."""
    _, two, kv_heads, page, head_dim = pool.shape
    pages = jnp.moveaxis(pool[table], 0, 2)
    return pages.reshape(two, kv_heads, table.shape[0] * page, head_dim)


def attend(
    q: Float[Array, "queries heads head_dim"],
    positions: Int[Array, " queries"],
    pool: Float[Array, "pages 2 kv_heads page head_dim"],
    table: Int[Array, " width"],
    length: Int[Array, ""],
    *,
    scale: float,
    window: int | None = None,
) -> Float[Array, "queries heads head_dim"]:
    """Attention of one sequence's queries at ``positions`` to its first ``length`` keys, causally, in float32.

    A query that sees no key gives zeros. ``window`` counts the visible keys, the query's own included.
    """
    keys, values = gather(pool, table).astype(jnp.float32)
    group = q.shape[1] // keys.shape[0]
    keys, values = (jnp.repeat(x, group, axis=0) for x in (keys, values))
    scores = jnp.einsum("qhd,hkd->hqk", q.astype(jnp.float32), keys, precision=lax.Precision.HIGHEST) * scale
    distance = positions[:, None] - jnp.arange(keys.shape[1])[None, :]
    visible = (distance >= 0) & (jnp.arange(keys.shape[1]) < length)
    if window is not None:
        visible &= distance < window
    weights = jnp.where(visible.any(-1)[:, None], jax.nn.softmax(jnp.where(visible, scores, -1e30), axis=-1), 0.0)
    return jnp.einsum("hqk,hkd->qhd", weights, values, precision=lax.Precision.HIGHEST).astype(q.dtype)


def decode(
    q: Float[Array, "rows heads head_dim"],
    pool: Float[Array, "pages 2 kv_heads page head_dim"],
    tables: Int[Array, "rows width"],
    lengths: Int[Array, " rows"],
    *,
    scale: float,
    window: int | None = None,
) -> Float[Array, "rows heads head_dim"]:
    """One query per sequence, at the last of its ``lengths`` positions; rows of length 0 give zeros."""

    def row(q: jax.Array, table: jax.Array, length: jax.Array) -> jax.Array:
        return attend(q[None], length[None] - 1, pool, table, length, scale=scale, window=window)[0]

    return jax.vmap(row)(q, tables, lengths)


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
    """Chunks whose first queries stand at ``starts``; keys up to ``lengths`` are written. Length 0 gives zeros."""

    def lane(q: jax.Array, table: jax.Array, start: jax.Array, length: jax.Array) -> jax.Array:
        return attend(q, start + jnp.arange(q.shape[0]), pool, table, length, scale=scale, window=window)

    return jax.vmap(lane)(q, tables, starts, lengths)
