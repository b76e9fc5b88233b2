"""Paged decode attention for Hopper GPUs, in Pallas Mosaic GPU: few queries per row, split over the keys.

A launch has a fixed number of CTAs. Each takes a run of *units* (one split of one KV head of one row; see `schedule`)
and processes it without a pause in its loads: while the consumer finishes one unit, the copies of the next are in
flight. Two warpgroups of a CTA:

    producer (warpgroup 1)                          consumer (warpgroup 0)
    ----------------------                          ----------------------
    per unit:                                       per unit:
      waits query_free (from the third unit on)  <-   arrives at the unit's end
      queries                    -> query_ready  ->   waits
      per key block:                                  per key block:
        waits slot_free (not on first use)       <-     arrives when keys and values of the slot are read
        keys, one copy per page    -> keys_ready   ->   waits, scores = keys . queries, online softmax
        values, one copy per page  -> values_ready ->   waits, sums += values . probabilities

The TMA arrives at the ``*_ready`` mbarriers (one arrival per copy; the producer arrives for a page that no query sees)
and the consumer waits on them; the ``*_free`` ones work the other way round, and the producer drains their last
arrivals, so that no mbarrier ends in the middle of a phase.

A head with all splits in one CTA is merged there, in registers. Otherwise every split's sums go to device memory
(`slots`; they stay in the L2 cache), and the CTA with the last split merges them in order after its own work, once a
semaphore shows that all have arrived. Either way merges the same splits in the same order, with bitwise identical
results.

Online softmax: Milakov and Gimelshein 2018. Splitting over keys with a log-sum-exp merge: Dao et al. 2023
(Flash-Decoding). Equal shares of one list of units: Osama et al. 2023 (Stream-K, arXiv:2301.03598).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int, Num

from pallas_kernels import compat
from pallas_kernels.paged_attention.hopper.decode import schedule, types
from pallas_kernels.paged_attention.hopper.decode.consumer import consume
from pallas_kernels.paged_attention.hopper.decode.producer import produce
from pallas_kernels.paged_attention.hopper.decode.slots import slots
from pallas_kernels.paged_attention.hopper.decode.types import Gmem, Shape, Tiles
from pallas_kernels.paged_attention.hopper.softmax import sink_levels
from pallas_kernels.paged_attention.options import AttentionOptions
from pallas_kernels.paged_attention.spans import span
from pallas_kernels.paged_attention.tile_keys import DECODE, decode_key
from pallas_kernels.paged_attention.trees import MOST_IN_TREE, tree_words
from pallas_kernels.thread_block import SHARED_BYTES
from pallas_kernels.tiles import pick

__all__ = ["Tiles", "decode", "extend", "heuristic_tiles", "refusal"]

HEAD_DIMS = (64, 80, 96, 128, 256)
PAGES = (16, 32, 64, 128)
DTYPES = (jnp.bfloat16, jnp.float16)
QUANTIZED = (jnp.int8, jnp.float8_e4m3fn)
MOST_QUERIES = 64  # queries of one row and KV head
CONSUMER, PRODUCER = 0, 1
_MULTIPROCESSOR_BYTES, _RESERVED_BYTES = 233_472, 1024  # SMEM that CTAs share, and reserved bytes of each
_MOST_SUMS = 8192  # 64 registers of each thread
_COLUMNS_OF_TWO = 16  # more queries need more than 128 registers per thread, so that two CTAs no longer fit


def decode(
    q: Float[Array, "rows heads head_dim"],
    pool: Num[Array, "pages 2 kv_heads page head_dim"],
    tables: Int[Array, "rows width"],
    lengths: Int[Array, " rows"],
    options: AttentionOptions,
    *,
    tiles: Tiles | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Float[Array, "rows heads head_dim"]:
    """See `reference.decode`. Products are of bfloat16 or float16 numbers, sums in float32; exp2 is approximate.

    Args:
        tiles: block sizes; None: those tuned for the device (`pallas_kernels.tiles`), else `heuristic_tiles`.
        interpret: run on a CPU (`compat.interpret_params`).

    Raises:
        ValueError: the operands are rejected, see `refusal`.
    """
    starts = jnp.maximum(lengths - 1, 0)
    return extend(q[:, None], pool, tables, starts, lengths, options, tiles=tiles, interpret=interpret)[:, 0]


def extend(
    q: Float[Array, "sequences chunk heads head_dim"],
    pool: Num[Array, "pages 2 kv_heads page head_dim"],
    tables: Int[Array, "sequences width"],
    starts: Int[Array, " sequences"],
    lengths: Int[Array, " sequences"],
    options: AttentionOptions,
    *,
    tiles: Tiles | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Float[Array, "sequences chunk heads head_dim"]:
    """See `reference.prefill`: a few queries per row, at most 64 to a KV head. Padding queries give finite numbers.

    Raises:
        ValueError: the operands are rejected, see `refusal`.
    """
    if (why := refusal((q, pool, tables, starts, lengths), options, tiles)) is not None:
        raise ValueError(why)
    tiles = tiles or _best_tiles(q, pool, tables, options)
    shape = _shape_of(q, pool, tables, options, tiles, interpret is not None)
    starts, lengths = starts.astype(jnp.int32), lengths.astype(jnp.int32)
    sizes = {"block_keys": tiles.block_keys, "keys_per_split": tiles.keys_per_split}
    spans = span(starts, lengths, **sizes, window=options.window)
    per_split = tiles.keys_per_split // tiles.block_keys
    plan = schedule.plan(spans, kv_heads=shape.kv_heads, blocks=tiles.blocks, blocks_per_split=per_split)
    given = {
        "query": _flat_queries(shape, q),
        "pool": pool,
        "tables": tables.astype(jnp.int32),
        "starts": starts,
        "lengths": lengths,
        "plan": plan,
        **_of_options(shape, tables, options),
    }
    output = _launcher(shape, tuple(given), interpret)(*given.values())[0]
    return _unflat(shape, output[: shape.rows * shape.kv_heads * shape.queries])


def _of_options(shape: Shape, tables: Int[Array, "sequences width"], options: AttentionOptions) -> dict[str, Array]:
    given: dict[str, Array] = {}
    if options.sinks is not None:
        given["sinks"] = sink_levels(options.sinks)
    if options.scales is not None:
        given["scales"] = _scales_of(shape, tables, options.scales)
    if options.tree is not None:
        given["seen"], given["depths"] = tree_words(options.tree)
    return given


def refusal(operands: tuple[Any, ...], options: AttentionOptions, tiles: Tiles | None = None) -> str | None:
    """Return why this kernel does not support `decode` or `extend` of these operands; None if it does."""
    q, pool, tables, *per_row = operands
    if q.ndim == 3:
        q = jax.ShapeDtypeStruct((q.shape[0], 1, *q.shape[1:]), q.dtype)
    return (
        _shape_refusal(q, pool, tables, per_row)
        or _option_refusal(q, options)
        or _pool_refusal(q, pool, options.scales)
        or _tiles_refusal(q, pool, options, tiles)
    )


def _shape_refusal(q: Any, pool: Any, tables: Any, per_row: Sequence[Any]) -> str | None:
    rows, chunk, heads, head_dim = q.shape
    _, two, kv_heads, page, pool_dim = pool.shape
    if two != 2 or pool_dim != head_dim or heads % kv_heads:
        return f"queries {q.shape} and pool {pool.shape} do not fit each other"
    if tables.shape[0] != rows or any(each.shape != (rows,) for each in per_row):
        return f"{rows} rows, but tables {tables.shape} and lengths {per_row[-1].shape}"
    if head_dim not in HEAD_DIMS:
        return f"head_dim {head_dim}: this kernel does {HEAD_DIMS}"
    if head_dim % 64 and not compat.CLIPPED_STORES:
        return f"head_dim {head_dim} needs JAX 0.12"
    if page not in PAGES:
        return f"page size {page}: this kernel does {PAGES}"
    queries = chunk * (heads // kv_heads)
    if queries > MOST_QUERIES or types.columns(queries) * -(-head_dim // 64) * 64 > _MOST_SUMS:
        return f"{chunk} queries of {heads // kv_heads} heads to a KV head, of {head_dim} each, are too many"
    return None


def _option_refusal(q: Any, options: AttentionOptions) -> str | None:
    (rows, chunk, heads, _), sinks, tree = q.shape, options.sinks, options.tree
    if why := options.refusal:
        return why
    if sinks is not None and sinks.shape != (heads,):
        return f"{heads} heads, but sinks {sinks.shape}"
    if tree is not None and (tree.shape != (rows, chunk, chunk) or chunk > MOST_IN_TREE):
        return f"a tree of shape {tree.shape}: [sequences, chunk, chunk] with at most {MOST_IN_TREE} tokens is needed"
    return None


def _pool_refusal(q: Any, pool: Any, scales: Any) -> str | None:
    if q.dtype not in DTYPES:
        return f"queries are {q.dtype}: this kernel does bfloat16 and float16"
    if pool.dtype not in QUANTIZED:
        if pool.dtype != q.dtype or scales is not None:
            return f"queries are {q.dtype}, the pool is {pool.dtype}: neither alike nor the pool int8 or float8_e4m3fn"
        return None
    if scales is not None and scales.shape not in (pool.shape[:3], pool.shape[:4]):
        return f"scales {scales.shape} fit neither the pages nor the tokens of pool {pool.shape}"
    return None


def _tiles_refusal(q: Any, pool: Any, options: AttentionOptions, tiles: Tiles | None) -> str | None:
    if tiles is None:
        return None
    need = types.smem_bytes(_shape_of(q, pool, jax.ShapeDtypeStruct((1, 1), jnp.int32), options, tiles, False))
    if need > SHARED_BYTES:
        return f"{tiles} with head_dim {pool.shape[4]} need {need} bytes of shared memory: there are {SHARED_BYTES}"
    return None


def _best_tiles(q: Any, pool: Any, tables: Any, options: AttentionOptions) -> Tiles:
    """Return the tuned tiles, else the heuristic's."""
    untuned = heuristic_tiles(pool.shape[4], pool.shape[3], q.dtype, pool.dtype, queries=_queries(q, pool))
    key = decode_key(q, pool, tables, options)
    return pick(DECODE, key, untuned, lambda tiles: _tiles_refusal(q, pool, options, tiles))


