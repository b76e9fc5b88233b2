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
) -> Float[Array, "pages 2 kv_heads page head_dim"]:
    """Chunks that start at a page's first slot: whole pages are overwritten, out-of-range ones are dropped.

    Slots behind the chunk's last token hold zeros or the keys of padding rows: the sequence's length masks them.
    """
    page, extra = pool.shape[3], pages.shape[1] * pool.shape[3] - k.shape[1]
    both = jnp.stack([k, v]).astype(pool.dtype)
    both = jnp.pad(both, ((0, 0), (0, 0), (0, extra), (0, 0), (0, 0)))
    both = both.reshape(2, pages.size, page, *k.shape[2:])
    return pool.at[pages.reshape(-1)].set(jnp.transpose(both, (1, 0, 3, 2, 4)), mode="drop")
