"""Paged attention in XLA, for CPUs and for GPUs without a kernel.

The online softmax (Milakov & Gimelshein 2018) runs over fixed absolute blocks of keys. Decode sorts its rows by length
and processes a few at a time, prefill one sequence after the other, each up to its own last block: the work grows with
the keys that are really attended. A block that a query does not see adds exact zeros, so a row is bitwise independent
of the width of the tables and of the other rows.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Num

from pallas_kernels import bits
from pallas_kernels.paged_attention.options import AttentionOptions
from pallas_kernels.softmax import Softmax

# Keys of a block. Measured on a 2-core CPU, see docs/benchmarks.md: decode reads 256 in a third to half less time than
# four times 64, as long as the gathered keys and values stay in the cache; else it is a fifth slower. All chunks use
# one size, independent of their contents, or the order of sums would depend on the chunk that reads a key.
PREFILL_BLOCK = 128
_DECODE_BLOCK, _CACHED_BLOCK = 64, 256
_CACHED = 4096  # numbers per key of rows that run together: 4 MiB of keys, and as much of values
# Rows of similar length that decode processes together. On the same machine, against all 32 at once: 2 to 5 times as
# fast if lengths differ; if all are equal, the smaller products cost 0 to 40 % (head_dim 128 and 32).
ROWS_TOGETHER = 8
_LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class _Pages:
    """Keys and values of a few sequences, read by blocks of ``count`` pages."""

    pool: jax.Array
    scales: jax.Array | None
    tables: jax.Array  # [sequences, width]; the width is a multiple of count
    lengths: jax.Array  # [sequences]
    count: int

    @property
    def block(self) -> int:
        return self.count * self.pool.shape[3]

    def positions(self, index: jax.Array) -> jax.Array:
        return index * self.block + jnp.arange(self.block)

    def read(self, index: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Read keys and values of block ``index``, [sequences, kv_heads, block, head_dim] float32; 0 past the ends.

        A page's earlier owner may have left NaN, which a weight of 0 does not mask.
        """
        pages = lax.dynamic_slice_in_dim(self.tables, index * self.count, self.count, 1)
        written = (self.positions(index) < self.lengths[:, None])[:, None, :, None]
        # Two gathers: slicing keys and values out of one would copy both once more.
        keys, values = (_join_pages(self._numbers(pages, side)) for side in (0, 1))
        return keys, jnp.where(written, values, 0.0)

    def _numbers(self, pages: jax.Array, side: int) -> jax.Array:
        numbers = bits.widened(self.pool[pages, side])
        if self.scales is None:
            return numbers
        scales = self.scales[pages, side]
        return numbers * scales.reshape(*scales.shape, *(1,) * (numbers.ndim - scales.ndim))


def _join_pages(x: jax.Array) -> jax.Array:
    """Reshape [rows, pages, heads, page, dim] to [rows, heads, keys, dim]."""
    rows, pages, heads, page, dim = x.shape
    return x[:, 0] if pages == 1 else jnp.swapaxes(x, 1, 2).reshape(rows, heads, pages * page, dim)


@dataclasses.dataclass(frozen=True)
class _Equation:
    """The equation of options for queries [sequences, kv_heads, queries of a KV head, head_dim]."""

    options: AttentionOptions

    def scaled(self, q: jax.Array) -> jax.Array:
        scale, softcap = self.options.scale, self.options.softcap
        return q.astype(jnp.float32) * (scale * _LOG2_E if softcap is None else scale / softcap)

    def scores(self, q: jax.Array, keys: jax.Array) -> jax.Array:
        scores, softcap = _einsum("rhqd,rhkd->rhqk", q, keys), self.options.softcap
        return scores if softcap is None else jnp.tanh(scores) * (softcap * _LOG2_E)

    def start(self, shape: tuple[int, ...], sinks: jax.Array | None) -> Softmax:
        """Return the softmax before the first key, with ``sinks`` (one per query) added."""
        if sinks is None:
            return Softmax.of_nothing(shape)
        sinks = jnp.broadcast_to(sinks.astype(jnp.float32) * _LOG2_E, shape[:-1])
        return Softmax(jnp.ceil(sinks), jnp.exp2(sinks - jnp.ceil(sinks)), jnp.zeros(shape, jnp.float32))

    def first_block(self, first_query: jax.Array, block: int) -> jax.Array:
        """Return the first block that a query at this position, or at a later one, sees."""
        window = self.options.window
        return jnp.int32(0) if window is None else jnp.maximum(first_query - window + 1, 0) // block

    def in_window(self, queries: jax.Array, keys: jax.Array) -> jax.Array | bool:
        return True if self.options.window is None else keys > queries - self.options.window


