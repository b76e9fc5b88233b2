"""A loaded model: a pure module, its parameters, and what came with the checkpoint."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxinfer.layers.attention import causal_attend
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.registry import Family, family_for
from jaxinfer.quant import for_kernels, is_stored, with_activations
from jaxinfer.types import CacheSpec, ParamTree

_DECLARED: Any = None  # by the family, of the config


@dataclasses.dataclass(frozen=True)
class Model:
    """A model: `load_model` returns one, `LLM` serves it.

    Attributes:
        module: the Flax module; `module.clone(...)` makes an edited one.
        params: a plain nested dict of arrays.
        config: the family's frozen config.
        family: derives specs, cache and module from the config.
        tokenizer, chat_template, generation_config: as the checkpoint's folder has them.
        specs: a tree like ``params`` with a `ParamSpec` for each array: as the family declares them, unless given.
        cache_spec: the KV cache that the model needs: as the family declares it, unless given.
    """

    module: nn.Module
    params: Any
    config: Any
    family: Family
    name: str = ""
    tokenizer: Any = None
    chat_template: Any = None
    generation_config: Any = dataclasses.field(default_factory=dict)
    specs: ParamTree = _DECLARED
    cache_spec: CacheSpec = _DECLARED

    def __post_init__(self) -> None:
        if self.specs is _DECLARED or self.cache_spec is _DECLARED:
            for name, value in _declared(self.family, self.config).items():
                if getattr(self, name) is _DECLARED:
                    object.__setattr__(self, name, value)

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of activations, as unquantised weights have it."""
        leaves = jax.tree.leaves(self.params, is_leaf=is_stored)
        return next(leaf.dtype for leaf in leaves if not is_stored(leaf))

    def apply(self, params: Any, tokens: Int[Array, "*batch time"]) -> Float[Array, "*batch time vocab"]:
        """Logits (float32) of every position of contiguous sequences. Pure: jit, grad and vmap go through it."""
        apply: Any = self.module.apply
        return apply({"params": params}, self.hidden(params, tokens), method="head")

    def hidden(self, params: Any, tokens: Int[Array, "*batch time"]) -> Float[Array, "*batch time d"]:
        """Hidden states after the final norm."""
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[-1]), tokens.shape)
        apply: Any = self.module.apply
        return apply({"params": params}, tokens, positions, causal_attend, None)[0]

    def with_cache(self, kv_cache_dtype: str) -> Model:
        """The model with a KV cache of other elements, see `CacheSpec.stored_as`."""
        return self.replace(cache_spec=self.cache_spec.stored_as(kv_cache_dtype))

    def with_activations(self, kind: str) -> Model:
        """The model whose quantised weights have inputs of another dtype, see `EngineConfig.activation_dtype`."""
        return self if kind == "auto" else self.map_weights(functools.partial(with_activations, kind=kind))

    def for_kernels(self) -> Model:
        """The model with its weights in the layout of GPU kernels, see `jaxinfer.quant.for_kernels`."""
        return self.map_weights(for_kernels)

    def map_weights(self, function: Callable[[Any], Any]) -> Model:
        """Apply ``function`` to the tree of specs and to the tree of parameters."""
        return self.replace(specs=function(self.specs), params=function(self.params))

    def with_specs(self, specs: ParamTree, dtype: str) -> Model:
        """The model with abstract parameters (`jax.ShapeDtypeStruct`), in ``dtype`` where their specs name no other."""
        params = jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.dtype(spec.dtype or dtype)), specs)
        return self.replace(specs=specs, params=params)

    def up_to(self, length: int) -> Model:
        """The model for sequences of at most ``length`` tokens, see `Decoder.up_to`."""
        return self.replace(module=self.module.up_to(length)) if isinstance(self.module, Decoder) else self

    def replace(self, **changes: Any) -> Model:
        """Copy the model with other parameters, another module, ...: served exactly as it is.

        With another config or family, specs and cache are declared anew where these declare others.
        """
        if not changes.keys().isdisjoint(("config", "family")):
            before = _declared(self.family, self.config)
            after = _declared(changes.get("family", self.family), changes.get("config", self.config))
            changes = {name: value for name, value in after.items() if value != before[name]} | changes
        return dataclasses.replace(self, **changes)


def _declared(family: Family, config: Any) -> dict[str, Any]:
    return {"specs": family.param_specs(config), "cache_spec": family.cache_spec(config)}


def abstract(
    config_json: Mapping[str, Any],
    dtype: str,
    name: str = "",
    families: Mapping[str, Family] = MappingProxyType({}),
) -> Model:
    """Make the model that a config.json describes, without weights: its parameters are `jax.ShapeDtypeStruct`.

    Args:
        families: see `family_for`.

    Raises:
        ConfigError: one sentence that says what is wrong.
    """
    return describe(family_for(config_json, families), config_json, dtype, name)


def describe(family: Family, config_json: Mapping[str, Any], dtype: str, name: str = "") -> Model:
    """Make the abstract model (`abstract`) of a known family."""
    config = family.config(config_json)
    model = Model(family.module(config), {}, config, family, name)
    return model.with_specs(model.specs, dtype)
