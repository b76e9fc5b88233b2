"""The consumers of `prefill`: two warpgroups that own the arithmetic, the queries and the results."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat
from pallas_kernels.layouts import row_layout
from pallas_kernels.paged_attention.hopper.prefill.producer import pieces, rows_between
from pallas_kernels.paged_attention.hopper.prefill.rows import Rows, per_row, row_index, spread, zeros
from pallas_kernels.paged_attention.hopper.prefill.splits import (
    Sums,
    begin_splits,
    column_pieces,
    columns_of,
    end_split,
    no_sums,
    of_rows,
    total_with_earlier,
    with_earlier,
)
from pallas_kernels.paged_attention.hopper.prefill.types import (
    TOTALS,
    WARPGROUP_ROWS,
    Barriers,
    Shape,
    Smem,
    Tile,
    slot_of,
    this_tile,
)
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


class _Softmax(NamedTuple):
    """Online softmax of a warpgroup's rows, in powers of two."""

    top: Any  # [WARPGROUP_ROWS]: running maximum, an integer
    total: Any  # [WARPGROUP_ROWS]: running sum; None if it is a product (`Shape.like_decode`)
    shrink: Any  # [WARPGROUP_ROWS]: factor of the sums before the last block is added
    probs: Any  # [WARPGROUP_ROWS, block_keys] of the last block


def consume(rows: Rows, smem: Smem, barriers: Barriers) -> None:
    """Process a tile's key blocks, first to last; only those at the diagonal and at a window's far end are masked."""
    shape, tile, warpgroup = rows.shape, rows.tile, rows.warpgroup
    _write_ones(rows, smem, barriers)
    _load_queries(rows, smem, barriers)
    begin_splits(rows, smem)
    pl.when(warpgroup == 1)(lambda: plgpu.barrier_arrive(barriers.turn.at[rows.zero]))
    softmax = _first_scores(rows, smem, barriers)
    plgpu.barrier_wait(barriers.values_ready.at[0])
    if shape.options.window is not None:
        pl.when(tile.steps > 1)(lambda: _clear_unseen(rows, jnp.int32(0), smem, barriers.clean.at[1]))
    carry = (no_sums(shape), softmax._replace(probs=softmax.probs.astype(shape.dtype)))
    carry = lax.fori_loop(1, tile.steps, functools.partial(_overlapped_step, rows, smem, barriers), carry)
    # Read again, so that not all of it occupies registers during the loop.
    rows = dataclasses.replace(rows, tile=this_tile(shape, rows.gmem))
    _clear_unseen(rows, rows.tile.steps - 1, smem, barriers.clean.at[rows.zero])
    sums = _last_values(rows, smem, barriers, *carry)
    pl.when(warpgroup == 0)(lambda: plgpu.barrier_wait(barriers.turn.at[rows.zero]))
    _write_out(rows, smem, sums, carry[1])


def write_zeros(rows: Rows, smem: Smem) -> None:
    """Write the result of a tile of padding."""
    smem.query.at[rows.warpgroup][...] = zeros(rows.shape.head_dim).astype(rows.shape.dtype)
    _copy_out(rows, smem)


# --------------------------------------------------------------------------------------------------------------
# In and out.


def _write_ones(rows: Rows, smem: Smem, barriers: Barriers) -> None:
    """Write the ones in consumer 0, for both: ``query_ready`` covers the ones, too."""

    @pl.when(rows.warpgroup == 0)
    def _write() -> None:
        if rows.shape.like_decode:
            layout, _ = row_layout(TOTALS, WARPGROUP_ROWS, 8)
            compat.store(smem.ones, plgpu.layout_cast(jnp.ones(smem.ones.shape, rows.shape.dtype), layout))
            plgpu.commit_smem()
        for consumer in range(2):
            plgpu.barrier_arrive(barriers.query_ready.at[consumer])


def _boxes(rows: Rows, tensor: Any, smem: Smem) -> list[tuple[Any, Any]]:
    """Return a warpgroup's rows in device memory and in SMEM, head by head."""
    count = rows.shape.part_tokens
    tokens = pl.ds(pl.multiple_of(rows.token, count), count)
    return [
        (tensor.at[rows.tile.sequence, tokens, rows.head + i], smem.query.at[rows.warpgroup, pl.ds(i * count, count)])
        for i in range(rows.shape.part_heads)
    ]


