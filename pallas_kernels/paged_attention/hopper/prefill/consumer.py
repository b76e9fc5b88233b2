"""The consumers of `prefill`: two warpgroups that own the arithmetic, the queries and the results."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.hopper.prefill.producer import pieces, rows_between
from pallas_kernels.paged_attention.hopper.prefill.types import (
    WARPGROUP_ROWS,
    Barriers,
    Gmem,
    Shape,
    Smem,
    Tile,
    slot_of,
    this_tile,
)

LOWEST = -1e30  # where a row's maximum starts: finite, so that a block in which a row sees nothing adds exact zeros
LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class Rows:
    """One consumer's share of a tile."""

    shape: Shape
    tile: Tile
    warpgroup: Any
    gmem: Gmem

    @property
    def token(self) -> Any:
        """The first row's token within the chunk."""
        apart = self.shape.tokens > WARPGROUP_ROWS
        return self.tile.token + (self.warpgroup * WARPGROUP_ROWS if apart else 0)

    @property
    def head(self) -> Any:
        """The first row's head."""
        apart = self.shape.tokens > WARPGROUP_ROWS
        return self.tile.head + (0 if apart else self.warpgroup * self.shape.part_heads)

    def tokens(self) -> Any:
        """Each row's token within the chunk."""
        return (_row_index() & (self.shape.part_tokens - 1)) + self.token


class _Softmax(NamedTuple):
    """Online softmax of a warpgroup's rows, in powers of two."""

    top: Any  # [WARPGROUP_ROWS]: running maximum
    total: Any  # [WARPGROUP_ROWS]: running sum
    shrink: Any  # [WARPGROUP_ROWS]: what the output is to be multiplied with before the last block's values
    probs: Any  # [WARPGROUP_ROWS, block_keys] of the last block


def consume(rows: Rows, smem: Smem, barriers: Barriers) -> None:
    """All of a tile's key blocks, last one first: only there, and at a window's far end, is anything masked."""
    shape, tile, warpgroup = rows.shape, rows.tile, rows.warpgroup
    _load_queries(rows, smem, barriers)
    pl.when(warpgroup == 1)(lambda: plgpu.barrier_arrive(barriers.turn.at[0]))
    softmax = _first_scores(rows, smem, barriers)
    plgpu.barrier_wait(barriers.values_ready.at[0])
    _clear_unseen(rows, jnp.int32(0), smem, barriers.last_clean)
    carry = (_zeros(shape), softmax._replace(probs=softmax.probs.astype(shape.dtype)))
    carry = lax.fori_loop(1, tile.steps, functools.partial(_overlapped_step, rows, smem, barriers), carry)
    # Read again, so that not all of it occupies registers during the loop.
    rows = dataclasses.replace(rows, tile=this_tile(shape, rows.gmem))
    if shape.options.window is not None:
        last = rows.tile.steps - 1
        pl.when(last > 0)(lambda: _clear_unseen(rows, last, smem, barriers.first_clean))
    output = _last_values(rows, smem, barriers, *carry)
    pl.when(warpgroup == 0)(lambda: plgpu.barrier_wait(barriers.turn.at[0]))
    _write_out(rows, smem, output, carry[1].total)


def write_zeros(rows: Rows, smem: Smem) -> None:
    """Write the result of a tile of padding."""
    _store(rows, smem, _zeros(rows.shape))


def _zeros(shape: Shape) -> Any:
    return plgpu.layout_cast(jnp.zeros((WARPGROUP_ROWS, shape.head_dim), jnp.float32), plgpu.Layout.WGMMA)


def _row_index() -> Any:
    return plgpu.broadcasted_iota(jnp.int32, (WARPGROUP_ROWS,), 0, layout=plgpu.Layout.WGMMA.reduce(1))


def _per_row(value: float) -> Any:
    return plgpu.layout_cast(jnp.full((WARPGROUP_ROWS,), value, jnp.float32), plgpu.Layout.WGMMA.reduce(1))


def _spread(row_values: Any, columns: int) -> Any:
    return lax.broadcast_in_dim(row_values, (WARPGROUP_ROWS, columns), [0])


# --------------------------------------------------------------------------------------------------------------
# In and out.


def _boxes(rows: Rows, tensor: Any, smem: Smem) -> list[tuple[Any, Any]]:
    """A warpgroup's rows in device and in shared memory, head by head."""
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


