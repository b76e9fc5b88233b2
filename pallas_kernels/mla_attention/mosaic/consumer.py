"""The two consumer warpgroups of the MLA kernel: they own the arithmetic and the copies out.

Maxima are rounded to integers (scores are in powers of two): rescaling is then exact, and it makes no difference
whether a compiler contracts a multiplication and an addition into one instruction. A probability is at most sqrt(2).
"""

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

from pallas_kernels import compat
from pallas_kernels.mla_attention.mosaic.operands import SLOTS, TILE, Barriers, Gmem, Shape, Smem
from pallas_kernels.mla_attention.mosaic.units import Place, Unit, after, run_of, unit_at

LOWEST = -1e30  # represents minus infinity where inf - inf would give NaN
MASKED = 2 * LOWEST  # below every running maximum, so that its probability is 0
_ROUND = 1.5 * 2**23  # added and subtracted, it rounds a float32 to the nearest integer
_LOG2_E = math.log2(math.e)
_MATRIX = plgpu.Layout.WGMMA
_PER_ROW = _MATRIX.reduce(1)


class Sums(NamedTuple):
    """Softmax state of one consumer over some of the keys."""

    mixed: Any  # [TILE, half]: weighted values, its own columns
    top: Any  # [TILE]: the integer that scores are relative to
    total: Any  # [TILE]: weights of its own key blocks


@dataclasses.dataclass(frozen=True)
class Consumer:
    """A consumer warpgroup. ``me`` is static: 0 has even key blocks and left columns, 1 odd ones and right."""

    me: int
    shape: Shape
    gmem: Gmem
    smem: Smem
    barriers: Barriers

    @property
    def other(self) -> int:
        return 1 - self.me

    def values(self, slot: int) -> Any:
        """Return this consumer's columns of a slot's latents."""
        return self.smem.slots[self.me].at[slot]

    def await_part(self, part: int, slot: int) -> None:
        plgpu.barrier_wait(self.barriers.ready[part].at[slot])

    def release(self, slot: int) -> None:
        """Release this consumer's columns and, once the other has done the same, the slot's probabilities."""
        plgpu.barrier_arrive(self.barriers.free[self.me].at[slot])
        plgpu.barrier_arrive(self.barriers.free.rope.at[slot])


def consume(own: Consumer) -> None:
    place, count = run_of(own.shape, own.gmem)
    step = _even_step if own.me == 0 else _odd_step

    def attend_unit(index: Any, place: Place) -> Place:
        unit = unit_at(own.shape, own.gmem, place)
        plgpu.barrier_wait(own.barriers.query_ready)
        sums = lax.fori_loop(0, unit.steps, functools.partial(step, own, unit), _nothing(own.shape))
        _write(own, unit, sums)
        return after(own.shape, unit)

    lax.fori_loop(0, count, attend_unit, place)
    plgpu.wait_smem_to_gmem(0)


def _nothing(shape: Shape) -> Sums:
    mixed = plgpu.layout_cast(jnp.zeros((TILE, shape.half), jnp.float32), _MATRIX)
    return Sums(mixed, _per_row(LOWEST), _per_row(0.0))


def _per_row(value: float) -> Any:
    return plgpu.layout_cast(jnp.full((TILE,), value, jnp.float32), _PER_ROW)


def _across(per_row: Any, columns: int) -> Any:
    return lax.broadcast_in_dim(per_row, (TILE, columns), [0])


# --------------------------------------------------------------------------------------------------------------
# Steps: a pair of key blocks. Sums of both consumers grow by the even block first, then by the odd one.


def _even_step(own: Consumer, unit: Unit, index: Any, sums: Sums) -> Sums:
    """Process even scores and values, then the values of the odd block, with weights of the other consumer."""
    scores = _scores(own, unit, index)
    top = _raised(sums.top, scores)
    probs, total = _weights(scores, top)
    _publish(own, top, probs)
    shrink = jnp.exp2(sums.top - top)
    mixed, _ = _plus_values(own, sums.mixed * _across(shrink, own.shape.half), 0)
    own.release(0)
    own.await_part(own.me, 1)
    odd_top = _others_top(own)
    odd_shrink = jnp.exp2(top - odd_top)
    mixed, _ = _plus_values(own, mixed * _across(odd_shrink, own.shape.half), 1)
    own.release(1)
    return Sums(mixed, odd_top, (sums.total * shrink + total) * odd_shrink)


