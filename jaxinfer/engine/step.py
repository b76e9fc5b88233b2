"""The jitted program family: everything that ever runs on the device while serving."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxinfer.kv.pool import DecodeAttend, LayerPool, PrefillAttend
from jaxinfer.models.model import Model
from jaxinfer.sampling import Logprobs, Sampled, SlotParams, SlotState, admit, prompt_logprobs, sample


class StepState(NamedTuple):
    """What lives on the device between steps and is donated to each of them.

    ``last_tokens[slot]`` is what the slot sampled last: the next step reads it there, so that the host never waits.
    """

    pools: list[LayerPool]
    last_tokens: Int[Array, " rows"]
    slots: SlotState


class DecodeBatch(NamedTuple):
    """One token per slot, from the host.

    ``positions`` -1 marks an idle slot; ``tokens`` -1 takes what the slot sampled last.
    """

    tokens: Int[Any, " rows"]
    positions: Int[Any, " rows"]
    generated: Int[Any, " rows"]
    tables: Int[Any, "rows width"]


class PrefillBatch(NamedTuple):
    """A prompt chunk a lane: ``lengths`` tokens from ``starts``; ``tokens`` is padded to the program's size.

    A lane of length 0 is idle.
    """

    tokens: Int[Any, "lanes chunk"]
    starts: Int[Any, " lanes"]
    lengths: Int[Any, " lanes"]
    tables: Int[Any, "lanes width"]


class Programs(NamedTuple):
    """The functions to compile. All are pure; the state is donated, the parameters are not."""

    decode: Callable[[Any, SlotParams, StepState, DecodeBatch], tuple[StepState, Sampled]]
    prefill: Callable[[Any, StepState, PrefillBatch], StepState]
    prefill_logprobs: Callable[[Any, StepState, PrefillBatch, jax.Array], tuple[StepState, Logprobs]]
    admit: Callable[[StepState, jax.Array, jax.Array, jax.Array], StepState]


def make_programs(model: Model, max_logprobs: int) -> Programs:
    """The programs of one model."""
    apply: Any = model.module.apply

    def decode_step(params: Any, slots: SlotParams, state: StepState, batch: DecodeBatch) -> tuple[StepState, Sampled]:
        active = batch.positions >= 0
        tokens = jnp.where(batch.tokens >= 0, batch.tokens, state.last_tokens)
        attend = DecodeAttend(batch.tables, batch.positions)
        positions = jnp.maximum(batch.positions, 0)
        hidden, pools = apply({"params": params}, tokens, positions, attend, state.pools)
        logits = apply({"params": params}, hidden, method="head")
        sampled, slot_state = sample(
            logits, slots, state.slots, batch.positions + 1, batch.generated, active, max_logprobs
        )
        last_tokens = jnp.where(active, sampled.tokens, state.last_tokens)
        return StepState(pools, last_tokens, slot_state), sampled

    def backbone(params: Any, state: StepState, batch: PrefillBatch) -> tuple[StepState, jax.Array]:
        attend = PrefillAttend(batch.tables, batch.starts, batch.lengths)
        positions = batch.starts[:, None] + jnp.arange(batch.tokens.shape[1])
        # Lanes end to end: the products see one matrix.
        hidden, pools = apply({"params": params}, batch.tokens.reshape(-1), positions.reshape(-1), attend, state.pools)
        return state._replace(pools=pools), hidden

    def prefill_step(params: Any, state: StepState, batch: PrefillBatch) -> StepState:
        return backbone(params, state, batch)[0]

    def prefill_logprobs_step(
        params: Any, state: StepState, batch: PrefillBatch, following: Int[Array, " chunk"]
    ) -> tuple[StepState, Logprobs]:
        state, hidden = backbone(params, state, batch)
        logits = apply({"params": params}, hidden, method="head")
        return state, prompt_logprobs(logits, following, max_logprobs)

    def admit_step(
        state: StepState, slot: Int[Array, ""], prompt: Bool[Array, " vocab"], bias: Float[Array, " vocab"]
    ) -> StepState:
        return state._replace(slots=admit(state.slots, slot, prompt, bias))

    return Programs(decode_step, prefill_step, prefill_logprobs_step, admit_step)