def heuristic_tiles(
    head_dim: int, page: int, dtype: Any, pool_dtype: Any, *, queries: int, multiprocessors: int = 132
) -> Tiles:
    """Return tiles for two CTAs per multiprocessor, to overlap their waits, each with all stages that fit.

    If two would have fewer than two stages, or too few registers, one gets everything. Not measured on a GPU yet.
    """
    for resident in (2, 1):
        room = min(SHARED_BYTES, _MULTIPROCESSOR_BYTES // resident - _RESERVED_BYTES)
        stages = _stages(head_dim, page, dtype, pool_dtype, queries, room)
        if stages >= 2 and (resident == 1 or types.columns(queries) <= _COLUMNS_OF_TWO):
            break
    return Tiles(stages=max(stages, 1), blocks=resident * multiprocessors)


def _stages(head_dim: int, page: int, dtype: Any, pool_dtype: Any, queries: int, room: int) -> int:
    def need(stages: int) -> int:
        tiles, scaled = Tiles(stages=stages), "token" if jnp.dtype(pool_dtype).itemsize == 1 else None
        sizes: dict[str, Any] = {"page": page, "head_dim": head_dim, "splits": 1}
        storage: dict[str, Any] = {"dtype": dtype, "pool_dtype": pool_dtype, "scaled_by": scaled}
        off: dict[str, Any] = {"options": AttentionOptions(1.0), "interpret": False}
        return types.smem_bytes(
            Shape(rows=1, chunk=1, kv_heads=1, group=queries, tiles=tiles, **sizes, **storage, **off)
        )

    return max((stages for stages in range(1, 9) if need(stages) <= room), default=0)


def _queries(q: Any, pool: Any) -> int:
    return int(q.shape[1] * (q.shape[2] // pool.shape[2]))


def _shape_of(q: Any, pool: Any, tables: Any, options: AttentionOptions, tiles: Tiles, interpret: bool) -> Shape:
    rows, chunk, heads, head_dim = q.shape
    (kv_heads, page), scales = pool.shape[2:4], options.scales
    return Shape(
        rows=rows,
        chunk=chunk,
        kv_heads=kv_heads,
        group=heads // kv_heads,
        page=page,
        head_dim=head_dim,
        splits=_most_splits(tables.shape[1] * page, chunk, tiles.keys_per_split, options.window),
        dtype=jnp.dtype(q.dtype),
        pool_dtype=jnp.dtype(pool.dtype),
        scaled_by=None if scales is None else {3: "head", 4: "token"}[scales.ndim],
        options=options.flags,
        tiles=tiles,
        interpret=interpret,
    )


def _most_splits(keys: int, chunk: int, keys_per_split: int, window: int | None) -> int:
    """Return the most splits with visible keys in a row of at most ``keys`` keys. The queries are at its last keys,
    ``chunk`` at most, and the window of the first query may begin anywhere in a split."""
    most = pl.cdiv(keys, keys_per_split)
    return most if window is None else min(most, pl.cdiv(window + chunk - 2, keys_per_split) + 1)


def _flat_queries(shape: Shape, q: Array) -> Array:
    """Reshape queries to [rows * kv_heads * queries, key_dim], and pad to whole tiles."""
    if shape.chunk > 1:
        grouped = q.reshape(shape.rows, shape.chunk, shape.kv_heads, shape.group, shape.head_dim)
        q = jnp.swapaxes(grouped, 1, 2)
    flat = q.reshape(-1, shape.head_dim)
    missing = max(-flat.shape[0] % types.TILE_ROWS, shape.columns - flat.shape[0]), shape.key_dim - shape.head_dim
    return jnp.pad(flat, [(0, more) for more in missing]) if any(missing) else flat


def _unflat(shape: Shape, output: Array) -> Array:
    grouped = output.reshape(shape.rows, shape.kv_heads, shape.chunk, shape.group, shape.head_dim)
    return jnp.swapaxes(grouped, 1, 2).reshape(shape.rows, shape.chunk, -1, shape.head_dim)


def _scales_of(shape: Shape, tables: Int[Array, "sequences width"], scales: Array) -> Array:
    """Return the scales unchanged, or [sequences, 2, kv_heads, keys] in the order of the keys, in whole blocks."""
    scales = scales.astype(jnp.float32)
    if not shape.gathered:
        return scales
    filled = jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % (shape.tiles.block_keys // shape.page))))
    by_key = jnp.moveaxis(jnp.take(scales, filled, axis=0, mode="clip"), 1, 3)
    return by_key.reshape(*by_key.shape[:3], -1)


def _launcher(shape: Shape, names: tuple[str, ...], interpret: plgpu.InterpretGPUParams | None) -> Any:
    flat = (shape.rows * shape.kv_heads * shape.queries, shape.head_dim)
    results = {"output": jax.ShapeDtypeStruct(flat, shape.dtype)}
    scratch: dict[str, Any] = {"smem": types.smem(shape), "barriers": types.barriers(shape)}
    if shape.splits > 1:
        results["parts"] = jax.ShapeDtypeStruct((slots(shape), shape.value_dim, shape.columns), jnp.float32)
        results["stats"] = jax.ShapeDtypeStruct((slots(shape), 2, shape.columns), jnp.float32)
    return compat.kernel(
        functools.partial(_body, shape, (*names, *results)),
        out_type=tuple(results.values()),
        scratch_types=scratch,
        grid=(1 if shape.interpret else shape.tiles.blocks,),
        grid_names=("block",),
        num_threads=2,
        thread_name="warpgroup",
        kernel_name="paged_decode",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        cost_estimate=_cost(shape),
        interpret=interpret,
    )


def _cost(shape: Shape) -> pl.CostEstimate:
    """Return the cost as if every row filled its table or window: lengths are not known at compile time."""
    keys = shape.rows * shape.kv_heads * shape.splits * shape.tiles.keys_per_split
    return pl.CostEstimate(
        flops=4 * keys * shape.queries * shape.head_dim,
        transcendentals=keys * shape.queries,
        bytes_accessed=2 * keys * shape.head_dim * shape.pool_dtype.itemsize,
    )


def _body(shape: Shape, names: tuple[str, ...], *refs: Any, smem: Any, barriers: Any) -> None:
    gmem = Gmem(**(dict.fromkeys(Gmem._fields) | dict(zip(names, refs, strict=True))))
    warpgroup, arrived = lax.axis_index("warpgroup"), None
    if shape.splits > 1 and not shape.interpret:
        # Global: semaphores among the scratch types would be private to each CTA.
        arrived = pl.get_global(plgpu.SemaphoreType.REGULAR((shape.rows * shape.kv_heads,)))
    work = (
        functools.partial(consume, shape, gmem, smem, barriers, arrived),
        functools.partial(produce, shape, gmem, smem, barriers),
    )
    for role, whole in zip((CONSUMER, PRODUCER), work, strict=True):
        pl.when(warpgroup == role)(functools.partial(_as_blocks, shape, whole))


def _as_blocks(shape: Shape, work: Callable[[Any], None]) -> None:
    """Run as this CTA; interpreted, as each in turn: the interpreter has no semaphores between CTAs."""
    if shape.interpret:
        lax.fori_loop(0, shape.tiles.blocks, lambda block, _: work(block), None)
    else:
        work(lax.axis_index("block"))
