"""Schedule of paged decode: the units of work, and their share among a fixed number of CTAs.

A *unit* is one split of one KV head of one row. Splits are the keys ``[s * keys_per_split, (s + 1) * keys_per_split)``:
absolute positions, so that the order in which a row's keys are summed depends neither on the other rows nor on the
width of the table. Units are numbered by row, then head, then split. Each CTA takes a run of units of about equal cost,
so long rows occupy many CTAs and short rows share one.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.paged_attention.spans import Span

# Cost of a unit besides its key blocks (query, merge, first latencies), in key blocks. A guess; see `plan`.
_UNIT_COST = 1


def plan(spans: Span, *, kv_heads: int, blocks: int, blocks_per_split: int) -> Int[Array, "4 blocks"]:
    """Plan each CTA's run of units: row of the first, its index within that row, their number; and, if the run begins
    in the middle of a head, the CTA with the head's first split.

    A CTA begins at the first unit that starts at or after its share of the total cost. One step of a model computes
    this once: it depends on the lengths alone, which all layers share.
    """
    in_head = spans.last_split - spans.first_split + 1
    head_cost = spans.end_block - spans.first_block + _UNIT_COST * in_head
    cost_end, unit_end = _running_sum(head_cost * kv_heads), _running_sum(in_head * kv_heads)
    share = _shares(cost_end[-1], blocks)
    row = _count(cost_end, share)
    left = share - jnp.where(row > 0, cost_end[row - 1], 0)
    head, left = jnp.divmod(left, head_cost[row])
    # A head's first split may begin in its middle, at the window: later splits start that much earlier.
    cut = spans.first_block - spans.first_split * blocks_per_split
    step = blocks_per_split + _UNIT_COST
    split = jnp.where(left > 0, -((-left - cut[row]) // step), 0)
    before = jnp.where(row > 0, unit_end[row - 1], 0)
    head_first = before + head * in_head[row]
    first = jnp.minimum(head_first + split, unit_end[-1])
    # The last CTA that begins there or earlier: it is not empty, as the next begins later.
    began = (first[None, :] <= head_first[:, None]).sum(1) - 1
    end = jnp.concatenate([first[1:], unit_end[-1:]])
    row = _count(unit_end, first)
    within = first - jnp.where(row > 0, unit_end[row - 1], 0)
    return jnp.stack([row, within, end - first, began]).astype(jnp.int32)


def _running_sum(x: jax.Array) -> jax.Array:
    """Return the cumulative sum by comparing all with all: one fused kernel for few rows, unlike `cumsum`."""
    at = jnp.arange(x.shape[0])
    return jnp.where(at[None, :] <= at[:, None], x[None, :], 0).sum(1)


def _shares(total: jax.Array, blocks: int) -> jax.Array:
    """Return ``block * total / blocks`` rounded down, without overflow."""
    at = jnp.arange(blocks, dtype=jnp.int32)
    return at * (total // blocks) + at * (total % blocks) // blocks


def _count(ends: jax.Array, at: jax.Array) -> jax.Array:
    """Return the row that contains each of ``at``, given the rows' ends."""
    return jnp.minimum((ends[None, :] <= at[:, None]).sum(1), ends.shape[0] - 1)
