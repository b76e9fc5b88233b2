"""The consumer warpgroup of paged decode: owns the arithmetic and the copies out.

Scores are computed transposed, keys by queries: wgmma takes 64 keys at a time as its rows, and the few queries of a KV
head as its 8 or 16 columns, instead of padding the queries to 64 rows. So a thread holds a handful of numbers, and each
maximum is over rows: within a warp by shuffles, across the four warps through SMEM.

Maxima are rounded to integers (scores are in powers of two): rescaling is then exact, and it makes no difference
whether a compiler contracts a multiplication and an addition into one instruction. A probability is at most sqrt(2).
`pallas_kernels.paged_attention.hopper.softmax` explains why results are bitwise identical to those of prefill.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat
from pallas_kernels.paged_attention.hopper.decode.producer import (
    Place,
    Unit,
    after,
    page_id,
    query_row,
    query_slot,
    run_of,
    slot_of,
    unit_at,
)
from pallas_kernels.paged_attention.hopper.decode.slots import cut_slot, uncut_slot
from pallas_kernels.paged_attention.hopper.decode.sums import (
    MATRIX,
    PER_COLUMN,
    PER_ROW,
    Sums,
    across,
    as_matrix,
    merge,
    nothing,
    per_column,
    pick_sums,
)
from pallas_kernels.paged_attention.hopper.decode.types import ONES_ROWS, Barriers, Gmem, Shape, Smem
from pallas_kernels.paged_attention.hopper.softmax import (
    LOG2_E,
    LOWEST,
    capped,
    integer,
    integer_top,
    lifted,
    lifted_top,
    probabilities,
)

MASKED = 2 * LOWEST  # below every running maximum, so that its probability is 0


class _Bounds(NamedTuple):
    """First key that each query sees, and one past its last: scalars, or [columns] for many queries."""

    low: Any  # None: all from the first key on
    high: Any
    seen: Any  # bits of a token tree, else None


def consume(shape: Shape, gmem: Gmem, smem: Smem, barriers: Barriers, arrived: Any, block: Any) -> None:
    """Process all units of a CTA. ``arrived``: a semaphore per row and KV head, or None when CTAs run in turn."""
    if shape.interpret and shape.total_by_ones:
        smem.ones[...] = jnp.ones(smem.ones.shape, shape.dtype)
    place, count = run_of(shape, block, gmem)
    begun, began = _begun_elsewhere(shape, gmem, place), gmem.plan[3, block]

    def attend_unit(index: Any, carry: tuple[Place, Any, Any]) -> tuple[Place, Any, Any]:
        at, step, whole = carry
        unit = unit_at(shape, gmem, at)
        part = _attend(shape, unit, index, step, gmem, smem, barriers)
        borrowed = begun & (unit.row == place.row) & (unit.head == place.head)
        run = _Run(
            block=block,
            began=jnp.where(borrowed, began, block),
            borrowed=borrowed,
            ends_here=unit.keys.last_split - unit.split < count - index,
        )
        finish: Callable[..., Any] = _finish_parked if shape.parks else _finish
        return after(shape, unit), step + unit.steps, finish(shape, unit, run, part, whole, gmem, smem, arrived)

    first = () if shape.parks else nothing(shape)
    lax.fori_loop(0, count, attend_unit, (place, jnp.int32(0), first))
    if shape.splits > 1:
        unit = unit_at(shape, gmem, place)
        mine = (count > 0) & begun & (unit.keys.last_split - unit.split < count)
        pl.when(mine)(functools.partial(_gather, shape, unit, began, gmem, smem, arrived))
    plgpu.wait_smem_to_gmem(0)


class _Run(NamedTuple):
    """The splits of a head that this CTA has."""

    block: Any
    began: Any  # the CTA with the first split
    borrowed: Any  # whether the first splits are in another CTA
    ends_here: Any  # whether the last split is in this CTA


def _finish(shape: Shape, unit: Unit, run: _Run, part: Sums, whole: Sums, gmem: Gmem, smem: Smem, arrived: Any) -> Sums:
    """Merge a unit with those before it in registers; store its sums for another CTA if the head is cut."""
    whole = merge(pick_sums(unit.split == unit.keys.first_split, nothing(shape), whole), part)
    last = ~run.borrowed & (unit.split == unit.keys.last_split)
    pl.when(last)(functools.partial(_write, shape, unit, whole, gmem, smem))
    if shape.splits > 1:
        pl.when(run.borrowed | ~run.ends_here)(functools.partial(_lend, shape, unit, run, part, gmem, arrived))
    return whole


def _finish_parked(
    shape: Shape, unit: Unit, run: _Run, part: Sums, whole: tuple[()], gmem: Gmem, smem: Smem, arrived: Any
) -> tuple[()]:
    """Merge as `_finish` if registers hold the sums of one split only: the head's sums so far are parked in memory."""
    if shape.splits == 1:
        _write(shape, unit, merge(nothing(shape), part), gmem, smem)
        return whole
    cut = run.borrowed | ~run.ends_here
    pl.when(cut)(functools.partial(_lend, shape, unit, run, part, gmem, arrived))
    pl.when(~cut)(functools.partial(_park, shape, unit, run.block, part, gmem, smem))
    return whole


