"""Functions of a model for research: what its layers compute, padded batches, and a cache for decoding loops of one's own.

All of them are pure functions of a `Model`, which is a pytree: `jax.jit` and `jax.grad` go through them. They run the
module that is served, with another `attend` (`jaxinfer.layers.attention.Attend`), so they hold for every family and for
edited modules. docs/functional.md shows them.

A ``mask`` is True at tokens and False at padding, which may stand anywhere in a row: a token's position is the number of
tokens before it, it sees those alone, and no expert or state reads padding. What is computed at padding is finite and
means nothing. Without a mask all are tokens.
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
from jaxinfer.types import LayerSpec
from pallas_kernels.token_index import Index

_SOWN = "research"


class KV(NamedTuple):
    """Keys, values and index keys of one layer's tokens, ``[batch, length, ...]``; None: the layer has none of these."""

    k: Float[Array, "batch length kv_heads head_dim"]
    v: Float[Array, "batch length kv_heads value_dim"] | None = None
    index: Float[Array, "batch length dim"] | None = None


class Cache(NamedTuple):
    """A contiguous KV cache of a batch, of fixed size: see `init_cache`.

    Attributes:
        layers: of each layer a `KV`, a `StatePool` of its states, or None.
        positions: of what is in each slot; -1: nothing, or padding.
        used: slots that have been written, the same in all rows.
    """

    layers: list[Any]
    positions: Int[Array, "batch length"]
    used: Int[Array, ""]


def apply(
    model: Model, tokens: Int[Array, "batch time"], mask: Bool[Array, "batch time"] | None = None
) -> Float[Array, "batch time vocab"]:
    """Logits (float32) of every position, as `Model.apply`, of rows that may be padded on either side.

    Where frequencies depend on a text's length (longrope, dynamic), that of the longest row counts.

    Raises:
        ValueError: shapes do not fit, or the module is no `Decoder`.
        TypeError: ``tokens`` are no integers.
    """
    (hidden, _), _ = _watched(model, tokens, mask, "apply", False)
    return _apply(model, hidden, method="head")


def hidden_states(
    model: Model, tokens: Int[Array, "batch time"], mask: Bool[Array, "batch time"] | None = None
) -> list[Float[Array, "batch time *streams d"]]:
    """The residual stream: what the first layer is given, and the output of each of the layers.

    As ``output_hidden_states`` of transformers, but for the last one, which is not normed here: `run` goes on from any of
    them, and `logits` of the last are the model's. Gemma 3n has several streams between its layers.

    Raises: as `apply`.
    """
    _, sown = _watched(model, tokens, mask, "hidden_states")
    layers = [sown[f"layers_{index}"] for index in range(len(model.config.layers))]
    carried = [layers[0]["inputs"][0], *(layer["outputs"][0] for layer in layers)]
    return [_apply(model, each, method="hidden") for each in carried]


def attention_maps(
    model: Model,
    tokens: Int[Array, "batch time"],
    layers: Sequence[int] | None = None,
    mask: Bool[Array, "batch time"] | None = None,
) -> dict[int, Float[Array, "batch heads time time"]]:
    """The weights by which queries (third axis) gather values of keys (last axis), float32, by layer.

    They are those that multiply values: behind soft-caps and windows, and without the share of attention sinks, so that
    rows of gpt-oss sum to less than 1. As ``output_attentions`` of transformers' eager attention. Rows of padding are 0.

    Args:
        layers: -1 is the last one; None: all that attend (hybrid models have others).

    Raises:
        ValueError: a layer does not exist or has no attention; also as `apply`.
    """
    specs = _decoder(model, "attention_maps").config.layers
    wanted = range(len(specs)) if layers is None else [_layer(model, each, "attention_maps") for each in layers]
    for index in () if layers is None else wanted:
        if not specs[index].attends:
            raise ValueError(f"attention_maps: layer {index} of {_family(model)} has no attention")
    _, sown = _watched(model, tokens, mask, "attention_maps")
    return {index: sown[f"layers_{index}"]["weights"][0] for index in wanted if specs[index].attends}


def logits(model: Model, hidden: Float[Array, "batch time *streams d"]) -> Float[Array, "batch time vocab"]:
    """Logits (float32) of hidden states behind any layer, through the final norm and the head."""
    return _apply(model, _apply(model, hidden, method="normed"), method="head")


def logit_lens(
    model: Model,
    tokens: Int[Array, "batch time"],
    layers: Sequence[int] | None = None,
    mask: Bool[Array, "batch time"] | None = None,
) -> dict[int, Float[Array, "batch time vocab"]]:
    """What each layer's output would say if it were the last: `logits` of it, by layer (nostalgebraist 2020).

    Args:
        layers: -1 is the last one, whose logits are the model's; None: all.

    Raises: as `attention_maps`.
    """
    count = len(_decoder(model, "logit_lens").config.layers)
    wanted = range(count) if layers is None else [_layer(model, each, "logit_lens") for each in layers]
    states = hidden_states(model, tokens, mask)
    return {index: logits(model, states[index + 1]) for index in wanted}


