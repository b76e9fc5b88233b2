"""Paged decode for GPUs below Hopper, which have neither the TMA nor wgmma, in Pallas Mosaic GPU.

One thread block of 128 threads has one split of one KV head of one row. Keys are the rows of both products, as in the
kernel for Hopper, and the queries of a KV head the 8 to 32 columns:

    pages, by cp.async ->  keys   [stages, 64, dim] -> scores [64, columns]  = keys . queries       (mma)
                       ->  values [stages, 64, dim]    probs  [64, columns]  <- softmax, 16 bits
                                                    -> sums   [dim, columns] += values' . probs     (mma)

``stages - 1`` key blocks are on their way while one is computed. Copies are waited for by their number, so that every
step issues as many: beyond a split's end it copies the last block again, which the L2 cache has.

Splits lie at absolute positions and leave float32 sums, which XLA merges. Maxima are rounded to integers (scores are in
powers of two), so rescaling is exact: no bit of a row depends on other rows or on where its pages lie.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import compat
from pallas_kernels.paged_attention.mosaic.decode_schedule import span

__all__ = ["Tiles", "decode", "refusal"]

BLOCK = 64  # keys: the rows of four warps' mma
HEAD_DIMS = (64, 128)
PAGES = (16, 32, 64, 128)
MOST_GROUP = 32
_LEAST_COPY = 2048  # numbers: 16 bytes for each of 128 threads
_LOWEST = -1e30  # stands for minus infinity where inf - inf would give NaN
_ROUND = 1.5 * 2**23  # added and subtracted, it rounds a float32 to the nearest integer
_LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Block sizes. ``keys_per_split`` is part of the numerics: the last bits.

    Attributes:
        stages: key blocks in shared memory, one of which is computed: 2 to 4.
        keys_per_split: keys that one thread block goes through: a multiple of 64.

    Raises:
        ValueError: other numbers than these.
    """

    stages: int = 3
    keys_per_split: int = 512

    def __post_init__(self) -> None:
        if not 2 <= self.stages <= 4 or self.keys_per_split < 1 or self.keys_per_split % BLOCK:
            raise ValueError(f"there are 2 to 4 stages, and splits of multiples of {BLOCK} keys: {self}")