def _park(shape: Shape, unit: Unit, block: Any, part: Sums, gmem: Gmem, smem: Smem) -> None:
    """Merge a unit with those before it, which are in memory; write the sums back, or the result."""
    head, split = _head(shape, unit), unit.split - unit.keys.first_split

    def unpark(_: Any, sums: Sums) -> Sums:
        return merge(sums, _load(gmem, uncut_slot(shape, head, split - 1, block)))

    whole = merge(lax.fori_loop(0, jnp.minimum(split, 1), unpark, nothing(shape)), part)
    last = unit.split == unit.keys.last_split
    pl.when(last)(functools.partial(_write, shape, unit, whole, gmem, smem))
    pl.when(~last)(functools.partial(_store, gmem, uncut_slot(shape, head, split, block), whole))


def _begun_elsewhere(shape: Shape, gmem: Gmem, place: Place) -> Any:
    """Return whether the run begins in the middle of a head's splits, with the first ones in another CTA."""
    return place.split > unit_at(shape, gmem, place).keys.first_split


# --------------------------------------------------------------------------------------------------------------
# One unit.


def _attend(shape: Shape, unit: Unit, index: Any, done: Any, gmem: Gmem, smem: Smem, barriers: Barriers) -> Sums:
    slot = query_slot(index)
    bounds = _bounds(shape, unit, gmem)
    plgpu.barrier_wait(barriers.query_ready.at[slot])
    step = functools.partial(_attend_block, shape, unit, bounds, done, slot, gmem, smem, barriers)
    sums = nothing(shape)
    if not shape.total_by_ones:
        sums = lax.fori_loop(0, unit.steps, step, sums)
    else:
        zeros = as_matrix(jnp.zeros((ONES_ROWS, shape.columns), jnp.float32))
        sums = lax.fori_loop(0, unit.steps, step, sums._replace(total=zeros))
        sums = sums._replace(total=per_column(sums.total.max(axis=0)))  # all rows are the same
    plgpu.barrier_arrive(barriers.query_free.at[slot])
    return sums


def _bounds(shape: Shape, unit: Unit, gmem: Gmem) -> _Bounds:
    if shape.chunk == 1:
        return _Bounds(unit.keys.low, unit.keys.high, None)
    query = _query_of_column(shape, unit)
    length = unit.keys.high
    at = per_column(unit.start + query)
    high, seen = per_column(jnp.minimum(at + 1, length)), None
    if shape.options.tree:
        at = per_column(unit.start + _pick(query, [gmem.depths[unit.row, i] for i in range(shape.chunk)]))
        seen = _pick(query, [gmem.seen[unit.row, i] for i in range(shape.chunk)])
        high = per_column(jnp.full(query.shape, jnp.minimum(unit.start + shape.chunk, length)))
    low = None if shape.options.window is None else per_column(at - (shape.options.window - 1))
    return _Bounds(low, high, seen)


def _columns_of(shape: Shape) -> Any:
    return plgpu.broadcasted_iota(jnp.int32, (shape.columns,), 0, layout=PER_COLUMN)


def _query_of_column(shape: Shape, unit: Unit) -> Any:
    """Return the query of the chunk in each column; columns are by query, then head of the group."""
    query = per_column(jnp.zeros((shape.columns,), jnp.int32))
    if shape.chunk == 1:
        return query
    _, offset = query_row(shape, unit)
    column = per_column(_columns_of(shape) - offset)
    for i in range(1, shape.chunk):
        query = per_column(jnp.where(column >= i * shape.group, i, query))
    return query


