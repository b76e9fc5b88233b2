"""Token selection from processed logits: greedy, or temperature, min_p, top_n_sigma, top_k, top_p and a draw."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from jaxinfer.sampling.noise import PURPOSE_DRAW, exponentials, random_words
from jaxinfer.sampling.reductions import Lanes, argmax, argmax_of_made, count, to_lanes, total
from jaxinfer.sampling.search import kth_largest, nucleus_floor
from jaxinfer.sampling.slots import SlotParams

GREEDY_BELOW = 1e-5
"""Temperatures below this are treated as 0: float32 could not tell them apart. vLLM uses the same threshold."""

_DROPPED = 100.0  # between the logits, with noise, of tokens that filters keep and drop

Logits = Float32[Array, "rows vocab"]
Rows = Bool[Array, " rows"]


def select(logits: Logits, slots: SlotParams, positions: Int32[Array, " rows"], active: Rows) -> Int32[Array, " rows"]:
    """Select one token per row, a function of its logits, parameters, seed, sample index and position only."""
    random = is_random(slots, active)
    peak, best = argmax(logits)

    def drawn() -> Int32[Array, " rows"]:
        weights = weights_of(logits, peak, slots, random)
        return draw(weights, slots, positions, random, best)

    return lax.cond(jnp.any(random), drawn, lambda: best)


def is_random(slots: SlotParams, active: Rows) -> Rows:
    """Whether each row draws its token."""
    return active & (slots.temperature >= GREEDY_BELOW)


def draw(
    weights: Lanes, slots: SlotParams, positions: Int32[Array, " rows"], random: Rows, best: Int32[Array, " rows"]
) -> Int32[Array, " rows"]:
    """Draw a token in ``random`` rows, else return ``best``; also where every token is banned: then no weight is
    positive (or a number). A token of weight 0 is never drawn; of equal tokens the first is."""
    peak, drawn = argmax_of_made(weights / _noise(weights, slots, positions))
    return jnp.where(random & (peak > 0), drawn, best)


def perturbed(logits: Logits, slots: SlotParams, positions: Int32[Array, " rows"], active: Rows) -> Logits:
    """Return logits of which the largest is what `select` takes: with temperature and noise in rows that draw. There,
    tokens that a filter drops come after all others."""
    random, heat = is_random(slots, active), jnp.maximum(slots.temperature, GREEDY_BELOW)[:, None]

    def noisy() -> Logits:
        peak, _ = argmax(logits)
        weights = weights_of(logits, peak, slots, random)
        added = -jnp.log(_noise(weights, slots, positions)) - jnp.where(weights > 0, 0, _DROPPED)
        added = added.reshape(len(logits), -1)[:, : logits.shape[1]]
        return jnp.where(random[:, None], (logits - peak[:, None]) / heat + added, logits)

    return lax.cond(jnp.any(random), noisy, lambda: logits)


def _noise(weights: Lanes, slots: SlotParams, positions: Int32[Array, " rows"]) -> Lanes:
    """Return the noise of a draw from these weights, see `jaxinfer.sampling.noise`."""
    words = random_words(slots.seed, slots.sample_index, positions, PURPOSE_DRAW)
    return exponentials(words, *weights.shape[1:])


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