def _write_out(rows: Rows, smem: Smem, output: Any, total: Any) -> None:
    """Write the results; padding queries give zeros, whatever the caller padded with."""
    dim = rows.shape.head_dim
    real = rows.tokens() < rows.tile.length - rows.tile.start
    _store(rows, smem, jnp.where(_spread(real, dim), output * _spread(1.0 / total, dim), 0.0))


def _store(rows: Rows, smem: Smem, output: Any) -> None:
    """The queries are not needed any more: their half of the memory takes the results."""
    staging = smem.query.at[rows.warpgroup]
    staging[...] = output.astype(rows.shape.dtype)
    plgpu.commit_smem()
    for device, shared in _boxes(rows, rows.gmem.output, smem):
        plgpu.copy_smem_to_gmem(shared, device)
    plgpu.wait_smem_to_gmem(0)


def _clear_unseen(rows: Rows, step: Any, smem: Smem, clean: Any) -> None:
    """Zero the values that another owner of a page left behind: probability 0 times its NaN would be NaN."""
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
# Products. The tensor cores' time is what counts: nothing but their own instructions may stand between two products
# that are to be in flight together, and no register that they read or write may be touched until they are done.


def _first_scores(rows: Rows, smem: Smem, barriers: Barriers) -> _Softmax:
    plgpu.barrier_wait(barriers.keys_ready.at[0])

    def multiply(scores: Any) -> Any:
        plgpu.wgmma(scores, smem.query.at[rows.warpgroup], smem.keys.at[0].transpose((1, 0)))
        return scores[...]

    scores = pl.run_scoped(multiply, plgpu.ACC((WARPGROUP_ROWS, rows.shape.block_keys), jnp.float32))
    plgpu.barrier_arrive(barriers.keys_free.at[0])
    return _fold(rows, jnp.int32(0), scores, *_initial(rows))


def _overlapped_step(
    rows: Rows, smem: Smem, barriers: Barriers, step: Any, carry: tuple[Any, _Softmax]
) -> tuple[Any, _Softmax]:
    """The scores of ``step`` and, while the softmax works on them, the values of the step before.

    The two consumers take turns in issuing products, so that one's softmax falls into the other's products.
    """
    output, before = carry
    shape, me = rows.shape, rows.warpgroup
    slot, old_slot = slot_of(shape, step), slot_of(shape, step - 1)
    plgpu.barrier_wait(barriers.keys_ready.at[slot])
    plgpu.barrier_wait(barriers.turn.at[me])

    def multiply(mixed: Any) -> _Softmax:
        def score(scores: Any) -> _Softmax:
            plgpu.wgmma(scores, smem.query.at[me], smem.keys.at[slot].transpose((1, 0)))
            plgpu.wgmma(mixed, _left(rows, smem, before.probs), smem.values.at[old_slot])
            plgpu.barrier_arrive(barriers.turn.at[1 - me])
            ready = plgpu.wgmma_accumulator_load(scores, wait_n=1)
            plgpu.barrier_arrive(barriers.keys_free.at[slot])
            softmax = _fold(rows, step, ready, before.top, before.total)
            # The next step's values, but here: without this loop ptxas moves the softmax behind the wait for `mixed`.
            plgpu.barrier_wait(barriers.values_ready.at[slot])
            return softmax

        return pl.run_scoped(score, plgpu.ACC((WARPGROUP_ROWS, shape.block_keys), jnp.float32))

    output, softmax = _accumulated(shape, output, multiply)
    plgpu.barrier_arrive(barriers.values_free.at[old_slot])
    # Only now: until `mixed` is done the old probabilities are still being read from their registers.
    return output * _spread(softmax.shrink, shape.head_dim), softmax._replace(probs=softmax.probs.astype(shape.dtype))


def _last_values(rows: Rows, smem: Smem, barriers: Barriers, output: Any, softmax: _Softmax) -> Any:
    slot = slot_of(rows.shape, rows.tile.steps - 1)

    def multiply(mixed: Any) -> None:
        plgpu.wgmma(mixed, _left(rows, smem, softmax.probs), smem.values.at[slot])

    output, _ = _accumulated(rows.shape, output, multiply)
    plgpu.barrier_arrive(barriers.values_free.at[slot])
    return output


