"""Paged MLA attention for Hopper GPUs, in Pallas Mosaic GPU.

All heads of a token share one latent, so the rows of a tile are queries of any heads: 64 packed rows ``token * heads +
head``. One copy of 64 keys in SMEM serves as keys (all columns) and as values (the first ``rank``). Two such slots and
the queries fill the SMEM of a multiprocessor. Two consumers own half of the result's columns each, which fills their
registers (the split of FlashMLA), and every second key block's softmax:

    producer (warpgroup 2)            consumer 0                                 consumer 1
    ----------------------            ----------                                 ----------
    per unit:
      waits query_free            <-  arrive when their results have left the queries' memory
      queries     -> query_ready  ->  wait
    per pair of key blocks:
      slot 0: left, right, rope   ->  scores of slot 0, softmax
      slot 1: left, right, rope   ->                                             scores of slot 1
                                      P0 over slot 0's rope -> probs_ready[0] -> sums right += P0 . right 0; at the
                                      sums left += P0 . left 0                   same time softmax of slot 1
      waits left 0, right 0, rope 0 <-  arrives (left, rope)                     arrives (right, rope)
                                      waits                 <- probs_ready[1] <- P1 over slot 1's rope
                                      sums left += P1 . left 1                   sums right += P1 . right 1
      waits left 1, right 1, rope 1 <-  arrives (left, rope)                     arrives (right, rope)
    per unit:
                                      totals_ready: both exchange the sums of their weights
                                      result, or float32 sums of a split         the same: right columns
                                      of the keys: left columns

The column ranges of a slot have separate mbarriers: what one consumer has finished with is loaded again while the other
works. Consumers are half a step apart, so that the softmax of one overlaps products of the other.

Decode has a fixed number of CTAs, each with a run of units (one split of one tile; see `schedule`), whose copies
continue across units. A second, small launch merges splits. Splits are at absolute positions and are merged in order: a
row is bitwise independent of the other rows, its pages and the table's width. Prefill has one unit per CTA.

Online softmax: Milakov and Gimelshein 2018. Splitting over keys with a log-sum-exp merge: Dao et al. 2023
(Flash-Decoding). The latent: DeepSeek-V2 (arXiv:2405.04434).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import compat
from pallas_kernels.mla_attention.mosaic import operands, schedule
from pallas_kernels.mla_attention.mosaic.consumer import Consumer, consume
from pallas_kernels.mla_attention.mosaic.merge import merge
from pallas_kernels.mla_attention.mosaic.operands import ROPE, TILE, Gmem, Shape, Tiles
from pallas_kernels.mla_attention.mosaic.producer import produce
from pallas_kernels.mla_attention.options import LatentOptions
from pallas_kernels.mla_attention.tile_keys import DECODE, decode_key
from pallas_kernels.thread_block import split
from pallas_kernels.tiles import pick

__all__ = ["Tiles", "decode", "extend", "heuristic_tiles", "prefill", "refusal"]

RANKS = (128, 256, 384, 512)
PAGES = (16, 32, 64, 128)
DTYPES = (jnp.bfloat16, jnp.float16)
PRODUCER = 2


def heuristic_tiles(heads: int, *, multiprocessors: int = 132) -> Tiles:
    """Return tiles with shorter splits for few heads, whose sums are cheaper to merge. Not measured on a GPU."""
    return Tiles(512 if heads <= 32 else 1024, multiprocessors)


def decode(
    q: Float[Array, "rows heads latent"],
    pool: Float[Array, "pages page latent"],
    tables: Int[Array, "rows width"],
    lengths: Int[Array, " rows"],
    options: LatentOptions,
    *,
    tiles: Tiles | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Float[Array, "rows heads rank"]:
    """See `reference.decode`. Products are of bfloat16 or float16 numbers, sums in float32; exp2 is approximate.

    Args:
        tiles: sizes; None: those tuned for the device (`pallas_kernels.tiles`), else `heuristic_tiles`.
        interpret: run on a CPU (`compat.interpret_params`).

    Raises:
        ValueError: the operands are rejected, see `refusal`.
    """
    how: dict[str, Any] = {"tiles": tiles, "interpret": interpret}
    return extend(q[:, None], pool, tables, jnp.maximum(lengths - 1, 0), lengths, options, **how)[:, 0]


def extend(
    q: Float[Array, "sequences chunk heads latent"],
    pool: Float[Array, "pages page latent"],
    tables: Int[Array, "sequences width"],
    starts: Int[Array, " sequences"],
    lengths: Int[Array, " sequences"],
    options: LatentOptions,
    *,
    tiles: Tiles | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Float[Array, "sequences chunk heads rank"]:
    """Run `reference.prefill` with a few queries per sequence, split over the keys. Padding gives finite numbers.

    Raises:
        ValueError: the operands are rejected, see `refusal`.
    """
    shape = _checked((q, pool, tables, starts, lengths), options, tiles, interpret, split=True)
    starts, lengths = starts.astype(jnp.int32), lengths.astype(jnp.int32)
    plan = schedule.plan(shape, lengths)
    results = _launch(shape, interpret, q, pool, tables, starts, lengths, {"plan": plan})
    if shape.splits > 1:
        sums, stats = results
        return _unpacked(shape, merge(shape, sums, stats, lengths, interpret))
    return _unpacked(shape, results[0])


def prefill(
    q: Float[Array, "sequences chunk heads latent"],
    pool: Float[Array, "pages page latent"],
    tables: Int[Array, "sequences width"],
    starts: Int[Array, " sequences"],
    lengths: Int[Array, " sequences"],
    options: LatentOptions,
    *,
    tiles: Tiles | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Float[Array, "sequences chunk heads rank"]:
    """Run `reference.prefill` with many queries per sequence. Padding queries give finite numbers.

    Raises:
        ValueError: the operands are rejected, see `refusal`.
    """
    shape = _checked((q, pool, tables, starts, lengths), options, tiles, interpret, split=False)
    starts, lengths = starts.astype(jnp.int32), lengths.astype(jnp.int32)
    return _unpacked(shape, _launch(shape, interpret, q, pool, tables, starts, lengths, {})[0])


def refusal(operands: tuple[Any, ...], options: LatentOptions) -> str | None:
    """Return why this kernel does not support operands of these shapes and dtypes; None if it does."""
    q, pool, tables, *per_row = operands
    sequences, latent, rank = q.shape[0], q.shape[-1], options.rank
    if options.chosen is not None or pool.shape[-1] > latent:
        return "the pool has index keys beside its latents: this kernel does not attend to chosen tokens"
    if pool.ndim != 3 or pool.shape[-1] != latent:
        return f"queries {q.shape} and pool {pool.shape} do not fit each other"
    if tables.shape[0] != sequences or any(each.shape != (sequences,) for each in per_row):
        return f"{sequences} sequences, but tables {tables.shape} and lengths {per_row[-1].shape}"
    if rank not in RANKS or latent != rank + ROPE:
        return f"a latent of {rank} numbers and {latent - rank} rotated ones: this kernel does {RANKS} and {ROPE}"
    if pool.shape[1] not in PAGES:
        return f"page size {pool.shape[1]}: this kernel does {PAGES}"
    if options.scales is not None:
        return f"the pool is {pool.dtype} with scales: this kernel does no latents of 8 bits"
    if q.dtype not in DTYPES or pool.dtype != q.dtype:
        return f"queries are {q.dtype}, the pool is {pool.dtype}: this kernel does bfloat16 or float16 for both"
    return None


def _checked(
    operands: tuple[Any, ...],
    options: LatentOptions,
    tiles: Tiles | None,
    interpret: plgpu.InterpretGPUParams | None,
    *,
    split: bool,
) -> Shape:
    if why := refusal(operands, options):
        raise ValueError(why)
    q, pool, tables, *_ = operands
    sequences, chunk, heads, _ = q.shape
    return Shape(
        sequences=sequences,
        chunk=chunk,
        heads=heads,
        rank=options.rank,
        page=pool.shape[1],
        width=tables.shape[1],
        dtype=jnp.dtype(q.dtype),
        scale=options.scale,
        tiles=tiles or pick(DECODE, decode_key(q, pool, tables), heuristic_tiles(heads), lambda _: None),
        split=split,
        interpret=interpret is not None,
    )


def _unpacked(shape: Shape, output: Array) -> Array:
    rows = shape.chunk * shape.heads
    return output[:, :rows].reshape(shape.sequences, shape.chunk, shape.heads, shape.rank)


def _launch(
    shape: Shape,
    interpret: plgpu.InterpretGPUParams | None,
    q: Array,
    pool: Array,
    tables: Array,
    starts: Array,
    lengths: Array,
    more: dict[str, Array],
) -> tuple[Array, ...]:
    packed = q.reshape(shape.sequences, shape.chunk * shape.heads, shape.latent)
    packed = jnp.pad(packed, ((0, 0), (0, shape.packed - packed.shape[1]), (0, 0)))
    tables = tables.astype(jnp.int32)
    given = {"query": packed, "pool": pool, "tables": tables, "starts": starts, "lengths": lengths, **more}
    results = _results(shape)
    launch = compat.kernel(
        functools.partial(_body, shape, (*given, *results)),
        out_type=tuple(results.values()),
        scratch_types={"smem": operands.smem(shape), "barriers": operands.barriers(shape)},
        grid=(shape.tiles.blocks,) if shape.split else (shape.tile_count, shape.sequences),
        grid_names=("block",) if shape.split else ("tile", "sequence"),
        num_threads=3,
        thread_name="warpgroup",
        kernel_name="mla_decode" if shape.split else "mla_prefill",
        # Sums over a row stay within a warp and need no SMEM.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        cost_estimate=_cost(shape),
        interpret=interpret,
    )
    outcome: tuple[Array, ...] = launch(*given.values())
    return outcome


def _results(shape: Shape) -> dict[str, jax.ShapeDtypeStruct]:
    if shape.splits == 1:
        return {"output": jax.ShapeDtypeStruct((shape.sequences, shape.packed, shape.rank), shape.dtype)}
    part = (shape.sequences, shape.splits)
    return {
        "sums": jax.ShapeDtypeStruct((*part, shape.packed, shape.rank), jnp.float32),
        "stats": jax.ShapeDtypeStruct((*part, 2, shape.tile_count * TILE), jnp.float32),
    }


def _cost(shape: Shape) -> pl.CostEstimate:
    """Return the cost as if every sequence filled its table: lengths are not known at compile time."""
    keys = shape.sequences * shape.width * shape.page
    pairs = keys * shape.packed
    return pl.CostEstimate(
        flops=2 * pairs * (shape.latent + shape.rank),
        transcendentals=pairs,
        bytes_accessed=keys * shape.latent * shape.dtype.itemsize,
    )


def _body(shape: Shape, names: tuple[str, ...], *refs: Any, smem: Any, barriers: Any) -> None:
    gmem = Gmem(**(dict.fromkeys(Gmem._fields) | dict(zip(names, refs, strict=True))))
    warpgroup = lax.axis_index("warpgroup")

    shares = split(PRODUCER)

    def compute(me: int) -> None:
        plgpu.set_max_registers(shares.consumer, action="increase")
        consume(Consumer(me, shape, gmem, smem, barriers))

    @pl.when(warpgroup == PRODUCER)
    def _load() -> None:
        plgpu.set_max_registers(shares.producer, action="decrease")
        produce(shape, gmem, smem, barriers)

    for me in range(2):
        pl.when(warpgroup == me)(functools.partial(compute, me))
