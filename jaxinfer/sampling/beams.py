"""Draft paths of each slot, chosen by the draft head's probabilities (dynamic trees, EAGLE-2, arXiv:2406.16858). The
first path is always the head's own draft."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def best(
    scores: Float[Array, "slots choices"], count: int
) -> tuple[Float[Array, "slots count"], Int[Array, "slots count"]]:
    """Return the ``count`` largest scores of each slot and their indices. ``count`` is small: no sort."""
    values, places = [], []
    for _ in range(count):
        place = jnp.argmax(scores, axis=-1)
        values.append(jnp.take_along_axis(scores, place[:, None], axis=-1)[:, 0])
        places.append(place)
        scores = jnp.where(jnp.arange(scores.shape[-1]) == place[:, None], -jnp.inf, scores)
    return jnp.stack(values, axis=-1), jnp.stack(places, axis=-1)


def expand(
    logits: Float[Array, "slots paths vocab"],
    scores: Float[Array, "slots paths"],
    own: Int[Array, " slots"],
    count: int,
) -> tuple[Int[Array, "slots count"], Int[Array, "slots count"], Float[Array, "slots count"]]:
    """Return the best ``count`` paths that are one token longer.

    Args:
        logits: logits of the token after each path; ``scores``: log probabilities of the paths.
        own: token with which the first path continues as the first one.

    Returns:
        For each path: its parent path, its token, its log probability. The first continues the first path with ``own``.
    """
    chances = jax.nn.log_softmax(logits.astype(jnp.float32)) + scores[..., None]
    slots, paths, vocab = chances.shape
    first = jnp.take_along_axis(chances[:, 0], own[:, None], axis=-1)
    rest = chances.at[jnp.arange(slots), 0, own].set(-jnp.inf)
    # Top tokens of each path first: one search would be as long as all vocabularies together.
    values, tokens = best(rest.reshape(slots * paths, vocab), count - 1)
    found, places = best(values.reshape(slots, -1), count - 1)
    parents, others = places // (count - 1), jnp.take_along_axis(tokens.reshape(slots, -1), places, axis=-1)
    return (
        jnp.concatenate([jnp.zeros_like(own)[:, None], parents], axis=-1),
        jnp.concatenate([own[:, None], others], axis=-1),
        jnp.concatenate([first, found], axis=-1),
    )


def deviations(
    logits: Float[Array, "slots depth vocab"], own: Int[Array, "slots depth"], count: int
) -> Int[Array, "slots count depth"]:
    """Return the path of ``own`` tokens and the ``count - 1`` likeliest paths that differ from it in one token, where
    the logits of a token do not depend on earlier ones (Medusa)."""
    chances = jax.nn.log_softmax(logits.astype(jnp.float32))
    slots, depth, vocab = chances.shape
    of_own = jnp.take_along_axis(chances, own[..., None], axis=-1)[..., 0]
    before = jnp.cumsum(of_own, axis=-1) - of_own
    places = jnp.arange(slots)[:, None], jnp.arange(depth), own
    rest = chances.at[places].set(-jnp.inf) + before[..., None]
    values, tokens = best(rest.reshape(slots * depth, vocab), count - 1)
    _, chosen = best(values.reshape(slots, -1), count - 1)
    others = jnp.take_along_axis(tokens.reshape(slots, -1), chosen, axis=-1)
    differs = (chosen // (count - 1))[..., None] == jnp.arange(depth)
    paths = jnp.where(differs, others[..., None], own[:, None])
    return jnp.concatenate([own[:, None], paths], axis=1)
