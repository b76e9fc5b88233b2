"""Outputs for training: log probabilities in other modes and of chosen ids, entropies, and the ids that were kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from jaxinfer.sampling.logprobs import Logprobs, ranked
from jaxinfer.sampling.reductions import Lanes, argmax, to_lanes, total
from jaxinfer.sampling.select import draw, is_random, weights_of
from jaxinfer.sampling.slots import SlotParams
from jaxinfer.sampling_params import LOGPROBS_MODES, MAX_LOGPROB_TOKEN_IDS, SamplingParams

Logits = Float32[Array, "rows vocab"]
Rows = Bool[Array, " rows"]
Asks = Int32[Array, "rows asks"]
"""What each row's request asks: `FLAGS` in the first column, and its ``logprob_token_ids``, padded with -1."""
_NAMES = ("logits", "processed", "entropy", "ids", "kept", "whole", "forced")
FLAGS = {name: 1 << bit for bit, name in enumerate(_NAMES)}
"""Bits: mode of log probabilities (`LOGPROBS_MODES`), outputs, and whether the token is forced."""
WIDTH = 1 + MAX_LOGPROB_TOKEN_IDS


class Extras(NamedTuple):
    """Outputs that a step returns in addition to `Logprobs`. Rows that do not ask for one have no meaningful values.

    Attributes:
        entropy: entropy in nats of the distribution of the row's mode.
        ids: values of the row's ``logprob_token_ids``, in its mode.
        kept: whether the sampler could draw each token: bit ``i % 32`` of word ``i // 32``.
        whole: values of the whole vocabulary in the row's mode; no column where the engine does not return it.
        routed: experts that the row's token took in each layer that has any; None: the model has none.
    """

    entropy: Float32[Array, " rows"]
    ids: Float32[Array, "rows ids"]
    kept: Int32[Array, "rows words"]
    whole: Float32[Array, "rows whole"]
    routed: Int32[Array, "rows layers top_k"] | None = None


class Drawn(NamedTuple):
    """A draw: its tokens, and what it was made from: logits, their maximum, and the weights of all tokens."""

    tokens: Int32[Array, " rows"]
    logits: Logits
    peak: Float32[Array, " rows"]
    weights: Lanes


def asks_of(params: SamplingParams) -> Int32[np.ndarray, " asks"]:
    """Return the row of `Asks` of a request."""
    asks = np.full(WIDTH, -1, np.int32)
    ids = params.logprob_token_ids or ()
    asks[1 : 1 + len(ids)] = ids
    outputs = {
        "entropy": params.return_entropy,
        "ids": bool(ids),
        "kept": params.return_sampling_mask,
        "whole": params.logprobs == -1,
        "forced": params.forced_token_ids is not None,
    }
    asks[0] = LOGPROBS_MODES.index(params.logprobs_mode) | sum(FLAGS[name] for name, on in outputs.items() if on)
    return asks


def asked(asks: Asks, name: str) -> Rows:
    """Whether each row asks for one of `FLAGS`."""
    return asks[:, 0] & FLAGS[name] != 0


def draw_observed(
    logits: Logits, held: Logits, slots: SlotParams, positions: Int32[Array, " rows"], active: Rows, asks: Asks
) -> Drawn:
    """Select tokens as `select` does, and return what they were drawn from.

    Args:
        logits: processed logits.
        held: the same within the rows' masks. A forced row takes the largest of these, and is otherwise observed as if
            it were not forced.
    """
    forced, random = asked(asks, "forced"), is_random(slots, active)
    logits = jnp.where(forced[:, None], logits, held)
    (peak, best), only = argmax(logits), argmax(held)[1]
    # A greedy row has no filters.
    slots = slots._replace(min_p=jnp.where(random, slots.min_p, 0))
    observed = asked(asks, "processed") | asked(asks, "kept")
    weights = lax.cond(
        jnp.any(random | observed),
        lambda: weights_of(logits, peak, slots, random),
        lambda: jnp.zeros_like(to_lanes(logits, 0)),
    )
    tokens = lax.cond(jnp.any(random), lambda: draw(weights, slots, positions, random, best), lambda: best)
    return Drawn(jnp.where(forced, only, tokens), logits, peak, weights)


