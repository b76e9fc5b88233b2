"""Static sizes of the Mosaic kernel's launch: its tiles, and the shapes that they divide."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp

MOST_SPLITS = 8
CHANNELS = 64  # channels of one consumer: the rows of a wgmma
CONSUMERS = (1, 2, 3, 4)
DEPTHS = (64, 128, 192, 256)
BARRIER_BYTES = 1024


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Block sizes, tuned for speed. ``splits`` change the last bits of results.

    Attributes:
        consumers: warpgroups that compute, each for 64 output channels: 1 to 4.
        depth: inputs of one pipeline slot: 64, 128, 192 or 256.
        stages: pipeline slots: number of slots in flight from memory.
        splits: splits of k with a sum each, 1 to 8: by separate CTAs, or by one CTA in turn.
        blocks: CTAs, which share the work.

    Raises:
        ValueError: unsupported values.
    """

    consumers: int = 2
    depth: int = 128
    stages: int = 4
    splits: int = 1
    blocks: int = 132

    def __post_init__(self) -> None:
        if self.consumers not in CONSUMERS or self.depth not in DEPTHS:
            raise ValueError(f"consumers must be 1 to 4, and depth one of {DEPTHS}: {self}")
        if min(self.stages, self.blocks) < 1 or not 1 <= self.splits <= MOST_SPLITS:
            raise ValueError(f"there is at least one stage and one block, and there are 1 to 8 splits: {self}")


class Shape(NamedTuple):
    """The static parameters of one launch."""

    tile_count: int
    rows: int  # rows of a tile, a multiple of 8
    experts: int
    channels: int
    inputs: int
    group: int  # all inputs if a channel has one scale
    dtype: Any
    weight_dtype: Any
    scale_dtype: Any
    zeros: bool
    grouped: bool  # tiles have an expert each
    e2m1: bool
    tiles: Tiles
    interpret: bool

    @property
    def block_channels(self) -> int:
        return self.tiles.consumers * CHANNELS

    @property
    def steps(self) -> int:
        return -(-self.inputs // self.tiles.depth)

    @property
    def overlap(self) -> int:
        """Inputs that the last step shares with the step before: its slot is as deep as all others."""
        return self.steps * self.tiles.depth - self.inputs

    @property
    def span(self) -> int:
        """Inputs of a partial sum before it is added to the total: follows from the weights, not from the tiles."""
        most = 128 if self.inputs % 128 == 0 else 64
        return most if self.e2m1 else min(self.group, most)

    @property
    def grain(self) -> int:
        """Inputs that splits are multiples of; they follow from the weights as well."""
        return next((one for one in (256, 128) if self.inputs % one == 0), 64)

    @property
    def groups(self) -> int:
        """Groups of a step: each has a scale."""
        return max(1, self.tiles.depth // self.group)

    @property
    def serial(self) -> bool:
        """Whether a CTA sums the splits itself, one after the other, since there is enough work for all CTAs."""
        units = self.tile_count * (self.channels // self.block_channels)
        return self.tiles.splits > 1 and self.tile_count > 1 and 2 * units > self.tiles.blocks

    @property
    def written(self) -> int:
        """Sums that are written of each product."""
        return 1 if self.serial else self.tiles.splits

    @property
    def parts(self) -> int:
        """Units of a tile."""
        return self.channels // self.block_channels * self.written

    @property
    def blocks(self) -> int:
        return min(self.tiles.blocks, self.tile_count * self.parts)

    @property
    def smem_bytes(self) -> int:
        """Bytes of SMEM of a CTA: each array begins at a multiple of 1024 bytes."""
        tiles = self.tiles
        slot = (
            self.block_channels * tiles.depth * bits_of(self.weight_dtype) // 8,
            self.rows * tiles.depth * 2,
            self.groups * self.block_channels * jnp.dtype(self.scale_dtype).itemsize,
            self.groups * self.block_channels * self.zeros,
        )
        totals = self.block_channels * self.rows * 4 * self.serial
        return sum(-(-size // 1024) * 1024 for size in (*(tiles.stages * one for one in slot), totals)) + BARRIER_BYTES


def bits_of(dtype: Any) -> int:
    """Return the bits of one weight in memory."""
    return 4 if dtype == jnp.int4 else jnp.dtype(dtype).itemsize * 8
