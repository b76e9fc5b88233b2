"""Writing new keys and values into a layer's pool. Under donation both writes happen in place."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def write_rows(
    pool: Float[Array, "pages 2 kv_heads page head_dim"],
    k: Float[Array, "rows kv_heads head_dim"],
    v: Float[Array, "rows kv_heads head_dim"],
    pages: Int[Array, " rows"],
    offsets: Int[Array, " rows"],
) -> Float[Array, "pages 2 kv_heads page head_dim"]:
    """One token per row at ``offsets`` within ``pages``; a row whose page is out of range is dropped."""
    rows = jnp.stack([k, v], axis=1).astype(pool.dtype)
    return pool.at[pages, :, :, offsets].set(rows, mode="drop")


def write_pages(
    pool: Float[Array, "pages 2 kv_heads page head_dim"],
    k: Float[Array, "lanes chunk kv_heads head_dim"],
    v: Float[Array, "lanes chunk kv_heads head_dim"],
    pages: Int[Array, "lanes written"],
    offsets: Int[Array, " lanes"],
) -> Float[Array, "pages 2 kv_heads page head_dim"]:
    """Chunks, each from slot ``offsets`` of the first of its ``pages`` on; a token on a page out of range is dropped.

    ``written`` pages must hold the chunk at every offset that occurs.
    """
    # Token by token: on a CPU as fast as page by page, since that would have to shift the chunk to the pages' borders.
    lanes, chunk, page = *k.shape[:2], pool.shape[3]
    at = offsets[:, None] + jnp.arange(chunk)
    own = jnp.take_along_axis(pages, at // page, axis=1)
    k, v = (x.reshape(lanes * chunk, *x.shape[2:]) for x in (k, v))
    return write_rows(pool, k, v, own.reshape(-1), (at % page).reshape(-1))
