"""What a dense product's launch is made of: tiles, and the shapes that they cut."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp

Layout = Literal["in first", "in last"]
GROUP = 64  # rows of one consumer: those of a wgmma
CONSUMERS = (1, 2, 4)
COLUMNS = (16, 32, 48, 64, 96, 128, 160, 192, 224, 256)  # of a block: those of a wgmma, or of one for gate and up each
TOGETHER = (1, 2, 4)  # blocks of a cluster along rows or columns, which share what each of them reads a part of
CLUSTERS = ((1, 1), (2, 1), (1, 2), (4, 1), (1, 4), (2, 2))  # blocks along rows and along columns
_GPC = 16  # multiprocessors
LINE = 128  # bytes of a swizzled line
PROMOTED = 128  # inputs of float8 that a tensor core sums by itself


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Sizes of the work's pieces, tuned for speed: none of them changes a bit.

    Attributes:
        consumers: warpgroups that compute, each for 64 rows: 1, 2 or 4.
        columns: of a thread block, one of `COLUMNS`; of gate and up, so many each.
        depth: inputs of one pipeline slot: 64 or 128.
        stages: pipeline slots, 2 at least: one is multiplied while all others are on their way from memory.
        row_blocks: blocks of a cluster with the same columns, each of which reads a part of the weights for all.
        column_blocks: blocks of a cluster with the same rows, each of which reads a part of x for all. With both a
            cluster is a rectangle, of 4 blocks at most.
        panel: how many clusters' rows are together in the L2 cache.
        blocks: thread blocks, which share the work; of clusters of 4 no more are launched than run together.

    Raises:
        ValueError: other numbers than these.
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

        The blocks of one lie in one GPC, of 16 or 18 multiprocessors on an H100 and an H200: either has room for four
        clusters of 4. So 128 of 132 multiprocessors can be had; a cluster more would begin when another one ends.
        """
        reached = self.blocks // _GPC * _GPC if self.cluster > 2 else self.blocks
        return (reached or self.blocks) // self.cluster

    @property
    def rows(self) -> int:
        """Rows of a thread block."""
        return self.consumers * GROUP


class Extras(NamedTuple):
    """Operands of the epilogue, each None where the product has none. The order is that in which they are applied.

    Attributes:
        x_scales: [rows], of 8-bit numbers.
        scales: [*n], of 8-bit weights.
        bias: [*n].
        residual: [rows, n], what the result is added to.
    """

    x_scales: Any = None
    scales: Any = None
    bias: Any = None
    residual: Any = None


NOTHING = Extras()


class Shape(NamedTuple):
    """The static part of one launch."""

    rows: int
    inputs: int
    columns: int  # of the result
    parts: int  # 2: gate and up
    layout: Layout
    dtype: Any
    result: Any
    extras: tuple[str, ...]  # names of `Extras` that there are
    tiles: Tiles

    @property
    def steps(self) -> int:
        return math.ceil(self.inputs / self.tiles.depth)

    @property
    def swizzle(self) -> int:
        """Bytes of a line in shared memory, the same of x and weights: 64 where the weights' lines are no longer."""
        return LINE // 2 if self.layout == "in first" and self.tiles.columns % GROUP else LINE

    @property
    def line(self) -> int:
        """Numbers of a line in shared memory."""
        return int(self.swizzle // jnp.dtype(self.dtype).itemsize)

    @property
    def row_units(self) -> int:
        """Pieces of the rows, one for each cluster."""
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
        """Of results on their way out."""
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
        """Sums of float8 leave the tensor core every `PROMOTED` inputs: it adds them with some 14 bits only."""
        return bool(self.dtype == jnp.float8_e4m3fn)

    @property
    def sums_dtype(self) -> Any:
        return jnp.int32 if self.dtype == jnp.int8 else jnp.float32


def inputs_of(weights: Any, layout: Layout) -> int:
    """Inputs of weights ``[k, *n]`` ("in first") or ``[*n, k]`` ("in last")."""
    return int(weights.shape[0 if layout == "in first" else -1])


def outputs_of(weights: Any, layout: Layout) -> tuple[int, ...]:
    """The other dimensions."""
    return tuple(weights.shape[1:] if layout == "in first" else weights.shape[:-1])
