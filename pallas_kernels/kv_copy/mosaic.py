"""Copies within pools in one launch, in Pallas Mosaic GPU, for Ampere, Ada and Hopper.

A CTA (128 threads) owns one *tile*: the same few rows and columns of every page. It makes all copies of its tile, and
first reads all sources:

    for every copy     pool[source page, rows, source slot, columns]  -->  registers, or SMEM beyond `GROUP`
    then for each      registers or SMEM  -->  pool[target page, rows, target slot, columns]

No other CTA touches these tiles, and within a CTA each number is read and written by the same thread, so that the order
holds without waiting for other CTAs: a page may be a source and a target. If a tile is too small for all threads,
several hold the same number; barriers then separate reads and writes. The pools are mutable references: donated ones
are updated in place. A pool and its scales are one launch.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int

from pallas_kernels import compat
from pallas_kernels.layouts import LANES, THREADS, WARPS, power_of_two, row_layout

THREAD_NAME = "warpgroup"
GROUP = 8  # copies whose loads are in flight together
SHARED_BYTES = 96 * 1024  # of a CTA, on the smallest of the GPUs
ARRAYS = 2  # arrays of one launch: each adds code to compile
WARP_BYTES = 16 * LANES
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16, jnp.int8, jnp.float8_e4m3fn)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Block sizes; results are bitwise independent of them.

    Attributes:
        bytes: bytes of one copy of one tile; a power of two, at most 16 for each thread.
    """

    bytes: int = 2048

    def __post_init__(self) -> None:
        if self.bytes & (self.bytes - 1) or not 16 <= self.bytes <= 16 * THREADS:
            raise ValueError(f"bytes must be a power of two from 16 to {16 * THREADS}: {self}")


def heuristic_tiles(copies: int) -> Tiles:
    """Return tiles of at most a third of the SMEM, so that reading and writing CTAs share a multiprocessor."""
    most = 16 * THREADS
    while copies > GROUP and copies * most > SHARED_BYTES // 3 and most > 4 * THREADS:
        most //= 2
    return Tiles(most)


