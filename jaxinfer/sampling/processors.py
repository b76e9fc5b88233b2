"""Logits processors, in vLLM's order: bias and allowed tokens, bad words, minimum length, penalties.

Each is skipped unless an active row uses it, and leaves the bits of the other rows' logits as they are.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from jaxinfer.sampling.slots import SlotParams, SlotState

Logits = Float32[Array, "rows vocab"]
Rows = Bool[Array, " rows"]


def process(
    logits: Logits,
    slots: SlotParams,
    state_of_rows: Callable[[], SlotState],
    generated: Int32[Array, " rows"],
    active: Rows,
) -> Logits:
    """Logits from which tokens are chosen. ``generated``: how many tokens each row's slot has generated before it.
    The state is asked for where a row needs a processor alone."""
    short = active & (generated < slots.min_tokens)
    words = active & (slots.bad_words[:, :, -1] >= 0).any(axis=1)
    biased = active & slots.has_bias
    penalised = active & ((slots.presence != 0) | (slots.frequency != 0) | (slots.repetition != 1))

    def all_of_them(logits: Logits) -> Logits:
        state = state_of_rows()
        logits = _where_any(biased, lambda x: x + state.bias, logits)
        logits = _where_any(words, lambda x: _ban(x, _completing(slots.bad_words, state.recent)), logits)
        logits = _where_any(short, lambda x: _ban(x, slots.stop_ids), logits)
        return _where_any(penalised, lambda x: _penalise(x, slots, state), logits)

    return lax.cond(jnp.any(short | words | biased | penalised), all_of_them, lambda x: x, logits)


def _where_any(on: Rows, change: Callable[[Logits], Logits], logits: Logits) -> Logits:
    return lax.cond(jnp.any(on), lambda x: jnp.where(on[:, None], change(x), x), lambda x: x, logits)


def _ban(logits: Logits, ids: Int32[Array, "rows ids"]) -> Logits:
    """-inf at each id; a negative id bans nothing."""
    rows, vocab = logits.shape
    columns = jnp.where(ids >= 0, ids, vocab)
    return logits.at[jnp.arange(rows)[:, None], columns].set(-jnp.inf, mode="drop")


def _completing(
    words: Int32[Array, "rows words length"], recent: Int32[Array, "rows tail"]
) -> Int32[Array, "rows words"]:
    """The last token of each word whose other tokens were generated just now, else -1."""
    begin, end = words[:, :, :-1], words[:, :, -1]
    begun = jnp.all((begin < 0) | (begin == recent[:, None, :]), axis=-1)
    return jnp.where(begun, end, -1)


def _penalise(logits: Logits, slots: SlotParams, state: SlotState) -> Logits:
    """Penalise repetition in prompt and output (Keskar et al. 2019, CTRL), frequency and presence in the output."""
    generated = state.counts > 0
    repetition = jnp.where(state.prompt | generated, slots.repetition[:, None], 1.0)
    logits = jnp.where(logits > 0, logits / repetition, logits * repetition)
    return logits - slots.frequency[:, None] * state.counts - slots.presence[:, None] * generated
