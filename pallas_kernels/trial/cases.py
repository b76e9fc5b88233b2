"""Operands for launches, random and valid, small enough to fit next to a model: by op, from the shapes of a program.

Pools, and stacks of experts, have the size that a launch needs, not that of the engine: a kernel finds pages, states
and experts by their index. Where the XLA path would need much memory (256 rows of 131,072 keys), it gets a subset.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import bits
from pallas_kernels.grouped_matmul.groups import Groups
from pallas_kernels.launches import Launch

_KEYS = 2048  # keys of the longest row, and before a chunk
_QUERIES = 64  # queries at a chunk's beginning and end that are compared
_ROWS = 4  # rows of a decode step that are compared
_EXPERTS = 4
_PAGES = 256  # pages that rows read: they may share them


class Case(NamedTuple):
    """Operands of a launch, and those of the XLA path for the slice of the result that ``select`` takes."""

    operands: tuple[Any, ...]
    options: Mapping[str, Any]
    plain: tuple[Any, ...]
    select: Callable[[Any], Any] = lambda result: result


class Draw:
    """Random arrays of given shapes and dtypes, different at each call.

    Numbers are hashes of their indices: `jax.random` takes longer to compile than all trials. ``seed``: an integer
    array, so that a compiler cannot constant-fold the numbers.
    """

    def __init__(self, seed: Any) -> None:
        self._seed, self._calls = jnp.asarray(seed).astype(jnp.uint32), 0

    def _hashes(self, shape: tuple[int, ...]) -> Any:
        """Return 32 random bits each ("lowbias32" of Wellons, Prospecting for Hash Functions, 2018)."""
        self._calls += 1
        place = (
            jnp.arange(math.prod(shape), dtype=jnp.uint32) + np.uint32(self._calls * 0x9E3779B9 % 2**32) + self._seed
        )
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            place = (place ^ (place >> shift)) * np.uint32(factor)
        return (place ^ (place >> 16)).reshape(shape)

    def normal(self, like: Any, scale: float = 1.0, first: int | None = None) -> Any:
        """Draw bell-shaped numbers (the sum of two uniform ones) of variance 1; for integers, most of the range.

        ``first``: another first dimension. A float8 pool in bytes gets the bits of such numbers.
        """
        if like is None:
            return None
        kind, found = bits.meant(like.dtype), self._hashes(_shape(like, first))
        if jnp.issubdtype(kind, jnp.integer):
            most = int(jnp.iinfo(kind).max)
            return ((found % np.uint32(2 * most + 1)).astype(jnp.int32) - most).astype(kind)
        both = ((found >> 16) + (found & 0xFFFF)).astype(jnp.float32) / 65535 - 1
        return bits.held((both * (6**0.5 * scale)).astype(kind), like.dtype)

    def uniform(self, like: Any, least: float, most: float, first: int | None = None) -> Any:
        if like is None:
            return None
        found = self._hashes(_shape(like, first)).astype(jnp.float32) / 2.0**32
        return (least + (most - least) * found).astype(like.dtype)

    def integers(self, like: Any, least: int, most: int) -> Any:
        """Draw integers from ``least`` to ``most`` - 1."""
        return (self._hashes(like.shape) % np.uint32(most - least)).astype(jnp.int32) + least

    def distinct(self, like: Any, count: int) -> Any:
        """Return distinct numbers below ``count``: multiples of a number coprime to it."""
        factor = next(one for one in range(max(2, int(count * 0.618)), 2 * count + 3) if math.gcd(one, count) == 1)
        places = np.arange(math.prod(like.shape), dtype=np.int64) * factor % count
        return jnp.asarray(places.astype(np.int32).reshape(like.shape))

    def pool_scales(self, like: Any, pool: Any, first: int) -> Any:
        """Draw scales of an 8-bit pool, so that its dequantized numbers are about 1."""
        spread = 64.0 if jnp.issubdtype(bits.meant(pool.dtype), jnp.integer) else 1.0
        return self.uniform(like, 0.5 / spread, 1.5 / spread, first)


def _shape(like: Any, first: int | None) -> tuple[int, ...]:
    return tuple(like.shape) if first is None else (first, *like.shape[1:])


# --------------------------------------------------------------------------------------------------------------
# Attention. Options are a dataclass with the arrays that belong to a pool.


def _decode(draw: Draw, q: Any, pool: Any, tables: Any, lengths: Any, options: Any) -> Case:
    page, pages = _page_of(pool), min(_PAGES, pool.shape[0])
    width = max(1, min(tables.shape[1], _KEYS // page))
    rows, count = min(_ROWS, q.shape[0]), lengths.shape[0]
    arrays = draw.normal(q), draw.normal(pool, first=pages), draw.integers(tables, 0, pages)
    filled = draw.integers(lengths, 1, width * page + 1).at[0].set(width * page)
    given = _options(draw, options, pool, pages)
    if getattr(options, "chosen", None) is not None:
        first = jnp.arange(options.chosen.shape[1], dtype=jnp.int32)
        given = _replaced(given, chosen=jnp.broadcast_to(first, (count, first.size)))
    part = _replaced(given, chosen=given.chosen[:rows]) if getattr(given, "chosen", None) is not None else given
    plain = arrays[0][:rows], arrays[1], arrays[2][:rows, :width], filled[:rows], part
    return Case((*arrays, filled, given), {}, plain, lambda out: out[:rows])


def _prefill(draw: Draw, q: Any, pool: Any, tables: Any, starts: Any, lengths: Any, options: Any) -> Case:
    """Make full chunks, of which the first and the last queries of the first sequence are compared."""
    (sequences, chunk), page, pages = q.shape[:2], _page_of(pool), min(_PAGES, pool.shape[0])
    room = tables.shape[1] * page
    begun, count = min(_KEYS, max(0, room - chunk)), min(chunk, room)
    some, width = min(_QUERIES, count), -(-(begun + count) // page)
    arrays = draw.normal(q), draw.normal(pool, first=pages), draw.integers(tables, 0, pages)
    first, ends = jnp.full((sequences,), begun, jnp.int32), jnp.full((sequences,), begun + count, jnp.int32)
    given = _options(draw, options, pool, pages)
    whole, part = given, given
    if getattr(options, "tree", None) is not None:  # a chain: each token sees all before it
        whole = _replaced(given, tree=jnp.broadcast_to(jnp.tril(jnp.ones((chunk, chunk), bool)), options.tree.shape))
        part = _replaced(given, tree=None)
    if getattr(options, "chosen", None) is not None:
        whole = _replaced(given, chosen=jnp.ones(options.chosen.shape, bool))
        part = _replaced(given, chosen=None)
    at = jnp.array([begun, begun + count - some], jnp.int32)
    table = jnp.broadcast_to(arrays[2][:1, :width], (2, width))
    plain = jnp.stack([arrays[0][0, :some], arrays[0][0, count - some : count]]), arrays[1], table, at, at + some, part

    def select(out: Any) -> Any:
        return jnp.stack([out[0, :some], out[0, count - some : count]])

    return Case((*arrays, first, ends, whole), {}, plain, select)


def _attention(draw: Draw, *operands: Any) -> Case:
    return (_decode if len(operands) == 5 else _prefill)(draw, *operands)


def _page_of(pool: Any) -> int:
    """Return the tokens of a page, in a pool of keys and values or of latents."""
    return int(pool.shape[3] if len(pool.shape) == 5 else pool.shape[1])


def _options(draw: Draw, options: Any, pool: Any, pages: int) -> Any:
    scales = draw.pool_scales(options.scales, pool, pages)
    sinks = draw.normal(getattr(options, "sinks", None))
    return _replaced(options, scales=scales, **({} if sinks is None else {"sinks": sinks}))


def _replaced(options: Any, **changes: Any) -> Any:
    return type(options)(**{**{name: getattr(options, name) for name in options.__dataclass_fields__}, **changes})


# --------------------------------------------------------------------------------------------------------------
# The KV pool.


def _write(draw: Draw, pool: Any, *rest: Any, **options: Any) -> Case:
    """Make keys and values, or the output of a fused QKV projection, of chunks that share no page."""
    *tokens, pages, offsets = rest
    count = pages.size + 2
    rope = options.get("rope")
    angles = None if rope is None else draw.uniform(rope[0], -3.0, 3.0)
    given = {
        **options,
        "scales": draw.pool_scales(options.get("scales"), pool, count),
        "rope": None if angles is None else (jnp.cos(angles), jnp.sin(angles)),
        **({"q": draw.normal(options["q"])} if "q" in options else {}),
    }
    numbers = draw.normal(pool, first=count), *(draw.normal(each) for each in tokens)
    operands = *numbers, draw.distinct(pages, count), draw.integers(offsets, 0, _page_of(pool))
    return Case(operands, given, operands)


def _copy(draw: Draw, pool: Any, *places: Any) -> Case:
    """Make copies of pages (source, target), or of tokens (source pages and slots, target pages and slots)."""
    leaf, moves = jax.tree.leaves(pool)[0], places[0]
    count, slots = 2 * moves.size + 2, leaf.shape[3] if len(places) == 4 else 1
    targets = draw.distinct(moves, count * slots)
    at: tuple[Any, ...]
    if len(places) == 2:
        at = draw.integers(moves, 0, count), targets
    else:
        at = draw.integers(moves, 0, count), draw.integers(moves, 0, slots), targets // slots, targets % slots
    operands = jax.tree.map(lambda each: draw.normal(each, first=count), pool), *at
    return Case(operands, {}, operands)


def _states(draw: Draw, q: Any, k: Any, v: Any, decay: Any, beta: Any, pool: Any, read: Any, write: Any) -> Case:
    """Give each sequence its own state; of a chunked prompt the last chunk's is kept."""
    count = read.shape[0] + 1
    own = draw.distinct(read, count)
    kept = own if len(write.shape) == 1 else jnp.full(write.shape, count, jnp.int32).at[:, -1].set(own)
    rows = draw.normal(q), draw.normal(k, k.shape[-1] ** -0.5), draw.normal(v)
    gates = draw.uniform(decay, -1.0, -0.01), draw.uniform(beta, 0.1, 0.9)
    operands = *rows, *gates, draw.normal(pool, first=count), own, kept
    return Case(operands, {}, operands)


