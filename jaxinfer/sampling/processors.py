"""Logits processors, in vLLM's order: bias and allowed tokens, bad words, minimum length, penalties; grammars last.

Each is skipped unless an active row uses it, and leaves the logits of other rows bitwise unchanged.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from jaxinfer.sampling.slots import SlotParams, SlotState

Logits = Float32[Array, "rows vocab"]
Rows = Bool[Array, " rows"]
Masks = Int32[Array, "rows words"]


def process(
    logits: Logits,
    slots: SlotParams,
    state_of_rows: Callable[[], SlotState],
    generated: Int32[Array, " rows"],
    active: Rows,
    masks: Masks | None = None,
) -> Logits:
    """Return the logits from which tokens are chosen. ``generated``: tokens that each row's slot has generated before.
    The state is read only where a row needs a processor. ``masks``: see `sample`."""
    short = active & (generated < slots.min_tokens)
    words = active & (slots.bad_words[:, :, -1] >= 0).any(axis=1)
    biased = active & slots.has_bias
    repeated = (slots.presence_penalty != 0) | (slots.frequency_penalty != 0) | (slots.repetition_penalty != 1)
    penalised = active & repeated
    changed, constrained = short | words | biased | penalised, active & slots.constrained

    def change(logits: Logits) -> Logits:
        state = state_of_rows()
        logits = _where_any(biased, lambda x: x + state.bias, logits)
        logits = _where_any(words, lambda x: _ban(x, _completing(slots.bad_words, state.recent)), logits)
        logits = _where_any(short, lambda x: _ban(x, slots.stop_ids), logits)
        return _where_any(penalised, lambda x: _penalise(x, slots, state), logits)

    if masks is None:
        return _if_any(changed, change, logits)

    def all_of_them(logits: Logits) -> Logits:
        return _where_any(constrained, lambda x: _within(masks, x, logits), _if_any(changed, change, logits))

    return _if_any(changed | constrained, all_of_them, logits)


def within(masks: Masks, logits: Logits, raw: Logits, constrained: Rows) -> Logits:
    """Return the logits of ``constrained`` rows within their masks, as the last step of `process`."""
    return _where_any(constrained, lambda x: _within(masks, x, raw), logits)


def _within(masks: Masks, logits: Logits, raw: Logits) -> Logits:
    """Set each token outside its row's mask to -inf. If other processors have banned all allowed tokens, the grammar
    takes precedence: these tokens get their raw logits."""
    rows, vocab = logits.shape
    bits = masks[:, :, None] >> jnp.arange(32, dtype=jnp.int32) & 1
    allowed = bits.reshape(rows, -1)[:, :vocab] == 1
    left = jnp.any(allowed & (logits > -jnp.inf), axis=1, keepdims=True)
    return jnp.where(allowed, jnp.where(left, logits, raw), -jnp.inf)


def _where_any(on: Rows, change: Callable[[Logits], Logits], logits: Logits) -> Logits:
    return _if_any(on, lambda x: jnp.where(on[:, None], change(x), x), logits)


def _if_any(on: Rows, change: Callable[[Logits], Logits], logits: Logits) -> Logits:
    """Apply ``change`` if a row is on; else XLA copies the logits, so a step without processors needs one cond only."""
    return lax.cond(jnp.any(on), change, lambda x: x, logits)


def _ban(logits: Logits, ids: Int32[Array, "rows ids"]) -> Logits:
    """Set the logits of each id to -inf; a negative id bans no token."""
    rows, vocab = logits.shape
    columns = jnp.where(ids >= 0, ids, vocab)
    return logits.at[jnp.arange(rows)[:, None], columns].set(-jnp.inf, mode="drop")


def _completing(
    words: Int32[Array, "rows words length"], recent: Int32[Array, "rows tail"]
) -> Int32[Array, "rows words"]:
    """Return the last token of each word whose other tokens were just generated, else -1."""
    begin, end = words[:, :, :-1], words[:, :, -1]
    begun = jnp.all((begin < 0) | (begin == recent[:, None, :]), axis=-1)
    return jnp.where(begun, end, -1)


def _penalise(logits: Logits, slots: SlotParams, state: SlotState) -> Logits:
    """Penalise repetition in prompt and output (Keskar et al. 2019, CTRL), frequency and presence in the output."""
    generated = state.counts > 0
    repetition = jnp.where(state.prompt | generated, slots.repetition_penalty[:, None], 1.0)
    logits = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = logits - slots.frequency_penalty[:, None] * state.counts
    return logits - slots.presence_penalty[:, None] * generated
