"""Rotate, quantise and write keys and values in one launch, in Pallas Mosaic GPU, for Ampere, Ada and Hopper.

One CTA (128 threads) handles one token and one tile of up to `Tiles.heads` heads of its keys, of its values, or of its
queries; threads share only the largest magnitude of a head, by shuffles within a warp:

    device memory          registers                                        device memory
    k[token, heads]  -->   rotate, cast, largest magnitude, quantise  -->   pool[page, 0, heads, slot]
    v[token, heads]  -->                 largest magnitude, quantise  -->   pool[page, 1, heads, slot]
                                         scale of each head           -->   scales[page, side, heads, slot]
    q[token, heads]  -->   rotate, cast                               -->   turned[token, heads]

The loads do not wait for the page lookup. The pool and its scales are mutable references, updated in place: a donated
pool is never copied. A head's row is contiguous in the pool, 128 bytes or more, so a store fills whole memory sectors
for any slot; TMA copies could not do better.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int, Num

from pallas_kernels import compat
from pallas_kernels.kv_write.reference import SMALLEST, Rope, Written, limit
from pallas_kernels.layouts import THREADS, power_of_two, row_layout

SOURCE_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
QUANTIZED_DTYPES = (jnp.int8, jnp.float8_e4m3fn)
MAX_HEAD_DIM = 256
KEYS, VALUES = 0, 1


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Block sizes; results are bitwise independent of them.

    Attributes:
        heads: most heads of one token per CTA; a power of two.
    """

    heads: int = 8

    def __post_init__(self) -> None:
        if self.heads < 1 or self.heads & (self.heads - 1):
            raise ValueError(f"heads must be a power of two: {self}")


