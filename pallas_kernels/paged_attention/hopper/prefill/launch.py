"""Paged prefill attention for Hopper GPUs, in Pallas Mosaic GPU: chunks of many sequences against their pages.

A CTA handles one *tile*: 128 rows, which are 128 query tokens of one head, or fewer tokens of two to sixteen heads that
share their keys. It walks the key blocks that the tile's queries see from the first to the last:

    producer (warpgroup 2)                           consumers (warpgroups 0 and 1, 64 rows each)
    ----------------------                           --------------------------------------------
                                      query_ready    load their own queries, wait
    per key block:                                   per key block:
      waits keys_free             <-                   arrive when their scores are computed
      keys, one copy per page     ->  keys_ready       wait
                                      turn             wait for own turn; issue scores = queries . keys, and output
                                                       += probabilities . values of the block before; pass the turn
                                                       to the other; softmax of the scores meanwhile
      waits values_free           <-                   arrive when the products with the values are done
      values, one copy per page   ->  values_ready     wait, at the end of the block's softmax
                                      clean            consumer 0 arrives when it has zeroed the values at either end
                                                       that no query may see; both wait
                                                     at the end of a split of the keys: store the sums, start from zero
                                                     write their rows over their queries, and from there to memory

Two things overlap with the products on the tensor cores, as in FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608):
the softmax of the other warpgroup (the turns), and the softmax of a warpgroup's own next block. Only blocks at the
diagonal, at the far end of a window or within a tree are masked; those before the window are neither read nor counted.

For a quantised pool the producer copies into separate buffers, and writes the slots itself, multiplied by the scales
and rounded to the queries' type; it then has more registers, and the consumers fewer.

Key blocks are at absolute multiples of ``block_keys``, and one that a row does not see adds exact zeros to it: a row is
bitwise independent of other sequences, of its sequence index, of its chunk, of the width of the table and of the pages.
Also of whether a chunk or decode computes it, except for 8-bit pools and wide heads (`softmax`, `Shape.like_decode`).

Online softmax: Milakov and Gimelshein 2018 (arXiv:1805.02867).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int, Num

from pallas_kernels import compat
from pallas_kernels.paged_attention.hopper.prefill.consumer import Rows, consume, write_zeros
from pallas_kernels.paged_attention.hopper.prefill.producer import produce
from pallas_kernels.paged_attention.hopper.prefill.types import (
    BLOCK_ROWS,
    WARPGROUP_ROWS,
    Barriers,
    Gmem,
    Shape,
    Smem,
    barrier_types,
    smem_types,
    this_tile,
)
from pallas_kernels.paged_attention.hopper.softmax import sink_levels
from pallas_kernels.paged_attention.options import AttentionOptions
from pallas_kernels.paged_attention.spans import KEYS_PER_SPLIT
from pallas_kernels.paged_attention.tile_keys import PREFILL, prefill_key
from pallas_kernels.thread_block import SHARED_BYTES, Split, split
from pallas_kernels.tiles import pick

HEAD_DIMS = (64, 80, 96, 128, 256)
PAGES = (16, 32, 64, 128)
DTYPES = (jnp.bfloat16, jnp.float16)
QUANTIZED = (jnp.int8, jnp.float8_e4m3fn)
LARGEST_TREE = 512  # its mask is a byte per query, key and head of a tile
_SHARED_BYTES = SHARED_BYTES - 1024  # less mbarriers
PRODUCER = 2


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Block sizes, tuned for speed except ``keys_per_split``, which equals decode's: it changes bits of results.

    Attributes:
        block_keys: keys of one pipeline slot, 64 or 128.
        stages: pipeline slots, at least 2.
        heads: query heads, all of one KV head, that share a CTA: 1, 2, 4, 8 or 16. It then has
            ``128 // heads`` tokens, and computes less beyond the diagonal.
        keys_per_split: keys of a split, with separate sums; a multiple of ``block_keys``.
    """

    block_keys: int = 128
    stages: int = 2
    heads: int = 1
    keys_per_split: int = KEYS_PER_SPLIT

    def __post_init__(self) -> None:
        if self.block_keys not in (64, 128) or self.stages < 2 or self.heads not in (1, 2, 4, 8, 16):
            raise ValueError(f"block_keys must be 64 or 128, stages at least 2, heads 1, 2, 4, 8 or 16: {self}")
        if self.keys_per_split < 1 or self.keys_per_split % self.block_keys:
            raise ValueError(f"keys_per_split must be a multiple of block_keys: {self}")


