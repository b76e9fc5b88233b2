"""The jitted program family: everything that ever runs on the device while serving."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxinfer.kv.pool import DecodeAttend, LayerPool, PrefillAttend
from jaxinfer.kv.spread import copy_own_pages, spread
from jaxinfer.kv.transfer import export_pages, import_pages
from jaxinfer.models.model import Model
from jaxinfer.parallel.mesh import gathered_logits
from jaxinfer.sampling import (
    Logprobs,
    Sampled,
    SlotParams,
    SlotState,
    admit,
    keep_slot,
    prompt_logprobs,
    resume_slot,
    sample,
)
from pallas_kernels.choice import Wish


class StepState(NamedTuple):
    """What lives on the device between steps and is donated to each of them.

    ``last_tokens[slot]`` is what the slot sampled last: the next step reads it there, so that the host never waits.
    """

    pools: list[LayerPool]
    last_tokens: Int[Array, " rows"]
    slots: SlotState


class DecodeBatch(NamedTuple):
    """One token per row, from the host.

    ``positions`` -1 marks an idle row; ``tokens`` -1 takes what the slot sampled last. ``generated``: tokens that the
    sequence has generated before the one that this row samples.

    ``owners`` names the slot whose parameters each row uses. A row is its slot's own where the two are equal; any other
    one is borrowed: it neither reads nor changes what is kept of a slot. None: all rows are their slots' own.
    """

    tokens: Int[Any, " rows"]
    positions: Int[Any, " rows"]
    generated: Int[Any, " rows"]
    tables: Int[Any, "groups rows width"]
    owners: Int[Any, " rows"] | None = None


class PrefillBatch(NamedTuple):
    """A prompt chunk a lane: ``lengths`` tokens from ``starts``; ``tokens`` is padded to the program's size.

    A lane of length 0 is idle.
    """

    tokens: Int[Any, "lanes chunk"]
    starts: Int[Any, " lanes"]
    lengths: Int[Any, " lanes"]
    tables: Int[Any, "groups lanes width"]


class Programs(NamedTuple):
    """The functions to compile. All are pure; the state is donated (but by ``export`` and ``keep``)."""

    decode: Callable[[Any, SlotParams, StepState, DecodeBatch], tuple[StepState, Sampled]]
    decode_many: Callable[[Any, SlotParams, StepState, DecodeBatch, jax.Array], tuple[StepState, Sampled, jax.Array]]
    prefill: Callable[[Any, StepState, PrefillBatch], StepState]
    prefill_logprobs: Callable[[Any, StepState, PrefillBatch, jax.Array], tuple[StepState, Logprobs]]
    admit: Callable[[StepState, jax.Array, jax.Array, jax.Array], StepState]
    keep: Callable[[StepState, jax.Array], SlotState]
    resume: Callable[[StepState, jax.Array, SlotState], StepState]
    copy: Callable[[StepState, jax.Array, jax.Array], StepState]
    export: Callable[[StepState, jax.Array], jax.Array]
    restore: Callable[[StepState, jax.Array, jax.Array], StepState]


def make_programs(model: Model, max_logprobs: int, multi_step: int = 1, backend: Wish = "auto") -> Programs:
    """The programs of one model. ``multi_step``: the most steps of one ``decode_many``; ``backend``: attention's."""
    decode = _decode(model, max_logprobs, backend)
    prefill, prefill_logprobs = _prefill(model, max_logprobs, backend)
    return Programs(
        decode,
        _decode_many(decode, multi_step),
        prefill,
        prefill_logprobs,
        _admit,
        _keep,
        _resume,
        *_moves(model, backend),
    )


def _decode(model: Model, max_logprobs: int, backend: Wish) -> Callable[..., tuple[StepState, Sampled]]:
    apply: Any = model.module.apply
    spec = model.cache_spec

    def decode(params: Any, slots: SlotParams, state: StepState, batch: DecodeBatch) -> tuple[StepState, Sampled]:
        active = batch.positions >= 0
        tokens = jnp.where(batch.tokens >= 0, batch.tokens, state.last_tokens)
        attend = spread(DecodeAttend(spec, batch.tables, batch.positions, backend))
        hidden, pools = apply({"params": params}, tokens, batch.positions, attend, state.pools)
        logits = gathered_logits(apply({"params": params}, hidden, method="head"))
        slots, own = _of_rows(slots, batch.owners, active)
        sampled, slot_state = sample(
            logits, slots, state.slots, batch.positions + 1, batch.generated, active, max_logprobs, own
        )
        last_tokens = jnp.where(own, sampled.tokens, state.last_tokens)
        return StepState(pools, last_tokens, slot_state), sampled

    return decode


def _of_rows(
    slots: SlotParams, owners: Int[Array, " rows"] | None, active: Bool[Array, " rows"]
) -> tuple[SlotParams, Bool[Array, " rows"]]:
    """The parameters of each row, and which rows are active and their slots' own."""
    if owners is None:
        return slots, active
    mine = SlotParams(*(jnp.take(x, owners, axis=0, mode="clip") for x in slots))
    return mine, active & (owners == jnp.arange(owners.shape[0]))


