"""Weights that record statistics of their inputs, for calibration.

An `Observed` replaces an array inside a function that is traced once and returns the statistics. It never crosses the
boundary of a compiled function, so the function stays pure: statistics are ordinary results.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.grouped_matmul import Groups

# Orientation of the array: [in, *out], [*out, in], or [experts, *out, in].
Orientation = Literal["in first", "in last", "experts"]


class InputStatistics(NamedTuple):
    """Statistics of the vectors multiplied with a weight, float32; for expert weights, per expert.

    Attributes:
        rows: number of vectors.
        gram: sum of x x^T.
        largest: largest absolute value of each input.
        total: sum of the absolute values of each input.
    """

    rows: Float[Array, "*experts"]
    gram: Float[Array, "*experts k k"]
    largest: Float[Array, "*experts k"]
    total: Float[Array, "*experts k"]

    def merged(self, other: InputStatistics) -> InputStatistics:
        """Return the statistics of both sets of vectors."""
        largest = jnp.maximum(self.largest, other.largest)
        return InputStatistics(self.rows + other.rows, self.gram + other.gram, largest, self.total + other.total)


Note = Callable[[Orientation, InputStatistics], None]


@dataclasses.dataclass(frozen=True)
class Observed:
    """A weight array with a callback that records its inputs."""

    array: jax.Array
    note: Note

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def against(self, x: Float[Array, "... k"], lies: Orientation) -> jax.Array:
        """Record inputs and return the array."""
        self.note(lies, of_rows(x.reshape(-1, x.shape[-1])))
        return self.array

    def against_tiles(self, x: Float[Array, "tiles rows k"], groups: Groups) -> jax.Array:
        self.note("experts", of_tiles(x, groups, self.array.shape[0]))
        return self.array


def of_rows(x: Float[Array, "rows k"]) -> InputStatistics:
    x = x.astype(jnp.float32)
    absolute = jnp.abs(x)
    gram = jnp.matmul(x.T, x, precision=lax.Precision.HIGHEST)
    return InputStatistics(jnp.float32(x.shape[0]), gram, absolute.max(axis=0), absolute.sum(axis=0))


def of_tiles(x: Float[Array, "tiles rows k"], groups: Groups, experts: int) -> InputStatistics:
    """Return the statistics of each expert's rows; empty rows are zeros and are only excluded from the count."""
    tiles, _, k = x.shape
    x = x.astype(jnp.float32)
    owners = jnp.arange(tiles) if groups.experts is None else groups.experts
    held = (groups.entries < groups.places.shape[0]).sum(axis=1).astype(jnp.float32)
    absolute = jnp.abs(x)

    def add(i: jax.Array, gram: jax.Array) -> jax.Array:
        return gram.at[owners[i]].add(jnp.matmul(x[i].T, x[i], precision=lax.Precision.HIGHEST))

    # one tile at a time: a Gram matrix per tile would take many times the memory of those of the experts
    gram = lax.fori_loop(0, tiles, add, jnp.zeros((experts, k, k), jnp.float32))
    count = jnp.zeros(experts, jnp.float32).at[owners].add(held)
    largest = jnp.zeros((experts, k), jnp.float32).at[owners].max(absolute.max(axis=1))
    return InputStatistics(count, gram, largest, jnp.zeros((experts, k), jnp.float32).at[owners].add(absolute.sum(1)))
