"""Rows sorted by expert: tiles of a fixed number of rows, each of one expert.

A tile is one product of a fixed shape, so that a row's result depends neither on the other rows nor on how many rows
its expert has (Gale et al. 2022, MegaBlocks, pad to tiles likewise). Nothing is dropped: there are as many tiles as the
worst case needs, and ``occupied`` gives the number of non-empty tiles.
"""

from __future__ import annotations

import functools
import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from pallas_kernels.choice import Target, lowering_target

LEAST_ROWS, MOST_ROWS = 4, 64  # rows of a tile on a CPU
KERNEL_ROWS = (8, 128)  # rows of a tile for the Mosaic kernel: the fewest, which divide all, and the most
GPU_ROWS = 64  # rows of a tile that is read together with its expert's weights
# Up to here a GPU multiplies all experts at once. Beyond, XLA copies the weights of each tile's expert before it reads
# them: three times the traffic, which by an H100's rates takes as long as a product with some 700 rows.
DENSE_ROWS = 512
# A GPU compares entries with one another, where a sort would be several launches, or a library call that no command
# buffer can hold: up to `COUNTED` entries all with all, more in blocks of `BLOCK`.
COUNTED, BLOCK = 4096, 512


class Groups(NamedTuple):
    """Positions of entries (pairs of a token and one of its experts) among the rows of tiles.

    Attributes:
        entries: the entry of each row; the number of entries in empty rows.
        places: the row of each entry, counted over all tiles; the number of rows if the entry has no expert.
        experts: the expert of each tile; None: tile i has expert i.
        occupied: number of non-empty tiles, which come first; without ``experts`` all of them count.
    """

    entries: Int[Array, "tiles rows"]
    places: Int[Array, " entries"]
    experts: Int[Array, " tiles"] | None
    occupied: Int[Array, ""]

    def of_tiles(self, values: jax.Array) -> jax.Array:
        """Gather ``values`` [experts, ...] by the tiles' experts, as [tiles, 1, ...]."""
        return jnp.expand_dims(values if self.experts is None else values[self.experts], 1)


