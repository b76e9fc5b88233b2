"""The sampling step on the device: processors, token selection, log probabilities, state update."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from jaxinfer.sampling.drafts import DraftRows, advance, params_of_rows, state_of_rows
from jaxinfer.sampling.logprobs import Logprobs, wanted_logprobs
from jaxinfer.sampling.processors import process, within
from jaxinfer.sampling.reductions import LANES, argmax, to_lanes, total
from jaxinfer.sampling.select import GREEDY_BELOW, perturbed, select, weights_of
from jaxinfer.sampling.slots import SlotParams, SlotState, first_rows
from jaxinfer.sampling.training import Asks, Extras, draw_observed, observe

NOT_FINITE = -1
"""Token value of a row with NaN or infinite logits."""


class Typical(NamedTuple):
    """Numbers of typical acceptance: a draft passes with a probability above ``min(threshold, alpha * exp(-entropy))``.

    The defaults are Medusa's ``posterior_threshold`` and ``posterior_alpha``, as in its ``medusa_generate``.
    """

    threshold: float = 0.09
    alpha: float = 0.3


TYPICAL = Typical()


class Sampled(NamedTuple):
    """Sampled token of each row, or `NOT_FINITE`. ``logprobs`` are zeros in rows that did not request them. ``extras``:
    outputs for training; None: the step has none."""

    tokens: Int32[Array, " rows"]
    logprobs: Logprobs
    extras: Extras | None = None


def sample(
    logits: Float[Array, "rows vocab"],
    slots: SlotParams,
    state: SlotState,
    positions: Int32[Array, " rows"],
    generated: Int32[Array, " rows"],
    active: Bool[Array, " rows"],
    max_logprobs: int,
    drafts: DraftRows | None = None,
    masks: Int32[Array, "rows words"] | None = None,
    asks: Asks | None = None,
    *,
    whole: bool = False,
    typical: Typical = TYPICAL,
) -> tuple[Sampled, SlotState]:
    """Choose the next token of every row.

    Args:
        logits: any float type; all arithmetic is float32.
        slots: the parameters of each slot; row ``i`` is slot ``i`` except for draft rows. There may be fewer rows than
        slots: the state of the remaining slots is unchanged.
        state: sampler state of each slot.
        positions: absolute position of the token that is chosen.
        generated: how many tokens the slot has generated before this one.
        active: rows that decode in this step; other rows keep their state and have no meaningful token.
        max_logprobs: static width of the reported most likely tokens.
        drafts: the same rows where some of them may hold drafts; None: none does.
        masks: allowed tokens of each row, where its slot is constrained: bit ``i % 32`` of word ``i // 32`` for token
        i; None: no slot is constrained.
        asks: the outputs for training that each row asks for; None: the program has none.
        whole: these may be of the whole vocabulary.
        typical: bound of the drafts that rows with typical acceptance take.
    """
    raw = logits.astype(jnp.float32)
    rows = first_rows(slots, len(raw)) if drafts is None else params_of_rows(slots, drafts)

    def seen() -> SlotState:
        return first_rows(state, len(raw)) if drafts is None else state_of_rows(state, drafts)

    drawn = None
    if asks is None:
        processed = process(raw, rows, seen, generated, active, masks)
        tokens = select(processed, rows, positions, active)
    else:
        logits = process(raw, rows, seen, generated, active)
        processed = logits if masks is None else within(masks, logits, raw, active & rows.constrained)
        drawn = draw_observed(logits, processed, rows, positions, active, asks)
        tokens = drawn.tokens
    if drafts is not None:
        tokens = take_typical(tokens, processed, rows, drafts, typical)
    logprobs, extras = wanted_logprobs(raw, tokens, active & rows.logprobs, max_logprobs), None
    if drawn is not None and asks is not None:
        logprobs, extras = observe(raw, drawn, tokens, rows, active, asks, whole)(logprobs)
    after = _advance(state, tokens, active) if drafts is None else advance(state, drafts, tokens)
    return Sampled(jnp.where(_finite(raw), tokens, NOT_FINITE), logprobs, extras), after


def _finite(logits: Float32[Array, "rows vocab"]) -> Bool[Array, " rows"]:
    """Whether all logits of a row are finite: 0 times a non-finite value is NaN, and so is a sum with it. (XLA's float
    maximum may skip NaN, and a bit test takes four times as long on a CPU.)"""
    return jnp.isfinite(total(to_lanes(logits, 0) * 0))


def guess(
    logits: Float[Array, "rows vocab"],
    slots: SlotParams,
    state: SlotState,
    positions: Int32[Array, " rows"],
    generated: Int32[Array, " rows"],
    active: Bool[Array, " rows"],
) -> Int32[Array, " rows"]:
    """Choose tokens as `sample` would from these logits, for a draft model: with the same noise, two models that mostly
    agree draw the same token more often than either draws its most likely one. The state is unchanged."""
    processed = process(logits.astype(jnp.float32), slots, lambda: state, generated, active)
    return select(processed, slots, positions, active)


def guess_scores(
    logits: Float[Array, "rows vocab"],
    slots: SlotParams,
    state: SlotState,
    positions: Int32[Array, " rows"],
    generated: Int32[Array, " rows"],
    active: Bool[Array, " rows"],
) -> Float32[Array, "rows vocab"]:
    """Return logits that rank the guesses, for drafts of several paths: the largest is `guess`'s token, and the model
    takes the others in this order where that one fails, since the noise is in them."""
    processed = process(logits.astype(jnp.float32), slots, lambda: state, generated, active)
    return perturbed(processed, slots, positions, active)


def _advance(state: SlotState, tokens: Int32[Array, " rows"], active: Bool[Array, " rows"]) -> SlotState:
    rows, slots = tokens.shape[0], state.counts.shape[0]
    where, before = jnp.where(active, jnp.arange(rows), slots), state.recent[:rows]
    shifted = jnp.concatenate([before, tokens[:, None]], axis=1)[:, 1:]
    recent = jnp.where(active[:, None], shifted, before)
    return state._replace(
        counts=state.counts.at[where, tokens].add(1, mode="drop"),
        recent=lax.dynamic_update_slice(state.recent, recent.astype(state.recent.dtype), (0, 0)),
    )


_TINY = 1e-5  # added to a probability before its logarithm: Medusa's value

Logits = Float32[Array, "rows vocab"]


def take_typical(
    tokens: Int32[Array, " rows"], logits: Logits, rows: SlotParams, drafts: DraftRows, typical: Typical
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
        chances, least = posterior(logits, drafts.fed, rows, asks, typical)
        taken = jnp.where(follows & (chances > least[:, None]), chances, 0)
        best = jnp.argmax(taken, axis=1)  # the likeliest of several
        return jnp.where(jnp.any(taken > 0, axis=1), drafts.fed[best].astype(tokens.dtype), tokens)

    return lax.cond(jnp.any(follows), some, lambda: tokens)


def posterior(
    logits: Logits,
    candidates: Int[Array, " candidates"],
    rows: SlotParams,
    asks: Bool[Array, " rows"],
    typical: Typical,
) -> tuple[Float32[Array, "rows candidates"], Float32[Array, " rows"]]:
    """Return each candidate's probability per row, after temperature and all filters, and the bound that it
    must exceed to be ``typical``. Banned tokens have probability 0."""
    weights = weights_of(logits, argmax(logits)[0], rows, asks)
    chances = weights / jnp.maximum(total(weights), jnp.finfo(jnp.float32).tiny)[:, None, None]
    entropy = -total(chances * jnp.log(chances + _TINY))
    where = jnp.clip(candidates, 0, logits.shape[1] - 1)
    return chances[:, where // LANES, where % LANES], jnp.minimum(typical.threshold, typical.alpha * jnp.exp(-entropy))