def _odd_step(own: Consumer, unit: Unit, index: Any, sums: Sums) -> Sums:
    """Process odd scores; their softmax overlaps the product of the even block's weights and values."""
    scores = _scores(own, unit, index)
    own.await_part(own.me, 0)
    even_top = _others_top(own)

    def softmax() -> tuple[Any, Any]:
        top = _raised(even_top, scores)
        probs, total = _weights(scores, top)
        _publish(own, top, probs)
        return top, total

    shrink = jnp.exp2(sums.top - even_top)
    mixed, (top, total) = _plus_values(own, sums.mixed * _across(shrink, own.shape.half), 0, softmax)
    own.release(0)
    odd_shrink = jnp.exp2(even_top - top)
    mixed, _ = _plus_values(own, mixed * _across(odd_shrink, own.shape.half), 1)
    own.release(1)
    return Sums(mixed, top, sums.total * shrink * odd_shrink + total)


def _scores(own: Consumer, unit: Unit, index: Any) -> Any:
    """Return masked scores of the consumer's key block in units of log 2; clear the keys that no query sees."""
    slot = own.me
    key = ((unit.first + index) * SLOTS + slot) * TILE
    for part in range(3):
        own.await_part(part, slot)
    _clear_unseen(own, unit, key)
    queries, _ = own.smem.query

    # Always 0, which the compiler cannot know: else it keeps the addresses of all 36 products in registers from one
    # step to the next, and spills.
    zero = (index > unit.length).astype(jnp.int32)

    def multiply(accumulator: Any) -> Any:
        for query, keys in zip(queries, own.smem.slots, strict=True):
            plgpu.wgmma(accumulator, query.at[zero], keys.at[slot + zero].transpose((1, 0)))
        return accumulator[...]

    scores = pl.run_scoped(multiply, plgpu.ACC((TILE, TILE), jnp.float32)) * (own.shape.scale * _LOG2_E)
    plgpu.commit_smem()  # each warp waits for its own product: none may write probabilities while another reads keys
    first = unit.start + lax.div(unit.tile * own.shape.tile_rows, jnp.int32(own.shape.heads))
    edge = key + TILE > jnp.minimum(first + 1, unit.length)
    return lax.cond(edge, functools.partial(_mask, own.shape, unit, key), lambda x: x, scores)


def _mask(shape: Shape, unit: Unit, key: Any, scores: Any) -> Any:
    at = plgpu.broadcasted_iota(jnp.int32, (TILE, TILE), 1, layout=_MATRIX) + key
    seen = at < unit.length
    if shape.chunk > 1:
        seen &= at <= _across(_positions(shape, unit) + unit.start, TILE)
    return jnp.where(seen, scores, MASKED)


def _positions(shape: Shape, unit: Unit) -> Any:
    """Return positions of the rows' queries, relative to the first of the chunk."""
    row = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=_PER_ROW) + unit.tile * shape.tile_rows
    return lax.div(row, jnp.full_like(row, shape.heads))


def _clear_unseen(own: Consumer, unit: Unit, key: Any) -> None:
    """Zero keys that no query sees: a page's earlier owner may have left NaN, and probability 0 times NaN is NaN."""
    kept = unit.high - key

    @pl.when(kept < TILE)
    def _clear() -> None:
        row = plgpu.broadcasted_iota(jnp.int32, (TILE, TILE), 0, layout=_MATRIX)
        for part in (own.smem.slots.left, own.smem.slots.right):
            for column in range(0, own.shape.half, TILE):
                piece = part.at[own.me, :, pl.ds(column, TILE)]
                numbers = plgpu.load(piece, layout=_MATRIX)
                piece[...] = jnp.where(row < kept, numbers, jnp.zeros_like(numbers))
        plgpu.commit_smem()


def _raised(top: Any, scores: Any) -> Any:
    return jnp.maximum(top, (scores.max(axis=1) + _ROUND) - _ROUND)


def _weights(scores: Any, top: Any) -> tuple[Any, Any]:
    """Return unnormalized probabilities and their sum over this block."""
    probs = jnp.exp2(scores - _across(top, TILE))
    return probs, probs.sum(axis=1)