def _pick(index: Any, scalars: list[Any]) -> Any:
    """Select ``scalars[index]`` by comparing."""
    picked = per_column(jnp.full(index.shape, scalars[0]))
    for i, scalar in enumerate(scalars[1:], 1):
        picked = per_column(jnp.where(index == i, scalar, picked))
    return picked


def _attend_block(
    shape: Shape,
    unit: Unit,
    bounds: _Bounds,
    done: Any,
    query: Any,
    gmem: Gmem,
    smem: Smem,
    barriers: Barriers,
    index: Any,
    sums: Sums,
) -> Sums:
    slot, block = slot_of(shape, done + index), unit.first + index
    at = block * shape.tiles.block_keys
    # Page factors use plain loads, issued before the wait so that their latency overlaps it.
    factors = [_page_factors(shape, unit, block, half, gmem) for half in (0, 1)]

    plgpu.barrier_wait(barriers.keys_ready.at[slot])
    keys = _widened(shape, smem.keys.at[slot], smem.wide_keys)
    scores = _scores(shape, keys, smem.query.at[query])
    scores = _soft_scores(shape, scores, _factors(shape, factors[0], smem.key_scales, slot))
    visible = _visible(shape, unit, bounds, at)
    scores = jnp.where(visible, scores, MASKED)
    top = jnp.maximum(sums.top, integer_top(scores.max(axis=0)))
    probs = probabilities(scores, across(scores.shape, lifted_top(top)))
    shrink = jnp.exp2(sums.top - top)
    old = [sums.mixed * across(sums.mixed.shape, shrink)]
    if shape.total_by_ones:
        old.append(sums.total * across(sums.total.shape, shrink))
    else:
        total = sums.total * shrink + probs.sum(axis=0)

    plgpu.barrier_wait(barriers.values_ready.at[slot])
    value_factors = _factors(shape, factors[1], smem.value_scales, slot)
    if value_factors is not None:
        probs = jnp.where(visible, probs * value_factors, 0.0)
    _stage_probs(shape, probs, smem)
    values = _widened(shape, smem.values.at[slot], smem.wide_values)
    _clear_unseen(shape, unit, values, at)
    mixed, *rest = _add_products(shape, old, values, smem)
    plgpu.barrier_arrive(barriers.slot_free.at[slot])
    return Sums(mixed, top, rest[0] if rest else total)


def _scores(shape: Shape, keys: Any, query: Any) -> Any:
    def multiply(accumulator: Any) -> Any:
        plgpu.wgmma(accumulator, keys, query.transpose((1, 0)))
        plgpu.wgmma_wait(0)
        return accumulator[...]

    return pl.run_scoped(multiply, plgpu.ACC((shape.tiles.block_keys, shape.columns), jnp.float32))


def _add_products(shape: Shape, old: list[Any], values: Any, smem: Smem) -> list[Any]:
    """Add products of the probabilities to ``old``: with the values and, if there are two sums, with ones."""
    probs = smem.probs.transpose((1, 0))

    def multiply(*accumulators: Any) -> list[Any]:
        if not shape.interpret:  # the interpreter's accumulators always start at zero
            for accumulator, value in zip(accumulators, old, strict=True):
                accumulator[...] = value
        plgpu.wgmma(accumulators[0], values.transpose((1, 0)), probs)
        for total in accumulators[1:]:
            plgpu.wgmma(total, _ones(shape, smem), probs)
        plgpu.wgmma_wait(0)
        done = [accumulator[...] for accumulator in accumulators]
        return [a + b for a, b in zip(old, done, strict=True)] if shape.interpret else done

    return pl.run_scoped(multiply, *(plgpu.ACC(value.shape, jnp.float32) for value in old))


def _ones(shape: Shape, smem: Smem) -> Any:
    """Return ones in registers, or in SMEM for the interpreter, which has no wgmma with a left operand in registers."""
    if shape.interpret:
        return smem.ones
    return as_matrix(jnp.ones((ONES_ROWS, shape.tiles.block_keys), shape.dtype))


def _soft_scores(shape: Shape, scores: Any, factors: Any) -> Any:
    """Scale, cap and lift the scores, in units of log 2."""
    options, factor = shape.options, shape.options.scale * LOG2_E
    if factors is not None:
        scores = scores * factors
    if options.softcap is not None:
        scores, factor = capped(scores, options.scale, options.softcap)
    return lifted(scores, factor)