# --------------------------------------------------------------------------------------------------------------
# Products.


def _matmul(draw: Draw, x: Any, weights: Any, extras: Any, **options: Any) -> Case:
    inputs = x.shape[-1]
    small = 1.0 if jnp.issubdtype(weights.dtype, jnp.integer) else inputs**-0.5
    given = extras._replace(
        x_scales=draw.uniform(extras.x_scales, 0.01, 0.02),
        scales=draw.uniform(extras.scales, 0.001, 0.002),
        bias=draw.normal(extras.bias),
        residual=draw.normal(extras.residual),
    )
    operands = draw.normal(x), draw.normal(weights, small), given
    return Case(operands, options, operands)


def _quantised(draw: Draw, x: Any, weights: Any, scales: Any, zeros: Any, *groups: Any, **options: Any) -> Case:
    """Make a product of rows, or of tiles of rows that have an expert each."""
    experts = min(_EXPERTS, weights.shape[0]) if groups else None
    factors = (
        scales if experts is None else jax.ShapeDtypeStruct((scales.shape[0], experts, scales.shape[2]), scales.dtype)
    )
    offsets = None if zeros is None else jax.ShapeDtypeStruct(factors.shape, zeros.dtype)
    if options.get("e2m1"):
        small = draw.integers(factors, 118, 122).astype(scales.dtype)  # powers of two, by their exponents
    else:
        small = draw.uniform(factors, 0.005, 0.01)
    numbers = draw.normal(weights, first=experts)
    operands = (
        draw.normal(x),
        jnp.clip(numbers, -7, 7).astype(weights.dtype) if options.get("e2m1") else numbers,
        small,
        None if offsets is None else draw.integers(offsets, -4, 5).astype(offsets.dtype),
        *(_groups(draw, each, experts or 1) for each in groups),
    )
    return Case(operands, options, operands)


