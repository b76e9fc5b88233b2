"""Granite 3: Llama with four multipliers, of embeddings, residual branches, scores and logits."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxinfer.layers.attention import Attend
from jaxinfer.layers.base import Hidden, HiddenAndCache, Positions, Tokens
from jaxinfer.models.config import ConfigReader
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.families.llama import Llama, LlamaBlock, LlamaConfig, llama_fields, param_specs
from jaxinfer.models.family import Family
from jaxinfer.models.specs import cache_spec

# Defaults of transformers for fields missing from config.json.
DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class GraniteConfig(LlamaConfig):
    """The resolved config.json of a checkpoint: see `DecoderConfig`.

    Attributes:
        embedding_multiplier: factor of the embeddings.
        residual_multiplier: factor of the outputs of attention and MLP.
        scale: score scale.
        logits_scaling: divisor of the logits.
    """

    embedding_multiplier: float
    residual_multiplier: float
    scale: float
    logits_scaling: float

    @staticmethod
    def from_json(config: Mapping[str, Any]) -> GraniteConfig:
        """Read config.json; raises as `decoder_fields` does."""
        read = ConfigReader(config, DEFAULTS)
        return GraniteConfig(**llama_fields(read), **multipliers(read))


def multipliers(read: ConfigReader) -> dict[str, Any]:
    """Read the fields that `GraniteConfig` adds to `LlamaConfig`; raises ConfigError."""
    scaling = read.number("logits_scaling", 1.0)
    read.require(scaling != 0.0, "logits_scaling", "must not be 0")
    return {
        "embedding_multiplier": read.number("embedding_multiplier", 1.0),
        "residual_multiplier": read.number("residual_multiplier", 1.0),
        "scale": read.number("attention_multiplier", 1.0),
        "logits_scaling": scaling,
    }


class GraniteBlock(LlamaBlock):
    """A decoder layer."""

    config: GraniteConfig

    def options(self) -> dict[str, Any]:
        return {"scale": self.config.scale}

    def __call__(
        self, x: Hidden, rope: tuple[jax.Array, jax.Array] | None, attend: Attend, cache: Any
    ) -> HiddenAndCache:
        share = self.config.residual_multiplier
        mixed, cache = self.attention(self.attention_norm(x), rope, attend, cache)
        x = x + mixed * share
        return x + self.feed_forward(self.mlp_norm(x)) * share, cache


class ScaledDecoder(Decoder):
    """A decoder with Granite's factors of embeddings and logits."""

    def embed(self, tokens: Tokens, positions: Positions) -> Hidden:
        x = super().embed(tokens, positions)
        return x * jnp.asarray(self.config.embedding_multiplier, x.dtype)

    def head(self, hidden: Hidden) -> Float[Array, "*batch vocab"]:
        return super().head(hidden) / self.config.logits_scaling


class Granite(ScaledDecoder, Llama):
    """The Granite decoder: see `Decoder`."""

    config: GraniteConfig
    block_type = GraniteBlock


GRANITE = Family(GraniteConfig.from_json, param_specs, cache_spec, Granite)