def heuristic_tiles(*, group: int, head_dim: int, tree: bool, quantized: bool = False) -> Tiles:
    """Return tiles that fit into the registers (64 keys where the output, or a tree's mask, needs many; one head if the
    producer converts, too), with slots up to some 190 KiB.

    Args:
        group: query heads per KV head.
        quantized: whether the pool has 8 bits.
    """
    heads = 1 if quantized and head_dim > 128 else math.gcd(group, 4)
    block_keys = 64 if tree or head_dim > 128 else 128
    slot_bytes = 4 * block_keys * head_dim
    return Tiles(block_keys, max(2, min(4, 160_000 // slot_bytes)), heads)


def prefill(
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
    """Run `reference.prefill` on Hopper GPUs. Padding queries give zeros, and so does a sequence of length 0.

    Products are of bfloat16 or float16 numbers, including probabilities; sums are float32; exp2 is the hardware's
    approximation. Numbers of a quantised pool are scaled, then rounded to the queries' type.

    Args:
        tiles: block sizes; None: those tuned for the device (`pallas_kernels.tiles`), else `heuristic_tiles`.
        interpret: run on a CPU (`compat.interpret_params`).

    Raises:
        ValueError: a shape, dtype or option that this kernel does not support; the message names it (`refusal`).
    """
    if (why := refusal((q, pool, tables, starts, lengths), options, tiles)) is not None:
        raise ValueError(why)
    shape = _shape_of(q, pool, tables, options, tiles, interpret is not None)
    chunk, off = q.shape[1], jnp.zeros((1,), jnp.float32)
    if shape.chunk > chunk:
        q = jnp.pad(q, ((0, 0), (0, shape.chunk - chunk), (0, 0), (0, 0)))
    starts, lengths = starts.astype(jnp.int32), lengths.astype(jnp.int32)
    levels = off if options.sinks is None else sink_levels(options.sinks)
    factors = off if options.scales is None else _factors(shape, options.scales, tables)
    masks = (off, off) if options.tree is None else _tree_masks(shape, options.tree, starts, lengths)
    launch = _launcher(shape, interpret)
    return launch(q, pool, tables.astype(jnp.int32), starts, lengths, levels, factors, *masks)[0][:, :chunk]


def refusal(operands: tuple[Any, ...], options: AttentionOptions, tiles: Tiles | None = None) -> str | None:
    """Return why this kernel does not support `prefill` of these operands; None if it does."""
    q, pool, tables, starts, lengths = operands
    return (
        _wrong_shapes(q, pool, tables, starts, lengths)
        or _wrong_dtypes(q, pool, options.scales)
        or _wrong_options(q, pool, options)
        or _tiles_refusal(_shape_of(q, pool, tables, options, tiles, False))
    )


def _tiles_refusal(shape: Shape) -> str | None:
    if (shape.heads // shape.kv_heads) % shape.block_heads:
        return f"{shape.block_heads} heads a tile do not divide the {shape.heads // shape.kv_heads} of a KV head"
    if shape.quantized and shape.head_dim > 128 and shape.block_heads > 1:
        return f"{shape.block_heads} heads a tile, an 8-bit pool and head_dim {shape.head_dim}: registers would spill"
    if shape.shared_bytes > _SHARED_BYTES:
        slots = f"{shape.stages} stages of {shape.block_keys} keys"
        return f"{shape.shared_bytes} bytes of shared memory for {slots}: a block has {_SHARED_BYTES}"
    return None


def _wrong_shapes(q: Any, pool: Any, tables: Any, starts: Any, lengths: Any) -> str | None:
    if q.ndim != 4 or pool.ndim != 5:
        return f"queries {q.shape} and pool {pool.shape}: 4 and 5 dimensions are needed"
    (sequences, _, heads, head_dim), (_, two, kv_heads, page, pool_dim) = q.shape, pool.shape
    if two != 2 or pool_dim != head_dim or heads % kv_heads:
        return f"queries {q.shape} and pool {pool.shape} do not fit"
    if head_dim not in HEAD_DIMS:
        return f"head_dim {head_dim}: this kernel does {HEAD_DIMS}"
    if page not in PAGES:
        return f"page size {page}: this kernel does {PAGES}"
    if (
        tables.ndim != 2
        or tables.shape[0] != sequences
        or starts.shape != (sequences,)
        or lengths.shape != (sequences,)
    ):
        return f"{sequences} sequences, but tables {tables.shape}, starts {starts.shape} and lengths {lengths.shape}"
    return None


def _wrong_dtypes(q: Any, pool: Any, scales: Any) -> str | None:
    if q.dtype not in DTYPES:
        return f"queries are {q.dtype}: this kernel does bfloat16 and float16"
    if pool.dtype != q.dtype and pool.dtype not in QUANTIZED:
        return f"queries are {q.dtype}, the pool is {pool.dtype}: it must be the same, int8 or float8_e4m3fn"
    if scales is not None and pool.dtype not in QUANTIZED:
        return f"scales for a pool in {pool.dtype}"
    return None


def _wrong_options(q: Any, pool: Any, options: AttentionOptions) -> str | None:
    (sequences, chunk, heads, _), sinks, scales, tree = q.shape, options.sinks, options.scales, options.tree
    if options.scale <= 0:
        return f"scale {options.scale} must be positive"
    if why := options.refusal:
        return why
    if sinks is not None and sinks.shape != (heads,):
        return f"{heads} heads, but sinks {sinks.shape}"
    if scales is not None and scales.shape not in (pool.shape[:3], pool.shape[:4]):
        return f"pool {pool.shape}, but scales {scales.shape}"
    if tree is not None and (tree.shape != (sequences, chunk, chunk) or chunk > LARGEST_TREE):
        return f"queries {q.shape}, but a tree {tree.shape}; at most {LARGEST_TREE} tokens"
    return None


def _shape_of(
    q: Any,
    pool: Any,
    tables: Any,
    options: AttentionOptions,
    tiles: Tiles | None,
    interpret: bool,
) -> Shape:
    (sequences, chunk, heads, head_dim), (kv_heads, page) = q.shape, pool.shape[2:4]

    def shape(tiles: Tiles) -> Shape:
        tokens = BLOCK_ROWS // tiles.heads
        return Shape(
            sequences=sequences,
            chunk=pl.cdiv(chunk, tokens) * tokens,
            heads=heads,
            kv_heads=kv_heads,
            page=page,
            head_dim=head_dim,
            width=tables.shape[1],
            dtype=q.dtype,
            pool_dtype=pool.dtype,
            block_keys=tiles.block_keys,
            stages=tiles.stages,
            block_heads=tiles.heads,
            keys_per_split=tiles.keys_per_split,
            options=options.flags,
            interpret=interpret,
        )

    if tiles is None:
        kind = {"tree": options.tree is not None, "quantized": pool.dtype in QUANTIZED}
        untuned = heuristic_tiles(group=heads // kv_heads, head_dim=head_dim, **kind)
        tiles = pick(
            PREFILL, prefill_key(q, pool, tables, options), untuned, lambda tiles: _tiles_refusal(shape(tiles))
        )
    return shape(tiles)


def _launcher(shape: Shape, interpret: plgpu.InterpretGPUParams | None) -> Any:
    results = [jax.ShapeDtypeStruct((shape.sequences, shape.chunk, shape.heads, shape.head_dim), shape.dtype)]
    if shape.splits:
        parts = (shape.sequences, shape.tiles, shape.heads // shape.block_heads, 2)
        results.append(jax.ShapeDtypeStruct((*parts, 2, WARPGROUP_ROWS), jnp.float32))
    return compat.kernel(
        functools.partial(_body, shape),
        out_type=tuple(results),
        scratch_types={"smem": smem_types(shape), "barriers": barrier_types(shape)},
        grid=(shape.tiles, shape.sequences, shape.heads // shape.block_heads),
        grid_names=("tile", "sequence", "head"),  # the last one fastest: neighbours read the same keys
        num_threads=3,
        thread_name="warpgroup",
        kernel_name="paged_prefill",
        # Sums over a row stay within a warp and need no SMEM.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        cost_estimate=_cost(shape),
        interpret=interpret,
    )


def _cost(shape: Shape) -> pl.CostEstimate:
    """Return the cost as if every sequence filled its table: lengths are not known at compile time."""
    keys = shape.width * shape.page
    pairs = shape.sequences * shape.heads * shape.chunk * keys
    queries = 2 * shape.sequences * shape.heads * shape.chunk * jnp.dtype(shape.dtype).itemsize
    pool = 2 * shape.sequences * shape.kv_heads * keys * jnp.dtype(shape.pool_dtype).itemsize
    return pl.CostEstimate(
        flops=4 * pairs * shape.head_dim, transcendentals=pairs, bytes_accessed=(queries + pool) * shape.head_dim
    )


def _body(shape: Shape, *refs: Any, smem: Smem, barriers: Barriers) -> None:
    gmem = Gmem(*refs)
    warpgroup = lax.axis_index("warpgroup")
    shares = _registers(shape)

    @pl.when(warpgroup < PRODUCER)
    def _compute() -> None:
        plgpu.set_max_registers(shares.consumer, action="increase")
        tile = this_tile(shape, gmem)
        rows = Rows(shape, tile, warpgroup, gmem)
        pl.when(tile.steps > 0)(lambda: consume(rows, smem, barriers))
        pl.when(tile.steps == 0)(lambda: write_zeros(rows, smem))

    @pl.when(warpgroup == PRODUCER)
    def _load() -> None:
        plgpu.set_max_registers(shares.producer, action="decrease")
        own = this_tile(shape, gmem)
        pl.when(own.steps > 0)(lambda: produce(shape, own, gmem, smem, barriers))


def _registers(shape: Shape) -> Split:
    """Split registers between warpgroups: a producer that converts an 8-bit pool keeps some."""
    if not shape.quantized:
        return split(PRODUCER)
    return split(PRODUCER, 40 if shape.wide else 72)


# --------------------------------------------------------------------------------------------------------------
# Operands prepared by XLA.


def _factors(
    shape: Shape, scales: Float[Array, "pages 2 kv_heads *page"], tables: Int[Array, "sequences width"]
) -> Float[Array, "sequences 2 kv_heads keys"]:
    """Gather scales in the order of the keys, one per key: one format for both kinds, read in large copies."""
    taken = scales.astype(jnp.float32)[jnp.clip(tables, 0, scales.shape[0] - 1)]
    if scales.ndim == 3:
        taken = jnp.broadcast_to(taken[..., None], (*taken.shape, shape.page))
    ordered = jnp.transpose(taken, (0, 2, 3, 1, 4)).reshape(shape.sequences, 2, shape.kv_heads, -1)
    return jnp.pad(ordered, ((0, 0), (0, 0), (0, 0), (0, -ordered.shape[-1] % shape.block_keys)))


def _tree_masks(
    shape: Shape,
    tree: Bool[Array, "sequences chunk chunk"],
    starts: Int[Array, " sequences"],
    lengths: Int[Array, " sequences"],
) -> tuple[Any, Any]:
    """Return `Gmem.seen` and `Gmem.depths`. The mask's columns begin with the key block where the chunk starts."""
    chunk, block = tree.shape[1], shape.block_keys
    rows = jnp.pad(tree, ((0, 0), (0, shape.chunk - chunk), (0, 0)))
    keys = (starts // block * block)[:, None, None] + jnp.arange(shape.tree_blocks * block)
    within = keys - starts[:, None, None]
    columns = jnp.broadcast_to(jnp.clip(within, 0, chunk - 1), (shape.sequences, shape.chunk, keys.shape[-1]))
    own = jnp.take_along_axis(rows, columns, axis=2) & (within < chunk)
    seen = (keys < lengths[:, None, None]) & ((within < 0) | own)
    before = jnp.ones((shape.sequences, shape.chunk, block), bool)
    blocks = jnp.concatenate([before, seen], axis=2).astype(jnp.int8).reshape(shape.sequences, shape.chunk, -1, block)
    depths = rows.sum(-1, dtype=jnp.int32) - 1
    return _by_rows(shape, blocks).swapaxes(3, 4), _by_rows(shape, depths)


def _by_rows(
    shape: Shape, per_token: Num[Array, "sequences chunk *rest"]
) -> Num[Array, "sequences tiles 2 rows *rest"]:
    """Repeat each token's entry for each row that holds it."""
    rest = per_token.shape[2:]
    parts = shape.tokens // shape.part_tokens
    split = per_token.reshape(shape.sequences, shape.tiles, parts, 1, shape.part_tokens, *rest)
    repeated = (shape.sequences, shape.tiles, 2, shape.part_heads, shape.part_tokens, *rest)
    return jnp.broadcast_to(split, repeated).reshape(shape.sequences, shape.tiles, 2, WARPGROUP_ROWS, *rest)
