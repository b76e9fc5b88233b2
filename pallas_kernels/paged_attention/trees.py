"""Token trees in the format of kernels."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

MOST_IN_TREE = 32  # tokens: the bits of a word


def tree_words(
    tree: Bool[Array, "sequences chunk chunk"],
) -> tuple[Int32[Array, "sequences chunk"], Int32[Array, "sequences chunk"]]:
    """Pack the tokens that each token sees as bits (the first is the lowest), and return its depth: the root 0."""
    bits = jnp.arange(tree.shape[-1], dtype=jnp.uint32)
    words = (tree.astype(jnp.uint32) << bits).sum(-1, dtype=jnp.uint32)
    return lax.bitcast_convert_type(words, jnp.int32), tree.sum(-1, dtype=jnp.int32) - 1
