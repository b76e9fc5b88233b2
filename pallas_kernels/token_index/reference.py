"""Reference of the sparse indexer (DeepSeek-V3.2-Exp, "lightning indexer") in jnp.

A token has one index key, a query a few small heads and a weight for each. The score of a key is ``sum over heads of
weight * relu(q . k)``, and a query attends only to the ``k`` visible keys with the highest scores. Ties (a rectified
product is often 0) go to the earlier key, so that the choice depends on the scores alone.

DeepSeek's code rotates queries and keys by a Hadamard matrix before it rounds them to 8 bits, each by one scale. The
matrix is orthogonal and changes no product of unrounded numbers; it is not applied here.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32


class Index(NamedTuple):
    """Inputs of the choice for some tokens: their index queries, each head's weight, and their own index keys."""

    q: Float[Array, "*batch heads dim"]
    weights: Float[Array, "*batch heads"]
    k: Float[Array, "*batch dim"]


def scores(
    q: Float[Array, "*batch queries heads dim"],
    weights: Float[Array, "*batch queries heads"],
    keys: Float[Array, "*batch keys dim"],
) -> Float[Array, "*batch queries keys"]:
    """Compute scores of all keys for all queries, float32."""
    q, keys = q.astype(jnp.float32), keys.astype(jnp.float32)
    products = jnp.einsum("...qhd,...kd->...qhk", q, keys, precision=lax.Precision.HIGHEST)
    weighed = jax.nn.relu(products) * weights.astype(jnp.float32)[..., None]
    return weighed.sum(-2)


def top_keys(
    scores: Float[Array, "*batch keys"], visible: Bool[Array, "*batch keys"], k: int
) -> Bool[Array, "*batch keys"]:
    """Choose the ``k`` visible keys with the highest scores, ties to the first; all if there are fewer.

    The k-th score is found bit by bit, by counting: no sort, and the choice is independent of padding after the keys.
    """
    ordered = jnp.where(visible, _ordered(scores), 0)

    def bit(index: jax.Array, least: jax.Array) -> jax.Array:
        higher = least | (jnp.uint32(1) << (31 - index).astype(jnp.uint32))
        enough = (ordered >= higher[..., None]).sum(-1, dtype=jnp.int32) >= k
        return jnp.where(enough, higher, least)

    least = lax.fori_loop(0, 32, bit, jnp.zeros(scores.shape[:-1], jnp.uint32))[..., None]
    above, equal = ordered > least, ordered == least
    room = k - above.sum(-1, dtype=jnp.int32, keepdims=True)
    return visible & (above | (equal & (jnp.cumsum(equal, axis=-1, dtype=jnp.int32) <= room)))


def _ordered(scores: Float[Array, "*batch keys"]) -> UInt32[Array, "*batch keys"]:
    """Convert scores to integers above 0 in the same order; 0 and -0 are one number."""
    bits = lax.bitcast_convert_type(jnp.where(scores == 0, 0.0, scores), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def places(chosen: Bool[Array, "*batch keys"], k: int) -> Int[Array, "*batch k"]:
    """Return positions of the chosen keys, ascending, padded with the number of keys."""
    counted = jnp.cumsum(chosen, axis=-1, dtype=jnp.int32)
    wanted = jnp.arange(1, k + 1, dtype=jnp.int32)

    def found(row: jax.Array) -> jax.Array:
        return jnp.searchsorted(row, wanted).astype(jnp.int32)

    return jax.vmap(found)(counted.reshape(-1, counted.shape[-1])).reshape(*chosen.shape[:-1], k)