def _publish(own: Consumer, top: Any, probs: Any) -> None:
    """Store maxima and probabilities for both consumers, over the slot's rotated keys, which are no longer needed."""
    own.smem.tops[own.me] = top
    own.smem.slots.rope[own.me] = probs.astype(own.shape.dtype)
    plgpu.commit_smem()
    plgpu.barrier_arrive(own.barriers.probs_ready.at[own.me])


def _others_top(own: Consumer) -> Any:
    """Wait for the other consumer's maxima; from then on its probabilities are readable, too."""
    plgpu.barrier_wait(own.barriers.probs_ready.at[own.other])
    return plgpu.load(own.smem.tops.at[own.other], layout=_PER_ROW)


def _plus_values(own: Consumer, mixed: Any, slot: int, meanwhile: Callable[[], Any] = lambda: None) -> tuple[Any, Any]:
    """Add a slot's weighted values to ``mixed``; return it and the result of ``meanwhile``, which runs during it."""

    def multiply(accumulator: Any) -> tuple[Any, Any]:
        if not own.shape.interpret:  # the interpreter's accumulators always start at zero
            accumulator[...] = mixed
        plgpu.wgmma(accumulator, own.smem.slots.rope.at[slot], own.values(slot))
        result = meanwhile()
        done = accumulator[...]
        return mixed + done if own.shape.interpret else done, result

    return pl.run_scoped(multiply, plgpu.ACC(mixed.shape, jnp.float32))


# --------------------------------------------------------------------------------------------------------------
# Results are staged in the queries' SMEM, once both consumers have all their scores.


def _write(own: Consumer, unit: Unit, sums: Sums) -> None:
    total = sums.total + _others_total(own, sums.total)
    if own.shape.split and own.shape.splits > 1:
        _write_part(own, unit, sums._replace(total=total))
    else:
        _write_result(own, unit, sums.mixed, total)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.barrier_arrive(own.barriers.query_free)


def _others_total(own: Consumer, total: Any) -> Any:
    own.smem.totals[own.me] = total
    plgpu.commit_smem()
    plgpu.barrier_arrive(own.barriers.totals_ready.at[own.me])
    plgpu.barrier_wait(own.barriers.totals_ready.at[own.other])
    return plgpu.load(own.smem.totals.at[own.other], layout=_PER_ROW)


def _rows(shape: Shape, unit: Unit) -> Any:
    return pl.ds(pl.multiple_of(unit.tile * shape.tile_rows, shape.tile_rows), shape.tile_rows)


def _write_result(own: Consumer, unit: Unit, mixed: Any, total: Any) -> None:
    """Write the results; queries that see nothing give zeros."""
    shape, (queries, _) = own.shape, own.smem.query
    share = jnp.where(total > 0, 1.0 / total, 0.0)
    staging = queries[own.me].at[0]
    _stage(staging, mixed, share)
    target = own.gmem.output.at[unit.sequence, _rows(shape, unit), pl.ds(own.me * shape.half, shape.half)]
    plgpu.copy_smem_to_gmem(staging.at[pl.ds(0, shape.tile_rows)], target)


def _write_part(own: Consumer, unit: Unit, sums: Sums) -> None:
    """Write the sums of a split for the merge. In float32 half of a consumer's columns fit at a time."""
    shape, (_, results) = own.shape, own.smem.query
    staging, quarter = results[own.me], shape.half // 2
    for i in range(2):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        _stage(staging, sums.mixed[:, i * quarter : (i + 1) * quarter])
        columns = pl.ds(own.me * shape.half + i * quarter, quarter)
        target = own.gmem.sums.at[unit.sequence, unit.split, _rows(shape, unit), columns]
        plgpu.copy_smem_to_gmem(staging.at[pl.ds(0, shape.tile_rows)], target)
    if own.me == 0:
        stats = own.gmem.stats.at[unit.sequence, unit.split]
        rows = pl.ds(pl.multiple_of(unit.tile * TILE, TILE), TILE)
        compat.store(stats.at[0, rows], sums.top)
        compat.store(stats.at[1, rows], sums.total)


def _stage(staging: Any, numbers: Any, share: Any = None) -> None:
    """Store to SMEM, a few columns at a time: a store shuffles registers, which do not suffice for a copy."""
    columns = numbers.shape[1]
    step = min(columns, TILE)
    for column in range(0, columns, step):
        some = numbers[:, column : column + step]
        if share is not None:
            some = some * _across(share, step)
        staging[:, pl.ds(column, step)] = some.astype(staging.dtype)
        plgpu.commit_smem()
