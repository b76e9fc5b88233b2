"""One sampling step on the device, on one screen."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from jaxinfer.sampling.drafts import DraftRows, advance, params_of_rows, state_of_rows
from jaxinfer.sampling.logprobs import Logprobs, wanted_logprobs
from jaxinfer.sampling.processors import process
from jaxinfer.sampling.reductions import to_lanes, total
from jaxinfer.sampling.select import select
from jaxinfer.sampling.slots import SlotParams, SlotState, first_rows
from jaxinfer.sampling.typical import take_typical

NOT_FINITE = -1
"""In place of the token of a row that has NaN or infinities among its logits."""


class Sampled(NamedTuple):
    """One token of each row, or `NOT_FINITE`. ``logprobs`` are zeros in rows that did not ask for them."""

    tokens: Int32[Array, " rows"]
    logprobs: Logprobs


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
) -> tuple[Sampled, SlotState]:
    """Choose the next token of every row.

    Args:
        logits: any float type; all arithmetic is float32.
        slots: the parameters of each slot; slot ``i`` is row ``i`` but for rows of drafts. There may be fewer rows than
            slots: the others' state stays as it is.
        state: of each slot.
        positions: absolute position of the token that is chosen.
        generated: how many tokens the slot has generated before this one.
        active: rows that decode in this step; others leave their state as it is and have no meaningful token.
        max_logprobs: static width of the reported most likely tokens.
        drafts: the same rows where some of them may hold drafts; None: none does.
        masks: tokens that each row may choose, where its slot is constrained: bit ``i % 32`` of word ``i // 32`` for
            token i; None: no slot is.
    """
    raw = logits.astype(jnp.float32)
    rows = first_rows(slots, len(raw)) if drafts is None else params_of_rows(slots, drafts)

    def seen() -> SlotState:
        return first_rows(state, len(raw)) if drafts is None else state_of_rows(state, drafts)

    processed = process(raw, rows, seen, generated, active, masks)
    tokens = select(processed, rows, positions, active)
    if drafts is not None:
        tokens = take_typical(tokens, processed, rows, drafts)
    logprobs = wanted_logprobs(raw, tokens, active & rows.logprobs, max_logprobs)
    after = _advance(state, tokens, active) if drafts is None else advance(state, drafts, tokens)
    return Sampled(jnp.where(_finite(raw), tokens, NOT_FINITE), logprobs), after


def _finite(logits: Float32[Array, "rows vocab"]) -> Bool[Array, " rows"]:
    """Whether all logits of a row are finite: 0 times others is NaN, and so is a sum with it. (XLA's maximum of floats
    may pass NaN over, and one of their bits takes four times as long on a CPU.)"""
    return jnp.isfinite(total(to_lanes(logits, 0) * 0))


def guess(
    logits: Float[Array, "rows vocab"],
    slots: SlotParams,
    state: SlotState,
    positions: Int32[Array, " rows"],
    generated: Int32[Array, " rows"],
    active: Bool[Array, " rows"],
) -> Int32[Array, " rows"]:
    """The tokens that `sample` would choose of these logits, for a model that guesses what another one will say: with
    the same random numbers two models that agree by and large draw the same token more often than either draws its most
    likely one. The state stays as it is."""
    processed = process(logits.astype(jnp.float32), slots, lambda: state, generated, active)
    return select(processed, slots, positions, active)


def _advance(state: SlotState, tokens: Int32[Array, " rows"], active: Bool[Array, " rows"]) -> SlotState:
    rows, slots = tokens.shape[0], state.counts.shape[0]
    where, before = jnp.where(active, jnp.arange(rows), slots), state.recent[:rows]
    shifted = jnp.concatenate([before, tokens[:, None]], axis=1)[:, 1:]
    recent = jnp.where(active[:, None], shifted, before)
    return state._replace(
        counts=state.counts.at[where, tokens].add(1, mode="drop"),
        recent=lax.dynamic_update_slice(state.recent, recent.astype(state.recent.dtype), (0, 0)),
    )
