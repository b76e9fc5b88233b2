"""Attention and recurrences over rows of contiguous slots, with optional padding and a cache of fixed size or none.

A module takes `Contiguous` in place of the engine's paged `attend`. A token's position is the number of tokens before
it in its row; padding has position -1: no query, state or expert reads it.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxinfer.kv.pool import StatePool
from jaxinfer.layers.attention import causal_choice, distant_attend
from jaxinfer.layers.recurrent import Recurrence, run_whole
from jaxinfer.types import CacheSpec, LayerSpec
from pallas_kernels.token_index import Index


class KV(NamedTuple):
    """Keys (or latents), values and index keys of one layer's tokens; None: the layer has none of these."""

    k: Float[Array, "batch length kv_heads head_dim"]
    v: Float[Array, "batch length kv_heads value_dim"] | None = None
    index_k: Float[Array, "batch length dim"] | None = None


class Cache(NamedTuple):
    """A contiguous KV cache of a batch: a pytree of fixed shapes.

    Attributes:
        layers: per layer a `KV`, a `StatePool` of its states, or None if it keeps neither.
        positions: position of the token in each slot; -1: empty or padding.
        used: number of filled slots, the same in each row.
    """

    layers: list[Any]
    positions: Int[Array, "batch length"]
    used: Int[Array, ""]


def new_cache(spec: CacheSpec, batch: int, length: int, dtype: Any) -> Cache:
    """Return an empty cache of ``length`` slots per row."""
    layers = [_layer(spec, layer, (batch, length), dtype) for layer in spec.layers]
    return Cache(layers, jnp.full((batch, length), -1, jnp.int32), jnp.zeros((), jnp.int32))


def new_states(layer: LayerSpec, batch: int, dtype: Any, kv: KV | None = None) -> Any:
    """Return a layer's states before the first token with its keys and values; only ``kv`` if it has no states."""
    if not layer.states:
        return kv
    types = [jnp.float32 if state.exact else dtype for state in layer.states]
    zeros = (jnp.zeros((batch, *state.shape), each) for state, each in zip(layer.states, types, strict=True))
    return StatePool(tuple(zeros), kv)  # type: ignore[arg-type]


def _layer(spec: CacheSpec, layer: LayerSpec, slots: tuple[int, int], dtype: Any) -> Any:
    (heads, dim), kv = spec.sizes(layer), None
    if layer.attends and layer.latent_rank is not None:
        index = jnp.zeros((*slots, layer.index_dim), dtype) if layer.index_dim else None
        kv = KV(jnp.zeros((*slots, 1, dim - layer.index_dim), dtype), None, index)
    elif layer.attends:
        kv = KV(*(jnp.zeros((*slots, heads, dim), dtype) for _ in range(2)))
    return new_states(layer, slots[0], dtype, kv)


def positions_of(mask: Bool[Array, "batch time"], first: Any = 0) -> Int[Array, "batch time"]:
    """Return the positions of tokens that follow ``first`` earlier tokens; -1 for padding, where ``mask`` is False."""
    return jnp.where(mask, first + jnp.cumsum(mask, axis=-1, dtype=jnp.int32) - 1, -1)


@dataclasses.dataclass(frozen=True)
class Contiguous:
    """Implementation of `ChoosingAttend` and `Recur` over contiguous rows.

    The cache of an attention layer is a `KV`, or None for whole rows; that of a layer with states is a `StatePool`, or
    None for whole rows without padding.

    Attributes:
        queries, keys: positions of the new tokens, and of all slots including them.
        used: slot of the first new token.
        told: list to which the attention weights of each call are appended.
    """

    queries: Int[Array, "batch time"]
    keys: Int[Array, "batch keys"]
    used: Int[Array, ""] | int = 0
    told: list[Any] | None = None

    def __call__(
        self,
        q: Float[Array, "batch time heads head_dim"],
        k: Float[Array, "batch time kv_heads head_dim"] | None,
        v: Float[Array, "batch time kv_heads value_dim"] | None,
        cache: KV | None,
        layer: LayerSpec,
        scale: float,
        sinks: Float[Array, " heads"] | None = None,
        chosen: Bool[Array, "batch time keys"] | None = None,
    ) -> tuple[Float[Array, "batch time heads result_dim"], KV]:
        """See `Attend`."""
        kept = cache if k is None else self._written(cache, KV(k, v))
        assert kept is not None, layer
        return self._attended(q, kept, layer, scale, sinks, chosen), kept

    def choosing(
        self,
        q: Float[Array, "batch time heads head_dim"],
        k: Float[Array, "batch time 1 head_dim"],
        index: Index,
        cache: KV | None,
        layer: LayerSpec,
        scale: float,
    ) -> tuple[Float[Array, "batch time heads result_dim"], Bool[Array, "batch time keys"] | None, KV]:
        """See `ChoosingAttend`."""
        kept = self._written(cache, KV(k, None, index.k))
        assert kept.index_k is not None, layer
        chosen = causal_choice(index._replace(k=kept.index_k), layer, self._distance)
        return self._attended(q, kept, layer, scale, None, chosen), chosen, kept

    def recur(self, function: Recurrence, inputs: Any, state: jax.Array) -> tuple[Any, jax.Array]:
        """See `Recur`; each row's tokens are compacted to the left, without padding, before the recurrence."""
        live = self.queries >= 0
        order = jnp.argsort(~live, axis=-1, stable=True)
        outputs, state = run_whole(function, _taken(inputs, order), state, live.sum(-1))
        return _taken(outputs, jnp.argsort(order, axis=-1)), state

    @property
    def _distance(self) -> Int[Array, "batch time keys"]:
        keys = self.keys[:, None, :]
        return jnp.where(keys >= 0, self.queries[:, :, None] - keys, -1)

    def _written(self, cache: KV | None, new: KV) -> KV:
        def write(kept: Any, x: Any) -> Any:
            # Layers that reuse an earlier layer's choice have no index keys.
            return kept if x is None else lax.dynamic_update_slice_in_dim(kept, x.astype(kept.dtype), self.used, axis=1)

        return new if cache is None else KV(*map(write, cache, new))

    def _attended(
        self, q: jax.Array, kept: KV, layer: LayerSpec, scale: float, sinks: Any, chosen: Any
    ) -> Float[Array, "batch time heads result_dim"]:
        v = kept.k[..., : layer.latent_rank] if kept.v is None else kept.v
        mixed, weights = distant_attend(q, kept.k, v, self._distance, layer, scale, sinks, chosen)
        if self.told is not None:
            self.told.append(jnp.where(self.queries[:, None, :, None] >= 0, weights, 0.0))
        return mixed


def _taken(tree: Any, order: Int[Array, "batch time"]) -> Any:
    """Reorder arrays ``[batch, time, ...]`` along time."""
    return jax.tree.map(lambda x: jax.vmap(lambda row, at: row[at])(x, order), tree)
