"""Several continuations of each slot, chosen by how probable a draft head finds them (dynamic trees, EAGLE-2,
arXiv:2406.16858). The first one is the head's own draft, whatever the others are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def best(
    scores: Float[Array, "slots choices"], count: int
) -> tuple[Float[Array, "slots count"], Int[Array, "slots count"]]:
    """The ``count`` largest scores of each slot and their places. They are few: no sort."""
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
    """The best ``count`` paths that are a token longer.

    Args:
        logits: of the token behind each path; ``scores``: log probabilities of the paths.
        own: the token behind the first path that the first one goes on with.

    Returns:
        For each: the path that it continues, its token, its log probability. The first is the first path's own.
    """
    chances = jax.nn.log_softmax(logits.astype(jnp.float32)) + scores[..., None]
    slots, paths, vocab = chances.shape
    first = jnp.take_along_axis(chances[:, 0], own[:, None], axis=-1)
    rest = chances.at[jnp.arange(slots), 0, own].set(-jnp.inf)
    # The best of each path first: a search of all at once would be as long as all vocabularies together.
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
    """The path of ``own`` tokens and the ``count - 1`` likeliest that differ from it in one place, where the logits of
    a token do not depend on those before it (Medusa)."""
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
