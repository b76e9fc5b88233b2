"""At most 64 rows times quantised weights, for Hopper GPUs, in Pallas Mosaic GPU: bound by reading the weights once.

The operands are swapped: a wgmma's 64 rows are 64 output channels, whose numbers go from shared memory to registers,
become bfloat16 (or float16) there and enter the tensor core from there; its columns are the rows of x, 8 to 64. So
little is wasted where there are few of them, and a dequantised weight never lies in memory.

A thread block has ``consumers`` x 64 output channels and one of ``splits`` parts of k. Its warpgroups:

    producer (the last)                              consumers (one each for 64 channels)
    -------------------                              ------------------------------------
    per step of ``depth`` inputs:                    per step:
      waits free (once the ring is full)       <-      arrive when the slot is read
      weights [channels, depth] packed
      x [rows, depth]                  -> ready ->     wait
      scales, zeros [groups, channels]                 per group: weights -> registers -> 16 bits (- zero)
                                                         part = weights . x, sums += part * scale

``ready`` is arrived at by the copy engine, once per copy, and waited on by the consumers; ``free`` the other way round,
and the producer drains its last arrivals, so that no barrier ends in the middle of a phase.

Integers times x are exact before they are scaled: a group's sum is scaled, not its weights, which costs less than
scaling the weights as soon as a group has more inputs than x has rows, and rounds nothing to 16 bits.

Splits write float32 sums, which XLA adds in order, within whatever kernel comes next. No bit of a row depends on the
other rows. The heuristic's steps and splits follow from the weights' shape alone (tuned ones may not): the order of
additions is the same for every number of rows, and so are the bits, if a wgmma's column does not depend on how many
columns it has.

Swapped operands and weights upcast in registers: Frantar et al. 2024 (MARLIN, arXiv:2408.11743).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int, Num

from pallas_kernels import compat
from pallas_kernels.quant_matmul.reference import DTYPES, group_size
from pallas_kernels.quant_matmul.tile_keys import MATMUL, matmul_key
from pallas_kernels.quant_matmul.types import CHANNELS, CONSUMERS, MOST_SPLITS, Shape, Tiles, bits_of
from pallas_kernels.tiles import pick

__all__ = ["CONSUMERS", "MOST_SPLITS", "Tiles", "heuristic_tiles", "matmul", "refusal"]

MOST_ROWS = 64
SPAN = 64  # inputs that x's swizzled tiles hold: the least of a group
_TILE_ROWS = 8
_BLOCK_BYTES = 232_448  # shared memory that one thread block may have
_BARRIER_BYTES = 1024
_WAVE_BYTES = 24_000  # that a multiprocessor could have read while a new block's pipeline fills
# Four consumers start with 96 registers a thread: the producer gives away what they need.
_REGISTERS = {4: (24, 120)}
_MATRIX = plgpu.Layout.WGMMA
_PER_CHANNEL = plgpu.Layout.WGMMA.reduce(1)


class _Gmem(NamedTuple):
    """Operands and result in device memory."""

    x: Any  # [rows, inputs]
    weights: Any  # [channels, inputs]
    scales: Any  # [inputs / group, channels]
    zeros: Any  # the same, or None
    output: Any  # [rows, channels], or [splits, rows, channels] float32


class _Smem(NamedTuple):
    """One thread block's shared memory."""

    x: Any  # [stages, rows, depth]
    weights: Any  # [stages, block_channels, depth]
    scales: Any  # [stages, groups, block_channels]
    zeros: Any
    upcast: Any  # [consumers, 64, span]: interpreted, a wgmma takes no registers


class _Barriers(NamedTuple):
    ready: Any  # one per slot
    free: Any