def _einsum(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(spec, a, b, precision=lax.Precision.HIGHEST)


def _pages(pool: jax.Array, scales: jax.Array | None, tables: jax.Array, lengths: jax.Array, block: int) -> _Pages:
    """Pad tables to whole blocks with page 0; lengths mask the keys of the padding."""
    count = min(max(1, block // pool.shape[3]), tables.shape[1])
    return _Pages(pool, scales, jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % count))), lengths, count)


def _ceil_div(a: jax.Array, b: int) -> jax.Array:
    return (a + b - 1) // b


def decode_block(numbers: int) -> int:
    """Return the keys of a block for rows that together have ``numbers`` numbers per key."""
    return _CACHED_BLOCK if numbers <= _CACHED else _DECODE_BLOCK


def decode(
    q: Float[Array, "rows heads head_dim"],
    pool: Num[Array, "pages 2 kv_heads page head_dim"],
    tables: Int[Array, "rows width"],
    lengths: Int[Array, " rows"],
    options: AttentionOptions,
    *,
    together: int = ROWS_TOGETHER,
) -> Float[Array, "rows heads head_dim"]:
    """See `reference.decode`.

    Args:
        together: rows that run together, up to the longest of them; all of them is best on a GPU.
    """
    rows, heads, head_dim = q.shape
    kv_heads, together = pool.shape[2], min(together, rows)
    block = decode_block(together * kv_heads * head_dim)
    equation, pages = _Equation(options), _pages(pool, options.scales, tables, lengths, block)
    grouped = equation.scaled(q.reshape(rows, kv_heads, heads // kv_heads, head_dim))
    sinks = None if options.sinks is None else options.sinks.reshape(kv_heads, heads // kv_heads)
    if together == rows:
        return _decode_together(equation, grouped, pages, sinks).reshape(q.shape).astype(q.dtype)

    order = jnp.argsort(-lengths)
    by_length = _filled_up(grouped[order], together), _filled_up(pages.tables[order], together)
    ends = _filled_up(lengths[order], together)

    def some(index: jax.Array, results: jax.Array) -> jax.Array:
        at = index * together
        queries, own, last = (lax.dynamic_slice_in_dim(x, at, together) for x in (*by_length, ends))
        mixed = _decode_together(equation, queries, dataclasses.replace(pages, tables=own, lengths=last), sinks)
        return lax.dynamic_update_slice_in_dim(results, mixed, at, 0)

    results = lax.fori_loop(0, ends.size // together, some, jnp.zeros_like(by_length[0]))
    return results[jnp.argsort(order)].reshape(q.shape).astype(q.dtype)


def _filled_up(x: jax.Array, multiple: int) -> jax.Array:
    return jnp.pad(x, [(0, -x.shape[0] % multiple), *[(0, 0)] * (x.ndim - 1)])


def _decode_together(equation: _Equation, queries: jax.Array, pages: _Pages, sinks: jax.Array | None) -> jax.Array:
    """Decode scaled queries [rows, kv_heads, group, head_dim], each at the last of its keys."""
    lengths = pages.lengths
    last = (lengths - 1)[:, None, None, None]

    def body(index: jax.Array, state: Softmax) -> Softmax:
        (keys, values), at = pages.read(index), pages.positions(index)
        visible = (at <= last) & equation.in_window(last, at)
        return state.add(equation.scores(queries, keys), visible, lambda w: _einsum("rhqk,rhkd->rhqd", w, values))

    nothing = jnp.iinfo(jnp.int32).max
    first = equation.first_block(jnp.min(jnp.where(lengths > 0, lengths - 1, nothing)), pages.block)
    start = equation.start(queries.shape, sinks)
    return lax.fori_loop(first, _ceil_div(jnp.max(lengths), pages.block), body, start).result()


def prefill(
    q: Float[Array, "sequences chunk heads head_dim"],
    pool: Num[Array, "pages 2 kv_heads page head_dim"],
    tables: Int[Array, "sequences width"],
    starts: Int[Array, " sequences"],
    lengths: Int[Array, " sequences"],
    options: AttentionOptions,
) -> Float[Array, "sequences chunk heads head_dim"]:
    """See `reference.prefill`; results of padding are finite and unspecified. One product per KV head and block."""
    sequences, chunk, heads, head_dim = q.shape
    kv_heads, group = pool.shape[2], heads // pool.shape[2]
    equation, pages = _Equation(options), _pages(pool, options.scales, tables, lengths, PREFILL_BLOCK)
    grouped = jnp.transpose(q.reshape(sequences, chunk, kv_heads, group, head_dim), (0, 2, 3, 1, 4))
    grouped = equation.scaled(grouped.reshape(sequences, kv_heads, group * chunk, head_dim))
    sinks = None if options.sinks is None else jnp.repeat(options.sinks.reshape(kv_heads, group), chunk, axis=1)

    def sequence(index: jax.Array, results: jax.Array) -> jax.Array:
        own, start, length = (lax.dynamic_slice_in_dim(x, index, 1) for x in (pages.tables, starts, lengths))
        seen = None if options.tree is None else jnp.tile(options.tree[index], (group, 1))
        ends = None if options.ends is None else jnp.tile(options.ends[index], group)
        one = dataclasses.replace(pages, tables=own, lengths=length)
        queries = lax.dynamic_slice_in_dim(grouped, index, 1)
        places = jnp.tile(jnp.arange(chunk), group)
        mixed = _prefill_sequence(equation, queries, places, start[0], one, sinks, seen, ends)
        return lax.dynamic_update_slice_in_dim(results, mixed, index, 0)

    mixed = lax.fori_loop(0, sequences, sequence, jnp.zeros_like(grouped)).reshape(
        sequences, kv_heads, group, chunk, head_dim
    )
    return jnp.transpose(mixed, (0, 3, 1, 2, 4)).reshape(q.shape).astype(q.dtype)


def _prefill_sequence(
    equation: _Equation,
    queries: jax.Array,
    places: jax.Array,
    start: jax.Array,
    pages: _Pages,
    sinks: jax.Array | None,
    tree: jax.Array | None,
    ends: jax.Array | None,
) -> jax.Array:
    """Attend with one sequence's scaled queries [1, kv_heads, queries, head_dim], at ``places`` of its chunk."""
    length = pages.lengths[0]
    depths = places if tree is None else tree.sum(-1) - 1
    at_query = (start + depths)[:, None]
    last = at_query if ends is None else jnp.maximum(at_query, ends[:, None])

    def body(index: jax.Array, state: Softmax) -> Softmax:
        (keys, values), at = pages.read(index), pages.positions(index)
        causal = at <= last if tree is None else _seen_in_tree(tree, at - start)
        visible = causal & (at < length) & equation.in_window(at_query, at)
        return state.add(equation.scores(queries, keys), visible, lambda w: _einsum("rhqk,rhkd->rhqd", w, values))

    first = equation.first_block(jnp.where(length > 0, start, 0), pages.block)
    state = equation.start(queries.shape, sinks)
    return lax.fori_loop(first, _ceil_div(length, pages.block), body, state).result()


def _seen_in_tree(tree: jax.Array, places: jax.Array) -> jax.Array:
    """Index ``tree`` [queries, chunk] by keys at ``places`` of the chunk; those before it are seen."""
    chunk = tree.shape[1]
    inside = jnp.take(tree, jnp.clip(places, 0, chunk - 1), axis=1) & (places < chunk)
    return jnp.where(places < 0, True, inside)