class _Shape(NamedTuple):
    """What is static about one launch."""

    rows: int
    kv_heads: int
    group: int
    page: int
    head_dim: int
    splits: int
    dtype: Any
    scale: float
    window: int | None
    softcap: float | None
    tiles: Tiles
    interpret: bool

    @property
    def columns(self) -> int:
        return -(-self.group // 8) * 8

    @property
    def piece(self) -> int:
        """Keys of one copy."""
        return min(self.page, BLOCK)


class _Gmem(NamedTuple):
    q: Any  # [rows, kv_heads, columns, head_dim]
    pool: Any  # [pages, 2, kv_heads, page, head_dim]
    tables: Any  # [rows, width]
    lengths: Any  # [rows]
    sums: Any  # [rows, kv_heads, splits, head_dim, columns]
    stats: Any  # [rows, kv_heads, splits, 2, columns]: maximum, total


class _Smem(NamedTuple):
    queries: Any  # [columns, head_dim]
    keys: Any  # [stages, 64, head_dim]
    values: Any
    probs: Any  # [64, columns]


class _Unit(NamedTuple):
    """One split of one KV head of one row. Traced scalars."""

    row: Any
    head: Any
    split: Any
    low: Any  # first key that is seen
    high: Any  # one past the last
    first: Any  # key block
    steps: Any  # key blocks


class _Sums(NamedTuple):
    mixed: Any  # [head_dim, columns]
    top: Any  # [columns]
    total: Any  # [columns]


def decode(
    q: Float[Array, "rows heads head_dim"],
    pool: Float[Array, "pages 2 kv_heads page head_dim"],
    tables: Int[Array, "rows width"],
    lengths: Int[Array, " rows"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
    scales: None = None,
    tiles: Tiles | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Float[Array, "rows heads head_dim"]:
    """See `reference.decode`; the result has the dtype of ``q``. Probabilities are rounded to 16 bits.

    Args:
        tiles: block sizes; None: some that were not tuned.
        interpret: run on a CPU (`compat.interpret_params`).

    Raises:
        ValueError: what `refusal` says.
    """
    options: dict[str, Any] = {"window": window, "softcap": softcap, "sinks": sinks, "scales": scales}
    if (why := refusal(q, pool, tables, lengths, **options)) is not None:
        raise ValueError(why)
    (rows, heads, head_dim), (kv_heads, page), tiles = q.shape, pool.shape[2:4], tiles or _heuristic_tiles(q)
    splits = pl.cdiv(tables.shape[1] * page, tiles.keys_per_split)
    sizes = (rows, kv_heads, heads // kv_heads, page, head_dim, splits)
    shape = _Shape(*sizes, jnp.dtype(q.dtype), scale, window, softcap, tiles, interpret is not None)
    queries = q.reshape(rows, kv_heads, shape.group, head_dim)
    queries = jnp.pad(queries, ((0, 0), (0, 0), (0, shape.columns - shape.group), (0, 0)))
    operands = queries, pool, tables.astype(jnp.int32), lengths.astype(jnp.int32)
    sums, stats = _launcher(shape, interpret)(*operands)
    mixed = _merged(sums, stats, _by_head(shape, sinks))
    return jnp.swapaxes(mixed[..., : shape.group], 2, 3).reshape(q.shape).astype(q.dtype)


def refusal(
    q: Any,
    pool: Any,
    tables: Any,
    lengths: Any,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    scales: Any = None,
) -> str | None:
    """Why this kernel cannot do these shapes and dtypes (of arrays or tracers), in one sentence; None if it can."""
    (rows, heads, head_dim), (_, two, kv_heads, page, pool_dim) = q.shape, pool.shape
    if two != 2 or pool_dim != head_dim or heads % kv_heads:
        return f"queries {q.shape} and pool {pool.shape} do not fit each other"
    if tables.shape[0] != rows or lengths.shape != (rows,):
        return f"{rows} rows, but tables {tables.shape} and lengths {lengths.shape}"
    if head_dim not in HEAD_DIMS or page not in PAGES or page * head_dim < _LEAST_COPY:
        return (
            f"head_dim {head_dim}, pages of {page}: below Hopper the kernel does {HEAD_DIMS} and {PAGES}, not 64 and 16"
        )
    if heads // kv_heads > MOST_GROUP:
        return f"{heads // kv_heads} heads to a KV head: below Hopper the kernel does {MOST_GROUP}"
    if q.dtype not in (jnp.bfloat16, jnp.float16) or pool.dtype != q.dtype or scales is not None:
        return f"queries of {q.dtype}, a pool of {pool.dtype}: below Hopper the kernel does bfloat16, and float16"
    if (window is not None and window < 1) or (softcap is not None and softcap <= 0):
        return f"window {window} and softcap {softcap} must be positive"
    return None if sinks is None or sinks.shape == (heads,) else f"{heads} heads, but sinks {sinks.shape}"


def _heuristic_tiles(q: Any) -> Tiles:
    """What fits the 99 KiB that a block may have on compute capability 8.6 and 8.9. Not measured on a GPU yet."""
    return Tiles(stages=3 if q.shape[-1] == HEAD_DIMS[0] else 2)


def _by_head(shape: _Shape, sinks: Array | None) -> Float[Array, "kv_heads columns"] | None:
    """In powers of two."""
    if sinks is None:
        return None
    grouped = sinks.astype(jnp.float32).reshape(shape.kv_heads, shape.group) * _LOG2_E
    return jnp.pad(grouped, ((0, 0), (0, shape.columns - shape.group)))


def _merged(
    sums: Float[Array, "rows kv_heads splits head_dim columns"],
    stats: Float[Array, "rows kv_heads splits 2 columns"],
    sinks: Float[Array, "kv_heads columns"] | None,
) -> Float[Array, "rows kv_heads head_dim columns"]:
    tops, totals = stats[:, :, :, 0], stats[:, :, :, 1]
    top = tops.max(axis=2)
    if sinks is not None:
        top = jnp.maximum(top, jnp.ceil(sinks))
    shares = jnp.exp2(tops - top[:, :, None])
    total = (totals * shares).sum(axis=2)
    if sinks is not None:
        total = total + jnp.exp2(sinks - top)
    mixed = (sums * shares[:, :, :, None]).sum(axis=2)
    return mixed / jnp.where(total > 0, total, 1.0)[:, :, None]


# --------------------------------------------------------------------------------------------------------------
# The launch.


def _launcher(shape: _Shape, interpret: plgpu.InterpretGPUParams | None) -> Any:
    part = (shape.rows, shape.kv_heads, shape.splits)
    return compat.kernel(
        functools.partial(_body, shape),
        out_type=(
            jax.ShapeDtypeStruct((*part, shape.head_dim, shape.columns), jnp.float32),
            jax.ShapeDtypeStruct((*part, 2, shape.columns), jnp.float32),
        ),
        scratch_types={"smem": _smem(shape)},
        grid=part,
        grid_names=("row", "head", "split"),
        num_threads=1,
        thread_name="warpgroup",
        kernel_name="paged_decode",
        # Barriers between what one warp writes to shared memory and others read come by themselves.
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=True),
        cost_estimate=_cost(shape),
        interpret=interpret,
    )


def _cost(shape: _Shape) -> pl.CostEstimate:
    """As if every row filled its table: lengths are not known when the step is compiled."""
    keys = shape.rows * shape.kv_heads * shape.splits * shape.tiles.keys_per_split
    moved = 4 * keys * shape.head_dim
    return pl.CostEstimate(flops=moved * shape.group, transcendentals=keys * shape.group, bytes_accessed=moved)


def _smem(shape: _Shape) -> _Smem:
    block = (shape.tiles.stages, BLOCK, shape.head_dim)
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    return _Smem(
        queries=plgpu.SMEM((shape.columns, shape.head_dim), shape.dtype),
        keys=plgpu.SMEM(block, shape.dtype, transforms=transforms),
        values=plgpu.SMEM(block, shape.dtype, transforms=transforms),
        probs=plgpu.SMEM((BLOCK, shape.columns), shape.dtype),
    )


# --------------------------------------------------------------------------------------------------------------
# The kernel.


def _body(shape: _Shape, *refs: Any, smem: _Smem) -> None:
    gmem = _Gmem(*refs)
    unit = _unit_at(shape, gmem)
    smem.queries[...] = gmem.q[unit.row, unit.head]
    sums = _Sums(_zeros((shape.head_dim, shape.columns), shape), _per_column(shape, _LOWEST), _per_column(shape, 0.0))
    ahead = shape.tiles.stages - 1

    @pl.when(unit.steps > 0)
    def _begin() -> None:
        for index in range(ahead):
            _copy_block(shape, unit, index, gmem, smem)

    def step(index: Any, sums: _Sums) -> _Sums:
        if not shape.interpret:  # until this block is there, and no thread reads the one before any more
            plgpu.wait_gmem_to_smem((ahead - 1) * 2 * (BLOCK // shape.piece))
        _copy_block(shape, unit, index + ahead, gmem, smem)
        return _attend(shape, unit, index, sums, smem)

    sums = lax.fori_loop(0, unit.steps, step, sums)
    if not shape.interpret:
        plgpu.wait_gmem_to_smem(0)
    where = (unit.row, unit.head, unit.split)
    compat.store(gmem.sums.at[where], sums.mixed)
    compat.store(gmem.stats.at[(*where, 0)], sums.top)
    compat.store(gmem.stats.at[(*where, 1)], sums.total)


def _unit_at(shape: _Shape, gmem: _Gmem) -> _Unit:
    row, head, split = (lax.axis_index(name) for name in ("row", "head", "split"))
    length, per_split = gmem.lengths[row], shape.tiles.keys_per_split
    keys = span(jnp.maximum(length - 1, 0), length, block_keys=BLOCK, keys_per_split=per_split, window=shape.window)
    first = jnp.maximum(split * (per_split // BLOCK), keys.first_block)
    end = jnp.minimum((split + 1) * (per_split // BLOCK), keys.end_block)
    return _Unit(row, head, split, keys.low, keys.high, first, jnp.maximum(end - first, 0))


def _slot(shape: _Shape, index: Any) -> Any:
    return lax.rem(jnp.asarray(index, jnp.int32), jnp.int32(shape.tiles.stages))


def _copy_block(shape: _Shape, unit: _Unit, index: Any, gmem: _Gmem, smem: _Smem) -> None:
    """Keys and values; of pages past the row's end, or of none, any page of the pool will do."""
    block, slot = unit.first + jnp.clip(index, 0, jnp.maximum(unit.steps - 1, 0)), _slot(shape, index)
    for half, target in enumerate((smem.keys, smem.values)):
        for first in range(0, BLOCK, shape.piece):
            key = block * BLOCK + first
            place = jnp.minimum(lax.div(key, jnp.int32(shape.page)), gmem.tables.shape[1] - 1)
            page = jnp.clip(gmem.tables[unit.row, place], 0, gmem.pool.shape[0] - 1)
            rows = pl.ds(pl.multiple_of(lax.rem(key, jnp.int32(shape.page)), shape.piece), shape.piece)
            source, to = gmem.pool.at[page, half, unit.head, rows], target.at[slot, pl.ds(first, shape.piece)]
            if shape.interpret:  # which knows no copies without a barrier
                to[...] = source[...]
            else:
                plgpu.copy_gmem_to_smem(source, to, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)


def _attend(shape: _Shape, unit: _Unit, index: Any, sums: _Sums, smem: _Smem) -> _Sums:
    slot, dims = _slot(shape, index), (BLOCK, shape.columns)
    key = (unit.first + index) * BLOCK
    keys = plgpu.load(smem.keys.at[slot], layout=plgpu.Layout.MMA_LHS(shape.dtype))
    queries = _right(shape, smem.queries.transpose((1, 0)))
    scores = _mma(shape, _zeros(dims, shape), keys, queries) * (shape.scale * (1.0 if shape.softcap else _LOG2_E))
    if shape.softcap:
        scores = jnp.tanh(scores * (1.0 / shape.softcap)) * (shape.softcap * _LOG2_E)
    at = plgpu.broadcasted_iota(jnp.int32, dims, 0, layout=_acc(shape)) + key
    scores = jnp.where((at >= unit.low) & (at < unit.high), scores, 2 * _LOWEST)
    top = jnp.maximum(sums.top, (scores.max(axis=0) + _ROUND) - _ROUND)
    probs = jnp.exp2(scores - _across(top, BLOCK))
    shrink = jnp.exp2(sums.top - top)
    compat.store(smem.probs, probs.astype(shape.dtype))
    values = _seen_values(shape, unit, key, smem.values.at[slot])
    mixed = sums.mixed * _across(shrink, shape.head_dim)
    mixed = _mma(shape, mixed, values, _right(shape, smem.probs))
    return _Sums(mixed, top, sums.total * shrink + probs.sum(axis=0))


def _seen_values(shape: _Shape, unit: _Unit, key: Any, values: Any) -> Any:
    """[head_dim, keys]; zeros where nobody sees any: a page may hold an earlier owner's NaN, and 0 times it is NaN."""
    layout, dims = plgpu.Layout.MMA_LHS(shape.dtype), (shape.head_dim, BLOCK)
    numbers = plgpu.load(values.transpose((1, 0)), layout=layout)

    def cleared(numbers: Any) -> Any:
        at = plgpu.broadcasted_iota(jnp.int32, dims, 1, layout=layout) + key
        return jnp.where((at >= unit.low) & (at < unit.high), numbers, jnp.zeros_like(numbers))

    return lax.cond((key < unit.low) | (key + BLOCK > unit.high), cleared, lambda numbers: numbers, numbers)


def _right(shape: _Shape, ref: Any) -> Any:
    return plgpu.load(ref, layout=plgpu.Layout.MMA_RHS(shape.dtype), optimized=False)


def _mma(shape: _Shape, total: Any, left: Any, right: Any) -> Any:
    if shape.interpret:  # which knows no mma
        return total + jnp.dot(left, right, preferred_element_type=jnp.float32)
    return plgpu.mma(total, left, right)


def _acc(shape: _Shape) -> Any:
    return plgpu.Layout.MMA_ACC(shape.dtype)


def _zeros(dims: tuple[int, ...], shape: _Shape) -> Any:
    return plgpu.layout_cast(jnp.zeros(dims, jnp.float32), _acc(shape))


def _per_column(shape: _Shape, value: float) -> Any:
    return plgpu.layout_cast(jnp.full((shape.columns,), value, jnp.float32), _acc(shape).reduce(0))


def _across(per_column: Any, rows: int) -> Any:
    return lax.broadcast_in_dim(per_column, (rows, per_column.shape[0]), [1])