def _accumulated(shape: Shape, value: Any, multiply: Callable[[Any], Any]) -> tuple[Any, Any]:
    """``value`` plus the products that ``multiply`` issues, when they are done; and what it returns."""

    def scoped(accumulator: Any) -> tuple[Any, Any]:
        if not shape.interpret:  # the interpreter's accumulators always start at zero
            accumulator[...] = value
        result = multiply(accumulator)
        done = accumulator[...]
        return value + done if shape.interpret else done, result

    return pl.run_scoped(scoped, plgpu.ACC(value.shape, jnp.float32))


def _left(rows: Rows, smem: Smem, probs: Any) -> Any:
    """The interpreter has no wgmma with its left operand in registers."""
    if not rows.shape.interpret:
        return probs
    staging = smem.probs.at[rows.warpgroup]
    staging[...] = probs
    plgpu.commit_smem()
    return staging


# --------------------------------------------------------------------------------------------------------------
# Softmax and masks.


def _initial(rows: Rows) -> tuple[Any, Any]:
    """Maximum and sum before the first key. A sink is a key that has been seen already, with a value of zero."""
    top = _per_row(LOWEST)
    if not rows.shape.options.sinks:
        return top, _per_row(0.0)
    for i in range(rows.shape.part_heads):
        top = jnp.where(_row_index() >= i * rows.shape.part_tokens, rows.gmem.sinks[rows.head + i], top)
    return top, _per_row(1.0)


def _fold(rows: Rows, step: Any, scores: Any, top: Any, total: Any) -> _Softmax:
    """One more block of keys."""
    shape = rows.shape
    factor = shape.options.scale * LOG2_E
    if shape.options.softcap is not None:
        scores, factor = _tanh(scores, shape.options.scale / shape.options.softcap), shape.options.softcap * LOG2_E
    scores = lax.cond(_is_edge(shape, rows.tile, step), functools.partial(_mask, rows, step), lambda x: x, scores)
    new_top = jnp.maximum(top, scores.max(axis=1) * factor)
    shrink = jnp.exp2(top - new_top)
    probs = jnp.exp2(scores * factor - _spread(new_top, shape.block_keys))
    return _Softmax(new_top, total * shrink + probs.sum(axis=1), shrink, probs)


def _tanh(x: Any, factor: float) -> Any:
    """tanh(x * factor) by the hardware's exp2, exact to some 2**-22; its tanh is to 2**-11, too coarse for a cap."""
    return 1.0 - 2.0 / (1.0 + jnp.exp2(x * (2 * LOG2_E * factor)))


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
    """The mask of the step's key block for each row, [WARPGROUP_ROWS, block_keys]."""
    shape, tile = rows.shape, rows.tile
    dims, begin = (WARPGROUP_ROWS, shape.block_keys), tile.first_key(shape, step)
    # Added to the columns and not taken from the rows: else each thread's 32 column numbers outlive the loop and spill.
    keys = plgpu.broadcasted_iota(jnp.int32, dims, 1, layout=plgpu.Layout.WGMMA) + begin
    positions = tile.start + (_depths(rows) if shape.options.tree else rows.tokens())
    if shape.options.tree:
        seen = _tree_block(rows, step)
        return (
            seen
            if shape.options.window is None
            else seen & (keys > _spread(positions - shape.options.window, shape.block_keys))
        )
    behind = _spread(positions, shape.block_keys) - keys
    # One comparison for both ends, and no register for the window's: what lies ahead is a huge unsigned number.
    return behind >= 0 if shape.options.window is None else behind.astype(jnp.uint32) < shape.options.window


def _depths(rows: Rows) -> Any:
    place = rows.gmem.depths.at[rows.tile.sequence, rows.tile.index, rows.warpgroup]
    return plgpu.load(place, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)


def _tree_block(rows: Rows, step: Any) -> Any:
    """Part 0 of the mask is all ones, for blocks before the chunk."""
    shape, tile = rows.shape, rows.tile
    part = tile.last - step - lax.div(tile.start, jnp.int32(shape.block_keys))
    place = rows.gmem.seen.at[tile.sequence, tile.index, rows.warpgroup, jnp.maximum(part, 0)]
    return plgpu.load(place, layout=plgpu.Layout.WGMMA, optimized=False).astype(jnp.int32) > 0