class _Tiled(NamedTuple):
    """An array as ``[pages, rows, slots, columns]``, cut into tiles of ``tile_rows`` x ``tile_columns``."""

    pages: int
    rows: int
    slots: int
    columns: int
    dtype: Any
    tile_rows: int
    tile_columns: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.pages, self.rows, self.slots, self.columns

    @property
    def tiles(self) -> int:
        return self.rows // self.tile_rows * (self.columns // self.tile_columns)

    @property
    def layout(self) -> tuple[Any, bool]:
        return row_layout(self.tile_rows, self.tile_columns, 16 // jnp.dtype(self.dtype).itemsize)


class _Copies(NamedTuple):
    """Page and slot of every source and target, ``[copies]`` in device memory; slots None: whole pages, slot 0."""

    source_pages: Any
    source_slots: Any | None
    target_pages: Any
    target_slots: Any | None


def copy_pages[Pool](
    pool: Pool,
    source: Int[Array, " copies"],
    target: Int[Array, " copies"],
    *,
    tiles: Tiles | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Pool:
    """See `reference.copy_pages`. Raises ValueError if `refusal` rejects the operands."""

    def view(array: jax.Array) -> tuple[int, ...]:
        numbers = math.prod(array.shape[1:])
        columns = power_of_two(numbers, WARP_BYTES // array.dtype.itemsize)
        return array.shape[0], numbers // columns, 1, columns

    return _run(pool, view, _Copies(source, None, target, None), tiles, interpret)


def move_rows[Pool](
    pool: Pool,
    source_pages: Int[Array, " moves"],
    source_slots: Int[Array, " moves"],
    target_pages: Int[Array, " moves"],
    target_slots: Int[Array, " moves"],
    *,
    tiles: Tiles | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Pool:
    """See `reference.move_rows`. Raises ValueError if `refusal` rejects the operands."""

    def view(array: jax.Array) -> tuple[int, ...]:
        pages, two, kv_heads, page = array.shape[:4]
        return pages, two * kv_heads, page, math.prod(array.shape[4:])

    copies = _Copies(source_pages, source_slots, target_pages, target_slots)
    return _run(pool, view, copies, tiles, interpret)


def refusal(pool: Any, source: Any) -> str | None:
    """Return why this kernel does not support copies from ``source``, or None (compute capability 8.0 and above)."""
    arrays, copies = jax.tree.leaves(pool), source.shape[0]
    for array in arrays:
        if array.dtype not in DTYPES:
            return f"an array of {array.dtype}: {', '.join(jnp.dtype(one).name for one in DTYPES)} are copied."
    least = heuristic_tiles(copies).bytes
    if copies > GROUP and copies * least > SHARED_BYTES:
        return f"{copies} copies at once: the shared memory holds at most {SHARED_BYTES // least}."
    return None


def _run[Pool](
    pool: Pool,
    view: Callable[[jax.Array], tuple[int, ...]],
    copies: _Copies,
    tiles: Tiles | None,
    interpret: plgpu.InterpretGPUParams | None,
) -> Pool:
    arrays, tree = jax.tree.flatten(pool)
    if (why := refusal(arrays, copies.source_pages)) is not None:
        raise ValueError(why)
    count = copies.source_pages.shape[0]
    tiles = tiles or heuristic_tiles(count)
    least = 1 if copies.target_slots is None else 4  # scales per page and head do not move with rows
    large = [i for i, array in enumerate(arrays) if array.size and array.ndim >= least]
    indices = jax.tree.map(lambda x: x.astype(jnp.int32), copies)
    for first in range(0, len(large) if count else 0, ARRAYS):
        places = large[first : first + ARRAYS]
        cut = tuple(_cut(view(arrays[i]), arrays[i].dtype, tiles) for i in places)
        copied = _launch(tuple(arrays[i] for i in places), indices, cut, count, interpret)
        for i, array in zip(places, copied, strict=True):
            arrays[i] = array
    return jax.tree.unflatten(tree, arrays)


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _launch(
    arrays: tuple[jax.Array, ...],
    copies: _Copies,
    cut: tuple[_Tiled, ...],
    count: int,
    interpret: plgpu.InterpretGPUParams | None,
) -> tuple[jax.Array, ...]:
    """Launch within a separate jit, so that layers of one shape are lowered once."""
    refs = [jax.new_ref(array.reshape(own.shape)) for array, own in zip(arrays, cut, strict=True)]
    _launcher(cut, copies, count, interpret)(*jax.tree.leaves(copies), *refs)
    return tuple(jax.freeze(ref).reshape(array.shape) for ref, array in zip(refs, arrays, strict=True))


def _cut(shape: tuple[int, ...], dtype: Any, tiles: Tiles) -> _Tiled:
    """Cut an array into tiles: at least a row for each warp, many rows where columns are short, as with scales."""
    pages, rows, slots, columns = shape
    numbers = tiles.bytes // jnp.dtype(dtype).itemsize
    wide = power_of_two(columns, numbers // WARPS)
    return _Tiled(pages, rows, slots, columns, dtype, power_of_two(rows, numbers // wide), wide)


def _launcher(
    cut: Sequence[_Tiled], copies: _Copies, count: int, interpret: plgpu.InterpretGPUParams | None
) -> Callable[..., Any]:
    return compat.kernel(
        functools.partial(_body, tuple(cut), jax.tree.structure(copies), count),
        out_type=(),
        scratch_types=(),
        grid=(sum(own.tiles for own in cut),),
        grid_names=("tile",),
        num_threads=1,
        thread_name=THREAD_NAME,
        kernel_name="kv_copy",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=all(own.layout[1] for own in cut),
        ),
        cost_estimate=_cost(cut, count),
        interpret=interpret,
    )


def _cost(cut: Sequence[_Tiled], count: int) -> pl.CostEstimate:
    moved = sum(own.rows * own.columns * jnp.dtype(own.dtype).itemsize for own in cut)
    return pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=2 * count * moved)


# --------------------------------------------------------------------------------------------------------------
# The kernel.


def _body(cut: tuple[_Tiled, ...], tree: Any, count: int, *refs: Any) -> None:
    copies: _Copies = jax.tree.unflatten(tree, refs[: tree.num_leaves])
    tile, first = lax.axis_index("tile"), 0
    for own, array in zip(cut, refs[tree.num_leaves :], strict=True):
        here = (tile >= first) & (tile < first + own.tiles)
        pl.when(here)(functools.partial(_copy_tile, own, array, copies, tile - first, count))
        first += own.tiles


def _copy_tile(own: _Tiled, array: Any, copies: _Copies, tile: Any, count: int) -> None:
    if count <= GROUP:
        read = _read(own, array, copies, tile, 0, count)
        _write(own, array, copies, tile, 0, read)
        return

    def staged(shared: Any) -> None:
        def load(first: Any, size: int) -> None:
            for i, x in enumerate(_read(own, array, copies, tile, first, size)):
                compat.store(shared.at[first + i], x)

        def store(first: Any, size: int) -> None:
            layout = own.layout[0]
            read = [plgpu.load(shared.at[first + i], layout=layout, optimized=False) for i in range(size)]
            _write(own, array, copies, tile, first, read)

        for move in (load, store):
            _by_groups(own, copies, count, move)

    tile_copies = plgpu.SMEM((count, own.tile_rows, own.tile_columns), own.dtype)
    pl.run_scoped(staged, tile_copies, collective_axes=THREAD_NAME)


def _by_groups(own: _Tiled, copies: _Copies, count: int, move: Callable[[Any, int], None]) -> None:
    """Call ``move(first, size)`` for each group with a copy in range: padding at the end costs next to nothing."""

    def group(first: Any, size: int) -> None:
        meant = functools.reduce(jnp.logical_or, [_target(own, copies, first + i)[2] for i in range(size)])
        pl.when(meant)(functools.partial(move, first, size))

    lax.fori_loop(0, count // GROUP, lambda i, _: group(i * GROUP, GROUP), None)
    if count % GROUP:
        group(count // GROUP * GROUP, count % GROUP)


def _target(own: _Tiled, copies: _Copies, index: Any) -> tuple[Any, Any, Any]:
    """Return page and slot of a copy's target, and whether they exist."""
    page = copies.target_pages[index]
    slot = jnp.int32(0) if copies.target_slots is None else copies.target_slots[index]
    return page, slot, (page >= 0) & (page < own.pages) & (slot >= 0) & (slot < own.slots)


def _place(own: _Tiled, tile: Any, page: Any, slot: Any) -> tuple[Any, ...]:
    across = own.columns // own.tile_columns
    row, column = lax.div(tile, jnp.int32(across)), lax.rem(tile, jnp.int32(across))
    rows, columns = pl.ds(row * own.tile_rows, own.tile_rows), pl.ds(column * own.tile_columns, own.tile_columns)
    return page, rows, slot, columns


def _read(own: _Tiled, array: Any, copies: _Copies, tile: Any, first: Any, size: int) -> list[Any]:
    """Return the sources of a group; for a dropped copy any slot of the pool."""
    read = []
    for i in range(size):
        page = jnp.clip(copies.source_pages[first + i], 0, own.pages - 1)
        slot = jnp.int32(0)
        if copies.source_slots is not None:
            slot = jnp.clip(copies.source_slots[first + i], 0, own.slots - 1)
        read.append(plgpu.load(array.at[_place(own, tile, page, slot)], layout=own.layout[0], optimized=False))
    return read


def _write(own: _Tiled, array: Any, copies: _Copies, tile: Any, first: Any, read: Sequence[Any]) -> None:
    for i, x in enumerate(read):
        page, slot, exists = _target(own, copies, first + i)
        store = functools.partial(compat.store, array.at[_place(own, tile, page, slot)], x)
        pl.when(exists)(store)
