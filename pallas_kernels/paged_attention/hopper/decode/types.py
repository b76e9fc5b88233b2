"""Types shared by paged decode's host side and its kernel: static shapes, block sizes, memory and barriers."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.options import AttentionOptions
from pallas_kernels.paged_attention.spans import KEYS_PER_SPLIT

QUERY_SLOTS = 2  # the next unit's queries are on their way while this one is computed
# A KV head's first query lies anywhere in a shared-memory tile of so many rows.
TILE_ROWS = 8
# Rows of ones whose product with the probabilities is their sum: the rows of a wgmma.
ONES_ROWS = 64
# Scales that the copy engine takes at once: 128 bytes.
LEAST_SCALES = 32
# Bytes of shared memory: scratch of reductions across warps, barriers, alignment.
_OVERHEAD = 2048 + 768


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Block sizes, tuned for speed but for ``keys_per_split``, which is prefill's: it is part of the numerics. Of an
    8-bit pool ``block_keys`` is that, too.

    Attributes:
        block_keys: keys of one pipeline slot: 64 or 128; it divides the page size or is a multiple of it.
        stages: pipeline slots: how many key blocks are on their way from memory at once.
        keys_per_split: keys of one unit of work; a multiple of ``block_keys``.
        blocks: thread blocks of the launch, best a multiple of the GPU's multiprocessors.

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
    """The static part of one launch."""

    rows: int
    chunk: int  # queries of a row and head
    kv_heads: int
    group: int
    page: int
    head_dim: int
    splits: int  # most that a head has: its table's width and its window bound them
    dtype: Any
    pool_dtype: Any
    scaled_by: str | None  # "head", "token" or None
    options: AttentionOptions  # its `flags`
    tiles: Tiles
    interpret: bool

    @property
    def queries(self) -> int:
        """Queries of one row and KV head."""
        return self.chunk * self.group

    @property
    def columns(self) -> int:
        """Queries as the kernel reads them: whole tiles from the one in which the first query lies."""
        return columns(self.queries)

    @property
    def value_dim(self) -> int:
        """Width of values: the left operand of a wgmma, which takes 64 of their dimensions at a time."""
        return -(-self.head_dim // 64) * 64

    @property
    def key_dim(self) -> int:
        """Width of keys and queries in shared memory. Bytes are widened 64 columns at a time, the last with zeros."""
        return self.value_dim if self.quantized else self.head_dim

    @property
    def gathered(self) -> bool:
        """Are per-token scales gathered in the order of the keys? The copy engine takes at least 32 side by side."""
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
        """Are the sums too large to keep those of a head beside those of its split in registers?"""
        return self.quantized or self.value_dim * self.columns > 1024

    @property
    def total_by_ones(self) -> bool:
        """Are probabilities summed by a product with ones, as in prefill? Not where those that meet the values were
        scaled."""
        return not self.quantized

    @property
    def quantized(self) -> bool:
        return jnp.dtype(self.pool_dtype).itemsize == 1


def columns(queries: int) -> int:
    """Columns for ``queries`` (`Shape.columns`), whose first may be any tile row in steps of the common divisor."""
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
    """One thread block's shared memory."""

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
    """``*_ready``: the copy engine arrives, the consumer waits; ``*_free``: the other way round."""

    query_ready: Any  # one per query slot
    query_free: Any
    keys_ready: Any  # one per slot
    values_ready: Any
    slot_free: Any


def tiled(dims: tuple[int, ...], dtype: Any, swizzle: int) -> Any:
    """Rows in tiles of 8, swizzled as wgmma and the copy engine want them (a swizzle of 16 is none)."""
    tiling = plgpu.TilingTransform((TILE_ROWS, swizzle // jnp.dtype(dtype).itemsize))
    swizzled = (plgpu.SwizzleTransform(swizzle),) if swizzle > 16 else ()
    return plgpu.SMEM(dims, dtype, transforms=(tiling, *swizzled))


def swizzle(head_dim: int, dtype: Any) -> int:
    """The widest swizzle that divides a row, in bytes; 16 means none, which wgmma does not take."""
    return math.gcd(head_dim * jnp.dtype(dtype).itemsize, 128)


def smem(shape: Shape) -> Smem:
    stages, block, dim, wide = shape.tiles.stages, shape.tiles.block_keys, shape.key_dim, shape.value_dim
    own = swizzle(dim, shape.dtype)
    # Bytes are no operand of a wgmma: narrow tiles let them be widened a few at a time, in few registers.
    raw = min(64, swizzle(shape.head_dim, shape.pool_dtype)) if shape.quantized else own
    factors = plgpu.SMEM((stages, block), jnp.float32) if shape.scaled_by == "token" else None
    # Two tiles in a row of memory order: plain rows, of which the copy out may take any number.
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
    """Shared memory of one thread block in bytes, with the reductions' scratch and the barriers."""
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
