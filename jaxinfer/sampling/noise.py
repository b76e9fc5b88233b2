"""Noise of a draw: a function of seed, sample index, position and token, the same for a model and its drafter.

A token is drawn by a race (the Gumbel-max trick): token v arrives at time E[v] / weight[v], where E[v] is exponential,
and the first one wins, with probability weight[v] / sum(weight). In logarithms this is the largest logit / temperature
+ Gumbel noise. Two distributions with the same noise mostly draw the same token, at least with probability
(1 - d) / (1 + d) for a total variation distance d (Daliri et al. 2024, arXiv:2408.07978).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32, UInt32

from jaxinfer.sampling.reductions import Lanes

PURPOSE_DRAW = 0
"""Separates the sampler's randomness from other uses of a request's seed and positions."""

Words = UInt32[Array, "rows 2"]


def random_words(
    seed: Words, sample_index: Int32[Array, " rows"], positions: Int32[Array, " rows"], purpose: int
) -> Words:
    """Return 64 random bits per row: the Threefry-2x32 of its seed folded with the other arguments.

    The key data of the last fold are the bits, so that they do not depend on the configuration of jax's generators.
    """

    def row(seed: UInt32[Array, " 2"], index: Int32[Array, ""], position: Int32[Array, ""]) -> UInt32[Array, " 2"]:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        for word in (index, position, purpose):
            key = jax.random.fold_in(key, word)
        return jax.random.key_data(key)

    return jax.vmap(row)(seed, sample_index, positions)


def exponentials(words: Words, blocks: int, lanes: int) -> Lanes:
    """Return exponentially distributed numbers of mean 1, one for each token: between 2**-57 and 24 ln 2.

    A uniform number has 32 bits of the token's hash, which differ for all tokens of a row, and below them 24 bits of
    the row: so the smallest ones, which win, are exact to float32, and a token of any probability above 2**-57 has its
    share.
    """
    tokens = lax.broadcasted_iota(jnp.uint32, (1, blocks, lanes), 1) * lanes
    tokens += lax.broadcasted_iota(jnp.uint32, (1, blocks, lanes), 2)
    first, second = words[:, 0, None, None], words[:, 1, None, None]
    below = ((_mixed(first) >> 8).astype(jnp.float32) + 0.5) * 2.0**-24
    hashed = _mixed(_mixed(tokens ^ first) ^ second).astype(jnp.float32)
    return -jnp.log1p(-jnp.minimum((hashed + below) * 2.0**-32, 1 - 2.0**-24))


def _mixed(word: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """Permute 32-bit words: the multiply-xorshift hash of least bias in github.com/skeeto/hash-prospector's search."""
    word = (word ^ word >> 16) * jnp.uint32(0x21F0AAAD)
    word = (word ^ word >> 15) * jnp.uint32(0x735A2D97)
    return word ^ word >> 15