def _load_queries(rows: Rows, smem: Smem, barriers: Barriers) -> None:
    ready = barriers.query_ready.at[rows.warpgroup]
    for device, shared in _boxes(rows, rows.gmem.query, smem):
        plgpu.copy_gmem_to_smem(device, shared, ready)
    plgpu.barrier_wait(ready)


def _write_out(rows: Rows, smem: Smem, sums: Sums, softmax: _Softmax) -> None:
    """Write the results; padding queries give zeros for any padding values."""
    shape = rows.shape
    before, shrink, total = _last_factors(rows, sums, softmax)
    share, real = 1.0 / total, rows.tokens() < rows.tile.length - rows.tile.start
    for columns in column_pieces(shape):
        mixed = columns_of(sums.mixed, columns)
        if shape.splits:
            add = functools.partial(with_earlier, rows, smem, columns, before)
            mixed = lax.cond(rows.tile.several_splits(shape), add, lambda own: own, mixed)
        if shape.options.sinks:
            mixed = mixed * spread(shrink, columns.size)
        mixed = jnp.where(spread(real, columns.size), mixed * spread(share, columns.size), 0.0)
        smem.query.at[rows.warpgroup, :, columns][...] = mixed.astype(shape.dtype)
    _copy_out(rows, smem)


def _last_factors(rows: Rows, sums: Sums, softmax: _Softmax) -> tuple[Any, Any, Any]:
    """Return factors of the values' sums over earlier splits, and of those over all; and the weights' sum."""
    shape, top, before, shrink = rows.shape, softmax.top, per_row(0.0), None
    total = of_rows(sums.total) if shape.like_decode else softmax.total
    if shape.splits:
        add = functools.partial(total_with_earlier, rows, total, top)
        before, total = lax.cond(rows.tile.several_splits(shape), add, lambda: (before, total))
    if shape.options.sinks:  # a key without a value
        sink = _sinks(rows)
        highest = jnp.maximum(top, integer(sink))
        shrink = jnp.exp2(top - highest)
        total = total * shrink + jnp.exp2(sink - highest)
    return before, shrink, total


def _sinks(rows: Rows) -> Any:
    sinks = per_row(LOWEST)
    for i in range(rows.shape.part_heads):
        sinks = jnp.where(row_index() >= i * rows.shape.part_tokens, rows.gmem.sinks[rows.head + i], sinks)
    return sinks


def _copy_out(rows: Rows, smem: Smem) -> None:
    """Copy the results out of the queries' SMEM, which is no longer needed for queries."""
    plgpu.commit_smem()
    for device, shared in _boxes(rows, rows.gmem.output, smem):
        plgpu.copy_smem_to_gmem(shared, device)
    plgpu.wait_smem_to_gmem(0)


def _clear_unseen(rows: Rows, step: Any, smem: Smem, clean: Any) -> None:
    """Zero values that another owner of a page left behind: probability 0 times its NaN would be NaN."""
    shape = rows.shape
    if shape.quantized:  # the producer has done it
        return
    start = rows.tile.first_key(shape, step)
    low, high = rows.tile.low - start, rows.tile.high - start

    @pl.when((low > 0) | (high < shape.block_keys))
    def _edge() -> None:
        @pl.when(rows.warpgroup == 0)
        def _clear() -> None:
            values = smem.values.at[slot_of(shape, step)]
            for keys, columns in pieces(shape):
                part = values.at[keys, columns]
                kept = plgpu.load(part, layout=plgpu.Layout.WGMMA)
                first = keys.start
                part[...] = jnp.where(rows_between(kept.shape, low - first, high - first), kept, jnp.zeros_like(kept))
            plgpu.commit_smem()
            plgpu.barrier_arrive(clean)

        plgpu.barrier_wait(clean)


# --------------------------------------------------------------------------------------------------------------
# Products. Tensor core time dominates: only their own instructions may be issued between two products that are to be in
# flight together, and registers that they read or write must not be touched until they are done.