def run(
    model: Model,
    hidden: Float[Array, "batch time *streams d"],
    start: int,
    stop: int | None = None,
    mask: Bool[Array, "batch time"] | None = None,
) -> Float[Array, "batch time *streams d"]:
    """Run the layers from ``start`` to the one before ``stop`` (None: to the last) on hidden states.

    ``run(model, states[i], i, j)`` of `hidden_states` is ``states[j]``; an edited state shows what later layers make of it.

    Raises:
        ValueError: there are no such layers; or they need more than hidden states: keys of earlier layers, embeddings of
            their own (Gemma 3n and 4), tokens chosen by an earlier layer (some of GLM-5), several streams.
    """
    module, count = _decoder(model, "run"), len(model.config.layers)
    stop = count if stop is None else stop
    if not 0 <= start <= stop <= count:
        raise ValueError(f"run: layers {start} to {stop} must be within 0 to {count}, those of {_family(model)}")
    needs = module.bound or (None if start == count or module.begins(start) else "the choice of an earlier layer")
    if start < stop and needs:
        raise ValueError(f"run: layers {start} to {stop} of {_family(model)} cannot run alone, they need {needs}")
    attend, states = _attending(model, hidden.shape[:2], mask, "run")
    states = states and states[start:stop]
    return _apply(model, hidden, attend.queries, attend, states, range(start, stop), method="blocks")[0]


def init_cache(model: Model, batch: int, length: int) -> Cache:
    """An empty cache for ``batch`` rows of at most ``length`` tokens and padding, in the model's dtype.

    Raises:
        ValueError: the family cannot have sequences of that length, or no cache (dynamic RoPE beyond its context).
    """
    module, spec = _decoder(model, "init_cache").up_to(length), model.cache_spec
    _require_length(model, module, length)
    layers = [_empty(model, layer, batch, length) for layer in spec.layers]
    return Cache(layers, jnp.full((batch, length), -1, jnp.int32), jnp.zeros((), jnp.int32))


def decode(
    model: Model, tokens: Int[Array, "batch time"], cache: Cache, mask: Bool[Array, "batch time"] | None = None
) -> tuple[Float[Array, "batch time vocab"], Cache]:
    """Logits (float32) of tokens that follow those of the cache, and the cache with them: `Model.apply` in pieces.

    A prompt first, then one token at a time, or several; shapes of the cache stay, so that it is carried by `lax.scan`. A
    model whose RoPE depends on lengths (longrope) is computed as for texts of the cache's length, as an engine does whose
    ``max_model_len`` that is.

    Raises:
        ValueError: the cache has too few slots left (within `jax.jit`, where nobody knows, logits are NaN); shapes do not
            fit.
    """
    used, length = cache.used, cache.positions.shape[1]
    shape = _shape(tokens, "decode")
    time, fits = shape[1], used + shape[1] <= length
    if not isinstance(used, Tracer) and not fits:
        raise ValueError(f"decode: {time} tokens behind {int(used)} are more than the cache's length ({length})")
    queries = _positions(_mask(shape, mask, "decode"), cache.positions.max(-1, keepdims=True, initial=-1) + 1)
    attend = _Contiguous(queries, lax.dynamic_update_slice(cache.positions, queries, (0, used)), used)
    model = model.up_to(length)
    hidden, layers = _apply(model, tokens, queries, attend, cache.layers)
    found = jnp.where(fits, _apply(model, hidden, method="head"), jnp.nan)
    return found, Cache(layers, attend.keys, used + time)


@dataclasses.dataclass(frozen=True)
class _Contiguous:
    """`Attend`, `ChoosingAttend` and `Recur` over rows at any positions, with a cache or without.

    Attributes:
        queries, keys: positions of new tokens and of all that are there with them; -1 is padding, or nothing.
        used: the slot of the first new one.
        told: where the weights of each call are left.
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
        assert kept is not None
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
        chosen = causal_choice(index._replace(k=kept.index), layer, self._distance)
        return self._attended(q, kept, layer, scale, None, chosen), chosen, kept

    def recur(self, function: Recurrence, inputs: Any, state: jax.Array) -> tuple[Any, jax.Array]:
        """See `Recur`: over each row's tokens, moved together."""
        live = self.queries >= 0
        order = jnp.argsort(~live, axis=-1, stable=True)
        outputs, state = run_whole(function, _taken(inputs, order), state, live.sum(-1))
        return _taken(outputs, jnp.argsort(order, axis=-1)), state

    @property
    def _distance(self) -> Int[Array, "batch time keys"]:
        keys = self.keys[:, None, :]
        return jnp.where(keys >= 0, self.queries[:, :, None] - keys, -1)

    def _written(self, cache: KV | None, new: KV) -> KV:
        def write(kept: jax.Array, x: jax.Array) -> jax.Array:
            return lax.dynamic_update_slice_in_dim(kept, x.astype(kept.dtype), self.used, axis=1)

        return new if cache is None else jax.tree.map(write, cache, new)

    def _attended(
        self, q: jax.Array, kept: KV, layer: LayerSpec, scale: float, sinks: Any, chosen: Any
    ) -> Float[Array, "batch time heads result_dim"]:
        v = kept.k[..., : layer.latent_rank] if kept.v is None else kept.v
        mixed, weights = distant_attend(q, kept.k, v, self._distance, layer, scale, sinks, chosen)
        if self.told is not None:
            self.told.append(jnp.where(self.queries[:, None, :, None] >= 0, weights, 0.0))
        return mixed


