"""A loaded model: a pure module, its parameters, and what came with the checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
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
from jaxinfer.types import CacheSpec, ParamSpec, ParamTree


@dataclasses.dataclass(frozen=True)
class Model:
    """What `load_model` returns and `LLM` serves.

    Attributes:
        module: the Flax module; `module.clone(...)` makes an edited one.
        params: a plain nested dict of arrays.
        config: the family's frozen config.
        family: what else derives from the config (parameter specs, cache).
        tokenizer, chat_template, generation_config: as the checkpoint's folder has them.
    """

    module: nn.Module
    params: Any
    config: Any
    family: Family
    name: str = ""
    tokenizer: Any = None
    chat_template: Any = None
    generation_config: Any = dataclasses.field(default_factory=dict)

    @property
    def cache_spec(self) -> CacheSpec:
        return self.family.cache_spec(self.config)

    @property
    def dtype(self) -> jnp.dtype:
        """Of what goes through the layers; quantised weights do not say it."""
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
        family = self.family

        def cache_spec(config: Any) -> CacheSpec:
            return family.cache_spec(config).stored_as(kv_cache_dtype)

        return self.replace(family=dataclasses.replace(family, cache_spec=cache_spec))

    def with_activations(self, kind: str) -> Model:
        """The model whose quantised weights have inputs of another dtype, see `EngineConfig.activation_dtype`."""
        if kind == "auto":
            return self
        family = self.family

        def param_specs(config: Any) -> ParamTree:
            specs: ParamTree = with_activations(family.param_specs(config), kind)
            return specs

        return self.replace(
            family=dataclasses.replace(family, param_specs=param_specs), params=with_activations(self.params, kind)
        )

    def for_kernels(self) -> Model:
        """The same function with weights as a GPU's kernels read them, see `jaxinfer.quant.for_kernels`."""
        family = self.family

        def param_specs(config: Any) -> ParamTree:
            specs: ParamTree = for_kernels(family.param_specs(config))
            return specs

        return self.replace(
            family=dataclasses.replace(family, param_specs=param_specs), params=for_kernels(self.params)
        )

    def up_to(self, length: int) -> Model:
        """The model for sequences of at most ``length`` tokens, see `Decoder.up_to`."""
        return self.replace(module=self.module.up_to(length)) if isinstance(self.module, Decoder) else self

    def replace(self, **changes: Any) -> Model:
        """A copy with other parameters, another module, ...: served exactly as it is."""
        return dataclasses.replace(self, **changes)


def abstract(
    config_json: Mapping[str, Any],
    dtype: str,
    name: str = "",
    families: Mapping[str, Family] = MappingProxyType({}),
) -> Model:
    """The model that a config.json describes, without weights: its parameters are `jax.ShapeDtypeStruct`.

    Args:
        families: see `family_for`.

    Raises:
        ConfigError: one sentence that says what is wrong.
    """
    return describe(family_for(config_json, families), config_json, dtype, name)


def describe(family: Family, config_json: Mapping[str, Any], dtype: str, name: str = "") -> Model:
    """`abstract`, of a known family."""
    config = family.config(config_json)
    params = jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.dtype(spec.dtype or dtype)),
        family.param_specs(config),
        is_leaf=lambda x: isinstance(x, ParamSpec),
    )
    return Model(module=family.module(config), params=params, config=config, family=family, name=name)
