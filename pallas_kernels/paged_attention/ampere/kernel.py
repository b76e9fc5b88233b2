"""The launch, and the device code of a CTA."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat
from pallas_kernels.paged_attention.ampere.sums import (
    LOWEST,
    Sums,
    across,
    finished,
    fold,
    layout,
    load,
    load_columns,
    nothing,
    rounded,
    store,
    zeros,
)
from pallas_kernels.paged_attention.options import AttentionOptions
from pallas_kernels.paged_attention.spans import span
from pallas_kernels.paged_attention.trees import MOST_IN_TREE

BLOCK = 64  # keys: the rows of four warps' mma
LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Block sizes. ``keys_per_split`` changes the last bits of results.

    Attributes:
        stages: key blocks in SMEM, one of which is computed: 2 to 4.
        keys_per_split: keys of a segment, which in decode is the work of one CTA: a multiple of 64.

    Raises:
        ValueError: unsupported values.
    """

    stages: int = 3
    keys_per_split: int = 512

    def __post_init__(self) -> None:
        if not 2 <= self.stages <= 4 or self.keys_per_split < 1 or self.keys_per_split % BLOCK:
            raise ValueError(f"there are 2 to 4 stages, and splits of multiples of {BLOCK} keys: {self}")


class Shape(NamedTuple):
    """The static parameters of one launch."""

    sequences: int
    parts: int  # parts of a sequence's chunk
    tokens: int  # tokens of a part
    kv_heads: int
    group: int
    page: int
    head_dim: int
    splits: int
    dtype: Any
    options: AttentionOptions  # the `flags` of the options
    tiles: Tiles
    interpret: bool

    @property
    def units(self) -> int:
        return self.sequences * self.parts

    @property
    def columns(self) -> int:
        return -(-self.tokens * self.group // 8) * 8

    @property
    def piece(self) -> int:
        """Keys of one copy."""
        return min(self.page, BLOCK)

    @property
    def blocks_per_segment(self) -> int:
        return self.tiles.keys_per_split // BLOCK

    @property
    def whole(self) -> bool:
        """Whether a unit processes all segments that it sees, and writes results instead of sums."""
        return self.splits == 1


class Gmem(NamedTuple):
    q: Any  # [units, kv_heads, rows, head_dim]: a row per column, or per column with a query
    pool: Any  # [pages, 2, kv_heads, page, head_dim]
    tables: Any  # [sequences, width]
    starts: Any  # [sequences]: of the first token
    lengths: Any  # [sequences]
    low: Any  # [units, columns]: first key that a query sees
    high: Any  # [units, columns]: one past the last key, or past the keys before a tree
    seen: Any  # [units, columns]: bit mask of the tree tokens that a query sees
    sinks: Any  # [kv_heads, columns], or None
    sums: Any  # [units, kv_heads, splits, head_dim, columns]; finally the results, if a unit is whole
    stats: Any  # [units, kv_heads, splits, 2, columns]: maximum, total


class Smem(NamedTuple):
    queries: Any  # [columns, head_dim]
    keys: Any  # [stages, 64, head_dim]
    values: Any
    probs: Any  # [64, columns]


class Unit(NamedTuple):
    """A unit of work: one split of the keys of some tokens of a sequence, for one KV head. Traced scalars."""

    number: Any
    sequence: Any
    head: Any
    split: Any
    start: Any  # start of the sequence's chunk
    low: Any  # first key that any of its queries sees
    high: Any  # one past the last
    first: Any  # first key block
    steps: Any  # number of key blocks


class Blocks(NamedTuple):
    """The key blocks that a part's tokens see."""

    low: Any  # first key that any of its queries sees
    high: Any  # one past the last
    first: Any
    end: Any


# --------------------------------------------------------------------------------------------------------------
# The launch.


def launcher(shape: Shape, interpret: plgpu.InterpretGPUParams | None) -> Any:
    part = (shape.units, shape.kv_heads, shape.splits)
    return compat.kernel(
        functools.partial(_body, shape),
        out_type=(
            jax.ShapeDtypeStruct((*part, shape.head_dim, shape.columns), jnp.float32),
            jax.ShapeDtypeStruct((*part, 2, shape.columns), jnp.float32),
        ),
        scratch_types={"smem": _smem(shape)},
        grid=part,
        grid_names=("unit", "head", "split"),
        num_threads=1,
        thread_name="warpgroup",
        kernel_name="paged_decode" if shape.parts == 1 else "paged_prefill",
        # Mosaic inserts the barriers between one warp's writes to SMEM and reads of other warps.
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=True),
        cost_estimate=_cost(shape),
        interpret=interpret,
    )


def _cost(shape: Shape) -> pl.CostEstimate:
    """Return the cost as if every row filled its table: lengths are not known at compile time."""
    keys = shape.units * shape.kv_heads * shape.splits * shape.tiles.keys_per_split
    moved, queries = 4 * keys * shape.head_dim, shape.tokens * shape.group
    return pl.CostEstimate(flops=moved * queries, transcendentals=keys * queries, bytes_accessed=moved)


