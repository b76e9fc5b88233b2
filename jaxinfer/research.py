"""Research functions on a model: activations, padded batches, and a cache for custom decoding loops.

All functions are pure functions of a `Model`, which is a pytree: `jax.jit` and `jax.grad` go through them. They run the
module that is served, with another `attend` (`jaxinfer.research`), so they work for all families and for edited
modules; errors name the module. docs/functional.md has examples.

A ``mask`` [batch, time] is True at tokens and False at padding, which may be anywhere in a row. Results at padding are
finite and meaningless. Without a mask every position is a token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from jaxinfer.kv.pool import StatePool
from jaxinfer.layers.attention import causal_choice, distant_attend
from jaxinfer.layers.recurrent import Recurrence, run_whole
from jaxinfer.layers.rope import RopeConfig
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.model import Model, require_ids
from jaxinfer.types import CacheSpec, LayerSpec
from pallas_kernels.token_index import Index

__all__ = [
    "KV",
    "Cache",
    "apply",
    "attention_maps",
    "decode",
    "hidden_states",
    "init_cache",
    "logit_lens",
    "logits",
    "run",
]


def apply(
    model: Model, tokens: Int[Array, "batch time"], mask: Bool[Array, "batch time"] | None = None
) -> Float[Array, "batch time vocab"]:
    """Return logits (float32) of every position, as `Model.apply`, for rows that may be padded on either side.

    Where RoPE frequencies depend on the length of a text (longrope, dynamic), the longest row decides.

    Raises:
        ValueError: shapes do not fit, or the module is not a `Decoder`.
        TypeError: ``tokens`` are not integers.
    """
    hidden, _ = _run(model, tokens, mask, "apply")
    return _apply(model, hidden[0], method="head")


def hidden_states(
    model: Model, tokens: Int[Array, "batch time"], mask: Bool[Array, "batch time"] | None = None
) -> list[Float[Array, "batch time *streams d"]]:
    """Return the residual stream: the input of the first layer, and the output of each layer.

    As ``output_hidden_states`` of transformers, except that the last entry is before the final norm: `run` continues
    from any of them, and `logits` of the last are the logits of the model. Gemma 3n has several streams.

    Raises: as `apply`.
    """
    _, sown = _run(model, tokens, mask, "hidden_states", "hidden")
    layers = [sown["hidden"][f"layers_{index}"] for index in range(len(model.config.layers))]
    carried = [layers[0]["inputs"][0], *(layer["outputs"][0] for layer in layers)]
    return [_apply(model, each, method="hidden") for each in carried]


def attention_maps(
    model: Model,
    tokens: Int[Array, "batch time"],
    layers: Sequence[int] | None = None,
    mask: Bool[Array, "batch time"] | None = None,
) -> dict[int, Float[Array, "batch heads time time"]]:
    """Return the attention weights of queries (third axis) over keys (last axis), float32, by layer.

    As ``output_attentions`` of transformers' eager attention: after soft-caps, windows and the choice of sparse
    attention, and without the share of sinks, so that rows of gpt-oss sum to less than 1. Rows of padding are 0.

    Args:
        layers: -1 is the last one; None: all attention layers (hybrid models also have layers with states).

    Raises:
        ValueError: a layer does not exist or has no attention; also as `apply`.
    """
    specs = _decoder(model, "attention_maps").config.layers
    wanted = [index for index in _layers(model, layers, "attention_maps") if layers is not None or specs[index].attends]
    without = [index for index in wanted if not specs[index].attends]
    if without:
        raise ValueError(f"attention_maps: layer {without[0]} of {_family(model)} has no attention")
    _, sown = _run(model, tokens, mask, "attention_maps", "maps")
    return {index: sown["maps"][f"layers_{index}"]["weights"][0] for index in wanted}


def logits(model: Model, hidden: Float[Array, "batch time *streams d"]) -> Float[Array, "batch time vocab"]:
    """Return logits (float32) of hidden states after any layer: the final norm and the head."""
    return _apply(model, _apply(model, hidden, method="normed"), method="head")


def logit_lens(
    model: Model,
    tokens: Int[Array, "batch time"],
    layers: Sequence[int] | None = None,
    mask: Bool[Array, "batch time"] | None = None,
) -> dict[int, Float[Array, "batch time vocab"]]:
    """Return `logits` of the output of each layer, as if it were the last (nostalgebraist 2020), by layer.

    Args:
        layers: -1 is the last one, with the logits of the model; None: all.

    Raises: as `attention_maps`.
    """
    wanted = _layers(model, layers, "logit_lens")
    states = hidden_states(model, tokens, mask)
    return {index: logits(model, states[index + 1]) for index in wanted}


def run(
    model: Model,
    hidden: Float[Array, "batch time *streams d"],
    start: int,
    stop: int | None = None,
    mask: Bool[Array, "batch time"] | None = None,
) -> Float[Array, "batch time *streams d"]:
    """Run the layers from ``start`` up to, but not including, ``stop`` (None: to the end) on hidden states.

    ``run(model, states[i], i, j)`` of `hidden_states` is ``states[j]``.

    Raises:
        ValueError: the layers do not exist, or they need more than hidden states: keys of earlier layers or their own
            embeddings (Gemma 3n and 4), tokens chosen by an earlier layer (some of GLM-5).
    """
    module, count = _decoder(model, "run"), len(model.config.layers)
    stop = count if stop is None else stop
    if not 0 <= start <= stop <= count:
        raise ValueError(f"run: layers {start} to {stop} must be within 0 to {count}, those of {_family(model)}")
    if start == stop:
        return hidden
    if needed := module.bound or (None if module.begins(start) else "the tokens that an earlier layer chose"):
        raise ValueError(f"run: layers {start} to {stop} of {_family(model)} need more than hidden states: {needed}")
    attend, states = _attending(model, hidden.shape[:2], mask, "run")
    states = None if states is None else states[start:stop]
    return _apply(model, hidden, attend.queries, attend, states, range(start, stop), method="blocks")[0]


def init_cache(model: Model, batch: int, length: int) -> Cache:
    """Return an empty cache for ``batch`` rows of at most ``length`` tokens and padding, in the model's dtype.

    Raises:
        ValueError: the family cannot have a cache of that length: it exceeds Llama 4's chunk, or dynamic RoPE would
            change cached keys.
    """
    config = _decoder(model, "init_cache").up_to(length).config
    chunk = getattr(config, "chunk", None)
    if chunk is not None and length > chunk:
        raise ValueError(f"init_cache: length {length} is beyond attention_chunk_size ({chunk}) of {_family(model)}")
    if any(isinstance(each, RopeConfig) and each.kind == "dynamic" for each in vars(config).values()):
        raise ValueError(f"init_cache: length {length} is beyond the context of {_family(model)} with dynamic RoPE")
    return new_cache(model.cache_spec, batch, length, model.dtype)


def decode(
    model: Model, tokens: Int[Array, "batch time"], cache: Cache, mask: Bool[Array, "batch time"] | None = None
) -> tuple[Float[Array, "batch time vocab"], Cache]:
    """Return logits (float32) of tokens that follow the cached ones, and the updated cache: `apply` in chunks.

    Chunks may have any length; the cache's shapes are constant, so that `jax.lax.scan` can carry it. longrope uses the
    factors for texts of the cache's length, as an engine with that ``max_model_len`` does.

    Raises:
        ValueError: the cache has too few free slots (within `jax.jit`, where their number is unknown, logits are NaN);
            also as `apply`.
    """
    shape, length = _shape(tokens, "decode"), cache.positions.shape[1]
    fits = cache.used + shape[1] <= length
    if not isinstance(fits, Tracer) and not fits:
        raise ValueError(f"decode: {shape[1]} tokens after {int(cache.used)} do not fit the cache's length, {length}")
    queries = positions_of(_mask(shape, mask, "decode"), cache.positions.max(-1, keepdims=True) + 1)
    keys = lax.dynamic_update_slice_in_dim(cache.positions, queries, cache.used, axis=1)
    attend, model = Contiguous(queries, keys, cache.used), model.up_to(length)
    hidden, layers = _apply(model, tokens, queries, attend, cache.layers)
    found = jnp.where(fits, _apply(model, hidden, method="head"), jnp.nan)
    return found, Cache(layers, keys, cache.used + shape[1])


def _run(model: Model, tokens: Any, mask: Any, caller: str, *watched: str) -> tuple[Any, Any]:
    """Return the output of the module, and the values that `_watch` sows in the ``watched`` collections."""
    _decoder(model, caller)
    attend, states = _attending(model, _shape(tokens, caller), mask, caller)
    with nn.intercept_methods(_watch):
        return _apply(model, tokens, attend.queries, attend, states, mutable=list(watched))


def _watch(method: Any, args: Any, kwargs: Any, context: Any) -> Any:
    """Sow the inputs and outputs of a block, and its attention weights, where these collections are mutable.

    A block takes (x, context, attend, cache). Its submodules receive an `attend` whose list collects the weights.
    """
    watched = len(args) == 4 and isinstance(args[2], Contiguous) and args[2].told is None
    if not watched or isinstance(context.module, Decoder):
        return method(*args, **kwargs)
    x, shared, attend, cache = args
    attend = dataclasses.replace(attend, told=[])
    out = method(x, shared, attend, cache, **kwargs)
    for collection, name, values in (
        ("hidden", "inputs", [x]),
        ("hidden", "outputs", [out[0]]),
        ("maps", "weights", attend.told),
    ):
        for value in values:
            context.module.sow(collection, name, value)
    return out


def _attending(model: Model, shape: tuple[int, ...], mask: Any, caller: str) -> tuple[Contiguous, Any]:
    """Return the `attend` for whole rows, and the initial states of padded rows (None: no layer needs any)."""
    positions, spec = positions_of(_mask(shape, mask, caller)), model.cache_spec
    padded = mask is not None and spec.stateful
    states = [new_states(layer, shape[0], model.dtype) for layer in spec.layers] if padded else None
    return Contiguous(positions, positions), states


def _shape(tokens: Any, caller: str) -> tuple[int, ...]:
    require_ids(tokens)
    if tokens.ndim != 2:
        raise ValueError(f"{caller}: tokens is {tokens.shape}, and must be [batch, time]")
    return tuple(tokens.shape)


def _mask(shape: tuple[int, ...], mask: Any, caller: str) -> Bool[Array, "batch time"]:
    if mask is None:
        return jnp.ones(shape, bool)
    if jnp.shape(mask) != shape:
        raise ValueError(f"{caller}: mask is {jnp.shape(mask)}, and must be {shape}, one entry for each token")
    return jnp.asarray(mask).astype(bool)


def _decoder(model: Model, caller: str) -> Decoder:
    if not isinstance(model.module, Decoder):
        raise ValueError(f"{caller}: {_family(model)} is no Decoder (jaxinfer.models.decoder)")
    return model.module


def _layers(model: Model, layers: Sequence[int] | None, caller: str) -> Sequence[int]:
    count = len(_decoder(model, caller).config.layers)
    for layer in layers or ():
        if not -count <= layer < count:
            raise ValueError(f"{caller}: layer {layer} must be from {-count} to {count - 1}, those of {_family(model)}")
    return range(count) if layers is None else [layer % count for layer in layers]


def _family(model: Model) -> str:
    return type(model.module).__name__


def _apply(model: Model, *operands: Any, **options: Any) -> Any:
    function: Any = model.module.apply
    return function({"params": model.params}, *operands, **options)


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
