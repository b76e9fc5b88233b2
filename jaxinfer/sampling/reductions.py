"""Reductions over the vocabulary that are fast on a CPU and bitwise identical in every row.

XLA:CPU does not vectorise a float sum over the minor axis. So a row of V logits is reshaped to [blocks, LANES] and
reduced over the blocks first: one vector operation per block.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from pallas_kernels.choice import lowering_target

LANES = 128
"""Lanes of a block. Vocabularies that are no multiple of it are padded, which costs one copy."""

Lanes = Float32[Array, "rows blocks lanes"]


def to_lanes(values: Float32[Array, "rows vocab"], fill: float) -> Lanes:
    """Put token ``v`` at block ``v // LANES``, lane ``v % LANES``; the end is padded with ``fill``."""
    rows, vocab = values.shape
    padded = jnp.pad(values, ((0, 0), (0, -vocab % LANES)), constant_values=fill)
    return padded.reshape(rows, -1, LANES)


def total(values: Lanes) -> Float32[Array, " rows"]:
    """Sum each row. Monotone also in floating point: if no element grows, no sum grows."""
    return jnp.sum(jnp.sum(values, axis=1), axis=-1)


def count(mask: Bool[Array, "rows blocks lanes"]) -> Float32[Array, " rows"]:
    """Count true values, exactly up to 2**24. Float sums vectorise better than integer sums."""
    return total(mask.astype(jnp.float32))


def argmax(values: Float32[Array, "rows vocab"]) -> tuple[Float32[Array, " rows"], Int32[Array, " rows"]]:
    """Return the largest value and its first index: two passes that vectorise, unlike the one of ``jnp.argmax``."""
    vocab = values.shape[-1]
    peak = jnp.max(values, axis=-1)
    index = jnp.arange(vocab, dtype=jnp.float32)
    first = jnp.min(jnp.where(values == peak[:, None], index, vocab - 1), axis=-1)
    return peak, first.astype(jnp.int32)


def argmax_of_made(values: Lanes) -> tuple[Float32[Array, " rows"], Int32[Array, " rows"]]:
    """Return the largest value and its first token, as `argmax` does, of values (no NaN) that are computed for it.

    A GPU takes one pass: the fusion that makes the values reduces them, and does not store them for a second one.
    """
    flat = values.reshape(len(values), -1)
    if lowering_target().platform == "cpu":
        return argmax(flat)

    def larger(one: tuple[jax.Array, jax.Array], other: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        second = (other[0] > one[0]) | ((other[0] == one[0]) & (other[1] < one[1]))
        return jnp.where(second, other[0], one[0]), jnp.where(second, other[1], one[1])

    index = lax.broadcasted_iota(jnp.int32, flat.shape, 1)
    return lax.reduce((flat, index), (-jnp.inf, jnp.iinfo(jnp.int32).max), larger, (1,))