def _taken(tree: Any, order: Int[Array, "batch time"]) -> Any:
    """Arrays ``[batch, time, ...]`` in another order of time."""
    return jax.tree.map(lambda x: jax.vmap(lambda row, at: row[at])(x, order), tree)


def _watched(model: Model, tokens: Any, mask: Any, caller: str, watch: bool = True) -> tuple[Any, Any]:
    """What the module gives, and what `_watch` sows by layer."""
    _decoder(model, caller)
    attend, states = _attending(model, _shape(tokens, caller), mask, caller)
    if not watch:
        return _apply(model, tokens, attend.queries, attend, states), {}
    with nn.intercept_methods(_watch):
        out, sown = _apply(model, tokens, attend.queries, attend, states, mutable=[_SOWN])
    return out, sown[_SOWN]


def _watch(method: Any, args: Any, kwargs: Any, context: Any) -> Any:
    """Sow what a block takes and gives, and its attention's weights. A block is what is given an `attend` that tells
    nobody yet: all within it, its parents' methods too, are given one that does."""
    if len(args) != 4 or not isinstance(args[2], _Contiguous) or args[2].told is not None:
        return method(*args, **kwargs)
    if isinstance(context.module, Decoder):
        return method(*args, **kwargs)
    (x, shared, attend, cache), block = args, context.module
    attend = dataclasses.replace(attend, told=[])
    out = method(x, shared, attend, cache, **kwargs)
    sown = {"inputs": [x], "outputs": [out[0]], "weights": attend.told}
    for name, values in sown.items():
        for value in values:
            block.sow(_SOWN, name, value)
    return out


def _attending(model: Model, shape: tuple[int, ...], mask: Any, caller: str) -> tuple[_Contiguous, Any]:
    """The `attend` of whole rows, and the states that padded ones begin with (None: no row needs any)."""
    positions = _positions(_mask(shape, mask, caller))
    padded = mask is not None and model.cache_spec.stateful
    states = [_states(model, layer, shape[0], None) for layer in model.cache_spec.layers] if padded else None
    return _Contiguous(positions, positions), states


def _positions(mask: Bool[Array, "batch time"], first: Any = 0) -> Int[Array, "batch time"]:
    return jnp.where(mask, first + jnp.cumsum(mask, axis=-1, dtype=jnp.int32) - 1, -1)


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


def _empty(model: Model, layer: LayerSpec, batch: int, length: int) -> KV | StatePool | None:
    (heads, dim), dtype, kv = model.cache_spec.sizes(layer), model.dtype, None
    if layer.attends and layer.latent_rank is not None:
        index = jnp.zeros((batch, length, layer.index_dim), dtype) if layer.index_dim else None
        kv = KV(jnp.zeros((batch, length, 1, dim - layer.index_dim), dtype), None, index)
    elif layer.attends:
        zeros = jnp.zeros((batch, length, heads, dim), dtype)
        kv = KV(zeros, zeros)
    return _states(model, layer, batch, kv) if layer.states else kv


def _states(model: Model, layer: LayerSpec, batch: int, kv: KV | None) -> StatePool | None:
    """The states of a layer before the first token; None: it has none."""
    types = [jnp.float32 if state.exact else model.dtype for state in layer.states]
    zeros = (jnp.zeros((batch, *state.shape), dtype) for state, dtype in zip(layer.states, types, strict=True))
    return StatePool(tuple(zeros), kv) if layer.states else None  # type: ignore[arg-type]


def _require_length(model: Model, module: Any, length: int) -> None:
    chunk = getattr(module.config, "chunk", None)
    if chunk is not None and length > chunk:
        raise ValueError(f"init_cache: {_family(model)} has no cache beyond attention_chunk_size ({chunk})")
    ropes = [each for each in vars(module.config).values() if isinstance(each, RopeConfig)]
    if any(rope.kind == "dynamic" for rope in ropes):
        raise ValueError(f"init_cache: dynamic RoPE of {_family(model)} changes old keys beyond its context: use apply")


def _decoder(model: Model, caller: str) -> Decoder:
    if not isinstance(model.module, Decoder):
        raise ValueError(f"{caller}: {_family(model)} is no Decoder (jaxinfer.models.decoder)")
    return model.module


def _layer(model: Model, layer: int, caller: str) -> int:
    count = len(model.config.layers)
    if not -count <= layer < count:
        raise ValueError(f"{caller}: layer {layer} must be from {-count} to {count - 1}, those of {_family(model)}")
    return layer % count


def _family(model: Model) -> str:
    return type(model.module).__name__


def _apply(model: Model, *operands: Any, **options: Any) -> Any:
    apply_: Any = model.module.apply
    return apply_({"params": model.params}, *operands, **options)
