"""Types shared by paged decode's host side and its kernel: static shapes, block sizes, memory and barriers."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.options import AttentionOptions
from pallas_kernels.paged_attention.spans import KEYS_PER_SPLIT

QUERY_SLOTS = 2  # the next unit's queries are in flight while this one is computed
# Rows of an SMEM tile; a KV head's first query may be in any of them.
TILE_ROWS = 8
# Rows of ones whose product with the probabilities is their sum: the rows of a wgmma.
ONES_ROWS = 64
# Fewest scales of a TMA copy: 128 bytes.
LEAST_SCALES = 32
# Bytes of SMEM: scratch of reductions across warps, mbarriers, alignment.
_OVERHEAD = 2048 + 768


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Block sizes, tuned for speed except ``keys_per_split``, which equals prefill's, because it changes bits of
    results. For an 8-bit pool ``block_keys`` changes them, too.

    Attributes:
        block_keys: keys of one pipeline slot: 64 or 128; it divides the page size or is a multiple of it.
        stages: pipeline slots: number of key blocks in flight from memory.
        keys_per_split: keys of one unit of work; a multiple of ``block_keys``.
        blocks: CTAs of the launch, best a multiple of the GPU's multiprocessors.

    Raises:
        ValueError: sizes that do not fit each other.
    """

    block_keys: int = 64
    stages: int = 3
    keys_per_split: int = KEYS_PER_SPLIT
    blocks: int = 264

    def __post_init__(self) -> None:
        if self.block_keys not in (64, 128) or self.keys_per_split % self.block_keys or self.keys_per_split < 1:
            raise ValueError(f"keys_per_split must be a multiple of block_keys (64 or 128): {self}")
        if self.stages < 1 or self.blocks < 1:
            raise ValueError(f"stages and blocks must be positive: {self}")


