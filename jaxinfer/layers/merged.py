"""Tokens of which some are rows of images."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxinfer.parallel.tokens import own_tokens


class Merged(NamedTuple):
    """Input of a `Decoder` in place of token ids.

    Attributes:
        rows: row of ``images`` that takes the place of a token's embedding; -1: the token is text.
        images: outputs of a vision tower: the embedding, and what is added to the hidden states after each of the first
            decoder layers (deepstack).
    """

    tokens: Int[Array, "*batch"]
    rows: Int[Array, "*batch"]
    images: Float[Array, "rows width"]

    def embedded(self, text: Float[Array, "*batch d"]) -> Float[Array, "*batch d"]:
        """Return embeddings: those of ``text``, or rows of images."""
        return jnp.where(self.rows[..., None] >= 0, self._columns(0, text.shape[-1]).astype(text.dtype), text)

    def deep(self, layer: int, x: Float[Array, "*batch d"]) -> Float[Array, "*batch d"]:
        """Return the hidden states after a layer, with the rows of images for it added."""
        d = x.shape[-1]
        if (layer + 2) * d > self.images.shape[-1]:
            return x
        added = jnp.where(self.rows[..., None] >= 0, self._columns(layer + 1, d).astype(x.dtype), 0)
        return x + own_tokens(added)

    def _columns(self, part: int, d: int) -> Array:
        return self.images[:, part * d : (part + 1) * d][jnp.maximum(self.rows, 0)]
