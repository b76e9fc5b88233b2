"""The Llama family: Llama 2/3/3.1, Mistral, Qwen2/2.5, Qwen3 and all that share their shape.

One decoder: RMSNorm, rotary grouped-query attention, gated MLP, with switches for what differs between checkpoints
(biases, QK norm, sliding windows, RoPE scaling, tied embeddings).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jaxtyping import Array, Float

from jaxinfer.layers.attention import Attend, Attention
from jaxinfer.layers.base import Layer
from jaxinfer.layers.mlp import ACTIVATIONS, GatedMLP
from jaxinfer.layers.norm import RMSNorm
from jaxinfer.layers.rope import RopeConfig
from jaxinfer.models.config import ConfigReader, layer_windows, rope_config
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.specs import decoder, fused_qkv, gated_mlp, linear, plain, rms_norm
from jaxinfer.types import CacheSpec, LayerSpec, ParamTree


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
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
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool

    @staticmethod
    def from_json(config: Mapping[str, Any]) -> LlamaConfig:
        """Read config.json as `transformers` (old or new style) writes it.

        Raises:
            ConfigError: a field is missing, of the wrong type or not supported.
        """
        read = ConfigReader(config)
        model_type = read.text("model_type", "llama")
        heads = read.positive("num_attention_heads")
        hidden = read.positive("hidden_size")
        kv_heads = read.positive("num_key_value_heads", heads)
        read.require(heads % kv_heads == 0, "num_key_value_heads", f"must divide num_attention_heads ({heads})")
        max_position = read.positive("max_position_embeddings", 2048)
        attention_bias = read.flag("attention_bias", False)
        head_dim = read.positive("head_dim", 128 if model_type == "qwen3" else hidden // heads)
        return LlamaConfig(
            vocab_size=read.positive("vocab_size"),
            hidden_size=hidden,
            intermediate_size=read.positive("intermediate_size"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            layers=tuple(LayerSpec(window) for window in layer_windows(read, model_type)),
            max_position=max_position,
            rope=rope_config(read, max_position, head_dim),
            norm_eps=read.number("rms_norm_eps", 1e-6),
            activation=read.choice("hidden_act", "silu", tuple(ACTIVATIONS)),
            tied=read.flag("tie_word_embeddings", False),
            qkv_bias=attention_bias or model_type == "qwen2",
            out_bias=attention_bias and model_type != "qwen2",
            mlp_bias=read.flag("mlp_bias", False),
            qk_norm=model_type == "qwen3",
        )


class LlamaBlock(Layer):
    """One decoder layer. Subclass it and name it in `Llama.overrides` to change what a layer does."""

    config: LlamaConfig
    layer: LayerSpec

    def setup(self) -> None:
        cfg = self.config
        self.attention_norm = RMSNorm(cfg.norm_eps)
        self.attention = Attention(
            heads=cfg.heads,
            kv_heads=cfg.kv_heads,
            head_dim=cfg.head_dim,
            layer=self.layer,
            qkv_bias=cfg.qkv_bias,
            out_bias=cfg.out_bias,
            qk_norm_eps=cfg.norm_eps if cfg.qk_norm else None,
        )
        self.mlp_norm = RMSNorm(cfg.norm_eps)
        self.mlp = GatedMLP(cfg.activation, cfg.mlp_bias)

    def __call__(
        self, x: Float[Array, "*batch d"], rope: tuple[jax.Array, jax.Array], attend: Attend, cache: Any
    ) -> tuple[Float[Array, "*batch d"], Any]:
        mixed, cache = self.attention(self.attention_norm(x), rope, attend, cache)
        x = x + mixed
        return x + self.feed_forward(self.mlp_norm(x)), cache

    def feed_forward(self, x: Float[Array, "*batch d"]) -> Float[Array, "*batch d"]:
        return self.mlp(x)


class Llama(Decoder):
    """The whole decoder: see `Decoder`. Its context is the cosines and sines of the rotary embedding."""

    config: LlamaConfig

    def block(self, index: int, override: Callable[..., Layer] | None) -> Layer:
        return (override or LlamaBlock)(self.config, self.config.layers[index], parent=None)

    def up_to(self, length: int) -> Llama:
        rope = self.config.rope.up_to(length)
        return self if rope == self.config.rope else self.clone(config=dataclasses.replace(self.config, rope=rope))


def cache_spec(cfg: LlamaConfig) -> CacheSpec:
    return CacheSpec(cfg.layers, cfg.kv_heads, cfg.head_dim)


def param_specs(cfg: LlamaConfig) -> ParamTree:
    """Every parameter with its shape, logical axes and the checkpoint tensors it is made of."""

    def block(_: int, prefix: str) -> dict[str, Any]:
        mlp = gated_mlp(f"{prefix}.mlp", cfg.hidden_size, cfg.intermediate_size, cfg.mlp_bias)
        return block_specs(cfg, prefix, mlp)

    return decoder(cfg, block)


def block_specs(cfg: Any, prefix: str, mlp: dict[str, Any]) -> dict[str, Any]:
    """A layer of `attention_specs` and the parameters of a feed-forward network, each behind an `RMSNorm`."""
    return {
        "attention_norm": rms_norm(f"{prefix}.input_layernorm", cfg.hidden_size),
        "attention": attention_specs(cfg, f"{prefix}.self_attn"),
        "mlp_norm": rms_norm(f"{prefix}.post_attention_layernorm", cfg.hidden_size),
        "mlp": mlp,
    }


def attention_specs(cfg: Any, prefix: str, norms: str = "ones") -> dict[str, Any]:
    """`Attention` of q_proj, k_proj, v_proj and o_proj, with the sizes and switches that ``cfg`` names as this one;
    ``norms``: how the norms of queries and keys are initialised."""
    d, dim, sizes = cfg.hidden_size, cfg.head_dim, (cfg.hidden_size, cfg.heads, cfg.kv_heads, cfg.head_dim)
    tree: dict[str, Any] = {
        "qkv": fused_qkv(prefix, *sizes),
        "out": linear(f"{prefix}.o_proj.weight", (cfg.heads * dim, d), ("heads", "embed")),
    }
    if cfg.qkv_bias:
        tree["qkv_bias"] = fused_qkv(prefix, *sizes, kind="bias")
    if cfg.out_bias:
        tree["out_bias"] = plain(f"{prefix}.o_proj.bias", (d,), ("embed",), "zeros")
    if cfg.qk_norm:
        tree |= {name: rms_norm(f"{prefix}.{name}", dim, norms) for name in ("q_norm", "k_norm")}
    return tree