def _decode_many(
    decode: Callable[..., tuple[StepState, Sampled]], most: int
) -> Callable[..., tuple[StepState, Sampled, jax.Array]]:
    def decode_many(
        params: Any, slots: SlotParams, state: StepState, batch: DecodeBatch, steps: Int[Array, ""]
    ) -> tuple[StepState, Sampled, jax.Array]:
        """Up to ``steps`` steps, each on what the one before sampled, until one samples an end.

        Also returns how many steps ran; what was sampled has a leading axis of ``most`` steps, zeros behind those.
        """
        active = batch.positions >= 0
        shapes = jax.eval_shape(decode, params, slots, state, batch)[1]
        nothing = jax.tree.map(lambda x: jnp.zeros((most, *x.shape), x.dtype), shapes)

        def running(carry: tuple[Any, ...]) -> Bool[Array, ""]:
            done, ended, _, _ = carry
            return (done < steps) & ~ended

        def once(carry: tuple[Any, ...]) -> tuple[Any, ...]:
            done, _, state, seen = carry
            now = batch._replace(
                tokens=jnp.where(done == 0, batch.tokens, -1),
                positions=jnp.where(active, batch.positions + done, -1),
                generated=batch.generated + done,
            )
            state, sampled = decode(params, slots, state, now)
            seen = jax.tree.map(lambda x, new: lax.dynamic_update_index_in_dim(x, new, done, 0), seen, sampled)
            return done + 1, _any_ends(slots, now, sampled.tokens), state, seen

        done, _, state, seen = lax.while_loop(running, once, (jnp.int32(0), jnp.bool_(False), state, nothing))
        return state, seen, done

    return decode_many


def _any_ends(slots: SlotParams, batch: DecodeBatch, tokens: Int[Array, " rows"]) -> Bool[Array, ""]:
    """Whether a row sampled a token that ends its sequence (those that a length ends are the scheduler's business)."""
    active = batch.positions >= 0
    slots, _ = _of_rows(slots, batch.owners, active)
    stops = jnp.any(tokens[:, None] == slots.stop_ids, axis=1)
    return jnp.any(active & stops & (batch.generated + 1 >= slots.min_tokens))


def _prefill(model: Model, max_logprobs: int, backend: Wish) -> tuple[Callable[..., StepState], Callable[..., Any]]:
    apply: Any = model.module.apply
    spec = model.cache_spec

    def backbone(params: Any, state: StepState, batch: PrefillBatch) -> tuple[StepState, jax.Array]:
        attend = spread(PrefillAttend(spec, batch.tables, batch.starts, batch.lengths, backend))
        index = jnp.arange(batch.tokens.shape[1])
        positions = jnp.where(index < batch.lengths[:, None], batch.starts[:, None] + index, -1)
        # Lanes end to end: the products see one matrix.
        hidden, pools = apply({"params": params}, batch.tokens.reshape(-1), positions.reshape(-1), attend, state.pools)
        return state._replace(pools=pools), hidden

    def prefill(params: Any, state: StepState, batch: PrefillBatch) -> StepState:
        return backbone(params, state, batch)[0]

    def prefill_logprobs(
        params: Any, state: StepState, batch: PrefillBatch, following: Int[Array, " chunk"]
    ) -> tuple[StepState, Logprobs]:
        state, hidden = backbone(params, state, batch)
        logits = gathered_logits(apply({"params": params}, hidden, method="head"))
        return state, prompt_logprobs(logits, following, max_logprobs)

    return prefill, prefill_logprobs


def _admit(
    state: StepState, slot: Int[Array, ""], prompt: Bool[Array, " vocab"], bias: Float[Array, " vocab"]
) -> StepState:
    return state._replace(slots=admit(state.slots, slot, prompt, bias))


def _keep(state: StepState, slot: Int[Array, ""]) -> SlotState:
    return keep_slot(state.slots, slot)


def _resume(state: StepState, slot: Int[Array, ""], kept: SlotState) -> StepState:
    return state._replace(slots=resume_slot(state.slots, slot, kept))


def _moves(model: Model, backend: Wish) -> tuple[Callable[..., Any], ...]:
    """Programs that move pages: to other pages, out of the pools, and back into them."""
    spec = model.cache_spec

    def copy(state: StepState, source: Int[Array, "groups copies"], target: Int[Array, "groups copies"]) -> StepState:
        return state._replace(pools=copy_own_pages(spec, state.pools, source, target, backend))

    def export(state: StepState, source: Int[Array, "groups pages"]) -> jax.Array:
        return export_pages(spec, state.pools, source)

    def restore(state: StepState, pages: jax.Array, target: Int[Array, "groups pages"]) -> StepState:
        return state._replace(pools=import_pages(spec, state.pools, pages, target))

    return copy, export, restore
