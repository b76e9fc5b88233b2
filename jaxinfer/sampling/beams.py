"""Draft paths of each slot, chosen by the draft head's probabilities (dynamic trees, EAGLE-2, arXiv:2406.16858). The
first path is always the head's own draft."""

from __future__ import annotations

from collections.abc import Sequence

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
    count: int,
) -> tuple[Int[Array, "slots count"], Int[Array, "slots count"], Float[Array, "slots count"]]:
    """Return the best ``count`` paths that are one token longer.

    Args:
        logits: logits of the token after each path, with the noise of the draw; ``scores``: log probabilities of the
            paths, as these logits say.

    Returns:
        For each path: its parent path, its token, its log probability. The first continues the first path with its
        largest logit.
    """
    chances = jax.nn.log_softmax(logits.astype(jnp.float32)) + scores[..., None]
    slots, paths, vocab = chances.shape
    own = jnp.argmax(logits[:, 0], axis=-1).astype(jnp.int32)
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


def deviations(logits: Float[Array, "slots depth vocab"], count: int) -> Int[Array, "slots count depth"]:
    """Return the path of the largest logits and the ``count - 1`` likeliest paths that differ from it in one token,
    where the logits of a token do not depend on earlier ones (Medusa)."""
    chances = jax.nn.log_softmax(logits.astype(jnp.float32))
    slots, depth, vocab = chances.shape
    own = jnp.argmax(logits, axis=-1).astype(jnp.int32)
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


def ranked(logits: Float[Array, "slots depth vocab"], tree: Sequence[Sequence[int]]) -> Int[Array, "slots paths depth"]:
    """Return the tokens at these ranks (Medusa's static trees): ``tree[path][depth]`` is 0 for the largest logit."""
    slots, depth, vocab = logits.shape
    ranks = jnp.asarray(tree, jnp.int32)
    _, tokens = best(logits.reshape(slots * depth, vocab), 1 + max(map(max, tree)))
    return tokens.reshape(slots, depth, -1)[:, jnp.arange(depth), ranks].astype(jnp.int32)