def _visible(shape: Shape, unit: Unit, bounds: _Bounds, at: Any) -> Any:
    dims = (shape.tiles.block_keys, shape.columns)
    key = plgpu.broadcasted_iota(jnp.int32, dims, 0, layout=MATRIX) + at
    if shape.chunk == 1:
        return (key >= bounds.low) & (key < bounds.high)
    visible = key < across(dims, bounds.high)
    if shape.options.window is not None:
        visible &= key >= across(dims, bounds.low)
    if bounds.seen is not None:
        token = key - unit.start
        bit = lax.shift_right_logical(across(dims, bounds.seen), jnp.clip(token, 0, shape.chunk - 1)) & 1
        visible &= (token < 0) | (bit == 1)
    return visible


def _stage_probs(shape: Shape, probs: Any, smem: Smem) -> None:
    narrow = plgpu.layout_cast(probs.astype(shape.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
    smem.probs.transpose((1, 0))[...] = narrow
    plgpu.commit_smem()


def _clear_unseen(shape: Shape, unit: Unit, values: Any, at: Any) -> None:
    """Zero values that no query sees: a page's earlier owner may have left NaN, and probability 0 times NaN is NaN."""
    low, high = unit.keys.low - at, unit.keys.high - at

    @pl.when((low > 0) | (high < shape.tiles.block_keys))
    def _clear() -> None:
        # Tile by tile: all of the values at once would take more registers than the rest of the kernel.
        for row, tile in _tiles_of(values.shape):
            _clear_tile(values.at[tile], low - row, high - row)
        plgpu.commit_smem()


def _tiles_of(dims: tuple[int, int]) -> Iterator[tuple[int, tuple[Any, Any]]]:
    """Yield tiles of 64 rows by 64 columns: the first row, and the slices."""
    for row in range(0, dims[0], 64):
        for column in range(0, dims[1], 64):
            yield row, (pl.ds(row, 64), pl.ds(column, 64))


def _clear_tile(values: Any, low: Any, high: Any) -> None:
    key = plgpu.broadcasted_iota(jnp.int32, (64, 64), 0, layout=MATRIX)
    kept = plgpu.load(values, layout=MATRIX)
    values[...] = jnp.where((key >= low) & (key < high), kept, jnp.zeros_like(kept))


# --------------------------------------------------------------------------------------------------------------
# Quantised pools: numbers become bfloat16 or float16 in SMEM, factors multiply scores and probabilities.


def _widened(shape: Shape, raw: Any, wide: Any) -> Any:
    if not shape.quantized:
        return raw
    for _, tile in _tiles_of(wide.shape):
        numbers = plgpu.load(raw.at[tile], layout=plgpu.Layout.WGMMA_UPCAST_2X)
        wide[tile] = plgpu.layout_cast(_cast(numbers, shape.dtype), MATRIX)
    plgpu.commit_smem()
    return wide


def _cast(numbers: Any, dtype: Any) -> Any:
    """Convert exactly: bfloat16 and float16 hold any int8 and float8. The hardware converts float8 only to float16."""
    if numbers.dtype == jnp.int8:
        return numbers.astype(dtype)
    half = numbers.astype(jnp.float16)
    return half if dtype == jnp.float16 else half.astype(jnp.float32).astype(dtype)


def _page_factors(shape: Shape, unit: Unit, block: Any, half: int, gmem: Gmem) -> list[Any] | None:
    if shape.scaled_by != "head":
        return None
    first = block * shape.tiles.block_keys
    pages = [page_id(shape, gmem, unit.row, first + i * shape.piece) for i in range(shape.pieces)]
    return [gmem.scales[page, half, unit.head] for page in pages]


def _factors(shape: Shape, per_page: list[Any] | None, per_key: Any, slot: Any) -> Any:
    """Return the dequantization factors [block_keys, columns], or None."""
    dims = (shape.tiles.block_keys, shape.columns)
    if shape.scaled_by == "token":
        return lax.broadcast_in_dim(plgpu.load(per_key.at[slot], layout=PER_ROW), dims, [0])
    if per_page is None:
        return None
    key = plgpu.broadcasted_iota(jnp.int32, dims, 0, layout=MATRIX)
    factors = jnp.where(key >= 0, per_page[0], 0.0)
    for i, factor in enumerate(per_page[1:], 1):
        factors = jnp.where(key >= i * shape.piece, factor, factors)
    return factors


# --------------------------------------------------------------------------------------------------------------
# Results.


def _write(shape: Shape, unit: Unit, sums: Sums, gmem: Gmem, smem: Smem) -> None:
    """Normalise and copy out a head's queries; a query that saw nothing gives zeros."""
    row, offset = query_row(shape, unit)
    sums = _with_sinks(shape, unit, sums, gmem)
    share = per_column(jnp.where(sums.total > 0, per_column(1.0 / sums.total), 0.0))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    result = as_matrix(as_matrix(sums.mixed * across(sums.mixed.shape, share)).astype(shape.dtype))
    compat.store(smem.output.transpose((1, 0)), result)
    plgpu.commit_smem()
    columns = pl.ds(0, shape.head_dim)
    if shape.value_dim != shape.head_dim:  # TMA clips what is out of bounds
        columns = pl.ds(pl.multiple_of(offset * 0, shape.value_dim), shape.value_dim)
    target = gmem.output.at[pl.ds(row + offset, shape.queries), columns]
    plgpu.copy_smem_to_gmem(smem.output.at[pl.ds(offset, shape.queries)], target)


def _with_sinks(shape: Shape, unit: Unit, sums: Sums, gmem: Gmem) -> Sums:
    """Add the sink, a score without a value, once per row."""
    if not shape.options.sinks:
        return sums
    sink = _sinks_of_columns(shape, unit, gmem)
    top = per_column(jnp.maximum(sums.top, integer(sink)))
    shrink = per_column(jnp.exp2(sums.top - top))
    total = per_column(sums.total * shrink + jnp.exp2(sink - top))
    return Sums(as_matrix(sums.mixed * across(sums.mixed.shape, shrink)), top, total)


def _sinks_of_columns(shape: Shape, unit: Unit, gmem: Gmem) -> Any:
    first = unit.head * shape.group
    sinks = [gmem.sinks[first + i] for i in range(shape.group)]
    if shape.group == 1:
        return per_column(jnp.full((shape.columns,), sinks[0]))
    _, offset = query_row(shape, unit)
    return _pick(per_column(_columns_of(shape) - offset - _query_of_column(shape, unit) * shape.group), sinks)


def _lend(shape: Shape, unit: Unit, run: _Run, part: Sums, gmem: Gmem, arrived: Any) -> None:
    """Store a split's sums for the CTA with the head's last split, and signal that CTA (unless it is this one)."""
    head = _head(shape, unit)
    _store(gmem, cut_slot(shape, head, unit.split - unit.keys.first_split, run.began), part)
    if arrived is not None:
        pl.when(~run.ends_here)(lambda: pl.semaphore_signal(arrived.at[head]))


def _gather(shape: Shape, unit: Unit, began: Any, gmem: Gmem, smem: Smem, arrived: Any) -> None:
    """Merge a head's splits in order, once all before ``unit`` have arrived from other CTAs.

    Those are earlier CTAs, each of which stores its sums before it waits for any other: no execution order of CTAs can
    deadlock as long as earlier CTAs start first.
    """
    head = _head(shape, unit)
    if arrived is not None:
        pl.semaphore_wait(arrived.at[head], unit.split - unit.keys.first_split, decrement=False)

    def add(split: Any, sums: Sums) -> Sums:
        return merge(sums, _load(gmem, cut_slot(shape, head, split, began)))

    in_head = unit.keys.last_split - unit.keys.first_split + 1
    _write(shape, unit, lax.fori_loop(0, in_head, add, nothing(shape)), gmem, smem)


def _head(shape: Shape, unit: Unit) -> Any:
    return unit.row * shape.kv_heads + unit.head


def _store(gmem: Gmem, slot: Any, sums: Sums) -> None:
    compat.store(gmem.parts.at[slot], sums.mixed)
    compat.store(gmem.stats.at[slot, 0], sums.top)
    compat.store(gmem.stats.at[slot, 1], sums.total)


def _load(gmem: Gmem, slot: Any) -> Sums:
    load = functools.partial(plgpu.load, optimized=False)
    return Sums(
        load(gmem.parts.at[slot], layout=MATRIX),
        load(gmem.stats.at[slot, 0], layout=PER_COLUMN),
        load(gmem.stats.at[slot, 1], layout=PER_COLUMN),
    )