class Shape(NamedTuple):
    """The static parameters of one launch."""

    rows: int
    chunk: int  # queries of a row and head
    kv_heads: int
    group: int
    page: int
    head_dim: int
    splits: int  # most splits of a head, bounded by table width and window
    dtype: Any
    pool_dtype: Any
    scaled_by: str | None  # "head", "token" or None
    options: AttentionOptions  # the `flags` of the options
    tiles: Tiles
    interpret: bool

    @property
    def queries(self) -> int:
        """Queries of one row and KV head."""
        return self.chunk * self.group

    @property
    def columns(self) -> int:
        """Queries as the kernel reads them: whole tiles from the one that contains the first query."""
        return columns(self.queries)

    @property
    def value_dim(self) -> int:
        """Width of values: the left operand of a wgmma, which takes 64 of their dimensions at a time."""
        return -(-self.head_dim // 64) * 64

    @property
    def key_dim(self) -> int:
        """Width of keys and queries in SMEM. Bytes are widened 64 columns at a time, the last with zeros."""
        return self.value_dim if self.quantized else self.head_dim

    @property
    def gathered(self) -> bool:
        """Whether per-token scales are gathered in the order of the keys: TMA copies at least 32 adjacent ones."""
        return self.scaled_by == "token" and self.page < LEAST_SCALES

    @property
    def piece(self) -> int:
        """Keys of one copy: of a page, or of a slot if that is smaller."""
        return min(self.page, self.tiles.block_keys)

    @property
    def pieces(self) -> int:
        """Copies of one slot."""
        return self.tiles.block_keys // self.piece

    @property
    def parks(self) -> bool:
        """Whether registers are too few for the sums of a head in addition to those of its split."""
        return self.quantized or self.value_dim * self.columns > 1024

    @property
    def total_by_ones(self) -> bool:
        """Whether probabilities are summed by a product with ones, as in prefill: not if scales multiply the
        probabilities of the values."""
        return not self.quantized

    @property
    def quantized(self) -> bool:
        return jnp.dtype(self.pool_dtype).itemsize == 1


def columns(queries: int) -> int:
    """Return columns for ``queries`` (`Shape.columns`); the first is at any tile row in steps of the common divisor."""
    return -(-(queries + TILE_ROWS - math.gcd(queries, TILE_ROWS)) // TILE_ROWS) * TILE_ROWS


class Gmem(NamedTuple):
    """Operands and results in device memory."""

    query: Any  # [rows * kv_heads * queries, key_dim], and up to a tile more
    pool: Any  # [pages, 2, kv_heads, page, head_dim]
    tables: Any  # [rows, width]
    starts: Any  # [rows]
    lengths: Any  # [rows]
    plan: Any  # [4, blocks]: see `schedule.plan`
    sinks: Any  # [heads], in units of log 2
    scales: Any  # [pages, 2, kv_heads], [pages, 2, kv_heads, page], or [rows, 2, kv_heads, keys] if `Shape.gathered`
    seen: Any  # [rows, chunk] int32: bit i: does the query see token i of its chunk?
    depths: Any  # [rows, chunk]: positions of the queries, counted from the row's start
    output: Any  # [rows * kv_heads * queries, head_dim]
    parts: Any  # [slots, value_dim, columns] float32: sums that are merged later (`slots`)
    stats: Any  # [slots, 2, columns] float32: their maxima and weights


class Smem(NamedTuple):
    """Shared memory of one CTA."""

    query: Any  # [QUERY_SLOTS, columns, key_dim]
    keys: Any  # [stages, block_keys, key_dim]
    values: Any  # [stages, block_keys, value_dim]
    key_scales: Any  # [stages, block_keys] float32, per-token scales only
    value_scales: Any
    wide_keys: Any  # [block_keys, key_dim]: dequantised, quantised pools only
    wide_values: Any  # [block_keys, value_dim]
    probs: Any  # [columns, block_keys]
    ones: Any  # [ONES_ROWS, block_keys] when interpreting, else None
    output: Any  # [columns, value_dim]


class Barriers(NamedTuple):
    """The mbarriers. ``*_ready``: the TMA arrives, the consumer waits; ``*_free``: the other way round."""

    query_ready: Any  # one per query slot
    query_free: Any
    keys_ready: Any  # one per slot
    values_ready: Any
    slot_free: Any


def tiled(dims: tuple[int, ...], dtype: Any, swizzle: int) -> Any:
    """Return rows in tiles of 8, swizzled as wgmma and TMA require (a swizzle of 16 is none)."""
    tiling = plgpu.TilingTransform((TILE_ROWS, swizzle // jnp.dtype(dtype).itemsize))
    swizzled = (plgpu.SwizzleTransform(swizzle),) if swizzle > 16 else ()
    return plgpu.SMEM(dims, dtype, transforms=(tiling, *swizzled))


def swizzle(head_dim: int, dtype: Any) -> int:
    """Return the widest swizzle that divides a row, in bytes; 16 means none, which wgmma does not support."""
    return math.gcd(head_dim * jnp.dtype(dtype).itemsize, 128)


def smem(shape: Shape) -> Smem:
    stages, block, dim, wide = shape.tiles.stages, shape.tiles.block_keys, shape.key_dim, shape.value_dim
    own = swizzle(dim, shape.dtype)
    # Bytes are not an operand of a wgmma: narrow tiles let them be widened a few at a time, in few registers.
    raw = min(64, swizzle(shape.head_dim, shape.pool_dtype)) if shape.quantized else own
    factors = plgpu.SMEM((stages, block), jnp.float32) if shape.scaled_by == "token" else None
    # Two tiles in a row of memory order: unswizzled rows, so that the copy out may take any number of them.
    plain = (plgpu.TilingTransform((1, swizzle(shape.head_dim, shape.dtype) // 2)),) if wide != shape.head_dim else ()
    return Smem(
        query=tiled((QUERY_SLOTS, shape.columns, dim), shape.dtype, own),
        keys=tiled((stages, block, dim), shape.pool_dtype, raw),
        values=tiled((stages, block, wide), shape.pool_dtype, raw),
        key_scales=factors,
        value_scales=factors,
        wide_keys=tiled((block, dim), shape.dtype, own) if shape.quantized else None,
        wide_values=tiled((block, wide), shape.dtype, own) if shape.quantized else None,
        probs=tiled((shape.columns, block), shape.dtype, own),
        ones=tiled((ONES_ROWS, block), shape.dtype, own) if shape.interpret and shape.total_by_ones else None,
        output=plgpu.SMEM((shape.columns, wide), shape.dtype, transforms=plain),
    )


def smem_bytes(shape: Shape) -> int:
    """Return the SMEM of one CTA in bytes, with the reductions' scratch and the mbarriers."""
    size, raw = jnp.dtype(shape.dtype).itemsize, jnp.dtype(shape.pool_dtype).itemsize
    both = shape.tiles.block_keys * (shape.key_dim + shape.value_dim)
    slots = shape.tiles.stages * (both * raw + (8 * shape.tiles.block_keys if shape.scaled_by == "token" else 0))
    wide = both * size if shape.quantized else 0
    per_column = (QUERY_SLOTS * shape.key_dim + shape.tiles.block_keys + shape.value_dim) * size
    return slots + wide + shape.columns * per_column + _OVERHEAD


def barriers(shape: Shape) -> Barriers:
    stages = shape.tiles.stages
    copies = shape.pieces
    if shape.scaled_by == "token":
        copies += 1 if shape.gathered else shape.pieces
    return Barriers(
        query_ready=plgpu.Barrier(num_barriers=QUERY_SLOTS),
        query_free=plgpu.Barrier(num_barriers=QUERY_SLOTS),
        keys_ready=plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        values_ready=plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        slot_free=plgpu.Barrier(num_barriers=stages),
    )
