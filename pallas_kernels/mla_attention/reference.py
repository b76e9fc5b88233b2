"""Reference of multi-head latent attention (MLA) in jnp: oracle for the fast paths and their argument checker.

DeepSeek-V2 (arXiv:2405.04434), absorbed form: a token's cache is one latent of ``rank`` numbers, which all heads share,
and ``rope`` numbers of one rotated key. A query head is already multiplied by its slice of the key's up-projection:
scores are over all ``rank + rope`` numbers, values are the first ``rank`` of the same numbers, and the caller
multiplies the result by the value's up-projection.

Everywhere: the pool of a layer is ``[pages, page, rank + rope]``; a table lists the pages of one sequence in order.
Rows of a pool may be longer than queries: the further columns (`pallas_kernels.token_index`) are not read here. Keys
that a query does not see may hold anything (NaN included), and table entries past a sequence's last page any number.
The other arguments, identical in every path: `options.LatentOptions`. A uint8 pool holds the bits of float8_e4m3fn
(`pallas_kernels.bits`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from pallas_kernels import bits
from pallas_kernels.mla_attention.options import LatentOptions
from pallas_kernels.paged_attention.options import AttentionOptions
from pallas_kernels.paged_attention.reference import attend, visible_keys


def latents(
    pool: Num[Array, "pages page row"],
    options: LatentOptions,
    table: Int[Array, " width"],
    dtype: Any,
) -> Float[Array, "keys row"]:
    """Dequantize one sequence's pages into contiguous rows; columns after the latents are not scaled."""
    pages, _, latent = pool.shape
    table = jnp.clip(table, 0, pages - 1)
    taken = bits.numbers(pool[table]).astype(dtype)
    if options.scales is not None:
        own, of_key = jnp.split(options.scales[table, :, :2].astype(dtype), 2, axis=-1)
        taken = taken * jnp.where(jnp.arange(latent) < options.rank, own, of_key)
    return taken.reshape(-1, latent)


def decode(
    q: Float[Array, "rows heads latent"],
    pool: Num[Array, "pages page row"],
    tables: Int[Array, "rows width"],
    lengths: Int[Array, " rows"],
    options: LatentOptions,
    *,
    dtype: Any = jnp.float32,
    weights_dtype: Any = None,
) -> Float[Array, "rows heads rank"]:
    """Attend with one query per sequence, at the last of its ``lengths`` positions; rows of length 0 give zeros.

    Args:
        dtype: dtype of computation; the result has the dtype of ``q`` unless this one is wider than float32.
        weights_dtype: see `pallas_kernels.paged_attention.reference.attend`.
    """
    starts = jnp.maximum(lengths - 1, 0)
    if options.chosen is not None:
        keys = jnp.arange(tables.shape[1] * pool.shape[1])
        mask = (options.chosen[:, :, None] == keys).any(1)[:, None]
        options = dataclasses.replace(options, chosen=mask)
    return prefill(q[:, None], pool, tables, starts, lengths, options, dtype=dtype, weights_dtype=weights_dtype)[:, 0]


def prefill(
    q: Float[Array, "sequences chunk heads latent"],
    pool: Num[Array, "pages page row"],
    tables: Int[Array, "sequences width"],
    starts: Int[Array, " sequences"],
    lengths: Int[Array, " sequences"],
    options: LatentOptions,
    *,
    dtype: Any = jnp.float32,
    weights_dtype: Any = None,
) -> Float[Array, "sequences chunk heads rank"]:
    """Attend with chunks from ``starts`` on, causal; keys up to ``lengths`` are written. Length 0: zeros.

    A chunk's queries at ``lengths`` and beyond are padding: their results are meaningless (here: zeros).

    Raises:
        ValueError: queries are longer than the rows of the pool, or ``rank`` is not within them.
    """
    if q.shape[-1] > pool.shape[-1] or not 0 < options.rank <= q.shape[-1]:
        raise ValueError(f"queries {q.shape} and pool {pool.shape} do not fit each other, or rank {options.rank} them")
    chunk, rank = q.shape[1], options.rank

    def sequence(
        q: jax.Array, table: jax.Array, start: jax.Array, length: jax.Array, chosen: jax.Array | None
    ) -> jax.Array:
        keys = latents(pool, options, table, dtype)[:, : q.shape[-1]]
        visible = visible_keys(chunk, keys.shape[0], start, length, None, None)
        visible &= (start + jnp.arange(chunk) < length)[:, None]
        if chosen is not None:
            visible &= chosen[:, : keys.shape[0]]
        return attend(q, keys[None], keys[None, :, :rank], visible, AttentionOptions(options.scale), weights_dtype)

    mixed = jax.vmap(sequence)(q, tables, starts, lengths, options.chosen)
    return mixed.astype(jnp.promote_types(q.dtype, dtype) if jnp.dtype(dtype).itemsize > 4 else q.dtype)