def heuristic_tiles(head_dim: int) -> Tiles:
    """Return tiles with as many heads as give each thread up to eight numbers."""
    return Tiles(1 << ((8 * THREADS // head_dim).bit_length() - 1))


class _Operands(NamedTuple):
    """Operands in device memory; ``tokens`` are those of all sequences, concatenated. None: not in this launch."""

    pages: Any  # [sequences, written]
    offsets: Any  # [sequences]
    k: Any  # [tokens, kv_heads, *columns]; None, as v, if q holds them
    v: Any
    q: Any  # [tokens, heads, *columns]; or [tokens, kv_heads, group + 2, *columns], key and value after each group
    cos: Any  # [tokens, half]
    sin: Any
    given: Any  # [pages, 2, kv_heads]: scales per page and head
    pool: Any  # [pages, 2, kv_heads, page, *columns], mutable
    found: Any  # [pages, 2, kv_heads, page]: scales per token, mutable


class _Shape(NamedTuple):
    """The static parameters of one launch."""

    tokens: int
    chunk: int
    half: int  # half of the rotated numbers of a head; 0: no rotation
    head_dim: int
    interleaved: bool
    kv_heads: int
    group: int  # queries of a KV head if one array holds queries, keys and values; else 0
    kv_tile: int
    q_tile: int


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
    tiles: Tiles | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Written:
    """See `reference`. Sums of a rotation may be fused multiply-adds, and a division may be off by one ulp.

    Args:
        tiles: block sizes; None: `heuristic_tiles`.
        interpret: run on a CPU (`compat.interpret_params`).

    Raises:
        ValueError: a shape or dtype that this kernel does not support, see `refusal`.
    """
    if (why := refusal(pool, k, v, scales=scales, rope=rope, interleaved=interleaved, q=q)) is not None:
        raise ValueError(why)
    shape = _shape_of(k, q, rope, interleaved, tiles or heuristic_tiles(k.shape[3]))
    if shape.tokens == 0:
        return Written(pool, scales, q)
    sources = (_flat(shape, k), _flat(shape, v), None if q is None or not shape.half else _flat(shape, q))
    done = _launched(shape, pool, sources, pages, offsets, scales, rope, interpret)
    return done._replace(q=q if q is None or done.q is None else done.q.reshape(q.shape))


def write_projected(
    pool: Num[Array, "pages 2 kv_heads page head_dim"],
    qkv: Float[Array, "sequences chunk kv_heads parts head_dim"],
    pages: Int[Array, "sequences written"],
    offsets: Int[Array, " sequences"],
    *,
    rope: Rope,
    scales: Float[Array, "pages 2 kv_heads *page"] | None = None,
    interleaved: bool = False,
    tiles: Tiles | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Written:
    """See `reference`, and `write` for the same arguments. Results are bitwise identical to those of `write`.

    Raises:
        ValueError: a shape or dtype that this kernel does not support, see `projected_refusal`.
    """
    if (why := projected_refusal(pool, qkv, rope=rope, scales=scales, interleaved=interleaved)) is not None:
        raise ValueError(why)
    (sequences, chunk, kv_heads, parts, head_dim), half = qkv.shape, rope[0].shape[-1]
    tiles, group = tiles or heuristic_tiles(head_dim), parts - 2
    rows = power_of_two(kv_heads, tiles.heads), power_of_two(group, tiles.heads)
    shape = _Shape(sequences * chunk, chunk, half, head_dim, interleaved, kv_heads, group, *rows)
    whole = qkv.reshape(shape.tokens, kv_heads, parts, *_columns(shape))
    done = _launched(shape, pool, (None, None, whole), pages, offsets, scales, rope, interpret)
    assert done.q is not None
    return done._replace(q=done.q.reshape(sequences, chunk, kv_heads * group, head_dim))


def projected_refusal(pool: Any, qkv: Any, *, rope: Any, scales: Any | None = None, interleaved: bool) -> str | None:
    """Return why this kernel does not support `write_projected`, or None, like `refusal`."""
    (sequences, chunk, kv_heads, parts, head_dim), dtype = qkv.shape, qkv.dtype
    if parts < 3 or not rope[0].shape[-1] or not sequences * chunk:
        return f"queries, keys and values {qkv.shape} with {2 * rope[0].shape[-1]} numbers rotated."
    k = jax.ShapeDtypeStruct((sequences, chunk, kv_heads, head_dim), dtype)
    q = jax.ShapeDtypeStruct((sequences, chunk, kv_heads * (parts - 2), head_dim), dtype)
    return refusal(pool, k, k, scales=scales, rope=rope, interleaved=interleaved, q=q)


def _launched(
    shape: _Shape,
    pool: Array,
    sources: tuple[Array | None, Array | None, Array | None],
    pages: Array,
    offsets: Array,
    scales: Array | None,
    rope: Rope | None,
    interpret: plgpu.InterpretGPUParams | None,
) -> Written:
    """Launch the kernel. ``sources``: see `_Operands`. ``q`` of the result is [tokens, heads, *columns], or None."""
    by_token = scales is not None and scales.ndim == 4
    target = jax.new_ref(pool.reshape(*pool.shape[:4], *_columns(shape)))
    found = jax.new_ref(scales) if by_token else None
    operands = _Operands(
        pages.astype(jnp.int32),
        offsets.astype(jnp.int32),
        *sources,
        cos=None if rope is None else rope[0].reshape(shape.tokens, -1).astype(jnp.float32),
        sin=None if rope is None else rope[1].reshape(shape.tokens, -1).astype(jnp.float32),
        given=None if by_token else scales,
        pool=target,
        found=found,
    )
    turned = _launcher(shape, operands, interpret)(*jax.tree.leaves(operands))
    written = jax.freeze(target).reshape(pool.shape)
    return Written(written, scales if found is None else jax.freeze(found), turned[0] if turned else None)


def refusal(
    pool: Any,
    k: Any,
    v: Any,
    *,
    scales: Any | None = None,
    rope: tuple[Any, Any] | None = None,
    interleaved: bool = False,
    q: Any | None = None,
) -> str | None:
    """Return why this kernel does not support these operands, or None (compute capability 8.0, float8: 8.9)."""
    head_dim, half = k.shape[-1], 0 if rope is None else rope[0].shape[-1]
    if pool.shape[1] != 2 or pool.shape[2] != k.shape[2] or pool.shape[4] != head_dim or v.shape != k.shape:
        return f"keys {k.shape}, values {v.shape} and pool {pool.shape} do not fit."
    if head_dim % 16 or head_dim > MAX_HEAD_DIM or half % 8 or 2 * half > head_dim:
        return f"head_dim {head_dim} with {2 * half} numbers rotated: multiples of 16 up to {MAX_HEAD_DIM} are needed."
    if q is not None and (q.shape[:2] != k.shape[:2] or q.shape[-1] != head_dim):
        return f"queries {q.shape} and keys {k.shape} do not fit."
    sources = {jnp.dtype(x.dtype) for x in (k, v, q) if x is not None}
    if not sources <= set(map(jnp.dtype, SOURCE_DTYPES)):
        return f"keys, values and queries are {sorted(map(str, sources))}: float32, bfloat16 or float16 is needed."
    if pool.dtype not in (SOURCE_DTYPES if scales is None else QUANTIZED_DTYPES):
        return f"a pool of {pool.dtype} {'without' if scales is None else 'with'} scales is not written by this kernel."
    if scales is not None and (scales.dtype != jnp.float32 or scales.shape not in (pool.shape[:3], pool.shape[:4])):
        return f"scales {scales.dtype}{scales.shape} are neither per page and head nor per token, float32."
    return None


def _shape_of(k: Array, q: Array | None, rope: Rope | None, interleaved: bool, tiles: Tiles) -> _Shape:
    sequences, chunk, kv_heads, head_dim = k.shape
    half = 0 if rope is None else rope[0].shape[-1]
    q_tile = 0 if q is None or not half else power_of_two(q.shape[2], tiles.heads)
    pairs, kv_tile = interleaved and half > 0, power_of_two(kv_heads, tiles.heads)
    return _Shape(sequences * chunk, chunk, half, head_dim, pairs, kv_heads, 0, kv_tile, q_tile)


def _columns(shape: _Shape) -> tuple[int, ...]:
    """Return a head's dimensions in this launch: neighbours that are rotated together have their own axis."""
    return (shape.head_dim // 2, 2) if shape.interleaved else (shape.head_dim,)


def _flat(shape: _Shape, x: Array) -> Array:
    return x.reshape(shape.tokens, x.shape[2], *_columns(shape))


def _launcher(shape: _Shape, operands: _Operands, interpret: plgpu.InterpretGPUParams | None) -> Any:
    tree, q = jax.tree.structure(operands), operands.q
    heads = 0 if q is None else shape.kv_heads * shape.group or q.shape[1]
    kv_tiles, q_tiles = shape.kv_heads // shape.kv_tile, heads // shape.q_tile if heads else 0
    turned = () if q is None else (jax.ShapeDtypeStruct((shape.tokens, heads, *_columns(shape)), q.dtype),)
    return compat.kernel(
        functools.partial(_body, shape, tree, kv_tiles),
        out_type=turned,
        scratch_types=(),
        grid=(shape.tokens, 2 * kv_tiles + q_tiles),
        grid_names=("token", "part"),
        num_threads=1,
        thread_name="warpgroup",
        kernel_name="kv_write",
        # No thread reads what another thread has written, so no barriers are needed.
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        cost_estimate=_cost(shape, operands),
        interpret=interpret,
    )


def _cost(shape: _Shape, operands: _Operands) -> pl.CostEstimate:
    sources = [x for x in (operands.k, operands.v, operands.q) if x is not None]
    numbers = sum(math.prod(x.shape) for x in sources)
    moved = sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in sources)
    return pl.CostEstimate(flops=6 * numbers, transcendentals=0, bytes_accessed=2 * moved)


# --------------------------------------------------------------------------------------------------------------
# The kernel.


class _Part(NamedTuple):
    """A tile: the heads ``heads`` of a token's keys, values or queries, at index ``at`` of ``source``."""

    source: Any
    at: tuple[Any, ...]
    token: Any
    heads: Any
    rows: int
    rotated: bool


def _body(shape: _Shape, tree: Any, kv_tiles: int, *refs: Any) -> None:
    gmem: _Operands = jax.tree.unflatten(tree, refs[: tree.num_leaves])
    turned = refs[tree.num_leaves :]
    token, part = lax.axis_index("token"), lax.axis_index("part")

    for side, source in enumerate((gmem.k, gmem.v)):
        here = (part >= side * kv_tiles) & (part < (side + 1) * kv_tiles)
        heads = pl.ds((part - side * kv_tiles) * shape.kv_tile, shape.kv_tile)
        source, at = (gmem.q, (token, heads, shape.group + side)) if shape.group else (source, (token, heads))
        tile = _Part(source, at, token, heads, shape.kv_tile, shape.half > 0 and side == KEYS)
        pl.when(here)(functools.partial(_store_in_pool, shape, gmem, tile, side))
    if turned:
        tile = _query_tile(shape, gmem, token, (part - 2 * kv_tiles) * shape.q_tile)
        pl.when(part >= 2 * kv_tiles)(functools.partial(_turn_queries, shape, gmem, tile, turned[0]))


def _query_tile(shape: _Shape, gmem: _Operands, token: Any, first: Any) -> _Part:
    heads = pl.ds(first, shape.q_tile)
    if not shape.group:
        return _Part(gmem.q, (token, heads), token, heads, shape.q_tile, True)
    kv_head = lax.div(first, jnp.int32(shape.group))
    at = (token, kv_head, pl.ds(first - kv_head * shape.group, shape.q_tile))
    return _Part(gmem.q, at, token, heads, shape.q_tile, True)


def _turn_queries(shape: _Shape, gmem: _Operands, tile: _Part, target: Any) -> None:
    layout = _layout(shape, tile)
    for columns, x in zip(_pieces(shape, tile), _load(shape, gmem, tile, layout), strict=True):
        compat.store(target.at[(tile.token, tile.heads, *columns)], x)


def _store_in_pool(shape: _Shape, gmem: _Operands, tile: _Part, side: int) -> None:
    layout = _layout(shape, tile)
    loaded = _load(shape, gmem, tile, layout)
    page, slot, exists = _place(shape, gmem, tile.token)

    @pl.when(exists)
    def _() -> None:
        numbers, scales = _quantized(gmem, tile, layout, loaded, (page, side, tile.heads))
        for columns, x in zip(_pieces(shape, tile), numbers, strict=True):
            compat.store(gmem.pool.at[(page, side, tile.heads, slot, *columns)], x)
        if gmem.found is not None:
            compat.store(gmem.found.at[page, side, tile.heads, slot], scales)


def _place(shape: _Shape, gmem: _Operands, token: Any) -> tuple[Any, Any, Any]:
    """Return page and slot of a token, and whether that page exists."""
    (pages, _, _, page), written = gmem.pool.shape[:4], gmem.pages.shape[1]
    sequence = lax.div(token, jnp.int32(shape.chunk))
    at = gmem.offsets[sequence] + lax.rem(token, jnp.int32(shape.chunk))
    index = lax.div(at, jnp.int32(page))
    own = gmem.pages[sequence, jnp.minimum(index, written - 1)]
    return own, lax.rem(at, jnp.int32(page)), (index < written) & (own >= 0) & (own < pages)


def _pieces(shape: _Shape, tile: _Part) -> list[tuple[Any, ...]]:
    """Return the column indices that make up a head; for a rotated one the first two hold the pairs."""
    half, dim = shape.half, shape.head_dim
    if shape.interleaved:
        ranges = [(0, half), (half, dim // 2 - half)] if tile.rotated else [(0, dim // 2)]
        return [(pl.ds(start, size), side) for start, size in ranges for side in (0, 1) if size]
    ranges = [(0, half), (half, half), (2 * half, dim - 2 * half)] if tile.rotated else [(0, dim)]
    return [(pl.ds(start, size),) for start, size in ranges if size]


def _layout(shape: _Shape, tile: _Part) -> Any:
    """Return one layout for all column ranges [rows, columns], with a head within one warp."""
    columns = math.gcd(*(columns[0].size for columns in _pieces(shape, tile)))
    widest = 1 if shape.interleaved else 16 // jnp.dtype(tile.source.dtype).itemsize
    return row_layout(tile.rows, columns, widest)[0]


def _load(shape: _Shape, gmem: _Operands, tile: _Part, layout: Any) -> list[Any]:
    """Load the column ranges of a tile, rotated, in the source's dtype."""
    places = [tile.source.at[(*tile.at, *columns)] for columns in _pieces(shape, tile)]
    pieces = [plgpu.load(place, layout=layout, optimized=False) for place in places]
    if not tile.rotated:
        return pieces
    cos, sin = (
        _spread(plgpu.load(angle.at[tile.token], layout=layout.reduce(0), optimized=False), layout, tile.rows, axis=1)
        for angle in (gmem.cos, gmem.sin)
    )
    first, second = (x.astype(jnp.float32) for x in pieces[:2])
    turned = (first * cos - second * sin, second * cos + first * sin)
    return [*(x.astype(tile.source.dtype) for x in turned), *pieces[2:]]


def _spread(x: Any, layout: Any, size: int, *, axis: int) -> Any:
    """Broadcast [columns] (``axis`` 1) or [rows] (0) ``size`` times along the other axis."""
    dims = (size, *x.shape) if axis else (*x.shape, size)
    return plgpu.layout_cast(lax.broadcast_in_dim(x, dims, (axis,)), layout)


def _quantized(
    gmem: _Operands, tile: _Part, layout: Any, pieces: list[Any], at: tuple[Any, ...]
) -> tuple[list[Any], Any]:
    """Return the column ranges in the pool's dtype, and the scales per token, if the pool has such."""
    dtype = gmem.pool.dtype
    if gmem.found is None and gmem.given is None:
        return [x.astype(dtype) for x in pieces], None
    pieces = [x.astype(jnp.float32) for x in pieces]
    if gmem.found is not None:
        scales = _largest(pieces) / limit(dtype)
    else:
        scales = plgpu.load(gmem.given.at[at], layout=layout.reduce(1), optimized=False)
    inverse = 1 / jnp.maximum(scales, SMALLEST)
    rounded: Callable[[Any], Any] = (
        functools.partial(lax.round, rounding_method=lax.RoundingMethod.TO_NEAREST_EVEN)
        if jnp.issubdtype(dtype, jnp.integer)
        else lambda x: x
    )
    scaled = [x * _spread(inverse, layout, x.shape[1], axis=0) for x in pieces]
    clipped = [jnp.minimum(jnp.maximum(x, -limit(dtype)), limit(dtype)) for x in scaled]
    return [rounded(x).astype(dtype) for x in clipped], scales


def _largest(pieces: list[Any]) -> Any:
    tops = [jnp.abs(x).max(axis=1) for x in pieces]
    return jnp.maximum(functools.reduce(jnp.maximum, tops), SMALLEST)
