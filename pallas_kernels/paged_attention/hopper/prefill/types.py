"""Types shared by the modules of `prefill`: the shape of a launch, its memory and barriers, a CTA's work."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.options import AttentionOptions

WARPGROUP_ROWS = 64  # rows of a wgmma
BLOCK_ROWS = 2 * WARPGROUP_ROWS  # two warpgroups compute
TOTALS = 8  # identical columns of the product with ones: the fewest of a wgmma


@dataclasses.dataclass(frozen=True)
class Shape:
    """The static parameters of one launch."""

    sequences: int
    chunk: int  # a multiple of `tokens`
    heads: int
    kv_heads: int
    page: int
    head_dim: int
    width: int
    dtype: Any
    pool_dtype: Any
    block_keys: int
    stages: int
    block_heads: int
    keys_per_split: int
    options: AttentionOptions  # the `flags` of the options
    interpret: bool

    @property
    def tokens(self) -> int:
        """Query tokens of one CTA."""
        return BLOCK_ROWS // self.block_heads

    @property
    def part_tokens(self) -> int:
        """Query tokens of one warpgroup."""
        return min(self.tokens, WARPGROUP_ROWS)

    @property
    def part_heads(self) -> int:
        """Query heads of one warpgroup: row ``r`` holds token ``r % part_tokens`` of head ``r // part_tokens``."""
        return WARPGROUP_ROWS // self.part_tokens

    @property
    def tiles(self) -> int:
        return self.chunk // self.tokens

    @property
    def quantized(self) -> bool:
        return jnp.dtype(self.pool_dtype).itemsize == 1

    @property
    def raw_slots(self) -> int:
        """Key blocks of a quantised pool, and as many of values, that are in flight from memory."""
        return 1 if self.wide else 2

    @property
    def wide(self) -> bool:
        """Whether the output needs most of a consumer's registers, and a slot most of the SMEM."""
        return self.head_dim > 128

    @property
    def like_decode(self) -> bool:
        """Whether sums have the order of decode: not if numbers are rounded after they have been scaled, and not where
        registers would not suffice."""
        return not self.quantized and not self.wide

    @property
    def splits(self) -> bool:
        """Whether there may be several splits of the keys with sums added up in order."""
        return self.like_decode and self.width * self.page > self.keys_per_split

    @property
    def blocks_per_split(self) -> int:
        """Key blocks of a split, a power of two."""
        return self.keys_per_split // self.block_keys

    @property
    def piece(self) -> int:
        """Keys of one copy: a page, or the slice of it that belongs to one block."""
        return min(self.page, self.block_keys)

    @property
    def copies(self) -> int:
        return self.block_keys // self.piece

    @property
    def tree_blocks(self) -> int:
        """Key blocks that a chunk may touch, wherever it starts."""
        return -(-(self.chunk + self.block_keys - 1) // self.block_keys)

    @property
    def shared_bytes(self) -> int:
        """Bytes of SMEM without mbarriers."""
        numbers = (BLOCK_ROWS + 2 * self.stages * self.block_keys) * jnp.dtype(self.dtype).itemsize
        raw = 2 * self.raw_slots * self.block_keys if self.quantized else 0
        earlier = 4 * BLOCK_ROWS if self.splits else 0
        ones = TOTALS * self.block_keys * jnp.dtype(self.dtype).itemsize if self.like_decode else 0
        return (numbers + raw + earlier) * self.head_dim + ones


class Gmem(NamedTuple):
    """Operands and result in device memory. Operands of options that are off are single numbers that are never read."""

    query: Any  # [sequences, chunk, heads, head_dim]
    pool: Any  # [pages, 2, kv_heads, page, head_dim]
    tables: Any  # [sequences, width]
    starts: Any  # [sequences]
    lengths: Any  # [sequences]
    sinks: Any  # [heads] float32, in units of log 2
    factors: Any  # [sequences, 2, kv_heads, keys] float32: a quantised pool's scales in the order of the keys
    seen: Any  # [sequences, tiles, 2, 1 + tree_blocks, WARPGROUP_ROWS, block_keys] int8: the tree's mask
    depths: Any  # [sequences, tiles, 2, WARPGROUP_ROWS] int32: each row's distance from its tree's root
    output: Any  # [sequences, chunk, heads, head_dim]
    stats: Any = None  # [sequences, tiles, groups of heads, 2, 2, WARPGROUP_ROWS] float32, if there are splits


class Smem(NamedTuple):
    """Shared memory of one CTA."""

    query: Any  # [2, WARPGROUP_ROWS, head_dim]; each warpgroup copies its results out through its half
    keys: Any  # [stages, block_keys, head_dim]
    values: Any  # [stages, block_keys, head_dim]
    raw: Any  # [2, raw_slots, block_keys, head_dim] of a quantised pool, else None
    probs: Any  # [2, WARPGROUP_ROWS, block_keys] when interpreting, else None
    ones: Any  # [TOTALS, block_keys], or None
    earlier: Any  # [2, WARPGROUP_ROWS, head_dim] float32: sums of earlier splits, or None


class Barriers(NamedTuple):
    """The mbarriers; the diagram in `launch` shows the arriving and waiting warpgroups."""

    query_ready: Any  # one per consumer; also for the ones
    keys_ready: Any  # one per slot, as the next three
    values_ready: Any
    keys_free: Any
    values_free: Any
    turn: Any  # one per consumer: it may issue its products
    clean: Any  # consumer 0 has zeroed the unseen values: of the last key block, of a window's first one
    raw_ready: Any  # one per slot of raw keys, then of raw values


class Tile(NamedTuple):
    """The work of one CTA. Traced scalars."""

    index: Any  # index among the chunk's tiles
    sequence: Any
    head: Any  # first query head
    kv_head: Any
    token: Any  # first query token, within the chunk
    start: Any  # position of the chunk's first query
    length: Any
    low: Any  # keys [low, high) are visible to some query of the tile
    high: Any
    first: Any  # key blocks [first, first + steps)
    steps: Any  # 0 if all queries are padding

    def first_key(self, shape: Shape, step: Any) -> Any:
        return (self.first + step) * shape.block_keys

    def begins_split(self, shape: Shape, step: Any) -> Any:
        return ((self.first + step) & (shape.blocks_per_split - 1)) == 0

    def several_splits(self, shape: Shape) -> Any:
        return (self.first & -shape.blocks_per_split) + shape.blocks_per_split < self.first + self.steps


def smem_types(shape: Shape) -> Smem:
    block, dim = shape.block_keys, shape.head_dim
    return Smem(
        query=_tiled((2, WARPGROUP_ROWS, dim), shape.dtype),
        keys=_tiled((shape.stages, block, dim), shape.dtype),
        values=_tiled((shape.stages, block, dim), shape.dtype),
        raw=_tiled((2, shape.raw_slots, block, dim), shape.pool_dtype) if shape.quantized else None,
        probs=_tiled((2, WARPGROUP_ROWS, block), shape.dtype) if shape.interpret else None,
        ones=_tiled((TOTALS, block), shape.dtype) if shape.like_decode else None,
        earlier=_tiled((2, WARPGROUP_ROWS, dim), jnp.float32) if shape.splits else None,
    )


def _tiled(dims: tuple[int, ...], dtype: Any) -> Any:
    """Return SMEM in the swizzled tiles of 8 rows that wgmma and TMA require."""
    bits = jnp.dtype(dtype).itemsize * 8
    swizzle = min(plgpu.find_swizzle(dims[-1] * bits), 8 * bits)
    if swizzle == 16:  # none at all: only a quantised pool of head_dim 80
        return plgpu.SMEM(dims, dtype)
    tiling = plgpu.TilingTransform((8, swizzle * 8 // bits))
    return plgpu.SMEM(dims, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))


def barrier_types(shape: Shape) -> Barriers:
    stages, fills = shape.stages, 1 if shape.quantized else shape.copies
    return Barriers(
        query_ready=plgpu.Barrier(num_arrivals=shape.part_heads + 1, num_barriers=2),
        keys_ready=plgpu.Barrier(num_arrivals=fills, num_barriers=stages),
        values_ready=plgpu.Barrier(num_arrivals=fills, num_barriers=stages),
        keys_free=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        values_free=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        turn=plgpu.Barrier(num_barriers=2),
        clean=plgpu.Barrier(num_barriers=1 if shape.options.window is None else 2),
        raw_ready=plgpu.Barrier(num_arrivals=shape.copies, num_barriers=2 * shape.raw_slots)
        if shape.quantized
        else None,
    )


def this_tile(shape: Shape, gmem: Gmem) -> Tile:
    """Return this CTA's tile. Tiles are in descending order of tokens: those with the most keys start first."""
    index = shape.tiles - 1 - lax.axis_index("tile")
    sequence, head = lax.axis_index("sequence"), lax.axis_index("head") * shape.block_heads
    start, length, token = gmem.starts[sequence], gmem.lengths[sequence], index * shape.tokens
    high = length if shape.options.tree else jnp.minimum(length, start + token + shape.tokens)
    low = jnp.int32(0)
    if shape.options.window is not None:
        low = jnp.maximum(start + (0 if shape.options.tree else token) - shape.options.window + 1, 0)
    first = lax.div(low, jnp.int32(shape.block_keys))
    steps = jnp.where(start + token < length, pl.cdiv(high, jnp.int32(shape.block_keys)) - first, 0)
    kv_head = lax.div(head, jnp.int32(shape.heads // shape.kv_heads))
    return Tile(index, sequence, head, kv_head, token, start, length, low, high, first, steps)


def slot_of(shape: Shape, step: Any) -> Any:
    return lax.rem(step, jnp.int32(shape.stages))
