"""Layouts of a small tile of device memory over the 128 threads of a warpgroup, for kernels in Lane semantics."""

from __future__ import annotations

from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu

THREADS, LANES, WARPS = 128, 32, 4


def power_of_two(number: int, most: int) -> int:
    """Return the largest power of two that divides ``number``, at most ``most`` (a power of two itself)."""
    return min(number & -number, most)


def row_layout(rows: int, columns: int, widest: int) -> tuple[Any, bool]:
    """Choose a layout of tiles [rows, multiples of columns] with each row in one warp; is it free of copies?

    Vectors are as wide as the tile allows, up to ``widest`` numbers. A tile too small, or too odd, for 128 threads is
    replicated over several of them: each of these stores it.
    """
    each = max(1, rows * columns // THREADS)
    vector = power_of_two(columns, min(widest, 1 << (each.bit_length() - 1)))
    lanes = power_of_two(columns // vector, LANES)
    lane_rows = power_of_two(rows, LANES // lanes)
    warps = power_of_two(rows // lane_rows, WARPS)
    return _tiled(warps, lane_rows, lanes, vector), warps * lane_rows * lanes == THREADS


def _tiled(warps: int, lane_rows: int, lanes: int, vector: int) -> Any:
    """Return the layout of ``warps * lane_rows`` rows of ``lanes * vector`` numbers, in Mosaic's canonical form."""
    width = lanes * vector
    split = warps > 1 and lane_rows > 1
    tiling: list[tuple[int, ...]] = [(warps * lane_rows, width)]
    if split:
        tiling.append((lane_rows, width))
    if lanes > 1:
        tiling.append((vector,))
    row = -3 if lanes > 1 else -2
    warp_dims = [row - 2 if split else row] if warps > 1 else []
    lane_dims = ([row] if lane_rows > 1 else []) + ([-2] if lanes > 1 else [])
    return plgpu.Layout.TILED(
        plgpu.Tiling(tuple(tiling)),
        warp_dims=(*warp_dims, *_spare(WARPS // warps)),
        lane_dims=(*lane_dims, *_spare(LANES // (lanes * lane_rows))),
        vector_dim=-1,
    )


def _spare(times: int) -> tuple[Any, ...]:
    return (plgpu.Replicated(times),) if times > 1 else ()
