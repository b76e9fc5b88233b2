"""Writes of new keys and values into a layer's pool in XLA. Under donation every write happens in place."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from pallas_kernels.kv_write.reference import (
    Rope,
    Written,
    places,
    quantize,
    quantize_latents,
    rotate,
    token_scales,
)


def write(
    pool: Num[Array, "pages 2 kv_heads page head_dim"],
    k: Float[Array, "sequences chunk kv_heads head_dim"],
    v: Float[Array, "sequences chunk kv_heads head_dim"],
    pages: Int[Array, "sequences written"],
    offsets: Int[Array, " sequences"],
    *,
    scales: Float[Array, "pages 2 kv_heads *page"] | None = None,
    rope: Rope | None = None,
    interleaved: bool = False,
    q: Float[Array, "sequences chunk heads head_dim"] | None = None,
) -> Written:
    """See `reference`."""

    def turned(x: jax.Array) -> jax.Array:
        return x if rope is None else rotate(x, *rope, interleaved=interleaved).astype(x.dtype)

    # Token by token: on a CPU as fast as page by page, which would have to shift the chunk to page boundaries.
    sequences, chunk = k.shape[:2]
    ids, slots = _places(pages, offsets, chunk, pool.shape[3])
    rows = jnp.stack([x.reshape(sequences * chunk, *x.shape[2:]) for x in (turned(k), v)], axis=1)
    pool, scales = _scatter(pool, scales, rows, ids.reshape(-1), slots.reshape(-1))
    return Written(pool, scales, None if q is None else turned(q))


def _scatter(
    pool: Num[Array, "pages 2 kv_heads page head_dim"],
    scales: Float[Array, "pages 2 kv_heads *page"] | None,
    rows: Float[Array, "tokens 2 kv_heads head_dim"],
    ids: Int[Array, " tokens"],
    slots: Int[Array, " tokens"],
) -> tuple[jax.Array, jax.Array | None]:
    if scales is None:
        numbers = rows.astype(pool.dtype)
    else:
        rows = rows.astype(jnp.float32)
        own = token_scales(rows, pool.dtype) if scales.ndim == 4 else scales.at[ids].get(mode="clip")
        numbers = quantize(rows, own, pool.dtype)
        if scales.ndim == 4:
            scales = scales.at[ids, :, :, slots].set(own, mode="drop", wrap_negative_indices=False)
    return pool.at[ids, :, :, slots].set(numbers, mode="drop", wrap_negative_indices=False), scales


def write_latents(
    pool: Num[Array, "pages page row"],
    latents: Float[Array, "sequences chunk latent"],
    pages: Int[Array, "sequences written"],
    offsets: Int[Array, " sequences"],
) -> Num[Array, "pages page row"]:
    """See `reference`."""
    return _put(pool, latents.astype(pool.dtype), _places(pages, offsets, latents.shape[1], pool.shape[1]))


def write_scaled_latents(
    pool: Num[Array, "pages page row"],
    scales: Float[Array, "pages page parts"],
    latents: Float[Array, "sequences chunk latent"],
    pages: Int[Array, "sequences written"],
    offsets: Int[Array, " sequences"],
    *,
    borders: tuple[int, ...],
) -> tuple[Num[Array, "pages page row"], Float[Array, "pages page parts"]]:
    """See `reference`."""
    at = _places(pages, offsets, latents.shape[1], pool.shape[1])
    numbers, own = quantize_latents(latents, borders, pool.dtype)
    return _put(pool, numbers, at), _put(scales, own, at)


def _put(pool: jax.Array, numbers: jax.Array, at: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Write tokens into the first columns of their rows."""
    columns = slice(0, numbers.shape[-1])
    return pool.at[(*at, columns)].set(numbers, mode="drop", wrap_negative_indices=False)


def _places(
    pages: Int[Array, "sequences written"], offsets: Int[Array, " sequences"], chunk: int, page: int
) -> tuple[Int[Array, "sequences chunk"], Int[Array, "sequences chunk"]]:
    if (chunk, pages.shape[1]) == (1, 1):
        return pages, offsets[:, None]
    return places(pages, offsets, chunk, page)
