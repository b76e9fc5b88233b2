"""Types of a dense product's launch: tiles, and the shapes that they divide."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp

Layout = Literal["in first", "in last"]
GROUP = 64  # rows of one consumer: those of a wgmma
CONSUMERS = (1, 2, 4)
COLUMNS = (16, 32, 48, 64, 96, 128, 160, 192, 224, 256)  # of a CTA: wgmma columns, or those of gate and of up each
TOGETHER = (1, 2, 4)  # CTAs of a cluster along rows or columns, each of which loads a slice of the shared operand
CLUSTERS = ((1, 1), (2, 1), (1, 2), (4, 1), (1, 4), (2, 2))  # CTAs along rows and along columns
_GPC = 16  # multiprocessors
LINE = 128  # bytes of a swizzled line
PROMOTED = 128  # inputs of float8 that a tensor core accumulates itself


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Tile sizes, tuned for speed; results are bitwise independent of them.

    Attributes:
        consumers: warpgroups that compute, each for 64 rows: 1, 2 or 4.
        columns: columns of a CTA, one of `COLUMNS`; with gate and up, this many each.
        depth: inputs of one pipeline slot: 64 or 128.
        stages: pipeline slots, 2 at least: one is multiplied while all others are being loaded.
        row_blocks: CTAs of a cluster with the same columns, each of which multicasts a slice of the weights.
        column_blocks: CTAs of a cluster with the same rows, each of which multicasts a slice of x. With both a
            cluster is a rectangle, of 4 CTAs at most.
        panel: number of clusters whose rows are together in the L2 cache.
        blocks: CTAs, which share the work; of clusters of 4 no more are launched than run together.

    Raises:
        ValueError: unsupported values.
    """

    consumers: int = 1
    columns: int = 64
    depth: int = 64
    stages: int = 4
    row_blocks: int = 1
    column_blocks: int = 1
    panel: int = 8
    blocks: int = 132

    def __post_init__(self) -> None:
        if self.consumers not in CONSUMERS or self.columns not in COLUMNS or self.depth not in (64, 128):
            raise ValueError(f"consumers must be of {CONSUMERS}, columns of {COLUMNS}, depth 64 or 128: {self}")
        if (self.row_blocks, self.column_blocks) not in CLUSTERS:
            raise ValueError(f"the blocks of a cluster along rows and along columns must be of {CLUSTERS}: {self}")
        if self.stages < 2 or self.panel < 1 or self.blocks < self.cluster:
            raise ValueError(f"there are at least two stages, a panel of one and the blocks of a cluster: {self}")

    @property
    def cluster(self) -> int:
        return self.row_blocks * self.column_blocks

    @property
    def clusters(self) -> int:
        """Clusters that run together.

        The CTAs of one are in one GPC, of 16 or 18 multiprocessors on an H100 and an H200: either can hold four
        clusters of 4. So 128 of 132 multiprocessors are usable; a further cluster would start when another one ends.
        """
        reached = self.blocks // _GPC * _GPC if self.cluster > 2 else self.blocks
        return (reached or self.blocks) // self.cluster

    @property
    def rows(self) -> int:
        """Rows of a CTA."""
        return self.consumers * GROUP


class Extras(NamedTuple):
    """Operands of the epilogue, in the order in which they are applied; None if the product has none.

    Attributes:
        x_scales: [rows], of 8-bit numbers; further ones are ignored.
        scales: [*n], of 8-bit weights.
        bias: [*n].
        residual: [rows, n], added to the result.
    """

    x_scales: Any = None
    scales: Any = None
    bias: Any = None
    residual: Any = None


NOTHING = Extras()


class Shape(NamedTuple):
    """The static parameters of one launch."""

    rows: int
    inputs: int
    columns: int  # columns of the result
    parts: int  # 2: gate and up
    layout: Layout
    dtype: Any
    result: Any
    extras: tuple[str, ...]  # names of the `Extras` that are present
    tiles: Tiles

    @property
    def steps(self) -> int:
        return math.ceil(self.inputs / self.tiles.depth)

    @property
    def swizzle(self) -> int:
        """Bytes of a line in SMEM, the same for x and weights: 64 if the weights' lines are no longer."""
        return LINE // 2 if self.layout == "in first" and self.tiles.columns % GROUP else LINE

    @property
    def line(self) -> int:
        """Numbers of a line in SMEM."""
        return int(self.swizzle // jnp.dtype(self.dtype).itemsize)

    @property
    def row_units(self) -> int:
        """Units along rows, one for each cluster."""
        return math.ceil(self.rows / (self.tiles.rows * self.tiles.row_blocks))

    @property
    def column_units(self) -> int:
        return math.ceil(self.columns / (self.tiles.columns * self.tiles.column_blocks))

    @property
    def padded_rows(self) -> int:
        return self.row_units * self.tiles.row_blocks * self.tiles.rows

    @property
    def padded_columns(self) -> int:
        return self.column_units * self.tiles.column_blocks * self.tiles.columns

    @property
    def chunk(self) -> int:
        """Columns of the result that are written at a time: at most a swizzled line; they divide the result's."""
        most = LINE // jnp.dtype(self.result).itemsize
        return math.gcd(self.tiles.columns, self.columns, most)

    @property
    def slots(self) -> int:
        """SMEM slots for results being copied out."""
        return min(2, self.tiles.columns // self.chunk)

    @property
    def stage_bytes(self) -> int:
        numbers = (self.tiles.rows + self.parts * self.tiles.columns) * self.tiles.depth
        return numbers * jnp.dtype(self.dtype).itemsize

    @property
    def result_bytes(self) -> int:
        return self.tiles.rows * self.slots * self.chunk * jnp.dtype(self.result).itemsize

    @property
    def promoted(self) -> bool:
        """Whether float8 sums leave the tensor core every `PROMOTED` inputs: it accumulates with some 14 bits only."""
        return bool(self.dtype == jnp.float8_e4m3fn)

    @property
    def sums_dtype(self) -> Any:
        return jnp.int32 if self.dtype == jnp.int8 else jnp.float32


def inputs_of(weights: Any, layout: Layout) -> int:
    """Return the inputs of weights ``[k, *n]`` ("in first") or ``[*n, k]`` ("in last")."""
    return int(weights.shape[0 if layout == "in first" else -1])


def outputs_of(weights: Any, layout: Layout) -> tuple[int, ...]:
    """Return the output dimensions of weights."""
    return tuple(weights.shape[1:] if layout == "in first" else weights.shape[:-1])
