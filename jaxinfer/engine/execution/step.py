"""Jitted program family: all programs that run on the device while serving."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.export import register_namedtuple_serialization
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from jaxinfer.engine.execution.commands import DecodeBatch, DraftBatch, HeadBatch, PrefillBatch, PromptNumbers
from jaxinfer.engine.execution.draft import keep_features
from jaxinfer.engine.execution.stages import Stage
from jaxinfer.kv.pool import DecodeAttend, LayerPool, Pool, PrefillAttend, StatePool, copy_pages, pages_of, with_pages
from jaxinfer.kv.transfer import export_pages, import_pages
from jaxinfer.layers.base import Positions
from jaxinfer.layers.merged import Merged
from jaxinfer.layers.rope import AxisPositions
from jaxinfer.parallel.mesh import gathered_logits, traced_size
from jaxinfer.parallel.tokens import tokens_spread
from jaxinfer.quant.banks import Banked, with_banks
from jaxinfer.quant.lora_weight import rows_of
from jaxinfer.sampling import (
    TYPICAL,
    DraftRows,
    Extras,
    Logprobs,
    Sampled,
    SlotParams,
    SlotState,
    Typical,
    accepted,
    prompt_logprobs,
    sample,
    wanted_logprobs,
)
from jaxinfer.types import CacheSpec, LoRATarget
from pallas_kernels.choice import Wish


class StepState(NamedTuple):
    """State on the device, donated to each step. ``last_tokens[slot]`` is the token that the slot sampled last: the
    next step reads it there, so that the host never waits. ``features``: input of a draft head for each slot's last
    positions, position p at ``p % window``; None: there is no head."""

    pools: list[Pool]
    last_tokens: Int[Array, " rows"]
    slots: SlotState
    features: Float[Array, "rows window width"] | None = None


for _result in (StepState, LayerPool, StatePool, SlotParams, SlotState, Sampled, Logprobs, Extras, PromptNumbers):
    # A program loaded from an earlier start returns these types under these names.
    register_namedtuple_serialization(_result, serialized_name=f"{_result.__module__}.{_result.__name__}")


def pack(batch: DecodeBatch | DraftBatch | HeadBatch | PrefillBatch) -> Int32[np.ndarray, " numbers"]:
    """Pack all arrays of a batch into one."""
    return np.concatenate([np.asarray(leaf, np.int32).reshape(-1) for leaf in batch if leaf is not None])


def unpack[Batch](packed: Int32[Any, " numbers"], like: Batch) -> Batch:
    """Unpack the batch that `pack` was given, in the shapes of ``like``."""
    leaves, tree = jax.tree.flatten(like)
    ends = itertools.accumulate(leaf.size for leaf in leaves)
    parts = [packed[end - leaf.size : end].reshape(leaf.shape) for leaf, end in zip(leaves, ends, strict=True)]
    return jax.tree.unflatten(tree, parts)


def with_adapters(
    function: Callable[..., Any], place: int, slots: int, targets: Mapping[tuple[str, ...], LoRATarget]
) -> Callable[..., Any]:
    """Return a program of parameters as one of a `Banked`, with the adapter slot of each row in its batch.

    Args:
        place: the argument that is the batch.
        slots: slots of the banks.
        targets: weights that have banks.
    """

    @functools.wraps(function)
    def adapted(banked: Banked, *operands: Any) -> Any:
        batch = operands[place - 1]
        chunked = isinstance(batch, PrefillBatch)
        loras = jnp.repeat(batch.loras, batch.tokens.shape[1]) if chunked else batch.loras
        params = with_banks(banked.params, banked.banks, rows_of(loras, slots, runs=chunked), targets)
        return function(params, *operands)

    return adapted


def make_pass_programs(
    stage: Stage, backend: Wish = "auto", *, spread_tokens: bool = False
) -> tuple[Callable[..., tuple[list[Pool], jax.Array]], Callable[..., tuple[list[Pool], jax.Array]]]:
    """Make ``decode`` and ``prefill`` of a stage before the last: each also returns the hidden states for the next one.
    The first stage of a decode step receives the last sampled tokens of the slots, and the tokens drafted on the device
    for them."""
    spec, chunks = stage.model.cache_spec, _chunks(stage, backend, spread_tokens)

    def decode(
        params: Any,
        pools: list[Pool],
        batch: DecodeBatch,
        arriving: Any,
        drafted: Int[Array, "slots drafts"] | None = None,
    ) -> Any:
        fed = batch.tokens if drafted is None else _with_drafted(batch, drafted)
        x = jnp.where(fed >= 0, fed, arriving[: fed.shape[0]]) if stage.first else arriving
        attend = DecodeAttend(spec, batch.tables, batch.positions, backend)
        hidden, features, pools = stage.tapped(params, x, _row_positions(batch), attend, pools)
        return pools, stage.handed(hidden, features)

    def prefill(params: Any, pools: list[Pool], batch: PrefillBatch, arriving: Any) -> Any:
        pools, hidden, features, _ = chunks(params, pools, batch, arriving)
        return pools, stage.handed(hidden, features)

    return decode, prefill


def make_move_programs(spec: CacheSpec, backend: Wish = "auto") -> tuple[Callable[..., Any], ...]:
    """Make the programs that copy pages within the pools, out of the pools, and back into them."""

    def copy(pools: list[Pool], source: Int[Array, "groups copies"], target: Int[Array, "groups copies"]) -> Any:
        return with_pages(pools, copy_pages(spec, pages_of(pools), source, target, backend))

    def export(pools: list[Pool], source: Int[Array, "groups pages"]) -> tuple[jax.Array, ...]:
        return export_pages(spec, pages_of(pools), source)

    def restore(pools: list[Pool], pages: tuple[jax.Array, ...], target: Int[Array, "groups pages"]) -> list[Pool]:
        return with_pages(pools, import_pages(spec, pages_of(pools), pages, target))

    return copy, export, restore


def make_decode(
    stage: Stage,
    max_logprobs: int,
    most_drafts: int = 0,
    backend: Wish = "auto",
    *,
    whole: bool = False,
    routed: bool = False,
    typical: Typical = TYPICAL,
) -> Callable[..., tuple[StepState, Sampled]]:
    """Make the decode program of a whole model, or of its last pipeline stage. All programs are pure; changed arguments
    are donated.

    A step may have fewer rows than there are slots: they are those of the first slots (and their drafts), and the state
    of the remaining slots is unchanged. ``arriving`` are the hidden states of the stage before; None where there is
    none. ``drafted`` are the tokens drafted on the device for the slots, ``masks`` those of grammars,
    ``asks`` what rows ask of the outputs for training.

    Args:
        most_drafts: maximum draft depth.
        whole: rows may ask for the whole vocabulary.
        routed: rows may ask for the experts that their tokens take.
        typical: see `sample`.
    """
    spec = stage.model.cache_spec

    def decode(
        params: Any,
        slots: SlotParams,
        state: StepState,
        batch: DecodeBatch,
        arriving: Any = None,
        drafted: Int[Array, "slots drafts"] | None = None,
        masks: Int32[Array, "rows words"] | None = None,
        asks: Int32[Array, "rows asks"] | None = None,
    ) -> tuple[StepState, Sampled]:
        active, rows = batch.positions >= 0, batch.positions.shape[0]
        fed = batch.tokens if drafted is None else _with_drafted(batch, drafted)
        x = jnp.where(fed >= 0, fed, state.last_tokens[:rows]) if stage.first else arriving
        owners = batch.owners if spec.stateful else None
        turns = None if traced_size("kv_heads") == 1 else 1 + most_drafts
        attend = DecodeAttend(spec, batch.tables, batch.positions, backend, owners, turns)
        tapped, experts = stage.routed(params, x, _row_positions(batch), attend, state.pools, experts=routed)
        hidden, features, pools = tapped
        logits = gathered_logits(stage.head(params, hidden))
        drafts = None if batch.owners is None else DraftRows(batch.owners, fed, batch.positions, active, batch.branches)
        at, done = batch.positions + 1, batch.generated
        given = (at, done, active, max_logprobs, drafts, masks, asks)
        sampled, slot_state = sample(logits, slots, state.slots, *given, whole=whole, typical=typical)
        if sampled.extras is not None:
            sampled = sampled._replace(extras=sampled.extras._replace(routed=experts))
        if drafts is not None:
            pools = attend.accept(pools, accepted(drafts, sampled.tokens))
        own = active if drafts is None else drafts.slot_rows
        # A row without a token (`NOT_FINITE`) ends its sequence, but not before the next step is launched.
        newest = jnp.where(own, jnp.maximum(sampled.tokens, 0), state.last_tokens[:rows])
        last_tokens, kept = lax.dynamic_update_slice(state.last_tokens, newest, (0,)), state.features
        if kept is not None and drafts is not None:
            kept = keep_features(kept, drafts, sampled.tokens, features)
        return StepState(pools, last_tokens, slot_state, kept), sampled

    return decode


def _row_positions(batch: DecodeBatch) -> Positions:
    """Return the positions of rows; after images with M-RoPE rotary positions differ, alike on all axes."""
    if batch.shifts is None:
        return batch.positions
    turned = batch.positions + batch.shifts
    return AxisPositions(batch.positions, jnp.broadcast_to(turned, (3, *turned.shape)))


def _with_drafted(batch: DecodeBatch, drafted: Int[Array, "slots drafts"]) -> Int[Array, " rows"]:
    """Replace draft placeholders in the rows' tokens by the tokens that a draft model drafted."""
    return jnp.where(batch.tokens < -1, drafted[batch.owners, -2 - batch.tokens], batch.tokens)


