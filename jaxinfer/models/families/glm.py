"""GLM-4 dense models: Llama with half of each head rotated, interleaved; gate and up are one tensor.

``glm4`` (GLM-4-0414) adds post-norms of attention and MLP.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from jaxinfer.layers.attention import Attend
from jaxinfer.layers.base import Hidden, HiddenAndCache
from jaxinfer.layers.norm import RMSNorm
from jaxinfer.models.config import ConfigReader, decoder_fields, partial_rope
from jaxinfer.models.families.llama import Llama, LlamaBlock, LlamaConfig, block_specs
from jaxinfer.models.families.phi3 import fused_mlp
from jaxinfer.models.family import Family
from jaxinfer.models.specs import cache_spec, decoder, rms_norm
from jaxinfer.types import LayerSpec, ParamTree

# Defaults of transformers for fields missing from config.json.
_DEFAULTS = {
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-7,
    "partial_rotary_factor": 0.5,
}


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class GlmConfig(LlamaConfig):
    """The resolved config.json of a checkpoint: see `DecoderConfig`. ``sandwich``: whether there are post-norms."""

    sandwich: bool

    @staticmethod
    def from_json(config: Mapping[str, Any]) -> GlmConfig:
        """Read config.json; raises as `decoder_fields` does."""
        read = ConfigReader(config, _DEFAULTS)
        sandwich = read.choice("model_type", "glm", ("glm", "glm4")) == "glm4"
        fields = decoder_fields(read)
        return GlmConfig(
            **fields,
            layers=(LayerSpec(),) * read.positive("num_hidden_layers"),
            rope=partial_rope(read, fields),
            qkv_bias=read.flag("attention_bias", True),
            sandwich=sandwich,
        )


class GlmBlock(LlamaBlock):
    """A decoder layer."""

    config: GlmConfig

    def options(self) -> dict[str, Any]:
        return {"interleaved": True}

    def setup(self) -> None:
        super().setup()
        if self.config.sandwich:
            self.attention_out_norm, self.mlp_out_norm = (RMSNorm(self.config.norm_eps) for _ in range(2))

    def __call__(
        self, x: Hidden, rope: tuple[jax.Array, jax.Array] | None, attend: Attend, cache: Any
    ) -> HiddenAndCache:
        mixed, cache = self.attention(self.attention_norm(x), rope, attend, cache)
        x = x + (self.attention_out_norm(mixed) if self.config.sandwich else mixed)
        changed = self.feed_forward(self.mlp_norm(x))
        return x + (self.mlp_out_norm(changed) if self.config.sandwich else changed), cache


class Glm(Llama):
    """The Glm decoder: see `Decoder`."""

    config: GlmConfig
    block_type = GlmBlock


def param_specs(cfg: GlmConfig) -> ParamTree:
    return decoder(cfg, lambda _, prefix: _block_specs(cfg, prefix))


def _block_specs(cfg: GlmConfig, prefix: str) -> dict[str, Any]:
    d = cfg.hidden_size
    tree = block_specs(cfg, prefix, fused_mlp(f"{prefix}.mlp", d, cfg.intermediate_size))
    if cfg.sandwich:
        tree["attention_out_norm"] = rms_norm(f"{prefix}.post_self_attn_layernorm", d)
        tree["mlp_out_norm"] = rms_norm(f"{prefix}.post_mlp_layernorm", d)
    return tree


GLM = Family(GlmConfig.from_json, param_specs, cache_spec, Glm)
