"""Schedule of MLA decode: an equal share of the units of work for each of a fixed number of CTAs.

A unit is one split of one tile of one sequence, numbered by sequence, then tile, then split. A CTA takes a run of
units, so that a long sequence occupies many CTAs and short sequences share one (Osama et al. 2023, arXiv:2301.03598).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.mla_attention.mosaic.operands import PAIR, Shape

# Cost of a unit besides its key blocks (queries, results, latencies), in pairs of key blocks. A guess.
_UNIT_COST = 1


def plan(shape: Shape, lengths: Int[Array, " sequences"]) -> Int[Array, "3 blocks"]:
    """Plan each CTA's run: sequence of its first unit, that unit's index within the sequence, number of units.

    A CTA begins at the first unit that starts at or after its share of the total cost.
    """
    splits = jnp.maximum(-(-lengths // shape.tiles.keys_per_split), 1)
    tile_cost = -(-lengths // PAIR) + _UNIT_COST * splits
    cost_end, unit_end = (_running_sum(x * shape.tile_count) for x in (tile_cost, splits))
    share = _shares(cost_end[-1], shape.tiles.blocks)
    sequence = _count(cost_end, share)
    tile, left = jnp.divmod(share - _before(cost_end, sequence), tile_cost[sequence])
    step = shape.tiles.keys_per_split // PAIR + _UNIT_COST
    split = jnp.minimum((left + step - 1) // step, splits[sequence])
    first = _before(unit_end, sequence) + tile * splits[sequence] + split
    end = jnp.concatenate([first[1:], unit_end[-1:]])
    sequence = _count(unit_end, first)
    return jnp.stack([sequence, first - _before(unit_end, sequence), end - first]).astype(jnp.int32)


def _running_sum(x: jax.Array) -> jax.Array:
    """Return the cumulative sum by comparing all with all: one fused kernel for few sequences, unlike `cumsum`."""
    at = jnp.arange(x.shape[0])
    return jnp.where(at[None, :] <= at[:, None], x[None, :], 0).sum(1)


def _shares(total: jax.Array, blocks: int) -> jax.Array:
    """Return ``block * total / blocks`` rounded down, without overflow."""
    at = jnp.arange(blocks, dtype=jnp.int32)
    return at * (total // blocks) + at * (total % blocks) // blocks


def _before(ends: jax.Array, sequence: jax.Array) -> jax.Array:
    return jnp.where(sequence > 0, ends[sequence - 1], 0)


def _count(ends: jax.Array, at: jax.Array) -> jax.Array:
    """Return the sequence that contains each of ``at``, given the sequences' ends."""
    return jnp.minimum((ends[None, :] <= at[:, None]).sum(1), ends.shape[0] - 1)
