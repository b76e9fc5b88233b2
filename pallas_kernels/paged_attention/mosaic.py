"""Paged decode attention for Hopper GPUs, in Pallas Mosaic GPU: one query token per row, split over the keys.

One thread block handles one row, one KV head and one *split*: the keys ``[s * keys_per_split, (s + 1) *
keys_per_split)`` of the row. Split borders are absolute positions, so the order in which a row's keys are summed, and
with it every bit of the result, depends neither on the row's neighbours nor on the width of the table. Within a block:

    producer (warpgroup 1)                          consumer (warpgroup 0)
    ----------------------                          ----------------------
    query                       -> query_ready  ->  waits once
    per key block:                                  per key block:
      waits slot_free (not on a slot's first use) <-  arrives when it has read keys and values of the slot
      keys, one copy per page   -> keys_ready   ->    waits, scores = query . keys, online softmax
      values, one copy per page -> values_ready ->    waits, output += probabilities . values

The three ``*_ready`` barriers are arrived at by the copy engine (one arrival per copy) and waited on by the consumer;
``slot_free`` is arrived at by the consumer and waited on by the producer. Every arrival is waited on: the producer
drains the last ones, so that no barrier ends in the middle of a phase.

Online softmax: Milakov and Gimelshein 2018. Splitting over keys with a log-sum-exp merge: Dao et al. 2023
(Flash-Decoding).
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

QUERY_ROWS = 64  # rows of a wgmma: a KV head's queries, the rest idle
LOWEST = -1e30  # stands for minus infinity where inf - inf would give NaN
HEAD_DIMS = (64, 128)
DTYPES = (jnp.bfloat16, jnp.float16)
CONSUMER, PRODUCER = 0, 1


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Block sizes, tuned for speed. ``keys_per_split`` is part of the numerics: changing it changes the last bits.

    Attributes:
        block_keys: keys of one pipeline slot; a multiple of the page size.
        stages: pipeline slots: how many key blocks are on their way from memory at once.
        keys_per_split: keys that one thread block reads; a multiple of ``block_keys``.
    """

    block_keys: int = 64
    stages: int = 4
    keys_per_split: int = 1024

    def __post_init__(self) -> None:
        if self.block_keys not in (64, 128) or self.stages < 1 or self.keys_per_split % self.block_keys:
            raise ValueError(f"keys_per_split must be a multiple of block_keys (64 or 128), stages positive: {self}")