def make_decode_many(
    decode: Callable[..., tuple[StepState, Sampled]], most: int
) -> Callable[..., tuple[StepState, Sampled, jax.Array]]:
    """Make the program of several decode steps, at most ``most``."""

    def decode_many(
        params: Any, slots: SlotParams, state: StepState, batch: DecodeBatch, steps: Int[Array, ""]
    ) -> tuple[StepState, Sampled, jax.Array]:
        """Run up to ``steps`` steps, each on the samples of the one before, until a row samples a stop token.

        Also returns the number of steps that ran; the samples have a leading axis of ``most`` steps, zero-padded.
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
    """Whether a row sampled a token that ends its sequence (the scheduler handles the length limit)."""
    active, rows = batch.positions >= 0, tokens.shape[0]
    stops = jnp.any(tokens[:, None] == slots.stop_ids[:rows], axis=1)
    return jnp.any(active & stops & (batch.generated + 1 >= slots.min_tokens[:rows]))


def _chunks(
    stage: Stage, backend: Wish, spread_tokens: bool, *, routed: bool = False
) -> Callable[..., tuple[list[Pool], Any, Any, Any]]:
    spec = stage.model.cache_spec

    def chunks(params: Any, pools: list[Pool], batch: PrefillBatch, arriving: Any) -> tuple[list[Pool], Any, Any, Any]:
        attend = PrefillAttend(spec, batch.tables, batch.starts, batch.lengths, backend, batch.ends)
        index = jnp.arange(batch.tokens.shape[1])
        at = jnp.where(index < batch.lengths[:, None], batch.starts[:, None] + index, -1).reshape(-1)
        positions = at if batch.axes is None else AxisPositions(at, jnp.moveaxis(batch.axes, 1, 0).reshape(3, -1))
        # Chunks end to end: the matrix products see one matrix.
        x = _entering(batch, arriving) if stage.first else arriving
        with tokens_spread(spread_tokens):
            (hidden, features, pools), experts = stage.routed(params, x, positions, attend, pools, experts=routed)
        return pools, hidden, features, experts

    return chunks


def _entering(batch: PrefillBatch, images: Float[Array, "cached width"] | None) -> Array | Merged:
    """Return the input of the first stage: tokens, of which some may be rows of the encoder cache ``images``."""
    tokens = batch.tokens.reshape(-1)
    if batch.images is None or images is None:
        return tokens
    return Merged(tokens, batch.images.reshape(-1), images)


def make_prefill(stage: Stage, backend: Wish = "auto", *, spread_tokens: bool = False) -> Callable[..., Any]:
    """Make the program of prompt chunks. It returns the pools, with the features of all tokens where a draft head reads
    them. ``arriving`` are the hidden states of the stage before, or for the first stage the encoder cache; None where
    there is neither.

    Args:
        spread_tokens: see `jaxinfer.parallel.tokens`.
    """
    chunks = _chunks(stage, backend, spread_tokens)

    def prefill(params: Any, pools: list[Pool], batch: PrefillBatch, arriving: Any = None) -> Any:
        pools, _, features, _ = chunks(params, pools, batch, arriving)
        return (pools, features) if stage.prompts else pools

    return prefill


def make_prefill_logprobs(
    stage: Stage, max_logprobs: int, backend: Wish = "auto", *, spread_tokens: bool = False, routed: bool = False
) -> Callable[..., tuple[Any, PromptNumbers]]:
    """Make the program of a chunk that also returns the log probabilities of its tokens, and if ``routed`` their
    experts."""
    chunks = _chunks(stage, backend, spread_tokens, routed=routed)

    def prefill_logprobs(
        params: Any, pools: list[Pool], batch: PrefillBatch, arriving: Any, following: Int[Array, " chunk"]
    ) -> tuple[Any, PromptNumbers]:
        pools, hidden, features, experts = chunks(params, pools, batch, arriving)
        logits = gathered_logits(stage.head(params, hidden))
        filled = (pools, features) if stage.prompts else pools
        return filled, PromptNumbers(prompt_logprobs(logits, following, max_logprobs), experts)

    return prefill_logprobs


def make_decode_logprobs(
    stage: Stage, max_logprobs: int, backend: Wish = "auto"
) -> Callable[..., tuple[list[Pool], Float32[Array, " rows"]]]:
    """Make the program of rows as `make_decode` computes them, without drafts, which returns the log probabilities of
    given tokens."""

    def decode_logprobs(
        params: Any, pools: list[Pool], batch: DecodeBatch, following: Int[Array, " rows"], arriving: Any
    ) -> tuple[list[Pool], Float32[Array, " rows"]]:
        attend = DecodeAttend(stage.model.cache_spec, batch.tables, batch.positions, backend)
        x = batch.tokens if stage.first else arriving
        hidden, _, pools = stage.tapped(params, x, _row_positions(batch), attend, pools)
        raw = gathered_logits(stage.head(params, hidden)).astype(jnp.float32)
        return pools, wanted_logprobs(raw, following, batch.positions >= 0, max_logprobs).logprob

    return decode_logprobs
