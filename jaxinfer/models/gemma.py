"""Gemma 1, 2 and 3 (text): norms whose scales are stored less one, embeddings scaled by sqrt(d), gated GELU.

Gemma 2 adds norms behind attention and MLP, soft-caps and windows in every other layer; Gemma 3 norms of queries and
keys, more windows, and a rotary embedding of its own for the layers that have one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxinfer.layers.attention import Attend, Attention
from jaxinfer.layers.base import Layer
from jaxinfer.layers.mlp import ACTIVATIONS, GatedMLP
from jaxinfer.layers.norm import RMSNorm
from jaxinfer.layers.rope import RopeConfig
from jaxinfer.models.config import ConfigReader, layer_rope, rope_config
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.llama import attention_specs
from jaxinfer.models.specs import decoder, gated_mlp, rms_norm
from jaxinfer.types import CacheSpec, LayerSpec, ParamTree

# What transformers takes where config.json leaves a size out.
_SIZES = {
    "gemma": {"hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28, "num_attention_heads": 16},
    "gemma2": {"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8},
    "gemma3_text": {"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8},
}
_VOCABULARY = {"gemma": 256_000, "gemma2": 256_000, "gemma3_text": 262_208}
_KV_HEADS = {"gemma": 16, "gemma2": 4, "gemma3_text": 4}
_CONTEXT = {"gemma": 8192, "gemma2": 8192, "gemma3_text": 131_072}
# Every so many layers one sees the whole text; the others have a window.
_PATTERN = {"gemma2": 2, "gemma3_text": 6}
_OFFSET = 1.0


@dataclasses.dataclass(frozen=True)
class GemmaConfig:
    """A checkpoint's config.json, resolved: no optional field is left open.

    Attributes:
        local: which layers have a window, and with it ``local_rope``.
        sandwich: attention and MLP are normalised behind as well as before.
        scale: of the scores.
        final_softcap: logits become ``c * tanh(logit / c)`` (None: they stay).
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: tuple[LayerSpec, ...]
    local: tuple[bool, ...]
    max_position: int
    rope: RopeConfig
    local_rope: RopeConfig
    norm_eps: float
    activation: str
    tied: bool
    qkv_bias: bool
    out_bias: bool
    qk_norm: bool
    sandwich: bool
    scale: float
    final_softcap: float | None

    @staticmethod
    def from_json(config: Mapping[str, Any]) -> GemmaConfig:
        """Read config.json as `transformers` (old or new style) writes it.

        Raises:
            ConfigError: a field is missing, of the wrong type or not supported.
        """
        read = ConfigReader(config)
        kind = read.choice("model_type", "gemma", tuple(_SIZES))
        read.require(
            not read.flag("use_bidirectional_attention", False), "use_bidirectional_attention", "is no decoder"
        )
        sizes = {name: read.positive(name, default) for name, default in _SIZES[kind].items()}
        heads, kv_heads = sizes["num_attention_heads"], read.positive("num_key_value_heads", _KV_HEADS[kind])
        read.require(heads % kv_heads == 0, "num_key_value_heads", f"must divide num_attention_heads ({heads})")
        head_dim, max_position = (
            read.positive("head_dim", 256),
            read.positive("max_position_embeddings", _CONTEXT[kind]),
        )
        local = _local(read, kind, sizes["num_hidden_layers"])
        rope, local_rope = _ropes(read, kind, max_position, head_dim)
        return GemmaConfig(
            vocab_size=read.positive("vocab_size", _VOCABULARY[kind]),
            hidden_size=sizes["hidden_size"],
            intermediate_size=sizes["intermediate_size"],
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            layers=_layers(read, kind, local),
            local=local,
            max_position=max_position,
            rope=rope,
            local_rope=local_rope,
            norm_eps=read.number("rms_norm_eps", 1e-6),
            activation=_activation(read, kind),
            tied=read.flag("tie_word_embeddings", True),
            qkv_bias=read.flag("attention_bias", False),
            out_bias=read.flag("attention_bias", False),
            qk_norm=kind == "gemma3_text",
            sandwich=kind != "gemma",
            scale=_scale(read, kind, head_dim),
            final_softcap=_cap(read, "final_logit_softcapping", 30.0 if kind == "gemma2" else None, kind),
        )


