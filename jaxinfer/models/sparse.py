"""The decoder of Mixtral, Qwen's mixtures of experts and gpt-oss: a Llama with experts for feed-forward layers.

A family's module reads its config.json into a `SparseConfig` and names its experts' tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Bool, Float, Int

from jaxinfer.layers.attention import Attend, Attention
from jaxinfer.layers.base import Layer
from jaxinfer.layers.mlp import ACTIVATIONS, GatedMLP
from jaxinfer.layers.moe import GLU, ClampedGLU, MoE, RoutingRule
from jaxinfer.layers.norm import RMSNorm
from jaxinfer.layers.rope import RopeConfig
from jaxinfer.models.config import ConfigReader, rope_config
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.llama import block_specs
from jaxinfer.models.specs import decoder, gated_mlp
from jaxinfer.types import CacheSpec, LayerSpec, ParamTree


@dataclasses.dataclass(frozen=True)
class SparseConfig:
    """A checkpoint's config.json, resolved.

    Attributes:
        sparse: whether a layer has experts, or is a dense one of ``intermediate_size``.
        expert_size: the hidden size of an expert.
        expert_bias: router and experts have biases.
        shared_size: the hidden size of the expert that all tokens share; None: there is none.
        sinks: see `Attention`.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: tuple[LayerSpec, ...]
    sparse: tuple[bool, ...]
    max_position: int
    rope: RopeConfig
    norm_eps: float
    activation: str
    tied: bool
    qkv_bias: bool
    out_bias: bool
    qk_norm: bool
    sinks: bool
    experts: int
    expert_size: int
    expert_bias: bool
    rule: RoutingRule
    glu: GLU | ClampedGLU
    shared_size: int | None


@dataclasses.dataclass(frozen=True)
class Defaults:
    """The defaults of transformers for fields that a config.json leaves out."""

    kv_heads: int
    experts: int
    top_k: int
    norm_eps: float
    theta: float
    max_position: int


def read_config(
    read: ConfigReader, defaults: Defaults, windows: list[int | None], rule: RoutingRule, **switches: Any
) -> SparseConfig:
    """Read the fields that all families name alike; ``switches`` are the other fields of `SparseConfig`.

    Raises:
        ConfigError: a field is missing, of the wrong type or not supported.
    """
    heads, hidden = read.positive("num_attention_heads"), read.positive("hidden_size")
    kv_heads = read.positive(
        "num_key_value_heads", heads if "num_key_value_heads" in read.fields else defaults.kv_heads
    )
    read.require(heads % kv_heads == 0, "num_key_value_heads", f"must divide num_attention_heads ({heads})")
    max_position = read.positive("max_position_embeddings", defaults.max_position)
    activation = read.choice("hidden_act", "silu", tuple(ACTIVATIONS))
    experts = read_experts(read, defaults)
    read.require(rule.top_k <= experts, "num_experts_per_tok", f"must be at most the number of experts ({experts})")
    common: dict[str, Any] = {
        "vocab_size": read.positive("vocab_size"),
        "hidden_size": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": read.positive("head_dim", hidden // heads),
        "layers": tuple(LayerSpec(window) for window in windows),
        "sparse": (True,) * len(windows),
        "max_position": max_position,
        "rope": rope_config(with_theta(read, defaults.theta), max_position),
        "norm_eps": read.number("rms_norm_eps", defaults.norm_eps),
        "activation": activation,
        "tied": read.flag("tie_word_embeddings", False),
        "experts": experts,
        "rule": rule,
        "glu": GLU(activation),
        **dict.fromkeys(("qkv_bias", "out_bias", "qk_norm", "sinks", "expert_bias"), False),
        "shared_size": None,
    }
    return SparseConfig(**common | switches)


def read_experts(read: ConfigReader, defaults: Defaults) -> int:
    """Read the number of experts: transformers takes either name for it."""
    return read.positive("num_local_experts", read.positive("num_experts", defaults.experts))


def with_theta(read: ConfigReader, theta: float) -> ConfigReader:
    """Set the default of ``rope_theta``."""
    return read if read.fields.get("rope_theta") is not None else ConfigReader({**read.fields, "rope_theta": theta})


class SparseContext(NamedTuple):
    """Cosines and sines of the rotary embedding, and which tokens are real: padding asks for no expert."""

    rope: tuple[jax.Array, jax.Array]
    live: Bool[Array, "*batch"]


class SparseBlock(Layer):
    """One decoder layer: attention, then experts, or a dense feed-forward network where ``sparse`` is False."""

    config: SparseConfig
    layer: LayerSpec
    sparse: bool

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
            sinks=cfg.sinks,
        )
        self.mlp_norm = RMSNorm(cfg.norm_eps)
        self.mlp: Any = self._experts() if self.sparse else GatedMLP(cfg.activation)

    def _experts(self) -> MoE:
        cfg, shared = self.config, self.config.shared_size is not None
        activation = cfg.activation if shared else None
        return MoE(cfg.rule, cfg.glu, cfg.expert_bias, shared_activation=activation, shared_gate=shared)

    def __call__(
        self, x: Float[Array, "*batch d"], context: SparseContext, attend: Attend, cache: Any
    ) -> tuple[Float[Array, "*batch d"], Any]:
        mixed, cache = self.attention(self.attention_norm(x), context.rope, attend, cache)
        x = x + mixed
        normal = self.mlp_norm(x)
        return x + (self.mlp(normal, context.live) if self.sparse else self.mlp(normal)), cache


class Sparse(Decoder):
    """The whole decoder: see `Decoder`."""

    config: SparseConfig

    def block(self, index: int, override: Callable[..., Layer] | None) -> Layer:
        cfg = self.config
        return (override or SparseBlock)(cfg, cfg.layers[index], cfg.sparse[index], parent=None)

    def context(self, positions: Int[Array, "*batch"]) -> SparseContext:
        return SparseContext(self.config.rope.angles(positions, self.config.head_dim), positions >= 0)

    def up_to(self, length: int) -> Sparse:
        rope = self.config.rope.up_to(length)
        return self if rope == self.config.rope else self.clone(config=dataclasses.replace(self.config, rope=rope))


def cache_spec(cfg: SparseConfig) -> CacheSpec:
    return CacheSpec(cfg.layers, cfg.kv_heads, cfg.head_dim)


def param_specs(cfg: SparseConfig, experts: Callable[[SparseConfig, str], dict[str, Any]]) -> ParamTree:
    """Every parameter with its shape, logical axes and the checkpoint tensors it is made of.

    Args:
        experts: `MoE`'s parameters of the layer whose tensors' names begin as given.
    """

    def block(index: int, prefix: str) -> dict[str, Any]:
        dense = f"{prefix}.mlp", cfg.hidden_size, cfg.intermediate_size
        return block_specs(cfg, prefix, experts(cfg, prefix) if cfg.sparse[index] else gated_mlp(*dense))

    return decoder(cfg, block)