def _first_scores(rows: Rows, smem: Smem, barriers: Barriers) -> _Softmax:
    plgpu.barrier_wait(barriers.keys_ready.at[0])

    def multiply(scores: Any) -> Any:
        plgpu.wgmma(scores, smem.query.at[rows.warpgroup], smem.keys.at[0].transpose((1, 0)))
        return scores[...]

    scores = pl.run_scoped(multiply, plgpu.ACC((WARPGROUP_ROWS, rows.shape.block_keys), jnp.float32))
    plgpu.barrier_arrive(barriers.keys_free.at[0])
    return _fold(rows, jnp.int32(0), scores, per_row(LOWEST), None if rows.shape.like_decode else per_row(0.0))


def _overlapped_step(
    rows: Rows, smem: Smem, barriers: Barriers, step: Any, carry: tuple[Sums, _Softmax]
) -> tuple[Sums, _Softmax]:
    """Compute the scores of ``step`` and, during their softmax, add the values of the step before.

    The two consumers take turns in issuing products, so that the softmax of one overlaps the products of the other.
    """
    sums, last = carry
    shape, me = rows.shape, rows.warpgroup
    slot, old_slot = slot_of(shape, step), slot_of(shape, step - 1)
    plgpu.barrier_wait(barriers.keys_ready.at[slot])
    plgpu.barrier_wait(barriers.turn.at[me])

    def multiply(*accumulators: Any) -> _Softmax:
        def score(scores: Any) -> _Softmax:
            plgpu.wgmma(scores, smem.query.at[me], smem.keys.at[slot].transpose((1, 0)))
            _add_values(rows, smem, last.probs, old_slot, *accumulators)
            plgpu.barrier_arrive(barriers.turn.at[1 - me])
            ready = plgpu.wgmma_accumulator_load(scores, wait_n=len(accumulators))
            plgpu.barrier_arrive(barriers.keys_free.at[slot])
            softmax = _fold(rows, step, ready, last.top, last.total)
            # The wait for the next step's values must be here, or ptxas moves the softmax after the wait for `mixed`.
            plgpu.barrier_wait(barriers.values_ready.at[slot])
            return softmax

        return pl.run_scoped(score, plgpu.ACC((WARPGROUP_ROWS, shape.block_keys), jnp.float32))

    sums, softmax = _accumulated(shape, sums, multiply)
    plgpu.barrier_arrive(barriers.values_free.at[old_slot])
    # Only now: the old probabilities are read from their registers until `mixed` is done.
    softmax = softmax._replace(probs=softmax.probs.astype(shape.dtype))
    if shape.splits:
        put_away = functools.partial(end_split, rows, smem, sums, last.top)
        sums = lax.cond(rows.tile.begins_split(shape, step), put_away, lambda: sums)
    return _times(sums, softmax.shrink), softmax


def _add_values(rows: Rows, smem: Smem, probs: Any, slot: Any, mixed: Any, total: Any = None) -> None:
    left = _left(rows, smem, probs)
    plgpu.wgmma(mixed, left, smem.values.at[slot])
    if total is not None:
        plgpu.wgmma(total, left, smem.ones.transpose((1, 0)))


def _last_values(rows: Rows, smem: Smem, barriers: Barriers, sums: Sums, softmax: _Softmax) -> Sums:
    slot = slot_of(rows.shape, rows.tile.steps - 1)
    sums, _ = _accumulated(rows.shape, sums, functools.partial(_add_values, rows, smem, softmax.probs, slot))
    plgpu.barrier_arrive(barriers.values_free.at[slot])
    return sums


def _accumulated(shape: Shape, sums: Sums, multiply: Callable[..., Any]) -> tuple[Sums, Any]:
    """Add the products that ``multiply`` issues to ``sums``, and wait for them; also return its result."""
    before = [each for each in sums if each is not None]

    def scoped(*accumulators: Any) -> tuple[list[Any], Any]:
        if not shape.interpret:  # the interpreter's accumulators always start at zero
            for accumulator, value in zip(accumulators, before, strict=True):
                accumulator[...] = value
        result = multiply(*accumulators)
        done = [accumulator[...] for accumulator in accumulators]
        return [a + b for a, b in zip(before, done, strict=True)] if shape.interpret else done, result

    done, result = pl.run_scoped(scoped, *(plgpu.ACC(value.shape, jnp.float32) for value in before))
    return Sums(*done, *[None] * (2 - len(done))), result


