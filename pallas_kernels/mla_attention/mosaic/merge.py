"""Merge of the splits of decode: one CTA for each query, one step for each split of its sequence."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import compat
from pallas_kernels.mla_attention.mosaic.consumer import LOWEST
from pallas_kernels.mla_attention.mosaic.operands import TILE, Shape

_AT_ONCE = 8  # splits whose loads are in flight together


def merge(
    shape: Shape,
    sums: Float[Array, "sequences splits packed rank"],
    stats: Float[Array, "sequences splits two tiled"],
    lengths: Int[Array, " sequences"],
    interpret: plgpu.InterpretGPUParams | None,
) -> Float[Array, "sequences packed rank"]:
    """Add splits in their order, rescaled by powers of two: splits without keys leave results bitwise unchanged."""
    result = jax.ShapeDtypeStruct((shape.sequences, shape.packed, shape.rank), shape.dtype)
    read = 4 * sums.size
    launch = compat.kernel(
        functools.partial(_body, shape),
        out_type=result,
        scratch_types=(),
        grid=(shape.sequences, shape.packed),
        grid_names=("sequence", "row"),
        num_threads=1,
        thread_name="warpgroup",
        kernel_name="mla_merge",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        cost_estimate=pl.CostEstimate(flops=2 * sums.size, transcendentals=0, bytes_accessed=read),
        interpret=interpret,
    )
    return launch(sums, stats, lengths)


def _body(shape: Shape, sums: Any, stats: Any, lengths: Any, output: Any) -> None:
    sequence, row = lax.axis_index("sequence"), lax.axis_index("row")
    tile = lax.div(row, jnp.int32(shape.tile_rows))
    used = pl.cdiv(lengths[sequence], jnp.int32(shape.tiles.keys_per_split))

    def part(split: Any) -> tuple[Any, Any, Any]:
        """Load a split; those past the last one are masked, as their memory may contain NaN."""
        there, split = split < used, jnp.minimum(split, shape.splits - 1)
        column = tile * TILE + row - tile * shape.tile_rows
        top, total = stats[sequence, split, 0, column], stats[sequence, split, 1, column]
        mixed = jnp.where(jnp.broadcast_to(there, (shape.rank,)), sums[sequence, split, row], 0.0)
        return mixed, jnp.where(there, top, LOWEST), jnp.where(there, total, 0.0)

    def add(step: Any, carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        for mixed, top, total in [part(step * _AT_ONCE + i) for i in range(_AT_ONCE)]:
            highest = jnp.maximum(carry[1], top)
            before, now = jnp.exp2(carry[1] - highest), jnp.exp2(top - highest)
            carry = carry[0] * before + mixed * now, highest, carry[2] * before + total * now
        return carry

    nothing = jnp.zeros((shape.rank,), jnp.float32), jnp.float32(LOWEST), jnp.float32(0.0)
    mixed, _, total = lax.fori_loop(0, pl.cdiv(used, jnp.int32(_AT_ONCE)), add, nothing)
    share = jnp.where(total > 0, 1.0 / total, 0.0)
    compat.store(output.at[sequence, row], (mixed * share).astype(shape.dtype))
