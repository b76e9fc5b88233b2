"""Programs that draft on the device: of a draft model, and of heads that read the model's own states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxinfer.engine.execution.commands import DraftBatch, HeadBatch, PrefillBatch
from jaxinfer.engine.execution.stages import Stage
from jaxinfer.kv.pool import DecodeAttend, LayerPool, PrefillAttend
from jaxinfer.kv.spread import spread
from jaxinfer.models.head import DraftHead
from jaxinfer.parallel.mesh import gathered_logits
from jaxinfer.sampling import DraftRows, SlotParams, SlotState, accepted, guess
from pallas_kernels.choice import Wish


def make_draft_program(
    stage: Stage, most: int, backend: Wish = "auto"
) -> Callable[[Any, SlotParams, SlotState, list[LayerPool], DraftBatch], tuple[list[LayerPool], jax.Array]]:
    """The program of a draft model: up to ``most`` tokens behind each row's, one after the other.

    It goes as far as the row that wants most, and once more: then the last token's keys are there, too, and the next
    draft begins with one token, however many are accepted.
    """
    spec, known = stage.model.cache_spec, stage.model.config.vocab_size

    def draft(
        params: Any, slots: SlotParams, sampler: SlotState, pools: list[LayerPool], batch: DraftBatch
    ) -> tuple[list[LayerPool], jax.Array]:
        def once(step: jax.Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
            pools, tokens, drafted = carry
            active = (batch.positions >= 0) & (step <= batch.limits)
            positions = jnp.where(active, batch.positions + step, -1)
            attend = spread(DecodeAttend(spec, batch.tables, positions, backend))
            hidden, pools = stage.backbone(params, jnp.minimum(tokens, known - 1), positions, attend, pools)
            logits = fitted(gathered_logits(stage.head(params, hidden)), sampler.counts.shape[1])
            tokens = guess(logits, slots, sampler, positions + 1, batch.generated + step, active)
            return pools, tokens, lax.dynamic_update_index_in_dim(drafted, tokens, step, 1)

        drafted = jnp.zeros((batch.tokens.shape[0], most + 1), jnp.int32)
        pools, _, drafted = lax.fori_loop(0, jnp.max(batch.limits) + 1, once, (pools, batch.tokens, drafted))
        return pools, drafted

    return draft


def fitted(logits: Float[Array, "rows known"], vocab: int) -> Float[Array, "rows vocab"]:
    """Logits of a vocabulary that is padded otherwise: nobody says the rest."""
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
    """The features of each slot's last positions, with those of a step's rows that were accepted."""
    slots, window, _ = kept.shape
    owners = jnp.where(accepted(rows, sampled), rows.owners, slots)
    return kept.at[owners, rows.positions % window].set(features.astype(kept.dtype), mode="drop")


class HeadPrograms:
    """The programs of a draft head.

    Args:
        stage: the head.
        most: draft tokens at most.
    """

    def __init__(self, stage: Stage, most: int, backend: Wish = "auto") -> None:
        self._model, self._most, self._backend = stage.model, most, backend
        self._module = cast(DraftHead, stage.model.module)

    def prefill(self, params: Any, pools: list[LayerPool], batch: PrefillBatch, features: jax.Array) -> list[LayerPool]:
        """Compute keys and values of prompt chunks' pairs, of what the model's program gave of each token."""
        attend = PrefillAttend(self._model.cache_spec, batch.tables, batch.starts, batch.lengths, self._backend)
        index, ends = jnp.arange(batch.tokens.shape[1]), batch.lengths[:, None] - 1
        tokens = jnp.where(index == ends, cast(jax.Array, batch.following)[:, None], jnp.roll(batch.tokens, -1, axis=1))
        positions = jnp.where(index <= ends, batch.starts[:, None] + index, -1)
        first = self._apply(params, features, method="first")
        operands = tokens.reshape(-1), first, positions.reshape(-1), spread(attend), pools
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
        """Compute the batch's pairs, then draft behind the newest of each slot."""
        kept = features[batch.owners, batch.positions % features.shape[1]]

        def guessed(logits: jax.Array, step: int | jax.Array) -> jax.Array:
            logits = fitted(gathered_logits(logits), sampler.counts.shape[1])
            at, active = batch.positions[batch.last] + 2 + step, step < batch.limits
            return guess(logits, slots, sampler, at, batch.generated + step, active)

        if not self._module.recurrent:
            logits = self._apply(params, kept[batch.last], method="guesses")
            each = [guessed(logits[:, step], step) for step in range(min(self._most, logits.shape[1]))]
            return pools, jnp.stack(each, axis=1)
        return self._chain(params, pools, batch, self._apply(params, kept, method="first"), guessed)

    def _chain(
        self,
        params: Any,
        pools: list[LayerPool],
        batch: HeadBatch,
        entering: jax.Array,
        guessed: Callable[[jax.Array, int | jax.Array], jax.Array],
    ) -> tuple[list[LayerPool], jax.Array]:
        tables, bases = batch.tables[:, batch.owners], batch.bases[batch.owners]
        hidden, pools = self._pass(params, pools, batch.tokens, entering, batch.positions, tables, bases)
        state = hidden[batch.last]
        tokens = guessed(self._apply(params, state, method="head"), 0)
        drafted = jnp.zeros((tokens.shape[0], self._most), jnp.int32).at[:, 0].set(tokens)

        def once(step: jax.Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
            pools, state, tokens, drafted = carry
            positions = jnp.where(step < batch.limits, batch.positions[batch.last] + step, -1)
            state, pools = self._pass(params, pools, tokens, state, positions, batch.tables, batch.bases)
            tokens = guessed(self._apply(params, state, method="head"), step)
            return pools, state, tokens, lax.dynamic_update_index_in_dim(drafted, tokens, step, 1)

        carry = pools, state, tokens, drafted
        pools, _, _, drafted = lax.fori_loop(1, jnp.max(batch.limits), once, carry)
        return pools, drafted

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
        """Compute one pair a row. ``bases``: positions at which a row's tables begin."""
        places = jnp.where(positions >= 0, positions - bases, -1)
        attend = spread(DecodeAttend(self._model.cache_spec, tables, places, self._backend))
        known = jnp.minimum(tokens, self._model.config.vocab_size - 1)
        return cast(tuple[jax.Array, list[LayerPool]], self._apply(params, known, entering, positions, attend, pools))

    def _apply(self, params: Any, *operands: Any, method: str | None = None) -> Any:
        apply: Any = self._module.apply
        return apply({"params": params}, *operands, method=method)
