"""Ministral 3: Mistral whose queries are scaled up with their position beyond the original training context."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxinfer.layers.attention import Attend
from jaxinfer.layers.base import Hidden, HiddenAndCache, Positions
from jaxinfer.layers.rope import in_sequence
from jaxinfer.models.config import ConfigReader
from jaxinfer.models.families.llama import Llama, LlamaBlock, LlamaConfig, param_specs
from jaxinfer.models.family import Family
from jaxinfer.models.specs import cache_spec
from jaxinfer.types import LayerSpec

# Defaults of transformers: RoPE if config.json has none, and other missing fields.
_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_DEFAULTS = {"head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 262144, "rms_norm_eps": 1e-5}


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class MinistralConfig(LlamaConfig):
    """The resolved config.json of a checkpoint: see `DecoderConfig`.

    Attributes:
        beta: the query at position p is multiplied by ``1 + beta * log(1 + floor(p / rope.original_max_position))``, as
            in Llama 4's temperature tuning.
    """

    beta: float

    @staticmethod
    def from_json(config: Mapping[str, Any]) -> MinistralConfig:
        """Read config.json.

        Raises:
            ConfigError: a field is missing, of the wrong type or not supported.
        """
        scaling = config.get("rope_parameters") or config.get("rope_scaling") or _ROPE
        fields = {**_DEFAULTS, **config, "rope_parameters": scaling}
        # Without a model type: layers have a window only if config.json gives a number.
        plain = LlamaConfig.from_json({**fields, "model_type": "llama", "attention_bias": False})
        read, inner = ConfigReader(fields), ConfigReader(scaling if isinstance(scaling, dict) else {})
        window = None if read.get("sliding_window") is None else read.positive("sliding_window")
        layers = tuple(LayerSpec(window) for _ in plain.layers)
        values = {field.name: getattr(plain, field.name) for field in dataclasses.fields(plain)}
        return MinistralConfig(**{**values, "layers": layers}, beta=inner.number("llama_4_scaling_beta"))


class Context(NamedTuple):
    """Input common to all layers: the angles of the rotary embedding, and the query temperature."""

    rope: tuple[jax.Array, jax.Array]
    temperature: Float[Array, "*batch"]


class MinistralBlock(LlamaBlock):
    """A decoder layer."""

    def __call__(self, x: Hidden, context: Any, attend: Attend, cache: Any) -> HiddenAndCache:
        mixed, cache = self.attention(self.attention_norm(x), context.rope, attend, cache, context.temperature)
        x = x + mixed
        return x + self.feed_forward(self.mlp_norm(x)), cache


class Ministral(Llama):
    """The Ministral decoder: see `Decoder`."""

    config: MinistralConfig
    block_type = MinistralBlock

    def context(self, positions: Positions) -> Any:
        cfg = self.config
        turns = jnp.floor(in_sequence(positions).astype(jnp.float32) / cfg.rope.original_max_position)
        temperature = 1.0 + cfg.beta * jnp.log1p(jnp.maximum(turns, 0.0))  # padding has position -1
        return Context(super().context(positions), temperature)


MINISTRAL = Family(MinistralConfig.from_json, param_specs, cache_spec, Ministral)
