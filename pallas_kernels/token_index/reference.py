"""The equation of the sparse indexer (DeepSeek-V3.2-Exp, "lightning indexer") in plain jnp.

A token has one index key, a query a few small heads and a weight for each. The score of a key is ``sum over heads of
weight * relu(q . k)``, and a query attends to the ``k`` visible keys of the highest scores alone. Of equal scores (a
rectified product is often 0) the earlier key is taken, so that a choice follows from the scores, whoever computes it.

DeepSeek's code turns queries and keys by a Hadamard matrix before it rounds them to 8 bits, each by one scale. The
matrix is orthogonal and changes no product of unrounded numbers; here nothing is turned.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32


class Index(NamedTuple):
    """What chooses the keys of some tokens: their index queries, each head's weight, and their own index keys."""

    q: Float[Array, "*batch heads dim"]
    weights: Float[Array, "*batch heads"]
    k: Float[Array, "*batch dim"]


def scores(
    q: Float[Array, "*batch queries heads dim"],
    weights: Float[Array, "*batch queries heads"],
    keys: Float[Array, "*batch keys dim"],
) -> Float[Array, "*batch queries keys"]:
    """Scores of all keys for all queries, float32."""
    q, keys = q.astype(jnp.float32), keys.astype(jnp.float32)
    products = jnp.einsum("...qhd,...kd->...qhk", q, keys, precision=lax.Precision.HIGHEST)
    weighed = jax.nn.relu(products) * weights.astype(jnp.float32)[..., None]
    return weighed.sum(-2)


def top_keys(
    scores: Float[Array, "*batch keys"], visible: Bool[Array, "*batch keys"], k: int
) -> Bool[Array, "*batch keys"]:
    """Choose the ``k`` visible keys of the highest scores, of equal ones the first; all, where there are not as many.

    The k-th score is found bit by bit, by counting: no sort, and the same choice whatever lies behind the last key.
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
    """Integers above 0 in the order of the scores; 0 and -0 are one number."""
    bits = lax.bitcast_convert_type(jnp.where(scores == 0, 0.0, scores), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def places(chosen: Bool[Array, "*batch keys"], k: int) -> Int[Array, "*batch k"]:
    """Positions of the chosen keys, ascending; behind the last of them the number of keys."""
    counted = jnp.cumsum(chosen, axis=-1, dtype=jnp.int32)
    wanted = jnp.arange(1, k + 1, dtype=jnp.int32)

    def found(row: jax.Array) -> jax.Array:
        return jnp.searchsorted(row, wanted).astype(jnp.int32)

    return jax.vmap(found)(counted.reshape(-1, counted.shape[-1])).reshape(*chosen.shape[:-1], k)