def _times(sums: Sums, share: Any) -> Sums:
    mixed = sums.mixed * spread(share, sums.mixed.shape[1])
    return Sums(mixed, None if sums.total is None else sums.total * spread(share, TOTALS))


def _left(rows: Rows, smem: Smem, probs: Any) -> Any:
    """Return the left operand: the interpreter has no wgmma with its left operand in registers."""
    if not rows.shape.interpret:
        return probs
    staging = smem.probs.at[rows.warpgroup]
    staging[...] = probs
    plgpu.commit_smem()
    return staging


# --------------------------------------------------------------------------------------------------------------
# Softmax and masks.


def _fold(rows: Rows, step: Any, scores: Any, top: Any, total: Any) -> _Softmax:
    """Process one more block of keys. ``top`` is finite, so a block in which a row sees nothing adds exact zeros."""
    shape, options = rows.shape, rows.shape.options
    factor = options.scale * LOG2_E
    if options.softcap is not None:
        scores, factor = capped(scores, options.scale, options.softcap)
    scores = lifted(scores, factor)
    scores = lax.cond(_is_edge(shape, rows.tile, step), functools.partial(_mask, rows, step), lambda x: x, scores)
    new_top = jnp.maximum(top, integer_top(scores.max(axis=1)))
    probs = probabilities(scores, spread(lifted_top(new_top), shape.block_keys))
    shrink = jnp.exp2(top - new_top)
    return _Softmax(new_top, None if total is None else total * shrink + probs.sum(axis=1), shrink, probs)


def _is_edge(shape: Shape, tile: Tile, step: Any) -> Any:
    """Return whether some query of the tile does not see all keys of the step."""
    begin = tile.first_key(shape, step)
    edge = begin + shape.block_keys > tile.start + (0 if shape.options.tree else tile.token + 1)
    if shape.options.window is None:
        return edge
    furthest = tile.start + (shape.chunk if shape.options.tree else tile.token + shape.tokens)
    return edge | (begin < furthest - shape.options.window)


def _mask(rows: Rows, step: Any, scores: Any) -> Any:
    return jnp.where(_visible(rows, step), scores, -jnp.inf)


def _visible(rows: Rows, step: Any) -> Any:
    """Return the mask of the step's key block for each row, [WARPGROUP_ROWS, block_keys]."""
    shape, tile = rows.shape, rows.tile
    dims, begin = (WARPGROUP_ROWS, shape.block_keys), tile.first_key(shape, step)
    # Added to the columns, not subtracted from the rows: else each thread's 32 column numbers live on and spill.
    keys = plgpu.broadcasted_iota(jnp.int32, dims, 1, layout=plgpu.Layout.WGMMA) + begin
    positions = tile.start + (_depths(rows) if shape.options.tree else rows.tokens())
    if shape.options.tree:
        seen = _tree_block(rows, step)
        return (
            seen
            if shape.options.window is None
            else seen & (keys > spread(positions - shape.options.window, shape.block_keys))
        )
    behind = spread(positions, shape.block_keys) - keys
    # One comparison for both ends, without a register for the window's: future keys are huge unsigned numbers.
    return behind >= 0 if shape.options.window is None else behind.astype(jnp.uint32) < shape.options.window


def _depths(rows: Rows) -> Any:
    place = rows.gmem.depths.at[rows.tile.sequence, rows.tile.index, rows.warpgroup]
    return plgpu.load(place, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)


def _tree_block(rows: Rows, step: Any) -> Any:
    """Load a block of the tree's mask. Block 0 is all ones, for key blocks before the chunk."""
    shape, tile = rows.shape, rows.tile
    part = tile.first + step + 1 - lax.div(tile.start, jnp.int32(shape.block_keys))
    place = rows.gmem.seen.at[tile.sequence, tile.index, rows.warpgroup, jnp.maximum(part, 0)]
    return plgpu.load(place, layout=plgpu.Layout.WGMMA, optimized=False).astype(jnp.int32) > 0
