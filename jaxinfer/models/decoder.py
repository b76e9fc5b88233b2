"""Decoder common to all families: from token ids through embeddings and blocks to hidden states and logits.

The module of a family is a `Decoder` that names its block (`Block`) and defines the input common to all blocks
(`context`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, SupportsIndex

import jax
import jax.numpy as jnp
from flax.core.scope import is_filter_empty, subtract_filters
from jaxtyping import Array, Float

from jaxinfer.layers.attention import Attend
from jaxinfer.layers.base import Hidden, HiddenAndCache, Layer, Positions, Tokens
from jaxinfer.layers.merged import Merged
from jaxinfer.layers.norm import LayerNorm, RMSNorm
from jaxinfer.layers.rope import RopeConfig
from jaxinfer.parallel.host_weights import LayerWeights
from jaxinfer.parallel.tokens import all_tokens, own_tokens
from jaxinfer.quant import matmul_transposed, plus_bias, take
from jaxinfer.types import VISION, LayerSpec


class Block(Layer):
    """A decoder layer: attention and MLP, each after a norm.

    A family's `setup` makes ``attention_norm``, ``attention``, ``mlp_norm`` and ``mlp``.
    """

    config: Any
    layer: LayerSpec

    def __call__(self, x: Hidden, rope: Any, attend: Attend, cache: Any) -> HiddenAndCache:
        mixed, cache = self.attention(self.attention_norm(x), rope, attend, cache)
        x = x + mixed
        return x + self.feed_forward(self.mlp_norm(x)), cache

    def feed_forward(self, x: Hidden) -> Hidden:
        return self.mlp(x)


class ParallelBlock(Block):
    """A decoder layer: attention and MLP read the same normalised input. `setup` makes one ``norm``."""

    def __call__(self, x: Hidden, rope: Any, attend: Attend, cache: Any) -> HiddenAndCache:
        normal = self.norm(x)
        mixed, cache = self.attention(normal, rope, attend, cache)
        return mixed + self.feed_forward(normal) + x, cache


class PostNormBlock(Block):
    """A decoder layer with norms after attention and MLP: `setup` makes ``attention_out_norm`` and ``mlp_out_norm``."""

    def __call__(self, x: Hidden, rope: Any, attend: Attend, cache: Any) -> HiddenAndCache:
        mixed, cache = self.attention(x, rope, attend, cache)
        x = x + self.attention_out_norm(mixed)
        return x + self.mlp_out_norm(self.feed_forward(x)), cache


class Decoder(Layer):
    """Decoder model as a pure function of its parameters.

    ``config`` is the config of the family; it has at least ``vocab_size``, ``layers``, ``max_position`` and ``tied``.
    ``overrides`` replaces the block of single layers: ``module.clone(overrides=((3, MyBlock),))``, where ``MyBlock`` is
    constructed like the family's block; -1 is the last layer. Values that blocks sow are in their collections under
    ``layers_0`` .... ``taps`` are layers whose inputs are sown as ``features`` (`jaxinfer.models.head`).

    Parameters: ``embed`` {table [vocab, d]}, ``layers_0`` ..., ``final_norm``, and ``head`` {table} unless it is tied
    to ``embed``. If the ``head_bias`` of a family is true, ``head`` has a ``bias`` [vocab], tied or not.
    """

    config: Any
    overrides: tuple[tuple[int, Callable[..., Layer]], ...] = ()
    taps: tuple[int, ...] = ()

    block_type: ClassVar[Any] = Block
    block_fields: ClassVar[tuple[str, ...]] = ("layers",)
    """Fields of the config with an entry for each layer, which its block takes after the config."""

    head_bias: ClassVar[bool] = False
    embeddings: ClassVar[tuple[str, ...]] = ("embed",)
    """Parameters that `embed` reads."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "overrides", _by_layer(self.overrides, len(self.config.layers)))
        super().__post_init__()

    @property
    def bound(self) -> str | None:
        """Input of layers besides hidden states, without which single layers cannot run; None: hidden states alone."""
        shared = any(layer.source is not None for layer in self.config.layers)
        return "keys and values of other layers" if shared else None

    def block(self, index: int, override: Callable[..., Layer] | None) -> Layer:
        """Make the block of layer ``index``, unbound (``parent=None``): called with (x, context, attend, cache).

        Blocks with equal attributes share one compiled function.
        """
        own = (getattr(self.config, name)[index] for name in self.block_fields)
        block: Layer = (override or self.block_type)(self.config, *own, parent=None)
        return block

    def context(self, positions: Positions) -> Any:
        """Return the input common to all blocks: the angles of rotary embeddings.

        Padding has position -1: its results must be finite, and are not used.
        """
        return self.config.rope.angles(positions, self.config.head_dim)

    def entered(self, x: Array, positions: Positions) -> tuple[Array, Any]:
        """Return the input of the first block, made from embeddings, and the input common to all blocks (`context`)."""
        return x, self.context(positions)

    def told(self, context: Any, index: int) -> Any:
        """Return the ``context`` of layer ``index``."""
        del index
        return context

    def up_to(self, length: int) -> Decoder:
        """Return the decoder for at most ``length`` tokens, with the same RoPE for all, as an engine serves it.

        It differs for checkpoints with different rotary embeddings for long and short texts (docs/rope.md).
        """
        ropes = {name: value for name, value in vars(self.config).items() if isinstance(value, RopeConfig)}
        changed = {name: rope.up_to(length) for name, rope in ropes.items()}
        return self if changed == ropes else self.clone(config=dataclasses.replace(self.config, **changed))

    def final_norm(self) -> Layer:
        """Make the final norm, unbound like `block`. Its parameters are ``final_norm``."""
        return RMSNorm(self.config.norm_eps, parent=None)

    def embed(self, tokens: Tokens, positions: Positions) -> Hidden:
        del positions
        return take(self.weight("embed")["table"], tokens)

    def __call__(self, tokens: Tokens | Merged, positions: Positions, attend: Attend, cache: Any) -> HiddenAndCache:
        """Return hidden states after the final norm, and the caches (one per layer) with the new keys and values."""
        x, images = self._embedded(tokens, positions)
        return self.forward(x, positions, attend, cache, images)

    def _embedded(self, tokens: Tokens | Merged, positions: Positions) -> tuple[Array, Merged | None]:
        """Return embeddings, and the rows of images among them, of which deeper layers add more."""
        if not isinstance(tokens, Merged):
            return self.embed(tokens, positions), None
        return tokens.embedded(self.embed(tokens.tokens, positions)), tokens

    def forward(
        self,
        x: Float[Array, "*batch embedded"],
        positions: Positions,
        attend: Attend,
        cache: Any,
        images: Merged | None = None,
    ) -> HiddenAndCache:
        """Run the decoder from embeddings, for gradients with respect to them."""
        x, caches = self.blocks(x, positions, attend, cache, range(len(self.config.layers)), images)
        return all_tokens(self.normed(x)), caches

    def part(
        self, x: Array | Merged, positions: Positions, attend: Attend, cache: Any, layers: range
    ) -> HiddenAndCache:
        """Run a pipeline stage: a range of layers. The first takes tokens, the others the output of the previous stage.

        ``cache`` has one entry for each of these layers. Parameters of other stages may be missing (`owns`).
        """
        images = None
        if layers.start == 0:
            x, images = self._embedded(x, positions)
        assert not isinstance(x, Merged), layers
        x, caches = self.blocks(x, positions, attend, cache, layers, images)
        return all_tokens(self.normed(x) if layers.stop == len(self.config.layers) else x), caches

    def owns(self, name: str, layers: range) -> bool:
        """Return whether the pipeline stage of these layers reads the parameter ``name``."""
        if name.startswith("layers_"):
            return int(name.removeprefix("layers_")) in layers
        last = layers.stop == len(self.config.layers)
        if name == VISION:
            return layers.start == 0
        if name in self.embeddings:
            return layers.start == 0 or (last and name == "embed" and self.config.tied)
        return last

    def blocks(
        self,
        x: Array,
        positions: Positions,
        attend: Attend,
        cache: Any,
        layers: range,
        images: Merged | None = None,
    ) -> tuple[Array, Any]:
        """Run these layers; ``cache`` has one entry for each layer that stores keys and values.

        Args:
            images: rows of images, whose deeper numbers are added to the hidden states after the first layers.
        """
        overrides, specs = dict(self.overrides), self.config.layers
        compiled: dict[Any, Callable[..., Any]] = {}
        mutable = subtract_filters(self.scope.mutable, "params") if self.scope else False
        # Gather tokens first: if the output of the lookup were sharded over tokens, XLA would gather the table.
        x, context = self.entered(own_tokens(all_tokens(x)), positions)
        carried = self.carried(x)
        sources: set[int | None] = {spec.source for spec in specs}
        kept: dict[int, Any] = {}
        caches = []
        weights = LayerWeights([self.weight(f"layers_{index}") for index in layers])
        for place, index in enumerate(layers):
            if index in self.taps:
                self.sow("features", "taps", all_tokens(self.hidden(carried)))
            block, source = self.block(index, overrides.get(index)), specs[index].source
            own = None if cache is None or source is not None else cache[place]
            # Equal blocks share one inner jit: traced and lowered once, however deep the model.
            run = compiled.setdefault(_identity(block), _jit_block(block, attend, mutable))
            told, given = self.told(context, index), own if source is None else kept[source]
            (carried, layer_cache), sown = run(weights.take(place, carried), carried, told, given)
            carried = carried if images is None else images.deep(index, carried)
            for collection, values in sown.items():
                self.put_variable(collection, f"layers_{index}", values)
            if index in sources:
                kept[index] = layer_cache
            if source is None:
                caches.append(layer_cache)
        return self.hidden(carried), None if cache is None else caches

    def begins(self, index: int) -> bool:
        """Return whether a pipeline stage may begin with layer ``index``: its input is hidden states alone."""
        return True

    def carried(self, x: Array) -> Any:
        """Return the value passed from block to block: hidden states, unless a family adds to them."""
        return x

    def hidden(self, carried: Any) -> Array:
        """Return the hidden states of the value passed between blocks."""
        return carried

    def normed(self, x: Hidden) -> Hidden:
        final: Any = self.final_norm().apply
        return final({"params": self.weight("final_norm")}, x)

    def head(self, hidden: Hidden) -> Float[Array, "*batch vocab"]:
        """Compute logits, float32. The table is [vocab, d], tied or not."""
        table = self.weight("embed" if self.config.tied else "head")["table"]
        logits = matmul_transposed(hidden, table)
        if self.head_bias:
            logits = plus_bias(logits, self.weight("head")["bias"])
        return logits.astype(jnp.float32)


