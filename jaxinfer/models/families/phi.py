"""Phi-1, Phi-1.5 and Phi-2 (Gunasekar et al. 2023): partial rotation, parallel attention and MLP, biases everywhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jaxtyping import Array, Float

from jaxinfer.layers.attention import Attend, Attention
from jaxinfer.layers.base import Layer
from jaxinfer.layers.mlp import MLP
from jaxinfer.layers.norm import LayerNorm
from jaxinfer.layers.rope import RopeConfig
from jaxinfer.models.config import ConfigError, ConfigReader, DecoderConfig, decoder_fields, rope_config
from jaxinfer.models.decoder import LayerNormDecoder
from jaxinfer.models.family import Family
from jaxinfer.models.specs import cache_spec, decoder, fused_qkv, layer_norm, linear, plain, plain_mlp
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
            rope=_rope(read, fields["max_position"], fields["head_dim"]),
            qk_norm=read.flag("qk_layernorm", False),
        )


def _rope(read: ConfigReader, max_position: int, head_dim: int) -> RopeConfig:
    rope = rope_config(read, max_position, head_dim, partial=True)
    size = int(head_dim * rope.partial)
    if size == 0 or size % 2:
        raise ConfigError(
            f"config.json: partial_rotary_factor = {rope.partial} rotates {size} of {head_dim} numbers of a head: "
            "it must be an even number of them"
        )
    return rope


class PhiBlock(Layer):
    """A decoder layer: attention and MLP read the same normalised input."""

    config: PhiConfig
    layer: LayerSpec

    def setup(self) -> None:
        cfg, eps = self.config, self.config.norm_eps if self.config.qk_norm else None
        sizes = cfg.heads, cfg.kv_heads, cfg.head_dim, self.layer
        self.norm = LayerNorm(cfg.norm_eps)
        self.attention = Attention(*sizes, qkv_bias=True, out_bias=True, qk_norm_eps=eps, qk_layer_norm=True)
        self.mlp = MLP(cfg.activation)

    def __call__(
        self, x: Float[Array, "*batch d"], rope: tuple[jax.Array, jax.Array], attend: Attend, cache: Any
    ) -> tuple[Float[Array, "*batch d"], Any]:
        normal = self.norm(x)
        mixed, cache = self.attention(normal, rope, attend, cache)
        return mixed + self.feed_forward(normal) + x, cache

    def feed_forward(self, x: Float[Array, "*batch d"]) -> Float[Array, "*batch d"]:
        return self.mlp(x)


class Phi(LayerNormDecoder):
    config: PhiConfig
    head_bias = True

    def block(self, index: int, override: Callable[..., Layer] | None) -> Layer:
        return (override or PhiBlock)(self.config, self.config.layers[index], parent=None)


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
    d, sizes = cfg.hidden_size, (cfg.hidden_size, cfg.heads, cfg.kv_heads, cfg.head_dim)
    tree: dict[str, Any] = {
        "qkv": fused_qkv(prefix, *sizes),
        "qkv_bias": fused_qkv(prefix, *sizes, kind="bias"),
        "out": linear(f"{prefix}.dense.weight", (cfg.heads * cfg.head_dim, d), ("heads", "embed")),
        "out_bias": plain(f"{prefix}.dense.bias", (d,), ("embed",), "zeros"),
    }
    if cfg.qk_norm:
        tree["q_norm"] = layer_norm(f"{prefix}.q_layernorm", cfg.head_dim)
        tree["k_norm"] = layer_norm(f"{prefix}.k_layernorm", cfg.head_dim)
    return tree


PHI = Family(PhiConfig.from_json, param_specs, cache_spec, Phi)
