"""Token selection from processed logits: greedy, or temperature, min_p, top_n_sigma, top_k, top_p and a draw."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from jaxinfer.sampling.reductions import LANES, Lanes, argmax, count, to_lanes, total
from jaxinfer.sampling.search import kth_largest, nucleus_floor
from jaxinfer.sampling.slots import SlotParams

GREEDY_BELOW = 1e-5
"""Temperatures below this are treated as 0: float32 could not tell them apart. vLLM uses the same threshold."""
PURPOSE_DRAW = 0
"""Separates the sampler's randomness from other uses of a request's seed and positions."""

Logits = Float32[Array, "rows vocab"]
Rows = Bool[Array, " rows"]


def select(logits: Logits, slots: SlotParams, positions: Int32[Array, " rows"], active: Rows) -> Int32[Array, " rows"]:
    """Select one token per row, a function of its logits, parameters, seed, sample index and position only."""
    random = is_random(slots, active)
    peak, best = argmax(logits)

    def drawn() -> Int32[Array, " rows"]:
        weights = weights_of(logits, peak, slots, random)
        words = random_words(slots.seed, slots.sample_index, positions, PURPOSE_DRAW)
        return draw(weights, words, random, best)

    return lax.cond(jnp.any(random), drawn, lambda: best)


def is_random(slots: SlotParams, active: Rows) -> Rows:
    """Whether each row draws its token."""
    return active & (slots.temperature >= GREEDY_BELOW)


def draw(
    weights: Lanes, words: UInt32[Array, "rows 2"], random: Rows, best: Int32[Array, " rows"]
) -> Int32[Array, " rows"]:
    """Draw a token in ``random`` rows, else return ``best``; also where every token is banned: then no sum of weights
    is positive (or a number)."""
    drawn = _inverse_cdf(weights, words)
    return jnp.where(random & (total(weights) > 0), drawn, best)


def weights_of(logits: Logits, peak: Float32[Array, " rows"], slots: SlotParams, random: Rows) -> Lanes:
    """Return probabilities up to a factor (the most likely token has 1), 0 where a filter drops a token: min_p,
    top_n_sigma and top_k, then top_p among the rest."""
    values = to_lanes(logits, -jnp.inf)
    limited = random & (slots.top_k > 0) & (slots.top_k < logits.shape[-1])
    narrow = random & (slots.top_n_sigma > 0)
    smallest = lax.cond(
        jnp.any(limited | narrow),
        lambda: _smallest(values, peak, slots, limited, narrow),
        lambda: jnp.full_like(peak, -jnp.inf),
    )
    temperature = jnp.where(random, slots.temperature, 1)
    scaled = (values - peak[:, None, None]) / temperature[:, None, None]
    likely = (values >= smallest[:, None, None]) & (scaled >= jnp.log(slots.min_p)[:, None, None])
    weights = jnp.where(likely, jnp.exp(scaled), 0)
    nucleus = random & (slots.top_p < 1)
    floor = lax.cond(
        jnp.any(nucleus),
        lambda: nucleus_floor(weights, slots.top_p, nucleus),
        lambda: jnp.zeros_like(peak),
    )
    return jnp.where(weights >= floor[:, None, None], weights, 0)


def _smallest(
    values: Lanes, peak: Float32[Array, " rows"], slots: SlotParams, limited: Rows, narrow: Rows
) -> Float32[Array, " rows"]:
    """Return the smallest logit that top_k keeps in ``limited`` rows and top_n_sigma in ``narrow`` ones, else -inf."""
    everything = jnp.full_like(peak, -jnp.inf)
    kth = lax.cond(
        jnp.any(limited), lambda: kth_largest(values, jnp.maximum(slots.top_k, 1), limited), lambda: everything
    )
    near = lax.cond(jnp.any(narrow), lambda: peak - slots.top_n_sigma * _deviation(values, peak), lambda: everything)
    return jnp.maximum(kth, jnp.where(narrow, near, everything))


def _deviation(values: Lanes, peak: Float32[Array, " rows"]) -> Float32[Array, " rows"]:
    """Return the standard deviation of each row's logits, for top-n-sigma (Tang et al. 2024, arXiv:2411.07641).

    The logits are processed, but not divided by the temperature: the same tokens are kept at any temperature. Banned
    tokens (-inf) do not count. Both as in llama.cpp, whose filter also comes after the penalties and before top-k.
    """
    allowed = values > -jnp.inf
    shifted = jnp.where(allowed, values - peak[:, None, None], 0)
    size = count(allowed)
    mean = total(shifted) / size
    return jnp.sqrt(total(jnp.where(allowed, (shifted - mean[:, None, None]) ** 2, 0)) / size)


def random_words(
    seed: UInt32[Array, "rows 2"],
    sample_index: Int32[Array, " rows"],
    positions: Int32[Array, " rows"],
    purpose: int,
) -> UInt32[Array, "rows 2"]:
    """Return 64 random bits per row: the Threefry-2x32 of its seed folded with the other arguments.

    The key data of the last fold are the bits, so that they do not depend on the configuration of jax's generators.
    """

    def row(seed: UInt32[Array, " 2"], index: Int32[Array, ""], position: Int32[Array, ""]) -> UInt32[Array, " 2"]:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        for word in (index, position, purpose):
            key = jax.random.fold_in(key, word)
        return jax.random.key_data(key)

    return jax.vmap(row)(seed, sample_index, positions)


def _inverse_cdf(weights: Lanes, words: UInt32[Array, "rows 2"]) -> Int32[Array, " rows"]:
    """Draw a lane by the sums of the lanes, then a block inside it; a random word for each keeps rare tokens exact."""
    lane = _pick(jnp.sum(weights, axis=1), words[:, 0])
    block = _pick(jnp.take_along_axis(weights, lane[:, None, None], axis=2)[:, :, 0], words[:, 1])
    return block * LANES + lane


def _pick(weights: Float32[Array, "rows choices"], word: UInt32[Array, " rows"]) -> Int32[Array, " rows"]:
    """Draw an index per row with probability proportional to its weight; none of weight 0 unless all are."""
    uniform = (word >> 8).astype(jnp.float32) * 2.0**-24
    cumulative = jnp.cumsum(weights, axis=-1)
    possible = weights > 0
    passed = possible & (cumulative > uniform[:, None] * cumulative[:, -1:])
    last = weights.shape[-1] - 1 - jnp.argmax(possible[:, ::-1], axis=-1)
    return jnp.where(jnp.any(passed, axis=-1), jnp.argmax(passed, axis=-1), last).astype(jnp.int32)
