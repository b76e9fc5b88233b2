"""Drafting programs on the device: for a draft model, and for heads that read the model's own states."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxinfer.engine.execution.commands import DraftBatch, HeadBatch, PrefillBatch
from jaxinfer.engine.execution.stages import Stage
from jaxinfer.kv.pool import DecodeAttend, LayerPool, PrefillAttend
from jaxinfer.models.head import DraftHead
from jaxinfer.parallel.mesh import gathered_logits
from jaxinfer.sampling import DraftRows, SlotParams, SlotState, accepted, guess, guess_scores
from jaxinfer.sampling.beams import deviations, expand, ranked
from pallas_kernels.choice import Wish


def make_draft_program(
    stage: Stage, most: int, backend: Wish = "auto"
) -> Callable[[Any, SlotParams, SlotState, list[LayerPool], DraftBatch], tuple[list[LayerPool], jax.Array]]:
    """Make the program of a draft model: up to ``most`` tokens after each row's, one after the other.

    It runs as far as the row with the most drafts, and once more: then the keys of the last token exist too, and the
    next draft begins with one token, however many are accepted.
    """
    spec, known = stage.model.cache_spec, stage.model.config.vocab_size

    def draft(
        params: Any, slots: SlotParams, sampler: SlotState, pools: list[LayerPool], batch: DraftBatch
    ) -> tuple[list[LayerPool], jax.Array]:
        def once(step: jax.Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
            pools, tokens, drafted = carry
            active = (batch.positions >= 0) & (step <= batch.limits)
            positions = jnp.where(active, batch.positions + step, -1)
            attend = DecodeAttend(spec, batch.tables, positions, backend)
            hidden, pools = stage.backbone(params, jnp.minimum(tokens, known - 1), positions, attend, pools)
            logits = fitted(gathered_logits(stage.head(params, hidden)), sampler.counts.shape[1])
            tokens = guess(logits, slots, sampler, positions + 1, batch.generated + step, active)
            return pools, tokens, lax.dynamic_update_index_in_dim(drafted, tokens, step, 1)

        drafted = jnp.zeros((batch.tokens.shape[0], most + 1), jnp.int32)
        pools, _, drafted = lax.fori_loop(0, jnp.max(batch.limits) + 1, once, (pools, batch.tokens, drafted))
        return pools, drafted

    return draft


def fitted(logits: Float[Array, "rows known"], vocab: int) -> Float[Array, "rows vocab"]:
    """Fit logits to a vocabulary with other padding: missing tokens get -inf."""
    known = logits.shape[1]
    if known >= vocab:
        return logits[:, :vocab]
    return jnp.pad(logits, ((0, 0), (0, vocab - known)), constant_values=-jnp.inf)


def keep_features(
    kept: Float[Array, "slots window width"],
    rows: DraftRows,
    sampled: Int[Array, " rows"],
    features: Float[Array, "rows width"],
) -> Float[Array, "slots window width"]:
    """Update the features of each slot's last positions with those of a step's accepted rows."""
    slots, window, _ = kept.shape
    owners = jnp.where(accepted(rows, sampled), rows.owners, slots)
    return kept.at[owners, rows.positions % window].set(features.astype(kept.dtype), mode="drop")


class HeadPrograms:
    """Programs of a draft head.

    Args:
        stage: stage of the head.
        most: maximum draft tokens of each of the ``paths``.
        tree: ranks of the tokens of each path, where a file gives them (`ResolvedEngine.draft_tree`).
    """

    def __init__(
        self,
        stage: Stage,
        most: int,
        paths: int = 1,
        backend: Wish = "auto",
        tree: Sequence[Sequence[int]] = (),
    ) -> None:
        self._model, self._most, self._paths, self._backend = stage.model, most, paths, backend
        self._tree = [[*path, *[0] * (most - len(path))] for path in tree]
        self._module = cast(DraftHead, stage.model.module)

    def prefill(self, params: Any, pools: list[LayerPool], batch: PrefillBatch, features: jax.Array) -> list[LayerPool]:
        """Compute keys and values of prompt chunks' pairs, from the features that the model's program returned."""
        attend = PrefillAttend(self._model.cache_spec, batch.tables, batch.starts, batch.lengths, self._backend)
        index, ends = jnp.arange(batch.tokens.shape[1]), batch.lengths[:, None] - 1
        tokens = jnp.where(index == ends, cast(jax.Array, batch.following)[:, None], jnp.roll(batch.tokens, -1, axis=1))
        positions = jnp.where(index <= ends, batch.starts[:, None] + index, -1)
        first = self._apply(params, features, method="first")
        operands = tokens.reshape(-1), first, positions.reshape(-1), attend, pools
        return cast(list[LayerPool], self._apply(params, *operands)[1])

    def draft(
        self,
        params: Any,
        slots: SlotParams,
        sampler: SlotState,
        pools: list[LayerPool],
        batch: HeadBatch,
        features: Float[Array, "slots window width"],
    ) -> tuple[list[LayerPool], Int[Array, "slots drafts"]]:
        """Compute the batch's pairs, then draft after the newest pair of each slot: path by path."""
        kept = features[batch.owners, batch.positions % features.shape[1]]
        limits, vocab = jnp.max(batch.limits, axis=1), sampler.counts.shape[1]

        def own(logits: jax.Array, step: int | jax.Array) -> jax.Array:
            at, active = batch.positions[batch.last] + 2 + step, step < limits
            choose = guess_scores if self._paths > 1 else guess
            return choose(logits, slots, sampler, at, batch.generated + step, active)

        if not self._module.recurrent:
            every = self._apply(params, kept[batch.last], method="guesses")[:, : self._most]
            logits = [fitted(gathered_logits(every[:, step]), vocab) for step in range(every.shape[1])]
            chosen = jnp.stack([own(each, step) for step, each in enumerate(logits)], axis=1)
            return pools, self._told(self._by_rank(chosen) if self._paths > 1 else chosen[:, None])
        tables, bases = batch.tables[:, 0, batch.owners], batch.bases[batch.owners]
        entering = self._apply(params, kept, method="first")
        hidden, pools = self._pass(params, pools, batch.tokens, entering, batch.positions, tables, bases)
        chain = _Chain(self, params, batch, own, vocab)
        draft = chain.paths if self._paths > 1 else chain.one
        pools, drafted = draft(pools, hidden[batch.last])
        return pools, self._told(drafted)

    def _by_rank(self, scores: Float[Array, "slots depth vocab"]) -> Int[Array, "slots paths depth"]:
        """Return the paths of a draft: those of the file's tree, else the likeliest."""
        if not self._tree:
            return deviations(scores, self._paths)
        paths = ranked(scores, [path[: scores.shape[1]] for path in self._tree])
        return jnp.pad(paths, ((0, 0), (0, self._paths - paths.shape[1]), (0, 0)))

    def _told(self, drafted: Int[Array, "slots paths depth"]) -> Int[Array, "slots drafts"]:
        """Flatten the paths of each slot, each padded to the maximum draft length."""
        short = self._most - drafted.shape[2]
        return jnp.pad(drafted, ((0, 0), (0, 0), (0, short))).reshape(drafted.shape[0], -1)

    def _pass(
        self,
        params: Any,
        pools: list[LayerPool],
        tokens: jax.Array,
        entering: jax.Array,
        positions: jax.Array,
        tables: jax.Array,
        bases: jax.Array,
    ) -> tuple[jax.Array, list[LayerPool]]:
        """Compute one pair per row. ``bases``: positions at which a row's tables begin."""
        places = jnp.where(positions >= 0, positions - bases, -1)
        attend = DecodeAttend(self._model.cache_spec, tables, places, self._backend)
        known = jnp.minimum(tokens, self._model.config.vocab_size - 1)
        return cast(tuple[jax.Array, list[LayerPool]], self._apply(params, known, entering, positions, attend, pools))

    def _logits(self, params: Any, states: jax.Array, vocab: int) -> jax.Array:
        return fitted(gathered_logits(self._apply(params, states, method="head")), vocab)

    def _apply(self, params: Any, *operands: Any, method: str | None = None) -> Any:
        apply: Any = self._module.apply
        return apply({"params": params}, *operands, method=method)