def _grouped(draw: Draw, x: Any, weights: Any, groups: Any) -> Case:
    experts = min(_EXPERTS, weights.shape[0])
    operands = draw.normal(x), draw.normal(weights, weights.shape[-1] ** -0.5, experts), _groups(draw, groups, experts)
    return Case(operands, {}, operands)


def _low_rank(draw: Draw, x: Any, a: Any, b: Any, groups: Any) -> Case:
    matrices = (draw.normal(each, each.shape[-1] ** -0.5) for each in (a, b))
    operands = draw.normal(x), *matrices, _groups(draw, groups, a.shape[0])
    return Case(operands, {}, operands)


def _groups(draw: Draw, groups: Groups, experts: int) -> Groups:
    """Order entries, one per row; about half of the tiles are empty if there are more than entries fill."""
    tiles, rows = groups.entries.shape
    entries = groups.places.shape[0]
    places = np.arange(tiles * rows, dtype=np.int32)
    occupied = min(tiles, -(-entries // rows))
    owners = None if groups.experts is None else jnp.sort(draw.integers(groups.experts, 0, experts))
    return Groups(
        entries=jnp.asarray(np.minimum(places, entries).reshape(tiles, rows)),
        places=jnp.asarray(np.minimum(np.arange(entries, dtype=np.int32), tiles * rows)),
        experts=owners,
        occupied=jnp.asarray(occupied, jnp.int32).reshape(groups.occupied.shape),
    )


def _tokens(draw: Draw, x: Any, **options: Any) -> Case:
    operands = (draw.normal(x),)
    return Case(operands, options, operands)


_CASES: Mapping[str, Callable[..., Case]] = {
    "paged_attention.decode": _attention,
    "paged_attention.prefill": _attention,
    "mla_attention": _attention,
    "kv_write": _write,
    "kv_copy": _copy,
    "linear_attention": _states,
    "matmul": _matmul,
    "quant_matmul": _quantised,
    "grouped_matmul": _grouped,
    "lora": _low_rank,
    "token_quant": _tokens,
}


def case_of(launch: Launch, seed: Any) -> Case:
    """Make the operands of a launch; traceable, so that a program makes them on the device."""
    return _CASES[launch.op](Draw(seed), *launch.operands, **launch.options)
