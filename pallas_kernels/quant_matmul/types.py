"""Static sizes of the Mosaic kernel's launch: its tiles, and the shapes that they cut."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp

MOST_SPLITS = 8
CHANNELS = 64  # of one consumer: the rows of a wgmma
CONSUMERS = (1, 2, 4)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Block sizes, tuned for speed. ``depth`` and ``splits`` are part of the numerics: the last bits.

    Attributes:
        consumers: warpgroups that compute, each for 64 output channels: 1, 2 or 4.
        depth: inputs of one pipeline slot: 128 or 256.
        stages: pipeline slots: how many are on their way from memory at once.
        splits: parts of k that are summed by thread blocks of their own, 1 to 8.

    Raises:
        ValueError: other numbers than these.
    """

    consumers: int = 2
    depth: int = 128
    stages: int = 4
    splits: int = 1

    def __post_init__(self) -> None:
        if self.consumers not in CONSUMERS or self.depth not in (128, 256):
            raise ValueError(f"consumers must be 1, 2 or 4, and depth 128 or 256: {self}")
        if self.stages < 1 or not 1 <= self.splits <= MOST_SPLITS:
            raise ValueError(f"there is at least one stage, and there are 1 to {MOST_SPLITS} splits: {self}")


class Shape(NamedTuple):
    """The static part of one launch."""

    rows: int  # a multiple of 8
    channels: int
    inputs: int
    group: int  # all inputs where a channel has one scale
    dtype: Any
    weight_dtype: Any
    scale_dtype: Any
    zeros: bool
    tiles: Tiles
    interpret: bool

    @property
    def block_channels(self) -> int:
        return self.tiles.consumers * CHANNELS

    @property
    def steps(self) -> int:
        return self.inputs // self.tiles.depth

    @property
    def span(self) -> int:
        """Inputs that are summed before a scale is applied."""
        return min(self.group, self.tiles.depth)

    @property
    def groups(self) -> int:
        """Groups of a step: each has a scale."""
        return self.tiles.depth // self.span

    @property
    def stage_bytes(self) -> int:
        factors = jnp.dtype(self.scale_dtype).itemsize + self.zeros
        weights = self.block_channels * self.tiles.depth * bits_of(self.weight_dtype) // 8
        return weights + self.rows * self.tiles.depth * 2 + self.groups * self.block_channels * factors


def bits_of(dtype: Any) -> int:
    """Bits of a weight's number in memory."""
    return 4 if dtype == jnp.int4 else jnp.dtype(dtype).itemsize * 8
