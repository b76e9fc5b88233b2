"""Units of work of a CTA of the MLA kernel, in the order of both producer and consumers."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.mla_attention.mosaic.operands import PAIR, Gmem, Shape


class Place(NamedTuple):
    """The index of a unit. Traced scalars."""

    sequence: Any
    tile: Any
    split: Any


class Unit(NamedTuple):
    """A unit of work: one split of the keys that one tile of queries sees. Traced scalars."""

    sequence: Any
    tile: Any
    split: Any
    splits: Any  # splits of the sequence
    start: Any  # position of the sequence's first query
    length: Any
    high: Any  # one past the last key that any query of the tile sees
    first: Any  # first pair of key blocks
    steps: Any  # pairs of key blocks


def run_of(shape: Shape, gmem: Gmem) -> tuple[Place, Any]:
    """Return the first unit of this CTA, and its number of units."""
    if not shape.split:  # tiles in descending order of position: those with the most keys start first
        tile = shape.tile_count - 1 - lax.axis_index("tile")
        return Place(lax.axis_index("sequence"), tile, jnp.int32(0)), jnp.int32(1)
    sequence, within, count = (gmem.plan[i, lax.axis_index("block")] for i in range(3))
    in_tile = _splits(shape, gmem.lengths[sequence])
    return Place(sequence, lax.div(within, in_tile), lax.rem(within, in_tile)), count


def unit_at(shape: Shape, gmem: Gmem, place: Place) -> Unit:
    start, length = gmem.starts[place.sequence], gmem.lengths[place.sequence]
    heads = jnp.int32(shape.heads)
    row = place.tile * shape.tile_rows
    first_token, last_token = lax.div(row, heads), lax.div(row + (shape.tile_rows - 1), heads)
    high = jnp.minimum(length, start + jnp.minimum(last_token, shape.chunk - 1) + 1)
    high = jnp.where(start + first_token < length, high, 0)  # else all of the tile is padding
    first, end = jnp.int32(0), pl.cdiv(high, jnp.int32(PAIR))
    if shape.split:
        first = place.split * (shape.tiles.keys_per_split // PAIR)
        end = jnp.minimum(end, first + shape.tiles.keys_per_split // PAIR)
    splits = _splits(shape, length)
    return Unit(*place, splits, start, length, high, first, jnp.maximum(end - first, 0))


def after(shape: Shape, unit: Unit) -> Place:
    """Return the next split, else tile, else sequence (the last sequence's successor is never visited)."""
    tile_ends = unit.split == unit.splits - 1
    tile = jnp.where(tile_ends, unit.tile + 1, unit.tile)
    sequence_ends = tile == shape.tile_count
    sequence = jnp.where(sequence_ends, jnp.minimum(unit.sequence + 1, shape.sequences - 1), unit.sequence)
    return Place(sequence, jnp.where(sequence_ends, 0, tile), jnp.where(tile_ends, 0, unit.split + 1))


def _splits(shape: Shape, length: Any) -> Any:
    """Return the number of splits; a sequence without keys has one without steps, which writes the zeros."""
    if not shape.split:
        return jnp.int32(1)
    return jnp.maximum(pl.cdiv(length, jnp.int32(shape.tiles.keys_per_split)), 1)