class LayerNormDecoder(Decoder):
    """A `Decoder` with a `LayerNorm` as the final norm (``final_norm``); its config has a ``norm_eps``."""

    def final_norm(self) -> Layer:
        return LayerNorm(self.config.norm_eps, parent=None)


def _identity(block: Layer) -> tuple[Any, ...]:
    """Return a key, equal for blocks that compute the same function of their parameters; arrays compare by id."""
    names = [field.name for field in dataclasses.fields(block) if field.name not in ("parent", "name")]
    return (type(block), *(_key(getattr(block, name)) for name in names))


def _key(value: Any) -> Any:
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value


def _by_layer(overrides: Any, count: int) -> tuple[tuple[int, Callable[..., Layer]], ...]:
    """Return the overrides by non-negative layer index.

    Raises:
        ValueError: they are not pairs of a layer of the model and a block factory, or name a layer twice.
    """
    pairs = overrides.items() if isinstance(overrides, Mapping) else overrides
    if not isinstance(pairs, Iterable) or not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
        raise ValueError(f"overrides = {overrides!r} must be pairs of a layer's number and a block: ((3, MyBlock),)")
    found: dict[int, Callable[..., Layer]] = {}
    for layer, block in pairs:
        if isinstance(layer, bool) or not isinstance(layer, SupportsIndex) or not -count <= int(layer) < count:
            raise ValueError(f"overrides: layer {layer!r} must be an integer from {-count} to {count - 1}")
        if not callable(block):
            raise ValueError(f"overrides: the block of layer {layer} is a {type(block).__name__}, and must be callable")
        if int(layer) % count in found:
            raise ValueError(f"overrides: layer {layer} is overridden twice")
        found[int(layer) % count] = block
    return tuple(found.items())


def _jit_block(block: Layer, attend: Attend, mutable: Any) -> Callable[..., Any]:
    """Compile the block: it returns its output, and what it sows in collections of the filter ``mutable``."""

    def layer(params: Any, carried: Any, context: Any, cache: Any) -> Any:
        operands = {"params": params}, carried, context, attend, cache
        return (block.apply(*operands), {}) if is_filter_empty(mutable) else block.apply(*operands, mutable=mutable)

    return jax.jit(layer)