def _local(read: ConfigReader, kind: str, count: int) -> tuple[bool, ...]:
    if kind == "gemma":
        return (False,) * count
    kinds = read.fields.get("layer_types")
    if kinds is None:
        every = _PATTERN[kind] if kind == "gemma2" else read.positive("sliding_window_pattern", _PATTERN[kind])
        return tuple((index + 1) % every != 0 for index in range(count))
    known = isinstance(kinds, list) and all(one in ("full_attention", "sliding_attention") for one in kinds)
    read.require(known and len(kinds) == count, "layer_types", f"must name {count} full or sliding attentions")
    return tuple(one == "sliding_attention" for one in kinds)


def _layers(read: ConfigReader, kind: str, local: tuple[bool, ...]) -> tuple[LayerSpec, ...]:
    window = read.positive("sliding_window", 4096) if any(local) else None
    softcap = _cap(read, "attn_logit_softcapping", 50.0, kind) if kind == "gemma2" else None
    return tuple(LayerSpec(window if near else None, softcap) for near in local)


def _cap(read: ConfigReader, name: str, default: float | None, kind: str) -> float | None:
    """Read a soft-cap; null means none, whatever the default."""
    if kind == "gemma" or read.fields.get(name, default) is None:
        return None
    cap = read.number(name, default)
    read.require(cap > 0.0, name, "must be > 0")
    return cap


def _scale(read: ConfigReader, kind: str, head_dim: int) -> float:
    scalar = head_dim if kind == "gemma" else read.number("query_pre_attn_scalar", 256)
    read.require(scalar > 0, "query_pre_attn_scalar", "must be > 0")
    return float(scalar) ** -0.5


def _activation(read: ConfigReader, kind: str) -> str:
    """Read the activation: "gelu" in Gemma's first checkpoints means the approximation, as in `transformers`."""
    name = "hidden_act" if kind == "gemma" else "hidden_activation"
    activation = read.choice(name, "gelu_pytorch_tanh", tuple(ACTIVATIONS))
    return "gelu_pytorch_tanh" if kind == "gemma" and activation == "gelu" else activation


def _ropes(read: ConfigReader, kind: str, max_position: int, head_dim: int) -> tuple[RopeConfig, RopeConfig]:
    """Read the rotary embeddings of full-attention layers and of sliding-window layers."""
    if kind != "gemma3_text":
        rope = rope_config(read, max_position, head_dim)
        return rope, rope
    for name in ("rope_parameters", "rope_scaling"):
        value = read.fields.get(name)
        read.require(value is None or isinstance(value, dict), name, "must be an object")
    both: dict[str, Any] = read.fields.get("rope_parameters") or {}
    wide, near = (both.get(name) or {} for name in ("full_attention", "sliding_attention"))
    read.require(isinstance(wide, dict) and isinstance(near, dict), "rope_parameters", "must hold objects")
    wide = {"rope_theta": read.number("rope_theta", 1e6), **wide, **(read.fields.get("rope_scaling") or {})}
    near = {"rope_theta": read.number("rope_local_base_freq", 1e4), **near}
    rope, local = (layer_rope(read, scaling, max_position, head_dim) for scaling in (wide, near))
    return rope, local