def observe(
    raw: Logits, drawn: Drawn, tokens: Int32[Array, " rows"], slots: SlotParams, active: Rows, asks: Asks, whole: bool
) -> Callable[[Logprobs], tuple[Logprobs, Extras]]:
    """Return a function that adds the requested outputs to the raw log probabilities of ``tokens``; it computes nothing
    when no row asks. ``whole``: the engine returns the whole vocabulary."""
    random, any_asked = is_random(slots, active), active & (asks[:, 0] & ~FLAGS["forced"] != 0)

    def some(logprobs: Logprobs) -> tuple[Logprobs, Extras]:
        kept = _within(drawn.weights, raw.shape[1]) > 0
        shown = _shown(raw, drawn, kept, jnp.where(random, slots.temperature, 1), asks)
        found = ranked(shown.values, tokens, logprobs.top_ids.shape[1])
        other = active & (asked(asks, "logits") | asked(asks, "processed"))
        pairs = zip(found, logprobs, strict=True)
        mixed = Logprobs(*(jnp.where(other.reshape(-1, *[1] * (x.ndim - 1)), x, y) for x, y in pairs))
        ids = jnp.take_along_axis(shown.values, jnp.maximum(asks[:, 1:], 0), axis=1, mode="clip")
        drawable = jnp.where(random[:, None], kept, jnp.arange(raw.shape[1]) == tokens[:, None])
        return mixed, Extras(_entropy(shown), ids, _packed(drawable), shown.values if whole else raw[:, :0])

    def none(logprobs: Logprobs) -> tuple[Logprobs, Extras]:
        rows, vocab = raw.shape
        words, columns = jnp.zeros((rows, -(-vocab // 32)), jnp.int32), vocab if whole else 0
        ids = jnp.zeros((rows, asks.shape[1] - 1))
        return logprobs, Extras(jnp.zeros(rows), ids, words, jnp.zeros((rows, columns)))

    return lambda logprobs: lax.cond(jnp.any(any_asked), some, none, logprobs)


class _Shown(NamedTuple):
    """Values of the rows' modes, and the log probabilities of the same distributions."""

    values: Logits
    logprobs: Logits


def _shown(
    raw: Logits, drawn: Drawn, kept: Bool[Array, "rows vocab"], heat: Float32[Array, " rows"], asks: Asks
) -> _Shown:
    processed = asked(asks, "processed")[:, None]
    own = raw - jnp.max(raw, axis=-1, keepdims=True)
    scaled = (drawn.logits - drawn.peak[:, None]) / heat[:, None]
    shifted = jnp.where(processed, jnp.where(kept, scaled, -jnp.inf), own)
    mass = jnp.where(processed[:, 0], total(drawn.weights), total(jnp.exp(to_lanes(own, -jnp.inf))))
    logprobs = shifted - jnp.log(mass)[:, None]
    logits = jnp.where(processed, jnp.where(kept, drawn.logits / heat[:, None], -jnp.inf), raw)
    return _Shown(jnp.where(asked(asks, "logits")[:, None], logits, logprobs), logprobs)


def _entropy(shown: _Shown) -> Float32[Array, " rows"]:
    possible = shown.logprobs > -jnp.inf
    terms = jnp.where(possible, -jnp.exp(shown.logprobs) * jnp.where(possible, shown.logprobs, 0), 0)
    return total(to_lanes(terms, 0))


def _within(lanes: Lanes, vocab: int) -> Logits:
    return lanes.reshape(lanes.shape[0], -1)[:, :vocab]


def _packed(bits: Bool[Array, "rows vocab"]) -> Int32[Array, "rows words"]:
    rows, vocab = bits.shape
    words = jnp.pad(bits, ((0, 0), (0, -vocab % 32))).reshape(rows, -1, 32).astype(jnp.uint32)
    packed = jnp.sum(words << jnp.arange(32, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)
    return lax.bitcast_convert_type(packed, jnp.int32)
