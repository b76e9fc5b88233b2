"""The online softmax (Milakov & Gimelshein 2018) of the XLA paths, block by block of keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

_LOWEST = -1e30


class Softmax(NamedTuple):
    """Running maximum, normaliser and weighted sum of the values, all float32. Scores are in powers of two.

    The maximum is rounded up to an integer, so that rescaling is exact: results are bitwise identical whether or not a
    compiler contracts the multiplication and the addition into one instruction, which differs from program to program.
    """

    top: jax.Array
    total: jax.Array
    mixed: jax.Array

    @classmethod
    def of_nothing(cls, shape: tuple[int, ...]) -> Softmax:
        """Return the softmax before the first block; ``shape`` is the shape of the result."""
        lead = shape[:-1]
        zeros = (jnp.zeros(each, jnp.float32) for each in (lead, shape))
        return cls(jnp.full(lead, _LOWEST, jnp.float32), *zeros)

    def add(self, scores: jax.Array, visible: jax.Array, weigh: Callable[[jax.Array], jax.Array]) -> Softmax:
        """Fold in a block of scores (last axis: keys); ``weigh`` maps weights to the weighted sum of its values."""
        scores = jnp.where(visible, scores, -jnp.inf)
        top = jnp.maximum(self.top, jnp.ceil(scores.max(-1)))
        weights, decay = jnp.exp2(scores - top[..., None]), _power_of_two(self.top - top)
        mixed = self.mixed * decay[..., None] + weigh(weights)
        return Softmax(top, self.total * decay + weights.sum(-1), mixed)

    def result(self) -> jax.Array:
        return self.mixed / jnp.where(self.total > 0, self.total, 1.0)[..., None]


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """Return exactly 2**exponent of integers up to 0, by their bits; 0 if it would not be a normal number."""
    return lax.bitcast_convert_type((jnp.maximum(exponent, -127).astype(jnp.int32) + 127) << 23, jnp.float32)