class GemmaBlock(Layer):
    """One decoder layer. Subclass it and name it in `Gemma.overrides` to change what a layer does.

    ``local`` selects one of the two rotary embeddings.
    """

    config: GemmaConfig
    layer: LayerSpec
    local: bool

    def setup(self) -> None:
        cfg = self.config
        self.attention_norm, self.mlp_norm = (RMSNorm(cfg.norm_eps, _OFFSET) for _ in range(2))
        if cfg.sandwich:
            self.attention_out_norm, self.mlp_out_norm = (RMSNorm(cfg.norm_eps, _OFFSET) for _ in range(2))
        self.attention = Attention(
            heads=cfg.heads,
            kv_heads=cfg.kv_heads,
            head_dim=cfg.head_dim,
            layer=self.layer,
            qkv_bias=cfg.qkv_bias,
            out_bias=cfg.out_bias,
            qk_norm_eps=cfg.norm_eps if cfg.qk_norm else None,
            norm_offset=_OFFSET,
            scale=cfg.scale,
        )
        self.mlp = GatedMLP(cfg.activation)

    def __call__(
        self, x: Float[Array, "*batch d"], ropes: tuple[Any, Any], attend: Attend, cache: Any
    ) -> tuple[Float[Array, "*batch d"], Any]:
        mixed, cache = self.attention(self.attention_norm(x), ropes[self.local], attend, cache)
        x = x + (self.attention_out_norm(mixed) if self.config.sandwich else mixed)
        changed = self.feed_forward(self.mlp_norm(x))
        return x + (self.mlp_out_norm(changed) if self.config.sandwich else changed), cache

    def feed_forward(self, x: Float[Array, "*batch d"]) -> Float[Array, "*batch d"]:
        return self.mlp(x)


class Gemma(Decoder):
    """The whole decoder: see `Decoder`. Its context is both rotary embeddings' cosines and sines."""

    config: GemmaConfig

    def block(self, index: int, override: Callable[..., Layer] | None) -> Layer:
        cfg = self.config
        return (override or GemmaBlock)(cfg, cfg.layers[index], cfg.local[index], parent=None)

    def context(self, positions: Int[Array, "*batch"]) -> tuple[Any, Any]:
        cfg = self.config
        wide = cfg.rope.angles(positions, cfg.head_dim)
        return wide, wide if cfg.local_rope == cfg.rope else cfg.local_rope.angles(positions, cfg.head_dim)

    def embed(self, tokens: Int[Array, "*batch"], positions: Int[Array, "*batch"]) -> Float[Array, "*batch d"]:
        """Embed tokens, scaled by sqrt(d) rounded to the embeddings' dtype, as the checkpoints were trained."""
        x = super().embed(tokens, positions)
        return x * jnp.asarray(math.sqrt(self.config.hidden_size), x.dtype)

    def final_norm(self) -> Layer:
        return RMSNorm(self.config.norm_eps, _OFFSET, parent=None)

    def head(self, hidden: Float[Array, "*batch d"]) -> Float[Array, "*batch vocab"]:
        logits, cap = super().head(hidden), self.config.final_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)


def cache_spec(cfg: GemmaConfig) -> CacheSpec:
    return CacheSpec(cfg.layers, cfg.kv_heads, cfg.head_dim)


def param_specs(cfg: GemmaConfig) -> ParamTree:
    """Every parameter with its shape, logical axes and the checkpoint tensors it is made of."""
    final = _norm("model.norm", cfg.hidden_size)
    return decoder(cfg, lambda _, prefix: _block_specs(cfg, prefix), final_norm=final)


def _norm(prefix: str, size: int) -> dict[str, Any]:
    return rms_norm(prefix, size, "zeros")


def _block_specs(cfg: GemmaConfig, prefix: str) -> dict[str, Any]:
    d = cfg.hidden_size
    tree = {
        "attention_norm": _norm(f"{prefix}.input_layernorm", d),
        "attention": attention_specs(cfg, f"{prefix}.self_attn", "zeros"),
        "mlp": gated_mlp(f"{prefix}.mlp", d, cfg.intermediate_size),
    }
    if not cfg.sandwich:
        return tree | {"mlp_norm": _norm(f"{prefix}.post_attention_layernorm", d)}
    return tree | {
        "attention_out_norm": _norm(f"{prefix}.post_attention_layernorm", d),
        "mlp_norm": _norm(f"{prefix}.pre_feedforward_layernorm", d),
        "mlp_out_norm": _norm(f"{prefix}.post_feedforward_layernorm", d),
    }
