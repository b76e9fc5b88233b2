"""Phi-1, Phi-1.5 and Phi-2 (Gunasekar et al. 2023): partial rotary attention beside the MLP, biases everywhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jaxtyping import Array, Float

from jaxinfer.layers.attention import Attend, Attention
from jaxinfer.layers.base import Layer
from jaxinfer.layers.mlp import ACTIVATIONS, MLP
from jaxinfer.layers.norm import LayerNorm
from jaxinfer.layers.rope import RopeConfig
from jaxinfer.models.config import ConfigError, ConfigReader, rope_config
from jaxinfer.models.decoder import LayerNormDecoder
from jaxinfer.models.specs import decoder, fused_qkv, layer_norm, linear, plain, plain_mlp
from jaxinfer.types import CacheSpec, LayerSpec, ParamTree


@dataclasses.dataclass(frozen=True)
class PhiConfig:
    """A checkpoint's config.json, resolved: no optional field is left open."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: tuple[LayerSpec, ...]
    max_position: int
    rope: RopeConfig
    norm_eps: float
    activation: str
    tied: bool
    qk_norm: bool

    @staticmethod
    def from_json(config: Mapping[str, Any]) -> PhiConfig:
        """Read config.json.

        Raises:
            ConfigError: a field is of the wrong type or not supported.
        """
        read = ConfigReader({"partial_rotary_factor": 0.5, **config})
        hidden, heads = read.positive("hidden_size", 2048), read.positive("num_attention_heads", 32)
        kv_heads = read.positive("num_key_value_heads", heads)
        read.require(heads % kv_heads == 0, "num_key_value_heads", f"must divide num_attention_heads ({heads})")
        head_dim, max_position = hidden // heads, read.positive("max_position_embeddings", 2048)
        return PhiConfig(
            vocab_size=read.positive("vocab_size", 51200),
            hidden_size=hidden,
            intermediate_size=read.positive("intermediate_size", 8192),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            layers=(LayerSpec(),) * read.positive("num_hidden_layers", 24),
            max_position=max_position,
            rope=_rope(read, max_position, head_dim),
            norm_eps=read.number("layer_norm_eps", 1e-5),
            activation=read.choice("hidden_act", "gelu_new", tuple(ACTIVATIONS)),
            tied=read.flag("tie_word_embeddings", False),
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
    """One decoder layer: attention and MLP read the same normalised input."""

    config: PhiConfig
    layer: LayerSpec

    def setup(self) -> None:
        cfg = self.config
        self.norm = LayerNorm(cfg.norm_eps)
        self.attention = Attention(
            heads=cfg.heads,
            kv_heads=cfg.kv_heads,
            head_dim=cfg.head_dim,
            layer=self.layer,
            qkv_bias=True,
            out_bias=True,
            qk_norm_eps=cfg.norm_eps if cfg.qk_norm else None,
            qk_layer_norm=True,
        )
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
    """The whole decoder: see `Decoder`."""

    config: PhiConfig
    head_bias = True

    def block(self, index: int, override: Callable[..., Layer] | None) -> Layer:
        return (override or PhiBlock)(self.config, self.config.layers[index], parent=None)


def cache_spec(cfg: PhiConfig) -> CacheSpec:
    return CacheSpec(cfg.layers, cfg.kv_heads, cfg.head_dim)


def param_specs(cfg: PhiConfig) -> ParamTree:
    """Every parameter with its shape, logical axes and the checkpoint tensors it is made of."""
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
