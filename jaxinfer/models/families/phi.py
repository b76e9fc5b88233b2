"""Phi-1, Phi-1.5 and Phi-2 (Gunasekar et al. 2023): partial rotation, parallel attention and MLP, biases everywhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxinfer.layers.attention import Attention
from jaxinfer.layers.mlp import MLP
from jaxinfer.layers.norm import LayerNorm
from jaxinfer.layers.rope import RopeConfig
from jaxinfer.models.config import ConfigReader, DecoderConfig, decoder_fields, partial_rope
from jaxinfer.models.decoder import LayerNormDecoder, ParallelBlock
from jaxinfer.models.family import Family
from jaxinfer.models.specs import attention, cache_spec, decoder, layer_norm, plain_mlp
from jaxinfer.types import LayerSpec, ParamTree

# Defaults of transformers for fields missing from config.json.
_DEFAULTS = {
    "vocab_size": 51200,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-5,
    "hidden_act": "gelu_new",
    "partial_rotary_factor": 0.5,
}


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class PhiConfig(DecoderConfig):
    """The resolved config.json of a checkpoint: see `DecoderConfig`."""

    rope: RopeConfig
    qk_norm: bool

    @staticmethod
    def from_json(config: Mapping[str, Any]) -> PhiConfig:
        """Read config.json; raises as `decoder_fields` does."""
        read = ConfigReader(config, _DEFAULTS, {"rms_norm_eps": "layer_norm_eps"})
        read.choice("model_type", "phi", ("phi",))  # configs older than the transformers port have other field names
        fields = decoder_fields(read, cut_heads=True)
        return PhiConfig(
            **fields,
            layers=(LayerSpec(),) * read.positive("num_hidden_layers"),
            rope=partial_rope(read, fields),
            qk_norm=read.flag("qk_layernorm", False),
        )


class PhiBlock(ParallelBlock):
    """A decoder layer: attention and MLP read the same normalised input."""

    config: PhiConfig

    def setup(self) -> None:
        cfg, eps = self.config, self.config.norm_eps if self.config.qk_norm else None
        sizes = cfg.heads, cfg.kv_heads, cfg.head_dim, self.layer
        self.norm = LayerNorm(cfg.norm_eps)
        self.attention = Attention(*sizes, qkv_bias=True, out_bias=True, qk_norm_eps=eps, qk_layer_norm=True)
        self.mlp = MLP(cfg.activation)


class Phi(LayerNormDecoder):
    config: PhiConfig
    block_type = PhiBlock
    head_bias = True


def param_specs(cfg: PhiConfig) -> ParamTree:
    final = layer_norm("model.final_layernorm", cfg.hidden_size)
    return decoder(cfg, lambda _, prefix: _block_specs(cfg, prefix), final_norm=final, head_bias=True)


def _block_specs(cfg: PhiConfig, prefix: str) -> dict[str, Any]:
    d, mlp = cfg.hidden_size, f"{prefix}.mlp"
    return {
        "norm": layer_norm(f"{prefix}.input_layernorm", d),
        "attention": _attention_specs(cfg, f"{prefix}.self_attn"),
        "mlp": plain_mlp(f"{mlp}.fc1", f"{mlp}.fc2", d, cfg.intermediate_size),
    }


def _attention_specs(cfg: PhiConfig, prefix: str) -> dict[str, Any]:
    tree = attention(cfg, prefix, qkv_bias=True, out_bias=True, out="dense")
    if cfg.qk_norm:
        tree["q_norm"] = layer_norm(f"{prefix}.q_layernorm", cfg.head_dim)
        tree["k_norm"] = layer_norm(f"{prefix}.k_layernorm", cfg.head_dim)
    return tree


PHI = Family(PhiConfig.from_json, param_specs, cache_spec, Phi)
