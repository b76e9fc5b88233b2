"""The kernel that folds the segments of a row, computed by the CTAs of decode.

A CTA has 64 of the head's dimensions. It loads a few segments at once, to overlap their latencies, and folds them one
by one.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat
from pallas_kernels.paged_attention.ampere.kernel import Shape, seen_blocks
from pallas_kernels.paged_attention.ampere.sums import LOWEST, Sums, finished, fold, load, load_columns, nothing

_DIMS = 64  # the rows of four warps' mma, the layout of the sums
_TOGETHER = 64  # columns of all segments that are read at once: 32 registers


class _Gmem(NamedTuple):
    """Operands and results in device memory, see `kernel.Gmem`."""

    starts: Any
    lengths: Any
    sinks: Any  # or None
    sums: Any
    stats: Any
    results: Any  # [units, kv_heads, head_dim, columns]


def merger(shape: Shape, interpret: plgpu.InterpretGPUParams | None) -> Any:
    numbers = shape.units * shape.kv_heads * shape.splits * shape.head_dim * shape.columns
    return compat.kernel(
        functools.partial(_body, shape),
        out_type=jax.ShapeDtypeStruct((shape.units, shape.kv_heads, shape.head_dim, shape.columns), jnp.float32),
        scratch_types={},
        grid=(shape.units, shape.kv_heads, shape.head_dim // _DIMS),
        grid_names=("unit", "head", "dims"),
        num_threads=1,
        thread_name="warpgroup",
        kernel_name="paged_merge",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=True),
        cost_estimate=pl.CostEstimate(flops=4 * numbers, transcendentals=0, bytes_accessed=4 * numbers),
        interpret=interpret,
    )


def _body(shape: Shape, starts: Any, lengths: Any, *refs: Any) -> None:
    gmem = _Gmem(starts, lengths, *(refs if shape.options.sinks else (None, *refs)))
    unit, head = lax.axis_index("unit"), lax.axis_index("head")
    dims = pl.ds(pl.multiple_of(lax.axis_index("dims") * _DIMS, _DIMS), _DIMS)
    blocks = seen_blocks(shape, gmem.starts[unit], gmem.lengths[unit], jnp.int32(0))
    first = lax.div(blocks.first, jnp.int32(shape.blocks_per_segment))
    count = lax.div(blocks.end + (shape.blocks_per_segment - 1), jnp.int32(shape.blocks_per_segment)) - first
    together = max(1, _TOGETHER // shape.columns)

    def some(index: Any, sums: Sums) -> Sums:
        numbers = [index * together + number for number in range(together)]
        places = [(unit, head, first + jnp.minimum(number, count - 1)) for number in numbers]
        segments = [load(gmem.sums.at[(*place, dims)], gmem.stats.at[place], shape.dtype) for place in places]
        for number, segment in zip(numbers, segments, strict=True):
            # Past the end the last segment is loaded again and adds zeros.
            sums = fold(sums, segment._replace(top=segment.top + jnp.where(number < count, 0.0, LOWEST)))
        return sums

    steps = lax.div(jnp.maximum(count, 0) + (together - 1), jnp.int32(together))
    sums = lax.fori_loop(0, steps, some, nothing((_DIMS, shape.columns), shape.dtype))
    sinks = None if gmem.sinks is None else load_columns(gmem.sinks.at[head], shape.dtype)
    compat.store(gmem.results.at[unit, head, dims], finished(sums, sinks))
