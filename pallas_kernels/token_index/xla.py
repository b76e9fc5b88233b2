"""The sparse indexer over paged index keys, in XLA: there is no kernel.

Index keys are the last ``dim`` numbers of a token's row in the pool of latents, ``[pages, page, row]``; in an 8-bit
pool the last scale of the token is theirs. Scores are computed by fixed absolute blocks of keys up to the last block of
the longest sequence, so they are bitwise independent of other rows, pages and the width of the tables.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Num

from pallas_kernels import bits
from pallas_kernels.token_index.reference import places, scores, top_keys

BLOCK = 128  # keys that are scored together


def decode(
    q: Float[Array, "rows heads dim"],
    weights: Float[Array, "rows heads"],
    pool: Num[Array, "pages page row"],
    scales: Float[Array, "pages page parts"] | None,
    tables: Int[Array, "rows width"],
    lengths: Int[Array, " rows"],
    k: int,
) -> Int[Array, "rows k"]:
    """Choose keys for one query per sequence, at the last of its ``lengths`` positions.

    Positions are ascending, padded with positions beyond all keys: min(k, length) of each row are valid.
    """
    scored = _scores(q[:, None], weights[:, None], pool, scales, tables, lengths)[:, 0]
    visible = jnp.arange(scored.shape[-1]) < lengths[:, None]
    return places(top_keys(scored, visible, k), k)


def prefill(
    q: Float[Array, "sequences chunk heads dim"],
    weights: Float[Array, "sequences chunk heads"],
    pool: Num[Array, "pages page row"],
    scales: Float[Array, "pages page parts"] | None,
    tables: Int[Array, "sequences width"],
    starts: Int[Array, " sequences"],
    lengths: Int[Array, " sequences"],
    k: int,
) -> Bool[Array, "sequences chunk keys"]:
    """Choose keys for causal chunks from ``starts`` on; keys up to ``lengths`` are written."""
    sequences, chunk = q.shape[:2]

    def sequence(index: jax.Array, chosen: jax.Array) -> jax.Array:
        operands = (lax.dynamic_slice_in_dim(x, index, 1) for x in (q, weights, tables, lengths))
        queries, own, table, length = operands
        scored = _scores(queries, own, pool, scales, table, length)
        at, keys = starts[index] + jnp.arange(chunk), jnp.arange(scored.shape[-1])
        visible = (keys <= at[:, None]) & (keys < length)
        return lax.dynamic_update_slice_in_dim(chosen, top_keys(scored, visible[None], k), index, 0)

    keys = _padded(tables, pool).shape[1] * pool.shape[1]
    return lax.fori_loop(0, sequences, sequence, jnp.zeros((sequences, chunk, keys), bool))


def _padded(tables: jax.Array, pool: jax.Array) -> jax.Array:
    """Pad tables to whole blocks with page 0; lengths mask the keys of the padding."""
    return jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % max(1, BLOCK // pool.shape[1]))))


def _scores(
    q: Float[Array, "sequences chunk heads dim"],
    weights: Float[Array, "sequences chunk heads"],
    pool: Num[Array, "pages page row"],
    scales: Float[Array, "pages page parts"] | None,
    tables: Int[Array, "sequences width"],
    lengths: Int[Array, " sequences"],
) -> Float[Array, "sequences chunk keys"]:
    """Compute scores of the keys up to the longest sequence's last block; 0 for further keys."""
    tables, page, dim = _padded(tables, pool), pool.shape[1], q.shape[-1]
    count = max(1, BLOCK // page)
    block = count * page

    def scored(index: jax.Array, results: jax.Array) -> jax.Array:
        pages = lax.dynamic_slice_in_dim(tables, index * count, count, 1)
        keys = bits.widened(pool[pages][..., -dim:])
        if scales is not None:
            keys = keys * scales[pages][..., -1:]
        some = scores(q, weights, keys.reshape(pages.shape[0], block, dim))
        return lax.dynamic_update_slice_in_dim(results, some, index * block, 2)

    results = jnp.zeros((*q.shape[:2], tables.shape[1] * page), jnp.float32)
    return lax.fori_loop(0, (jnp.max(lengths) + block - 1) // block, scored, results)