def matmul(
    x: Float[Array, "rows k"],
    weights: Num[Array, "n k"],
    scales: Float[Array, "*groups n"],
    zeros: Int[Array, "groups n"] | None = None,
    *,
    tiles: Tiles | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Float[Array, "rows n"]:
    """See `reference.matmul`; the result has the dtype of ``x``. Products are exact, sums in float32.

    Args:
        tiles: block sizes; None: those tuned for the device (`pallas_kernels.tiles`), else `heuristic_tiles`.
        interpret: run on a CPU (`compat.interpret_params`).

    Raises:
        ValueError: what `refusal` says.
    """
    if (why := refusal(x, weights, scales, zeros, tiles=tiles)) is not None:
        raise ValueError(why)
    shape = _shape_of(x, weights, scales, zeros, tiles or _best_tiles(x, weights, scales, zeros))
    shape = shape._replace(interpret=interpret is not None)
    missing = shape.rows - x.shape[0]
    given = {
        "x": jnp.pad(x, ((0, missing), (0, 0))) if missing else x,
        "weights": weights,
        "scales": scales.reshape(-1, shape.channels),
        **({} if zeros is None else {"zeros": zeros.astype(jnp.int8)}),
    }
    parts = _launcher(shape, tuple(given), interpret)(*given.values())[0]
    if shape.tiles.splits > 1:
        parts = functools.reduce(jnp.add, list(parts)).astype(shape.dtype)
    return parts[: x.shape[0]] if missing else parts


def refusal(x: Any, weights: Any, scales: Any, zeros: Any = None, *, tiles: Tiles | None = None) -> str | None:
    """Why this kernel cannot do these shapes and dtypes (of arrays or tracers), in one sentence; None if it can."""
    return _shape_refusal(x, weights, scales, zeros) or _tiles_refusal(x, weights, scales, zeros, tiles)


def _shape_refusal(x: Any, weights: Any, scales: Any, zeros: Any) -> str | None:
    (channels, inputs), group = weights.shape, group_size(weights, scales, zeros)
    if x.ndim != 2 or x.shape[1] != inputs:
        return f"x {x.shape} is no matrix that fits weights {weights.shape} of [outputs, inputs]"
    if not 1 <= x.shape[0] <= MOST_ROWS:
        return f"{x.shape[0]} rows: 1 to {MOST_ROWS}"
    if x.dtype not in (jnp.bfloat16, jnp.float16) or weights.dtype not in DTYPES:
        return f"{weights.dtype} weights times {x.dtype}: int4, int8 or float8_e4m3fn times bfloat16 or float16"
    if scales.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"scales of {scales.dtype}: float32, bfloat16 or float16"
    if channels % CHANNELS or inputs % 128:
        return f"weights {weights.shape}: a multiple of {CHANNELS} outputs and of 128 inputs"
    if group % SPAN or (group < 256 and 256 % group) or (group > 256 and group % 128):
        return f"a scale for {group} inputs: for 64, or multiples of 128"
    return None


def _tiles_refusal(x: Any, weights: Any, scales: Any, zeros: Any, tiles: Tiles | None) -> str | None:
    if tiles is None:
        return None
    shape = _shape_of(x, weights, scales, zeros, tiles)
    if shape.channels % shape.block_channels or shape.inputs % tiles.depth or tiles.splits > shape.steps:
        return f"{tiles} does not divide weights {weights.shape} of [outputs, inputs]"
    if tiles.depth % shape.span or shape.group % shape.span:
        return f"{tiles} and a scale for {shape.group} inputs: neither of depth and group divides the other"
    if (need := tiles.stages * shape.stage_bytes + _BARRIER_BYTES) > _BLOCK_BYTES:
        return f"{tiles} needs {need} bytes of shared memory: there are {_BLOCK_BYTES}"
    return None


def _best_tiles(x: Any, weights: Any, scales: Any, zeros: Any) -> Tiles:
    """The tuned tiles, else the heuristic's."""
    key, untuned = matmul_key(x, weights, scales, zeros), heuristic_tiles(x, weights, scales, zeros)
    return pick(MATMUL, key, untuned, lambda tiles: _tiles_refusal(x, weights, scales, zeros, tiles))


def heuristic_tiles(x: Any, weights: Any, scales: Any, zeros: Any = None, *, multiprocessors: int = 132) -> Tiles:
    """One wave of thread blocks that keeps most multiprocessors busy, at little traffic besides the weights'.

    All but ``stages`` follows from the weights alone. Nothing here was measured on a GPU.
    """
    (channels, inputs), group = weights.shape, group_size(weights, scales, zeros)
    depth = 256 if bits_of(weights.dtype) == 4 and inputs % 256 == 0 and (group % 256 == 0 or 256 % group == 0) else 128
    steps = inputs // depth
    fitting = [one for one in CONSUMERS if channels % (one * CHANNELS) == 0]
    choices = itertools.product(fitting, range(1, min(MOST_SPLITS, steps) + 1))

    def cost(choice: tuple[int, int]) -> float:
        consumers, splits = choice
        waves = pl.cdiv(channels // (consumers * CHANNELS) * splits, multiprocessors)
        step = consumers * CHANNELS * depth * bits_of(weights.dtype) // 8
        share = pl.cdiv(steps, splits) * step * _traffic(consumers, splits, inputs, weights.dtype)
        return waves * (share + _WAVE_BYTES)

    consumers, splits = min(choices, key=cost)
    shape = _shape_of(x, weights, scales, zeros, Tiles(consumers, depth, 1, splits))
    stages = (_BLOCK_BYTES - _BARRIER_BYTES) // shape.stage_bytes
    return Tiles(consumers, depth, min(stages, 6, max(2, pl.cdiv(steps, splits))), splits)


def _traffic(consumers: int, splits: int, inputs: int, dtype: Any, rows: int = 16) -> float:
    """Bytes moved over bytes of weights; those of x and of splits' sums, in the L2 cache, count a third."""
    width = bits_of(dtype) / 8
    x = rows * 2 / (consumers * CHANNELS * width)
    sums = splits * rows * 8 / (inputs * width) if splits > 1 else 0.0
    return 1 + (x + sums) / 3


def _shape_of(x: Any, weights: Any, scales: Any, zeros: Any, tiles: Tiles) -> Shape:
    return Shape(
        rows=-(-x.shape[0] // _TILE_ROWS) * _TILE_ROWS,
        channels=weights.shape[0],
        inputs=weights.shape[1],
        group=group_size(weights, scales, zeros),
        dtype=jnp.dtype(x.dtype),
        weight_dtype=jnp.dtype(weights.dtype),
        scale_dtype=jnp.dtype(scales.dtype),
        zeros=zeros is not None,
        tiles=tiles,
        interpret=False,
    )


# --------------------------------------------------------------------------------------------------------------
# The launch.


def _launcher(shape: Shape, names: tuple[str, ...], interpret: plgpu.InterpretGPUParams | None) -> Callable[..., Any]:
    splits = shape.tiles.splits
    whole = (shape.rows, shape.channels)
    result = _struct((splits, *whole), jnp.float32) if splits > 1 else _struct(whole, shape.dtype)
    return compat.kernel(
        functools.partial(_body, shape, (*names, "output")),
        out_type=(result,),
        scratch_types={"smem": _smem(shape), "barriers": _barriers(shape)},
        grid=(shape.channels // shape.block_channels * splits,),
        grid_names=("block",),
        num_threads=shape.tiles.consumers + 1,
        thread_name="warpgroup",
        kernel_name="quant_matmul",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        cost_estimate=_cost(shape),
        interpret=interpret,
    )


def _struct(dims: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def _cost(shape: Shape) -> pl.CostEstimate:
    numbers = shape.channels * shape.inputs
    moved = numbers * bits_of(shape.weight_dtype) // 8 + 2 * shape.rows * (shape.inputs + shape.channels)
    return pl.CostEstimate(flops=2 * shape.rows * numbers, transcendentals=0, bytes_accessed=moved)


def _smem(shape: Shape) -> _Smem:
    tiles, factors = shape.tiles, (shape.tiles.stages, shape.groups, shape.block_channels)
    return _Smem(
        x=_tiled((tiles.stages, shape.rows, tiles.depth), shape.dtype),
        weights=_tiled((tiles.stages, shape.block_channels, tiles.depth), shape.weight_dtype),
        scales=plgpu.SMEM(factors, shape.scale_dtype),
        zeros=plgpu.SMEM(factors, jnp.int8) if shape.zeros else (),
        upcast=_tiled((tiles.consumers, CHANNELS, shape.span), shape.dtype) if shape.interpret else (),
    )


def _tiled(dims: tuple[int, ...], dtype: Any) -> Any:
    """Rows in swizzled tiles of 8, as wgmma and the copy engine want them."""
    swizzle = min(128, dims[-1] * bits_of(dtype) // 8)
    tiling = plgpu.TilingTransform((_TILE_ROWS, swizzle * 8 // bits_of(dtype)))
    return plgpu.SMEM(dims, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))


def _barriers(shape: Shape) -> _Barriers:
    stages = shape.tiles.stages
    return _Barriers(
        ready=plgpu.Barrier(num_arrivals=4 if shape.zeros else 3, num_barriers=stages),
        free=plgpu.Barrier(num_arrivals=shape.tiles.consumers, num_barriers=stages),
    )


# --------------------------------------------------------------------------------------------------------------
# The kernel.


class _Unit(NamedTuple):
    """A thread block's share: channels from ``channel`` on, steps ``first`` to ``first + count``."""

    channel: Any
    split: Any
    first: Any
    count: Any


def _body(shape: Shape, names: tuple[str, ...], *refs: Any, smem: _Smem, barriers: _Barriers) -> None:
    gmem = _Gmem(**(dict.fromkeys(_Gmem._fields) | dict(zip(names, refs, strict=True))))
    unit, warpgroup = _unit(shape, lax.axis_index("block")), lax.axis_index("warpgroup")
    consumers = shape.tiles.consumers
    pl.when(warpgroup < consumers)(functools.partial(_consume, shape, unit, warpgroup, gmem, smem, barriers))
    pl.when(warpgroup == consumers)(functools.partial(_produce, shape, unit, gmem, smem, barriers))


def _unit(shape: Shape, block: Any) -> _Unit:
    splits = jnp.int32(shape.tiles.splits)
    split = lax.rem(block, splits)
    first = lax.div(split * shape.steps, splits)
    count = lax.div((split + 1) * shape.steps, splits) - first
    return _Unit(lax.div(block, splits) * shape.block_channels, split, first, count)


def _slot(shape: Shape, step: Any) -> Any:
    return lax.rem(step, jnp.int32(shape.tiles.stages))


def _produce(shape: Shape, unit: _Unit, gmem: _Gmem, smem: _Smem, barriers: _Barriers) -> None:
    stages = shape.tiles.stages
    if registers := _REGISTERS.get(shape.tiles.consumers):
        plgpu.set_max_registers(registers[0], action="decrease")

    def await_free(step: Any, _: Any = None) -> None:
        plgpu.barrier_wait(barriers.free.at[_slot(shape, step)])

    def step(index: Any, _: Any) -> None:
        pl.when(index >= stages)(functools.partial(await_free, index))
        _copy_step(shape, unit, index, gmem, smem, barriers)

    lax.fori_loop(0, unit.count, step, None)
    lax.fori_loop(jnp.maximum(unit.count - stages, 0), unit.count, await_free, None)


def _copy_step(shape: Shape, unit: _Unit, index: Any, gmem: _Gmem, smem: _Smem, barriers: _Barriers) -> None:
    slot, depth = _slot(shape, index), shape.tiles.depth
    start = (unit.first + index) * depth
    inputs, channels = pl.ds(start, depth), pl.ds(unit.channel, shape.block_channels)
    groups = pl.ds(lax.div(start, jnp.int32(shape.group)), shape.groups)
    ready = barriers.ready.at[slot]
    plgpu.copy_gmem_to_smem(gmem.weights.at[channels, inputs], smem.weights.at[slot], ready)
    plgpu.copy_gmem_to_smem(gmem.x.at[:, inputs], smem.x.at[slot], ready)
    plgpu.copy_gmem_to_smem(gmem.scales.at[groups, channels], smem.scales.at[slot], ready)
    if shape.zeros:
        plgpu.copy_gmem_to_smem(gmem.zeros.at[groups, channels], smem.zeros.at[slot], ready)


def _consume(shape: Shape, unit: _Unit, warpgroup: Any, gmem: _Gmem, smem: _Smem, barriers: _Barriers) -> None:
    own = pl.ds(pl.multiple_of(warpgroup * CHANNELS, CHANNELS), CHANNELS)

    def step(index: Any, sums: Any) -> Any:
        slot = _slot(shape, index)
        plgpu.barrier_wait(barriers.ready.at[slot])
        packed = _packed(shape, smem.weights.at[slot, own])
        for group in range(shape.groups):
            sums = sums + _group_sums(shape, packed, group, slot, own, warpgroup, smem)
        plgpu.barrier_arrive(barriers.free.at[slot])
        return sums

    if registers := _REGISTERS.get(shape.tiles.consumers):
        plgpu.set_max_registers(registers[1], action="increase")
    nothing = plgpu.layout_cast(jnp.zeros((CHANNELS, shape.rows), jnp.float32), _MATRIX)
    _write(shape, unit, warpgroup, lax.fori_loop(0, unit.count, step, nothing), gmem)


def _packed(shape: Shape, ref: Any) -> Any:
    """Numbers of 64 channels, moved between threads while they are small to where the tensor core wants them."""
    narrow = plgpu.Layout.WGMMA_UPCAST_4X if bits_of(shape.weight_dtype) == 4 else plgpu.Layout.WGMMA_UPCAST_2X
    return plgpu.layout_cast(plgpu.load(ref, layout=narrow), _MATRIX)


def _group_sums(
    shape: Shape, packed: Any, group: int, slot: Any, own: Any, warpgroup: Any, smem: _Smem
) -> Float[Array, "64 rows"]:
    inputs, dims = (group * shape.span, (group + 1) * shape.span), (CHANNELS, shape.rows)
    scales = lax.broadcast_in_dim(_factors(smem.scales, slot, group, own), dims, [0])
    left = _upcast(shape, lax.slice(packed, (0, inputs[0]), (CHANNELS, inputs[1])))
    if shape.zeros:
        zeros = _factors(smem.zeros, slot, group, own).astype(shape.dtype)
        left = left - lax.broadcast_in_dim(zeros, left.shape, [0])
    if shape.interpret:
        smem.upcast[warpgroup] = left
        plgpu.commit_smem()
        left = smem.upcast.at[warpgroup]
    right = smem.x.at[slot, :, pl.ds(inputs[0], shape.span)].transpose((1, 0))

    def multiply(accumulator: Any) -> Any:
        plgpu.wgmma(accumulator, left, right)
        return accumulator[...]

    return pl.run_scoped(multiply, plgpu.ACC(dims, jnp.float32)) * scales


def _upcast(shape: Shape, numbers: Any) -> Any:
    """Convert to the dtype of x, exactly, by ways for which Mosaic GPU has short code."""
    if shape.weight_dtype == jnp.int4 and shape.dtype == jnp.float16:
        numbers = numbers.astype(jnp.bfloat16).astype(jnp.float32)
    if shape.weight_dtype == jnp.float8_e4m3fn and shape.dtype == jnp.bfloat16:
        numbers = numbers.astype(jnp.float16).astype(jnp.float32)
    return numbers.astype(shape.dtype)


def _factors(ref: Any, slot: Any, group: int, own: Any) -> Float[Array, " 64"]:
    return plgpu.load(ref.at[slot, group, own], layout=_PER_CHANNEL, optimized=False).astype(jnp.float32)


def _write(shape: Shape, unit: _Unit, warpgroup: Any, sums: Any, gmem: _Gmem) -> None:
    """Write from registers: pairs of channels are adjacent once the matrix is transposed."""
    result = plgpu.layout_cast(sums.astype(gmem.output.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
    own = pl.ds(pl.multiple_of(unit.channel + warpgroup * CHANNELS, CHANNELS), CHANNELS)
    target = gmem.output.at[:, own] if shape.tiles.splits == 1 else gmem.output.at[unit.split, :, own]
    compat.store(target.transpose((1, 0)), result)