def group(
    experts: Int[Array, " entries"],
    count: int,
    most: int,
    *,
    spread: int | None = None,
    path: Literal["mosaic", "xla"] = "xla",
    kernel_rows: tuple[int, int] = KERNEL_ROWS,
    target: Target | None = None,
) -> Groups:
    """Order entries by their expert; entries of one expert stay in order.

    Args:
        experts: 0 to ``count`` - 1; an entry of any other expert has no row.
        count: number of experts.
        most: the most entries of one expert: the tokens, if a token's experts are distinct.
        spread: experts that the entries are routed to, those of other devices included, from which follows the likely
            number of entries per expert; None: ``count``.
        path: path that the tiles are made for; see `explain`.
        kernel_rows: rows of a tile for the path "mosaic": the fewest, which divide all, and the most.
        target: lowering target of the program; None: see `pallas_kernels.choice`.
    """
    entries, target = experts.shape[0], target or lowering_target()
    rows, dense = _tile(entries, spread or count, most, kernel_rows if path == "mosaic" else None, target)
    used = min(count, entries)
    tiles = count if dense else used + (entries - used) // rows  # all tiles of an expert but the last are full
    known = (experts >= 0) & (experts < count)
    experts = jnp.where(known, experts, count).astype(jnp.int32)
    counted = target.platform != "cpu"
    if counted and entries <= COUNTED:
        return _by_comparing(experts, _Tiling(count, tiles, rows, dense))
    sizes, rank = _ranks_in_blocks(experts, count) if counted else _ranks_by_sorting(experts, count)
    each = jnp.ones_like(sizes) if dense else -(-sizes // rows)
    ends = _running_sum(each) if counted else jnp.cumsum(each)
    places = jnp.where(experts < count, taken((ends - each) * rows, experts) + rank, tiles * rows).astype(jnp.int32)
    held = jnp.full(tiles * rows, entries, jnp.int32).at[places].set(jnp.arange(entries, dtype=jnp.int32), mode="drop")
    # Empty tiles count as tiles of the last expert.
    owners = (ends[None, :-1] <= jnp.arange(tiles)[:, None]).sum(1, dtype=jnp.int32)
    return Groups(held.reshape(tiles, rows), places, None if dense else owners, ends[-1])


def taken(values: Shaped[Array, "n *each"], at: Int[Array, "*batch"], shared: int = 1) -> Shaped[Array, "*batch *each"]:
    """Gather ``values``, each shared by ``shared`` entries; 0 for entries beyond the last one.

    This is one launch: for a gather with a fill value, XLA adds another one that checks the bounds.
    """
    inside = (at < values.shape[0] * shared).reshape(*at.shape, *(1,) * (values.ndim - 1))
    return jnp.where(inside, values.at[at // shared].get(mode="clip"), 0)


def _ranks_by_sorting(
    experts: Int[Array, " entries"], count: int
) -> tuple[Int[Array, " count"], Int[Array, " entries"]]:
    """Count the entries of each expert, and for each entry the earlier ones of its expert."""
    sizes = jnp.zeros(count + 1, jnp.int32).at[experts].add(1)
    order = jnp.argsort(experts, stable=True)
    at = jnp.arange(experts.shape[0], dtype=jnp.int32)
    rank = jnp.zeros_like(at).at[order].set(at - (jnp.cumsum(sizes) - sizes)[experts[order]])
    return sizes[:count], rank


class _Tiling(NamedTuple):
    """Numbers of experts, of tiles and of a tile's rows, a power of two unless ``dense``: tile i has expert i."""

    experts: int
    tiles: int
    rows: int
    dense: bool


def _by_comparing(experts: Int[Array, " entries"], tiling: _Tiling) -> Groups:
    """Group by comparing all entries with all: three kernels one after the other, where XLA sorts in several.

    The first entry of a tile represents it: such entries are counted before an entry, instead of experts.
    """
    at, rows = jnp.arange(experts.shape[0], dtype=jnp.int32), tiling.rows
    mine, other, before = experts[:, None], experts[None, :], _alike_and_before(experts)
    if tiling.dense:
        rank = experts * rows + before.sum(1, dtype=jnp.int32)
        occupied = jnp.int32(tiling.tiles)
    else:
        # A power of two: a bit mask instead of a division, which would be a separate kernel.
        begins = (before.sum(1, dtype=jnp.int32) & (rows - 1)) == 0
        weight = jnp.where(begins, rows, 0)
        rank = jnp.where(other < mine, weight[None, :], before.astype(jnp.int32)).sum(1, dtype=jnp.int32)
        occupied = (begins & (experts < tiling.experts)).sum(dtype=jnp.int32)
    # Entries without an expert come last, beyond the occupied tiles. They are masked here, fused into a gather.
    places = jnp.where(experts < tiling.experts, rank, tiling.tiles * rows)
    here = rank[None, :] == jnp.arange(tiling.tiles * rows, dtype=jnp.int32)[:, None]
    held = jnp.where(here, at, at.size).min(1).reshape(tiling.tiles, rows)
    held = jnp.where(jnp.arange(tiling.tiles)[:, None] < occupied, held, at.size)
    first = rank[None, :] == (jnp.arange(tiling.tiles, dtype=jnp.int32) * rows)[:, None]
    last = tiling.experts - 1  # empty tiles count as tiles of this expert
    owners = None if tiling.dense else jnp.where(first, jnp.minimum(experts, last), last).min(1)
    return Groups(held, places, owners, occupied)


def _ranks_in_blocks(
    experts: Int[Array, " entries"], count: int
) -> tuple[Int[Array, " count"], Int[Array, " entries"]]:
    """Count by comparing all with all within blocks."""
    entries = experts.shape[0]
    blocks = jnp.pad(experts, (0, -entries % BLOCK), constant_values=count).reshape(-1, BLOCK)
    sizes, rank = jax.vmap(functools.partial(_sizes, count=count))(blocks), jax.vmap(_alike_before)(blocks)
    ends = jax.vmap(_running_sum, in_axes=1, out_axes=1)(sizes)
    before = jnp.take_along_axis(ends - sizes, blocks, axis=1, mode="clip")
    return ends[-1], (before + rank).reshape(-1)[:entries]


def _sizes(experts: Int[Array, " entries"], count: int) -> Int[Array, " count"]:
    return (experts[:, None] == jnp.arange(count)).sum(0, dtype=jnp.int32)


def _alike_before(experts: Int[Array, " entries"]) -> Int[Array, " entries"]:
    """Count for each entry the earlier ones of its expert."""
    return _alike_and_before(experts).sum(1, dtype=jnp.int32)


def _alike_and_before(experts: Int[Array, " entries"]) -> Bool[Array, "entries entries"]:
    """Return a mask, for each entry, of the earlier entries of its expert."""
    at = jnp.arange(experts.shape[0], dtype=jnp.int32)
    return (experts[None, :] == experts[:, None]) & (at[None, :] < at[:, None])


def _running_sum(numbers: Int[Array, " n"]) -> Int[Array, " n"]:
    """Return the cumulative sum in one kernel."""
    at = jnp.arange(numbers.shape[0])
    return jnp.where(at[None, :] <= at[:, None], numbers[None, :], 0).sum(1, dtype=jnp.int32)


def _tile(
    entries: int, spread: int, most: int, kernel_rows: tuple[int, int] | None, target: Target
) -> tuple[int, bool]:
    """Return the rows of a tile, and whether each expert has one tile for all its possible entries."""
    likely = _power_of_two(2 * entries / spread)
    if kernel_rows is not None:
        least, largest = kernel_rows
        return max(least, min(likely, largest, _power_of_two(most))), False
    if target.platform == "cpu":
        return min(max(likely, LEAST_ROWS), MOST_ROWS, _power_of_two(most)), False
    return (most, True) if most <= DENSE_ROWS else (GPU_ROWS, False)


def _power_of_two(number: float) -> int:
    """Return the smallest power of two that is not below ``number``."""
    return 1 << max(0, math.ceil(math.log2(number)))