class _Shape(NamedTuple):
    """What is static about one launch."""

    rows: int
    kv_heads: int
    group: int
    splits: int
    page: int
    head_dim: int
    dtype: Any
    scale: float
    tiles: Tiles
    interpret: bool

    @property
    def pages_per_block(self) -> int:
        return self.tiles.block_keys // self.page

    @property
    def group_rows(self) -> int:
        """Rows that are really copied: the group, rounded up to the 8 rows of a shared-memory tile."""
        return -(-self.group // 8) * 8


class _Gmem(NamedTuple):
    """Operands and results in device memory."""

    query: Any  # [rows, kv_heads, group_rows, head_dim]
    pool: Any  # [pages, 2, kv_heads, page, head_dim]
    tables: Any  # [rows, width]
    lengths: Any  # [rows]
    output: Any  # [rows, kv_heads, splits, group_rows, head_dim] float32, normalised within the split
    lse: Any  # [rows, kv_heads, splits, QUERY_ROWS] float32, base 2


class _Smem(NamedTuple):
    """One thread block's shared memory."""

    query: Any  # [QUERY_ROWS, head_dim]; rows past the group are never written, nor is their result read
    keys: Any  # [stages, block_keys, head_dim]
    values: Any  # [stages, block_keys, head_dim]
    probs: Any  # [QUERY_ROWS, block_keys] when interpreting, else a dummy
    output: Any  # [QUERY_ROWS, head_dim] float32
    lse: Any  # [QUERY_ROWS] float32


class _Barriers(NamedTuple):
    """See the table at the top for who arrives and who waits."""

    query_ready: Any
    keys_ready: Any  # one per slot
    values_ready: Any  # one per slot
    slot_free: Any  # one per slot


class _Block(NamedTuple):
    """Which part of the work this thread block does. Traced scalars."""

    row: Any
    head: Any
    split: Any
    length: Any  # keys of the row
    first: Any  # first key block of the split
    steps: Any  # key blocks of the split that hold keys of the row


def paged_decode_mosaic(
    q: Float[Array, "rows heads head_dim"],
    pool: Float[Array, "pages 2 kv_heads page head_dim"],
    tables: Int[Array, "rows width"],
    lengths: Int[Array, " rows"],
    *,
    scale: float,
    tiles: Tiles = Tiles(),
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Float[Array, "rows heads head_dim"]:
    """``softmax(q . keys * scale) . values`` of each row over the first ``lengths[row]`` keys of its pages.

    Query head ``h`` reads KV head ``h // group``. A row of length 0 gives zeros. Table entries past a row's last page
    may hold anything, and so may pool positions past its length (NaN included). Products are of bfloat16 or float16
    numbers, sums in float32; exp2 is the hardware's approximation.

    Args:
        scale: multiplies the scores, usually ``head_dim ** -0.5``.
        tiles: block sizes.
        interpret: run on a CPU (`compat.interpret_params`).

    Raises:
        ValueError: a shape or dtype that this kernel does not do; the message names it.
    """
    _check(q, pool, tables, lengths, tiles)
    shape = _shape_of(q, pool, tables, scale, tiles, interpret is not None)
    grouped = q.reshape(shape.rows, shape.kv_heads, shape.group, shape.head_dim)
    padding = ((0, 0), (0, 0), (0, shape.group_rows - shape.group), (0, 0))
    launch = _launcher(shape, interpret)
    output, lse = launch(jnp.pad(grouped, padding), pool, tables.astype(jnp.int32), lengths.astype(jnp.int32))
    merged = _merge(output[..., : shape.group, :], lse[..., : shape.group], lengths, tiles.keys_per_split)
    return merged.astype(q.dtype).reshape(q.shape)


def _check(q: Array, pool: Array, tables: Array, lengths: Array, tiles: Tiles) -> None:
    rows, heads, head_dim = q.shape
    _, two, kv_heads, page, pool_dim = pool.shape
    if two != 2 or pool_dim != head_dim or heads % kv_heads or heads // kv_heads > QUERY_ROWS:
        raise ValueError(f"queries {q.shape} and pool {pool.shape} do not fit; at most {QUERY_ROWS} queries a KV head")
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head_dim {head_dim}: this kernel does {HEAD_DIMS}")
    if q.dtype not in DTYPES or pool.dtype != q.dtype:
        raise ValueError(f"queries are {q.dtype}, the pool is {pool.dtype}: both must be bfloat16, or both float16")
    if page % 8 or tiles.block_keys % page:
        raise ValueError(f"page size {page}: a multiple of 8 that divides block_keys {tiles.block_keys} is needed")
    if tables.shape[0] != rows or lengths.shape != (rows,):
        raise ValueError(f"{rows} rows, but tables {tables.shape} and lengths {lengths.shape}")


def _shape_of(q: Array, pool: Array, tables: Array, scale: float, tiles: Tiles, interpret: bool) -> _Shape:
    rows, heads, head_dim = q.shape
    kv_heads, page = pool.shape[2:4]
    splits = pl.cdiv(tables.shape[1] * page, tiles.keys_per_split)
    log2_scale = scale * math.log2(math.e)
    return _Shape(rows, kv_heads, heads // kv_heads, splits, page, head_dim, q.dtype, log2_scale, tiles, interpret)


def _launcher(shape: _Shape, interpret: plgpu.InterpretGPUParams | None) -> Any:
    partial = (shape.rows, shape.kv_heads, shape.splits)
    return compat.kernel(
        functools.partial(_body, shape),
        out_type=(
            jax.ShapeDtypeStruct((*partial, shape.group_rows, shape.head_dim), jnp.float32),
            jax.ShapeDtypeStruct((*partial, QUERY_ROWS), jnp.float32),
        ),
        scratch_types={"smem": _smem(shape), "barriers": _barriers(shape)},
        grid=partial,
        grid_names=("row", "head", "split"),
        num_threads=2,
        thread_name="warpgroup",
        kernel_name="paged_decode",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        cost_estimate=_cost(shape),
        interpret=interpret,
    )


def _cost(shape: _Shape) -> pl.CostEstimate:
    """As if every row filled its table: lengths are not known when the step is compiled."""
    keys = shape.rows * shape.kv_heads * shape.splits * shape.tiles.keys_per_split
    return pl.CostEstimate(
        flops=4 * keys * shape.group * shape.head_dim,
        transcendentals=keys * shape.group,
        bytes_accessed=2 * keys * shape.head_dim * jnp.dtype(shape.dtype).itemsize,
    )


def _smem(shape: _Shape) -> _Smem:
    def tiled(dims: tuple[int, ...], dtype: Any) -> Any:
        # wgmma and the copy engine want rows in 128-byte swizzled tiles of 8
        columns = 128 // jnp.dtype(dtype).itemsize
        return plgpu.SMEM(dims, dtype, transforms=(plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(128)))

    block, dim = shape.tiles.block_keys, shape.head_dim
    return _Smem(
        query=tiled((QUERY_ROWS, dim), shape.dtype),
        keys=tiled((shape.tiles.stages, block, dim), shape.dtype),
        values=tiled((shape.tiles.stages, block, dim), shape.dtype),
        probs=tiled((QUERY_ROWS, block), shape.dtype) if shape.interpret else plgpu.SMEM((8,), jnp.float32),
        output=tiled((QUERY_ROWS, dim), jnp.float32),
        lse=plgpu.SMEM((QUERY_ROWS,), jnp.float32),
    )


def _barriers(shape: _Shape) -> _Barriers:
    stages, copies = shape.tiles.stages, shape.pages_per_block
    return _Barriers(
        query_ready=plgpu.Barrier(),
        keys_ready=plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        values_ready=plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        slot_free=plgpu.Barrier(num_barriers=stages),
    )


def _body(shape: _Shape, *refs: Any, smem: _Smem, barriers: _Barriers) -> None:
    gmem = _Gmem(*refs)
    block = _this_block(shape, gmem)

    # A split without keys writes nothing; the merge masks it by length.
    @pl.when(block.steps > 0)
    def _work() -> None:
        warpgroup = lax.axis_index("warpgroup")
        pl.when(warpgroup == CONSUMER)(functools.partial(_consume, shape, block, gmem, smem, barriers))
        pl.when(warpgroup == PRODUCER)(functools.partial(_produce, shape, block, gmem, smem, barriers))


def _this_block(shape: _Shape, gmem: _Gmem) -> _Block:
    row, head, split = (lax.axis_index(name) for name in ("row", "head", "split"))
    length = gmem.lengths[row]
    blocks_per_split = shape.tiles.keys_per_split // shape.tiles.block_keys
    first = split * blocks_per_split
    steps = jnp.clip(pl.cdiv(length, shape.tiles.block_keys) - first, 0, blocks_per_split)
    return _Block(row, head, split, length, first, steps)


def _slot(shape: _Shape, step: Any) -> Any:
    return lax.rem(step, jnp.int32(shape.tiles.stages))


# --------------------------------------------------------------------------------------------------------------
# Producer: owns every copy into shared memory.


def _produce(shape: _Shape, block: _Block, gmem: _Gmem, smem: _Smem, barriers: _Barriers) -> None:
    rows = pl.ds(0, shape.group_rows)
    plgpu.copy_gmem_to_smem(gmem.query.at[block.row, block.head], smem.query.at[rows], barriers.query_ready)

    def fill(step: Any, _: None) -> None:
        slot = _slot(shape, step)

        @pl.when(step >= shape.tiles.stages)
        def _reuse() -> None:
            plgpu.barrier_wait(barriers.slot_free.at[slot])

        _copy_pages(shape, block, step, slot, gmem, smem, barriers)

    def drain(step: Any, _: None) -> None:
        plgpu.barrier_wait(barriers.slot_free.at[_slot(shape, step)])

    lax.fori_loop(0, block.steps, fill, None)
    lax.fori_loop(jnp.maximum(block.steps - shape.tiles.stages, 0), block.steps, drain, None)


def _copy_pages(
    shape: _Shape, block: _Block, step: Any, slot: Any, gmem: _Gmem, smem: _Smem, barriers: _Barriers
) -> None:
    """Start the copies of one key block: all its keys first, so that the scores need not wait for the values."""
    first = (block.first + step) * shape.pages_per_block
    pages = [_page_id(gmem, block.row, first + i) for i in range(shape.pages_per_block)]
    halves = ((smem.keys, barriers.keys_ready), (smem.values, barriers.values_ready))
    for half, (target, ready) in enumerate(halves):
        for i, page in enumerate(pages):
            rows = pl.ds(i * shape.page, shape.page)
            plgpu.copy_gmem_to_smem(gmem.pool.at[page, half, block.head], target.at[slot, rows], ready.at[slot])


def _page_id(gmem: _Gmem, row: Any, index: Any) -> Any:
    """A block's last pages may lie past the row's end, or past the table's: any page of the pool will do there."""
    page = gmem.tables[row, jnp.minimum(index, gmem.tables.shape[1] - 1)]
    return jnp.clip(page, 0, gmem.pool.shape[0] - 1)


# --------------------------------------------------------------------------------------------------------------
# Consumer: owns the arithmetic and the copies out.


def _consume(shape: _Shape, block: _Block, gmem: _Gmem, smem: _Smem, barriers: _Barriers) -> None:
    plgpu.barrier_wait(barriers.query_ready)
    step = functools.partial(_attend_block, shape, block, smem, barriers)
    output, top, total = lax.fori_loop(0, block.steps, step, _empty_softmax(shape))
    smem.output[...] = output / lax.broadcast_in_dim(total, output.shape, [0])
    smem.lse[...] = top + jnp.log2(total)
    _write_out(shape, block, gmem, smem)


def _empty_softmax(shape: _Shape) -> tuple[Any, Any, Any]:
    """Output, running maximum and running sum, in the layout in which wgmma leaves its results."""
    per_row = plgpu.Layout.WGMMA.reduce(1)
    return (
        plgpu.layout_cast(jnp.zeros((QUERY_ROWS, shape.head_dim), jnp.float32), plgpu.Layout.WGMMA),
        plgpu.layout_cast(jnp.full((QUERY_ROWS,), LOWEST, jnp.float32), per_row),
        plgpu.layout_cast(jnp.zeros((QUERY_ROWS,), jnp.float32), per_row),
    )


def _attend_block(
    shape: _Shape, block: _Block, smem: _Smem, barriers: _Barriers, step: Any, carry: tuple[Any, Any, Any]
) -> tuple[Any, Any, Any]:
    output, top, total = carry
    slot, start = _slot(shape, step), (block.first + step) * shape.tiles.block_keys

    plgpu.barrier_wait(barriers.keys_ready.at[slot])
    scores = _masked_scores(shape, smem.query, smem.keys.at[slot], block.length - start)
    new_top = jnp.maximum(top, scores.max(axis=1))
    shrink = jnp.exp2(top - new_top)
    probs = jnp.exp2(scores - lax.broadcast_in_dim(new_top, scores.shape, [0]))
    total = total * shrink + probs.sum(axis=1)

    plgpu.barrier_wait(barriers.values_ready.at[slot])
    _clear_past_end(shape, smem.values.at[slot], block.length - start)
    added = _weighted_values(shape, probs.astype(shape.dtype), smem.values.at[slot], smem.probs)
    plgpu.barrier_arrive(barriers.slot_free.at[slot])
    return output * lax.broadcast_in_dim(shrink, output.shape, [0]) + added, new_top, total


def _masked_scores(shape: _Shape, query: Any, keys: Any, keys_left: Any) -> Any:
    """Scaled scores [QUERY_ROWS, block_keys], in units of log 2; keys at ``keys_left`` and beyond count nothing."""
    dims = (QUERY_ROWS, shape.tiles.block_keys)

    def multiply(accumulator: Any) -> Any:
        plgpu.wgmma(accumulator, query, keys.transpose((1, 0)))
        plgpu.wgmma_wait(0)
        return accumulator[...]

    scores = pl.run_scoped(multiply, plgpu.ACC(dims, jnp.float32))
    index = plgpu.broadcasted_iota(jnp.int32, dims, 1, layout=plgpu.Layout.WGMMA)
    return jnp.where(index < keys_left, scores * shape.scale, LOWEST)


def _clear_past_end(shape: _Shape, values: Any, keys_left: Any) -> None:
    """Zero what an earlier owner of the row's last page left behind: probability 0 times its NaN would be NaN."""

    @pl.when(keys_left < shape.tiles.block_keys)
    def _clear() -> None:
        dims = (shape.tiles.block_keys, shape.head_dim)
        index = plgpu.broadcasted_iota(jnp.int32, dims, 0, layout=plgpu.Layout.WGMMA)
        kept = plgpu.load(values, layout=plgpu.Layout.WGMMA)
        values[...] = jnp.where(index < keys_left, kept, jnp.zeros_like(kept))
        plgpu.commit_smem()


def _weighted_values(shape: _Shape, probs: Any, values: Any, staging: Any) -> Any:
    left = probs
    if shape.interpret:  # the interpreter has no wgmma with its left operand in registers
        staging[...] = probs
        plgpu.commit_smem()
        left = staging

    def multiply(accumulator: Any) -> Any:
        plgpu.wgmma(accumulator, left, values)
        plgpu.wgmma_wait(0)
        return accumulator[...]

    return pl.run_scoped(multiply, plgpu.ACC((QUERY_ROWS, shape.head_dim), jnp.float32))


def _write_out(shape: _Shape, block: _Block, gmem: _Gmem, smem: _Smem) -> None:
    where = (block.row, block.head, block.split)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(smem.output.at[pl.ds(0, shape.group_rows)], gmem.output.at[where])
    plgpu.copy_smem_to_gmem(smem.lse, gmem.lse.at[where])
    plgpu.wait_smem_to_gmem(0)


# --------------------------------------------------------------------------------------------------------------
# Merge of the splits, in XLA.


def _merge(
    output: Float[Array, "rows kv_heads splits group head_dim"],
    lse: Float[Array, "rows kv_heads splits group"],
    lengths: Int[Array, " rows"],
    keys_per_split: int,
) -> Float[Array, "rows kv_heads group head_dim"]:
    """Weight each split by its share of the softmax. Added one by one, in order: empty splits change no bit."""
    splits = output.shape[2]
    used = (jnp.arange(splits) * keys_per_split < lengths[:, None])[:, None, :, None]
    lse = jnp.where(used, lse, LOWEST)
    weights = jnp.where(used, jnp.exp2(lse - lse.max(axis=2, keepdims=True)), 0.0)
    output = jnp.where(used[..., None], output, 0.0)
    merged, total = jnp.zeros_like(output[:, :, 0]), jnp.zeros_like(weights[:, :, 0])
    for split in range(splits):
        merged += weights[:, :, split, :, None] * output[:, :, split]
        total += weights[:, :, split]
    return merged / jnp.where(total > 0, total, 1.0)[..., None]
