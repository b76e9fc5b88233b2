"""Types shared by the modules of the MLA kernel: static shapes, block sizes, memory and barriers."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

TILE = 64  # queries of a tile (rows of a wgmma), and keys of a slot: probabilities are a tile of both
PAIR = 2 * TILE  # keys that the two consumers handle together
SLOTS = 2
ROPE = TILE  # a slot's probabilities overwrite its rotated keys, once the scores are computed
PARTS = ("left", "right", "rope")


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Sizes tuned for speed. ``keys_per_split`` changes the last bits of results.

    Attributes:
        keys_per_split: keys of one unit of work in decode; a multiple of 128. Prefill does not split.
        blocks: CTAs of a decode launch, one for each of the GPU's multiprocessors.

    Raises:
        ValueError: unsupported sizes.
    """

    keys_per_split: int = 512
    blocks: int = 132

    def __post_init__(self) -> None:
        if self.keys_per_split < 1 or self.keys_per_split % PAIR or self.blocks < 1:
            raise ValueError(f"keys_per_split must be a positive multiple of {PAIR}, blocks at least 1: {self}")


@dataclasses.dataclass(frozen=True)
class Shape:
    """The static parameters of one launch. Queries are packed: row ``token * heads + head`` of a sequence."""

    sequences: int
    chunk: int
    heads: int
    rank: int
    page: int
    width: int
    dtype: Any
    scale: float
    tiles: Tiles
    split: bool  # decode: units of `Tiles.keys_per_split` keys, merged later; prefill: a tile's keys are one unit
    interpret: bool

    @property
    def half(self) -> int:
        """Columns of the result that one consumer owns."""
        return self.rank // 2

    @property
    def latent(self) -> int:
        return self.rank + ROPE

    @property
    def tile_rows(self) -> int:
        """Rows of a tile that are read and written."""
        return min(TILE, -(-self.chunk * self.heads // 8) * 8)

    @property
    def packed(self) -> int:
        """A sequence's queries, padded to whole tiles."""
        return self.tile_count * self.tile_rows

    @property
    def tile_count(self) -> int:
        return -(-self.chunk * self.heads // self.tile_rows)

    @property
    def splits(self) -> int:
        """The most splits of a table of this width."""
        return max(1, -(-self.width * self.page // self.tiles.keys_per_split)) if self.split else 1

    @property
    def pieces(self) -> int:
        """Copies of one column range of a slot: one per page, or one for a slice of a longer page."""
        return TILE // self.piece

    @property
    def piece(self) -> int:
        return min(self.page, TILE)


class Gmem(NamedTuple):
    """Operands and results in device memory; None if a launch has none."""

    query: Any  # [sequences, packed, latent]
    pool: Any  # [pages, page, latent]
    tables: Any  # [sequences, width]
    starts: Any  # [sequences]
    lengths: Any  # [sequences]
    plan: Any  # [3, blocks]: decode, see `schedule.plan`
    output: Any  # [sequences, packed, rank]: of a launch without splits
    sums: Any  # [sequences, splits, packed, rank] float32: splits' weighted values, not yet divided by their totals
    stats: (
        Any  # [sequences, splits, 2, tile_count * TILE] float32: maxima of the splits (as powers of 2) and their totals
    )


class Latent(NamedTuple):
    """Rows of latents: the columns that consumer 0 owns as values, those of consumer 1, and the rotated keys."""

    left: Any  # [..., half]
    right: Any  # [..., half]
    rope: Any  # [..., ROPE]; in a slot overwritten by probabilities [TILE, TILE] once its scores are computed


class Smem(NamedTuple):
    """Shared memory of one CTA."""

    query: Any  # a union of the queries, a `Latent`, and of both float32 halves of the result being copied out
    slots: Latent  # each [SLOTS, TILE, ...]
    tops: Any  # [2, TILE] float32: each consumer's maxima
    totals: Any  # [2, TILE] float32: each consumer's share of the weights' sums


class Barriers(NamedTuple):
    """The mbarriers; the diagram in `attention` shows the arriving and waiting warpgroups."""

    query_ready: Any
    query_free: Any
    ready: Latent  # one per slot in each field
    free: Latent
    probs_ready: Any  # one per consumer: its maxima and probabilities are in SMEM
    totals_ready: Any  # one per consumer: its totals are in SMEM, and it no longer reads queries


def smem(shape: Shape) -> Smem:
    sizes = Latent(shape.half, shape.half, ROPE)
    query = Latent(*(tiled((1, TILE, size), shape.dtype) for size in sizes))
    result = tuple(tiled((TILE, shape.half // 2), jnp.float32) for _ in range(2))
    vectors = plgpu.SMEM((2, TILE), jnp.float32)
    return Smem(
        query=plgpu.RefUnion(query, result),
        slots=Latent(*(tiled((SLOTS, TILE, size), shape.dtype) for size in sizes)),
        tops=vectors,
        totals=vectors,
    )


def tiled(dims: tuple[int, ...], dtype: Any) -> Any:
    """Return rows in swizzled tiles of 8 by 128 bytes, as wgmma and TMA require."""
    transforms = (plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(128))
    return plgpu.SMEM(dims, dtype, transforms=transforms)


def barriers(shape: Shape) -> Barriers:
    slot, both = plgpu.Barrier(num_barriers=SLOTS), plgpu.Barrier(num_arrivals=2, num_barriers=SLOTS)
    filled = plgpu.Barrier(num_arrivals=shape.pieces, num_barriers=SLOTS)
    return Barriers(
        query_ready=plgpu.Barrier(num_arrivals=len(PARTS)),
        query_free=plgpu.Barrier(num_arrivals=2),
        ready=Latent(filled, filled, filled),
        free=Latent(slot, slot, both),
        probs_ready=plgpu.Barrier(num_barriers=2),
        totals_ready=plgpu.Barrier(num_barriers=2),
    )
