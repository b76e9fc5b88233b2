"""Log probabilities under the raw logits."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from jaxinfer.layers.top_k import top_k
from jaxinfer.sampling.reductions import count, to_lanes, total

Logits = Float32[Array, "rows vocab"]


class Logprobs(NamedTuple):
    """Natural logs of probabilities. ``rank`` counts from 1; ties share the better rank.

    ``top_ids`` are the most likely tokens, most likely first, ties by id; beyond the vocabulary they are -1.
    """

    logprob: Float32[Array, " rows"]
    rank: Int32[Array, " rows"]
    top_ids: Int32[Array, "rows top"]
    top_logprobs: Float32[Array, "rows top"]


def token_logprobs(logits: Logits, tokens: Int32[Array, " rows"], top: int) -> Logprobs:
    """Return log probabilities of ``tokens``, one per row, and of the ``top`` most likely tokens."""
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)
    values = to_lanes(logits, -jnp.inf)
    peak = jnp.max(logits, axis=-1, keepdims=True)
    log_mass = jnp.log(total(jnp.exp(values - peak[:, :, None])))[:, None]
    rank = 1 + count(values > chosen[:, :, None]).astype(jnp.int32)
    within = min(top, logits.shape[-1])
    best, ids = top_k(logits, within)
    padding = ((0, 0), (0, top - within))
    return Logprobs(
        logprob=(chosen - peak - log_mass)[:, 0],
        rank=rank,
        top_ids=jnp.pad(ids.astype(jnp.int32), padding, constant_values=-1),
        top_logprobs=jnp.pad(best - peak - log_mass, padding, constant_values=-jnp.inf),
    )


def ranked(values: Logits, tokens: Int32[Array, " rows"], top: int) -> Logprobs:
    """Return the values of ``tokens``, one per row, with their ranks, and the ``top`` largest ones."""
    chosen = jnp.take_along_axis(values, tokens[:, None], axis=1)
    rank = 1 + count(to_lanes(values, -jnp.inf) > chosen[:, :, None]).astype(jnp.int32)
    within = min(top, values.shape[-1])
    best, ids = top_k(values, within)
    padding = ((0, 0), (0, top - within))
    return Logprobs(
        chosen[:, 0],
        rank,
        jnp.pad(ids.astype(jnp.int32), padding, constant_values=-1),
        jnp.pad(best, padding, constant_values=-jnp.inf),
    )


def wanted_logprobs(logits: Logits, tokens: Int32[Array, " rows"], wanted: Bool[Array, " rows"], top: int) -> Logprobs:
    """Return ``token_logprobs`` of the ``wanted`` rows, zeros elsewhere; computes nothing when no row is wanted."""

    def some() -> Logprobs:
        every = token_logprobs(logits, tokens, top)
        return Logprobs(*(jnp.where(wanted.reshape(-1, *[1] * (x.ndim - 1)), x, 0) for x in every))

    def none() -> Logprobs:
        rows = tokens.shape[0]
        return Logprobs(
            jnp.zeros(rows), jnp.zeros(rows, jnp.int32), jnp.zeros((rows, top), jnp.int32), jnp.zeros((rows, top))
        )

    return lax.cond(jnp.any(wanted), some, none)


def prompt_logprobs(logits: Float[Array, "rows vocab"], next_tokens: Int32[Array, " rows"], top: int) -> Logprobs:
    """Return log probabilities of the token after each prompt position, and of the ``top`` most likely ones there."""
    return token_logprobs(logits.astype(jnp.float32), next_tokens, top)
