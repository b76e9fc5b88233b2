"""Typical acceptance of drafts (Cai et al. 2024, Medusa): a draft that is likely enough replaces the drawn token.

Lossy: the output depends on the drafts. Only rows of slots that request it and draw randomly are affected: a greedy row
keeps its likeliest token.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int, Int32

from jaxinfer.sampling.drafts import DraftRows
from jaxinfer.sampling.reductions import LANES, argmax, total
from jaxinfer.sampling.select import GREEDY_BELOW, weights_of
from jaxinfer.sampling.slots import SlotParams

EPSILON, DELTA = 0.09, 0.3
"""Medusa's ``posterior_threshold`` and ``posterior_alpha``, as in its ``medusa_generate``."""
_TINY = 1e-5  # added to a probability before its logarithm: Medusa's value

Logits = Float32[Array, "rows vocab"]


def take_typical(
    tokens: Int32[Array, " rows"], logits: Logits, rows: SlotParams, drafts: DraftRows
) -> Int32[Array, " rows"]:
    """Replace ``tokens`` in requesting rows by the draft fed at the next position, where it is typical.

    The draft then *is* the sampled token of the row, and everything after (draft acceptance, sampler state, log
    probabilities) is unchanged.

    Args:
        tokens: drawn token of each row.
        logits: processed logits, the same as for the draw.
        rows: parameters of each row.
    """
    asks = drafts.active & rows.typical & (rows.temperature >= GREEDY_BELOW)
    follows = drafts.behind().T & (drafts.positions == drafts.positions[:, None] + 1) & asks[:, None]

    def some() -> Int32[Array, " rows"]:
        chances, least = posterior(logits, drafts.fed, rows, asks)
        taken = jnp.where(follows & (chances > least[:, None]), chances, 0)
        best = jnp.argmax(taken, axis=1)  # the likeliest of several
        return jnp.where(jnp.any(taken > 0, axis=1), drafts.fed[best].astype(tokens.dtype), tokens)

    return lax.cond(jnp.any(follows), some, lambda: tokens)


def posterior(
    logits: Logits,
    candidates: Int[Array, " candidates"],
    rows: SlotParams,
    asks: Bool[Array, " rows"],
    epsilon: float = EPSILON,
    delta: float = DELTA,
) -> tuple[Float32[Array, "rows candidates"], Float32[Array, " rows"]]:
    """Return each candidate's probability per row, after temperature, min_p, top_k and top_p, and the bound that it
    must exceed to be typical: ``min(epsilon, delta * exp(-entropy))``. Banned tokens have probability 0."""
    weights = weights_of(logits, argmax(logits)[0], rows, asks)
    chances = weights / jnp.maximum(total(weights), jnp.finfo(jnp.float32).tiny)[:, None, None]
    entropy = -total(chances * jnp.log(chances + _TINY))
    where = jnp.clip(candidates, 0, logits.shape[1] - 1)
    return chances[:, where // LANES, where % LANES], jnp.minimum(epsilon, delta * jnp.exp(-entropy))