def _smem(shape: Shape) -> Smem:
    block = (shape.tiles.stages, BLOCK, shape.head_dim)
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    return Smem(
        queries=plgpu.SMEM((shape.columns, shape.head_dim), shape.dtype),
        keys=plgpu.SMEM(block, shape.dtype, transforms=transforms),
        values=plgpu.SMEM(block, shape.dtype, transforms=transforms),
        probs=plgpu.SMEM((BLOCK, shape.columns), shape.dtype),
    )


# --------------------------------------------------------------------------------------------------------------
# The kernel.


def _body(shape: Shape, *refs: Any, smem: Smem) -> None:
    gmem = Gmem(*(refs if shape.options.sinks else (*refs[:-2], None, *refs[-2:])))
    unit = _unit_at(shape, gmem)
    smem.queries[pl.ds(0, gmem.q.shape[2])] = gmem.q[unit.number, unit.head]  # columns without a query: undefined
    ahead = shape.tiles.stages - 1

    @pl.when(unit.steps > 0)
    def _begin() -> None:
        for index in range(ahead):
            _copy_block(shape, unit, index, gmem, smem)

    def step(index: Any, sums: Sums) -> Sums:
        if not shape.interpret:  # until this block is loaded, and all threads have read the previous one
            plgpu.wait_gmem_to_smem((ahead - 1) * 2 * (BLOCK // shape.piece))
        _copy_block(shape, unit, index + ahead, gmem, smem)
        return _attend(shape, unit, index, sums, gmem, smem)

    def of_blocks(first: Any, end: Any) -> Sums:
        begin, end = (jnp.clip(each - unit.first, 0, unit.steps) for each in (first, end))
        return lax.fori_loop(begin, end, step, nothing((shape.head_dim, shape.columns), shape.dtype))

    if shape.whole:
        _fold_all(shape, unit, gmem, of_blocks)
    else:
        _leave(unit, gmem, of_blocks)
    if not shape.interpret:
        plgpu.wait_gmem_to_smem(0)


def _leave(unit: Unit, gmem: Gmem, of_blocks: Callable[[Any, Any], Sums]) -> None:
    """Write the sums of the unit's one segment for the merge, which skips segments without keys."""
    where = (unit.number, unit.head, unit.split)

    @pl.when(unit.steps > 0)
    def _of_keys() -> None:
        store(gmem.sums.at[where], gmem.stats.at[where], of_blocks(unit.first, unit.first + unit.steps))


def _fold_all(shape: Shape, unit: Unit, gmem: Gmem, of_blocks: Callable[[Any, Any], Sums]) -> None:
    """Fold the segments one by one. Sums are kept in memory in between: registers hold those of one segment only."""
    where = (unit.number, unit.head, 0)
    kept, dims = (gmem.sums.at[where], gmem.stats.at[where]), (shape.head_dim, shape.columns)
    per_segment = jnp.int32(shape.blocks_per_segment)
    first = lax.div(unit.first, per_segment)
    last = lax.div(unit.first + jnp.maximum(unit.steps - 1, 0), per_segment)

    @pl.loop(first, last + 1)
    def _segment(number: Any) -> None:
        sums = of_blocks(number * per_segment, (number + 1) * per_segment)
        before = lax.cond(number > first, lambda: load(*kept, shape.dtype), lambda: nothing(dims, shape.dtype))
        sums = fold(before, sums)

        @pl.when(number < last)
        def _keep() -> None:
            store(*kept, sums)

        @pl.when(number == last)
        def _finish() -> None:
            sinks = None if gmem.sinks is None else load_columns(gmem.sinks.at[unit.head], shape.dtype)
            compat.store(kept[0], finished(sums, sinks))


def seen_blocks(shape: Shape, start: Any, length: Any, part: Any) -> Blocks:
    """Return the key blocks that a part of a sequence's chunk sees; ``end`` is 0 for a part without queries."""
    begin, end = start + part * shape.tokens, start + (part + 1) * shape.tokens
    own = (start, length) if shape.options.tree else (begin, jnp.minimum(length, end))
    keys = span(*own, block_keys=BLOCK, keys_per_split=shape.tiles.keys_per_split, window=shape.options.window)
    return Blocks(keys.low, keys.high, keys.first_block, jnp.where(begin < length, keys.end_block, 0))


def _unit_at(shape: Shape, gmem: Gmem) -> Unit:
    number, head, split = (lax.axis_index(name) for name in ("unit", "head", "split"))
    sequence, part = (operation(number, jnp.int32(shape.parts)) for operation in (lax.div, lax.rem))
    start = gmem.starts[sequence]
    blocks = seen_blocks(shape, start, gmem.lengths[sequence], part)
    first, end = blocks.first, blocks.end
    if not shape.whole:
        first = jnp.maximum(first, split * shape.blocks_per_segment)
        end = jnp.minimum(end, (split + 1) * shape.blocks_per_segment)
    return Unit(number, sequence, head, split, start, blocks.low, blocks.high, first, jnp.maximum(end - first, 0))


def _slot(shape: Shape, index: Any) -> Any:
    return lax.rem(jnp.asarray(index, jnp.int32), jnp.int32(shape.tiles.stages))


def _copy_block(shape: Shape, unit: Unit, index: Any, gmem: Gmem, smem: Smem) -> None:
    """Copy a block of keys and values; past the row's end it is any page of the pool."""
    block, slot = unit.first + jnp.clip(index, 0, jnp.maximum(unit.steps - 1, 0)), _slot(shape, index)
    for half, target in enumerate((smem.keys, smem.values)):
        for first in range(0, BLOCK, shape.piece):
            key = block * BLOCK + first
            place = jnp.minimum(lax.div(key, jnp.int32(shape.page)), gmem.tables.shape[1] - 1)
            page = jnp.clip(gmem.tables[unit.sequence, place], 0, gmem.pool.shape[0] - 1)
            rows = pl.ds(pl.multiple_of(lax.rem(key, jnp.int32(shape.page)), shape.piece), shape.piece)
            source, to = gmem.pool.at[page, half, unit.head, rows], target.at[slot, pl.ds(first, shape.piece)]
            if shape.interpret:  # the interpreter has no copies without a barrier
                to[...] = source[...]
            else:
                plgpu.copy_gmem_to_smem(source, to, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)


def _attend(shape: Shape, unit: Unit, index: Any, sums: Sums, gmem: Gmem, smem: Smem) -> Sums:
    slot, dims = _slot(shape, index), (BLOCK, shape.columns)
    key = (unit.first + index) * BLOCK
    keys = plgpu.load(smem.keys.at[slot], layout=plgpu.Layout.MMA_LHS(shape.dtype))
    queries = _right(shape, smem.queries.transpose((1, 0)))
    scores = _mma(shape, zeros(dims, shape.dtype), keys, queries) * (
        shape.options.scale * (1.0 if shape.options.softcap else LOG2_E)
    )
    if shape.options.softcap:
        scores = jnp.tanh(scores * (1.0 / shape.options.softcap)) * (shape.options.softcap * LOG2_E)
    scores = jnp.where(_visible(shape, unit, key, gmem), scores, 2 * LOWEST)
    top = jnp.maximum(sums.top, rounded(scores.max(axis=0)))
    probs = jnp.exp2(scores - across(top, BLOCK))
    shrink = jnp.exp2(sums.top - top)
    compat.store(smem.probs, probs.astype(shape.dtype))
    values = _seen_values(shape, unit, key, smem.values.at[slot])
    mixed = sums.mixed * across(shrink, shape.head_dim)
    mixed = _mma(shape, mixed, values, _right(shape, smem.probs))
    return Sums(mixed, top, sums.total * shrink + probs.sum(axis=0))


def _visible(shape: Shape, unit: Unit, key: Any, gmem: Gmem) -> Any:
    """Return the mask of the keys from ``key`` on for each column. [64, columns]"""
    at = plgpu.broadcasted_iota(jnp.int32, (BLOCK, shape.columns), 0, layout=layout(shape.dtype)) + key
    if shape.tokens == 1 and not shape.options.tree:
        return (at >= unit.low) & (at < unit.high)

    def of_column(values: Any) -> Any:
        return across(load_columns(values.at[unit.number], shape.dtype), BLOCK)

    seen = at < of_column(gmem.high)
    if shape.options.tree:
        token = at - unit.start
        bit = lax.shift_right_logical(of_column(gmem.seen), jnp.clip(token, 0, MOST_IN_TREE - 1)) & 1
        seen |= (token >= 0) & (token < MOST_IN_TREE) & (bit == 1)
    return seen if shape.options.window is None else seen & (at >= of_column(gmem.low))


def _seen_values(shape: Shape, unit: Unit, key: Any, values: Any) -> Any:
    """Load values [head_dim, keys], zeros where no query sees them: a page may hold an earlier owner's NaN."""
    left, dims = plgpu.Layout.MMA_LHS(shape.dtype), (shape.head_dim, BLOCK)
    numbers = plgpu.load(values.transpose((1, 0)), layout=left)

    def cleared(numbers: Any) -> Any:
        at = plgpu.broadcasted_iota(jnp.int32, dims, 1, layout=left) + key
        return jnp.where((at >= unit.low) & (at < unit.high), numbers, jnp.zeros_like(numbers))

    return lax.cond((key < unit.low) | (key + BLOCK > unit.high), cleared, lambda numbers: numbers, numbers)


def _right(shape: Shape, ref: Any) -> Any:
    return plgpu.load(ref, layout=plgpu.Layout.MMA_RHS(shape.dtype), optimized=False)


def _mma(shape: Shape, total: Any, left: Any, right: Any) -> Any:
    if shape.interpret:  # the interpreter has no mma
        return total + jnp.dot(left, right, preferred_element_type=jnp.float32)
    return plgpu.mma(total, left, right)