@dataclasses.dataclass(frozen=True)
class _Chain:
    """Drafting of a head that is fed its own states, after the newest pair of each slot.

    Attributes:
        own: draws a slot's token from logits, given the number of steps after that pair; of several paths, scores that
            rank the tokens.
    """

    programs: HeadPrograms
    params: Any
    batch: HeadBatch
    own: Callable[[jax.Array, int | jax.Array], jax.Array]
    vocab: int

    def one(self, pools: list[LayerPool], state: jax.Array) -> tuple[list[LayerPool], jax.Array]:
        """Draft one path: as far as the slot with the most drafts."""
        batch, heads, limits = self.batch, self.programs, self.batch.limits[:, 0]
        tokens = self.own(heads._logits(self.params, state, self.vocab), 0)
        drafted = jnp.zeros((tokens.shape[0], heads._most), jnp.int32).at[:, 0].set(tokens)

        def once(step: jax.Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
            pools, state, tokens, drafted = carry
            positions = jnp.where(step < limits, batch.positions[batch.last] + step, -1)
            operands = tokens, state, positions, batch.tables[:, 0], batch.bases
            state, pools = heads._pass(self.params, pools, *operands)
            tokens = self.own(heads._logits(self.params, state, self.vocab), step)
            return pools, state, tokens, lax.dynamic_update_index_in_dim(drafted, tokens, step, 1)

        carry = pools, state, tokens, drafted
        pools, _, _, drafted = lax.fori_loop(1, jnp.max(limits), once, carry)
        return pools, drafted[:, None]

    def paths(self, pools: list[LayerPool], state: jax.Array) -> tuple[list[LayerPool], jax.Array]:
        """Draft several paths. Each has its own pages, and is recomputed there in full at each step, since paths change
        places. For new pairs of this batch these pages hold guesses (measured: no path is shorter for it)."""
        count, most = self.programs._paths, self.programs._most
        logits = self.programs._logits(self.params, state, self.vocab)
        slots = jnp.arange(state.shape[0])[:, None]
        _, tokens, scores = expand(self.own(logits, 0)[:, None], jnp.zeros((state.shape[0], 1)), count)
        drafted = jnp.zeros((state.shape[0], count, most), jnp.int32).at[:, :, 0].set(tokens)
        entering = jnp.broadcast_to(state[:, None, None], (state.shape[0], count, most, state.shape[1]))

        def once(step: jax.Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
            pools, entering, drafted, scores = carry
            states, pools = self._whole(pools, drafted, entering, step)
            newest = jnp.take_along_axis(states, (step - 1)[None, None, None, None], axis=2)[:, :, 0]
            logits = self.programs._logits(self.params, newest.reshape(-1, newest.shape[-1]), self.vocab)
            ranks = jax.vmap(lambda each: self.own(each, step), 1, 1)(logits.reshape(*newest.shape[:2], -1))
            known = jnp.where(step < self.batch.limits, scores, -jnp.inf)  # the rest has no pages, or is long enough
            parents, tokens, scores = expand(ranks, known, count)
            entering = lax.dynamic_update_index_in_dim(entering, newest, step, 2)[slots, parents]
            drafted = lax.dynamic_update_index_in_dim(drafted[slots, parents], tokens, step, 2)
            return pools, entering, drafted, scores

        pools, _, drafted, _ = lax.fori_loop(1, jnp.max(self.batch.limits), once, (pools, entering, drafted, scores))
        return pools, drafted

    def _whole(
        self, pools: list[LayerPool], drafted: jax.Array, entering: jax.Array, step: jax.Array
    ) -> tuple[jax.Array, list[LayerPool]]:
        """Compute the states of all pairs of the paths, each of ``step`` tokens."""
        batch, shape = self.batch, drafted.shape
        depth = jnp.arange(shape[2])
        live = (depth < step) & (step < batch.limits[..., None])
        positions = jnp.where(live, batch.positions[batch.last][:, None, None] + 1 + depth, -1)
        by_path = jnp.moveaxis(batch.tables, 1, 2).reshape(-1, shape[0] * shape[1], batch.tables.shape[-1])
        tables = jnp.repeat(by_path, shape[2], axis=1)
        bases = jnp.repeat(batch.bases, shape[1] * shape[2])
        flat = drafted.reshape(-1), entering.reshape(-1, entering.shape[-1]), positions.reshape(-1)
        states, pools = self.programs._pass(self.params, pools, *flat, tables, bases)
        return states.reshape(entering.shape), pools
