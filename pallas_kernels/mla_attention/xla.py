"""MLA in XLA, for CPUs and for GPUs without a kernel.

The online softmax (Milakov & Gimelshein 2018) runs over fixed absolute blocks of keys, sequence by sequence in prefill
and a few rows of similar length at a time in decode, each up to its own last block: the work grows with the keys that
are really attended. A block that a query does not see adds exact zeros, so a row is bitwise independent of the width of
the tables and of the other rows.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Num

from pallas_kernels import bits
from pallas_kernels.mla_attention.options import LatentOptions
from pallas_kernels.softmax import Softmax

DECODE_BLOCK = 64
PREFILL_BLOCK = 128
ROWS_TOGETHER = 8  # rows of similar length that decode processes together
_LOG2_E = math.log2(math.e)


def _einsum(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(spec, a, b, precision=lax.Precision.HIGHEST)


@dataclasses.dataclass(frozen=True)
class _Pages:
    """Latents of a few sequences, read by blocks of ``count`` pages."""

    pool: jax.Array
    scales: jax.Array | None
    tables: jax.Array  # [sequences, width]; the width is a multiple of count
    lengths: jax.Array  # [sequences]
    count: int
    rank: int  # length of the value within a latent
    latent: int  # numbers of a row that are read

    @property
    def block(self) -> int:
        return self.count * self.pool.shape[1]

    def positions(self, index: jax.Array) -> jax.Array:
        return index * self.block + jnp.arange(self.block)

    def read(self, index: jax.Array) -> jax.Array:
        """Read block ``index``, [sequences, block, latent] float32; zeros past the ends, where memory is undefined."""
        pages = lax.dynamic_slice_in_dim(self.tables, index * self.count, self.count, 1)
        numbers = bits.widened(self.pool[pages][..., : self.latent])
        if self.scales is not None:
            latent, key = jnp.split(self.scales[pages][..., :2], 2, axis=-1)
            numbers = numbers * jnp.where(jnp.arange(numbers.shape[-1]) < self.rank, latent, key)
        numbers = numbers.reshape(pages.shape[0], self.block, -1)
        written = self.positions(index) < self.lengths[:, None]
        return jnp.where(written[..., None], numbers, 0.0)

    def blocks(self) -> jax.Array:
        """Return the number of blocks up to the last key of the longest sequence."""
        return (jnp.max(self.lengths) + self.block - 1) // self.block


def _pages(
    pool: jax.Array, options: LatentOptions, tables: jax.Array, lengths: jax.Array, block: int, latent: int
) -> _Pages:
    """Pad tables to whole blocks with page 0; lengths mask the keys of the padding."""
    count = max(1, block // pool.shape[1])
    tables = jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % count)))
    return _Pages(pool, options.scales, tables, lengths, count, options.rank, latent)


def _chosen_pages(
    pool: jax.Array, options: LatentOptions, tables: jax.Array, lengths: jax.Array, latent: int
) -> _Pages:
    """View the chosen tokens of each row as a sequence with pages of one token; block sizes are unchanged."""
    page, block = pool.shape[1], max(DECODE_BLOCK, pool.shape[1])
    chosen = jnp.minimum(options.chosen, tables.shape[1] * page - 1)
    slots = jnp.take_along_axis(tables, chosen // page, axis=1) * page + chosen % page
    alone, lengths = _by_token(pool), jnp.minimum(lengths, chosen.shape[1])
    options = dataclasses.replace(options, scales=None if options.scales is None else _by_token(options.scales))
    return _pages(alone, options, slots, lengths, block, latent)


def _by_token(pool: jax.Array) -> jax.Array:
    return pool.reshape(-1, 1, pool.shape[-1])


def decode(
    q: Float[Array, "rows heads latent"],
    pool: Num[Array, "pages page row"],
    tables: Int[Array, "rows width"],
    lengths: Int[Array, " rows"],
    options: LatentOptions,
    *,
    together: int = ROWS_TOGETHER,
) -> Float[Array, "rows heads rank"]:
    """See `reference.decode`.

    Args:
        together: rows that run together, up to the longest of them; all of them is best on a GPU.
    """
    rows, together = q.shape[0], min(together, q.shape[0])
    latent, rank = q.shape[-1], options.rank
    if options.chosen is None:
        pages = _pages(pool, options, tables, lengths, DECODE_BLOCK, latent)
    else:
        pages = _chosen_pages(pool, options, tables, lengths, latent)
        lengths = pages.lengths
    queries = q.astype(jnp.float32) * (options.scale * _LOG2_E)
    if together == rows:
        return _decode_together(queries, pages, rank).astype(q.dtype)

    order = jnp.argsort(-lengths)
    queries, own, ends = (_filled_up(x[order], together) for x in (queries, pages.tables, lengths))

    def some(index: jax.Array, results: jax.Array) -> jax.Array:
        at = index * together
        few, tables, lengths = (lax.dynamic_slice_in_dim(x, at, together) for x in (queries, own, ends))
        mixed = _decode_together(few, dataclasses.replace(pages, tables=tables, lengths=lengths), rank)
        return lax.dynamic_update_slice_in_dim(results, mixed, at, 0)

    results = lax.fori_loop(0, ends.size // together, some, jnp.zeros((*queries.shape[:2], rank)))
    return results[jnp.argsort(order)].astype(q.dtype)


def _filled_up(x: jax.Array, multiple: int) -> jax.Array:
    return jnp.pad(x, [(0, -x.shape[0] % multiple), *[(0, 0)] * (x.ndim - 1)])


def _decode_together(queries: jax.Array, pages: _Pages, rank: int) -> jax.Array:
    """Decode scaled queries [rows, heads, latent], each at the last of its keys."""

    def body(index: jax.Array, state: Softmax) -> Softmax:
        latents = pages.read(index)
        visible = (pages.positions(index) < pages.lengths[:, None])[:, None]
        values = latents[..., :rank]
        return state.add(
            _einsum("rhd,rkd->rhk", queries, latents), visible, lambda w: _einsum("rhk,rkd->rhd", w, values)
        )

    return lax.fori_loop(0, pages.blocks(), body, Softmax.of_nothing((*queries.shape[:2], rank))).result()


def prefill(
    q: Float[Array, "sequences chunk heads latent"],
    pool: Num[Array, "pages page row"],
    tables: Int[Array, "sequences width"],
    starts: Int[Array, " sequences"],
    lengths: Int[Array, " sequences"],
    options: LatentOptions,
) -> Float[Array, "sequences chunk heads rank"]:
    """See `reference.prefill`; results of padding are finite and unspecified."""
    sequences, chunk, heads, latent = q.shape
    pages, rank = _pages(pool, options, tables, lengths, PREFILL_BLOCK, latent), options.rank
    queries = q.astype(jnp.float32).reshape(sequences, chunk * heads, latent) * (options.scale * _LOG2_E)

    def sequence(index: jax.Array, results: jax.Array) -> jax.Array:
        own, length, few = (lax.dynamic_slice_in_dim(x, index, 1) for x in (pages.tables, lengths, queries))
        one = dataclasses.replace(pages, tables=own, lengths=length)
        chosen = None if options.chosen is None else options.chosen[index]
        mixed = _prefill_sequence(few, starts[index] + jnp.arange(chunk * heads) // heads, one, chosen)
        return lax.dynamic_update_slice_in_dim(results, mixed, index, 0)

    mixed = lax.fori_loop(0, sequences, sequence, jnp.zeros((sequences, chunk * heads, rank)))
    return mixed.reshape(sequences, chunk, heads, rank).astype(q.dtype)


def _prefill_sequence(
    queries: jax.Array, positions: jax.Array, pages: _Pages, chosen: Bool[Array, "chunk keys"] | None
) -> jax.Array:
    """Attend with one sequence's scaled queries [1, queries, latent] at ``positions``; a token's heads are adjacent."""

    rank = pages.rank

    def body(index: jax.Array, state: Softmax) -> Softmax:
        latents, at = pages.read(index), pages.positions(index)
        visible = (at <= positions[:, None]) & (at < pages.lengths[0])
        if chosen is not None:
            some = lax.dynamic_slice_in_dim(chosen, index * pages.block, pages.block, 1)
            visible &= jnp.repeat(some, queries.shape[1] // chosen.shape[0], axis=0)
        values = latents[..., :rank]
        return state.add(
            _einsum("rqd,rkd->rqk", queries, latents), visible, lambda w: _einsum("rqk,rkd->rqd", w, values)
        )

    return lax.fori_loop(0, pages.blocks(), body, Softmax.of_nothing((*queries.shape[:2], rank))).result()
