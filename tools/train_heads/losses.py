"""Losses of draft heads against the target's distribution of the tokens to draft.

EAGLE-3 learns from its own states ("training-time test", arXiv:2503.01840, 3.2): in turn j the layer reads the states
of turn j - 1, one position later, and attends to the same states as when drafting.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxinfer.layers.attention import Attend, causal_attend
from jaxinfer.models.head import shared
from jaxinfer.models.heads.eagle import MAP
from jaxinfer.models.model import Model
from jaxinfer.types import LayerSpec
from tools.train_heads.recipes import HeadRecipe

Tree = Any
Guessed = list[tuple[jax.Array, jax.Array]]
"""Logits of each guess, and the target's log-probabilities there: both [rows, places, tokens]."""


def states(target: Model, head: Model, tokens: Int[Array, "rows time"]) -> tuple[jax.Array, jax.Array]:
    """Return the features that the head reads at each position, and the target's logits there."""
    module: Any = target.module.clone(taps=head.config.taps)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    bound = {"params": target.params}
    (hidden, _), sown = module.apply(bound, tokens, positions, causal_attend, None, mutable=["features"])
    features = jnp.concatenate(sown["features"]["taps"], -1) if head.config.taps else hidden
    return features, module.apply(bound, hidden, method="head")


def guessed(head: Model, params: Tree, target: Model, tokens: Int[Array, "rows time"], count: int) -> Guessed:
    """Return the head's guesses after every position of ``tokens``, given that its previous guesses were accepted."""
    features, logits = states(target, head, tokens)
    theirs = _logprobs(logits[:, 1:], head)
    if head.module.recurrent:
        return _in_turns(head, params, target, tokens, features, theirs, count)
    all_guesses: Any = head.module.apply({"params": params}, features, method="guesses")
    ahead = [theirs[:, place:] for place in range(count)]
    return [(all_guesses[:, : each.shape[1], place], each) for place, each in enumerate(ahead)]


def _in_turns(
    head: Model, params: Tree, target: Model, tokens: jax.Array, features: jax.Array, theirs: jax.Array, count: int
) -> Guessed:
    bound = {"params": {**params, **shared(target.params, head.config)}}
    module: Any = head.module
    whole: Any = module.clone(config=dataclasses.replace(head.config, vocab_size=head.config.draft_vocab))
    following = tokens[:, 1:]
    positions = jnp.broadcast_to(jnp.arange(following.shape[1]), following.shape)
    entering = module.apply(bound, features[:, :-1], method="first")
    found, cache = [], ()
    for turn in range(count):
        left, (cache,) = module.apply(bound, following, entering, positions, turn_attend(turn), [cache])
        found.append((whole.apply(bound, left[:, turn:], method="head"), theirs[:, turn:]))
        entering = jnp.roll(left, 1, axis=1)
    return found


def _logprobs(logits: Float[Array, "... vocab"], head: Model) -> Float[Array, "... draft_vocab"]:
    """Return log-probabilities of the tokens in the head's vocabulary: other tokens need not be learnt."""
    logprobs = jax.nn.log_softmax(logits)
    if MAP not in head.params:
        return logprobs
    tokens = jnp.flatnonzero(head.params[MAP] >= 0, size=head.config.draft_vocab)
    return logprobs[..., tokens]


def turn_attend(turn: int) -> Attend:
    """Make the attention for drafting ``turn`` positions after the first one, for all positions at once.

    The cache has keys and values of earlier turns. A position sees the first turn's up to ``turn`` positions before it,
    which were made from the target's features, then one of each later turn: the head's own.
    """

    def attend(
        q: Float[Array, "rows time heads head_dim"],
        k: Float[Array, "rows time kv_heads head_dim"] | None,
        v: Float[Array, "rows time kv_heads head_dim"] | None,
        cache: Any,
        layer: LayerSpec,
        scale: float,
        sinks: Float[Array, " heads"] | None = None,
        chosen: None = None,
    ) -> tuple[Float[Array, "rows time heads head_dim"], Any]:
        del layer, sinks, chosen
        assert k is not None
        made = (*cache, (k, v))
        (keys, values), later = made[0], [_shifted(each, turn - 1 - place) for place, each in enumerate(made[1:])]
        grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3]) * scale
        time = jnp.arange(q.shape[1])
        scores = jnp.einsum("rqhgd,rkhd->rqhgk", grouped, keys)
        scores = jnp.where((time[:, None] - time >= turn)[:, None, None], scores, -jnp.inf)
        own = [jnp.einsum("rqhgd,rqhd->rqhg", grouped, each)[..., None] for each, _ in later]
        weights = jax.nn.softmax(jnp.concatenate([scores, *own], -1), -1)
        mixed = jnp.einsum("rqhgk,rkhd->rqhgd", weights[..., : len(time)], values)
        for place, (_, each) in enumerate(later):
            mixed = mixed + weights[..., len(time) + place, None] * each[..., None, :]
        return mixed.reshape(q.shape), made

    return attend


def _shifted(pair: tuple[jax.Array, jax.Array], places: int) -> tuple[jax.Array, jax.Array]:
    """Shift keys and values by ``places`` positions; the wrapped ones at the start are not read."""
    return jnp.roll(pair[0], places, axis=1), jnp.roll(pair[1], places, axis=1)


def loss(head: Model, target: Model, recipe: HeadRecipe) -> Callable[[Tree, Tree, jax.Array], jax.Array]:
    """Make the loss of (params, target's params, tokens): cross-entropy with the target, discounted by guess."""
    weights = [recipe.discount**place for place in range(recipe.guesses)]

    def total(params: Tree, known: Tree, tokens: Int[Array, "rows time"]) -> jax.Array:
        pairs = guessed(head, params, target.replace(params=known), tokens, recipe.guesses)
        nats = [weight * _nats(*pair).mean() for weight, pair in zip(weights, pairs, strict=True)]
        return jnp.stack(nats).sum() / sum(weights)

    return total


def _nats(ours: Float[Array, "... n"], theirs: Float[Array, "... n"]) -> Float[Array, "..."]:
    return -(jnp.exp(theirs) * jax.nn.log_softmax(ours)).sum(-1)


def measure(head: Model, params: Tree, target: Model, tokens: jax.Array, count: int) -> jax.Array:
    """Return means over all positions by guess, [3, guesses]: cross-entropy (nats), how often the likeliest token in
    the head's vocabulary is the target's, and the probability that draws agree."""
    found = []
    for ours, theirs in guessed(head, params, target, tokens, count):
        same = (jnp.argmax(ours, -1) == jnp.argmax(theirs, -1)).mean()
        overlap = jnp.minimum(jax.nn.softmax(ours), jnp.exp(theirs)).sum(-1).mean()
        found.append(jnp.stack([_nats(ours, theirs).mean(), same, overlap]))
    return jnp.stack(found, axis=1)
