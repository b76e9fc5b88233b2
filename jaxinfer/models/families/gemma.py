"""Gemma 1, 2 and 3 (text): norm scales stored minus one, embeddings scaled by sqrt(d), gated GELU.

Gemma 2 adds post-norms of attention and MLP, soft-caps, and sliding windows in every other layer; Gemma 3 adds a QK
norm, more sliding-window layers, and a separate rotary embedding for them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxinfer.layers.attention import Attend, Attention
from jaxinfer.layers.base import Hidden, HiddenAndCache, Layer, Positions, Tokens
from jaxinfer.layers.mlp import GatedMLP
from jaxinfer.layers.norm import RMSNorm
from jaxinfer.layers.rope import RopeConfig
from jaxinfer.models.config import ConfigReader, DecoderConfig, decoder_fields, layer_rope, rope_config, sliding_layers
from jaxinfer.models.decoder import Block, Decoder
from jaxinfer.models.families.llama import attention_specs
from jaxinfer.models.family import Family
from jaxinfer.models.specs import cache_spec, decoder, gated_mlp, rms_norm
from jaxinfer.types import LayerSpec, ParamTree

# Defaults of transformers for fields missing from config.json.
_ALL = {
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_GEMMA2 = _ALL | {
    "vocab_size": 256_000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
}
_DEFAULTS = {
    "gemma": _GEMMA2
    | {
        "hidden_size": 3072,
        "intermediate_size": 24576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
    },
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA2 | {"vocab_size": 262_208, "max_position_embeddings": 131_072},
}
# Period of full-attention layers; the other layers have a sliding window.
_PATTERN = {"gemma2": 2, "gemma3_text": 6}
_OFFSET = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class GemmaConfig(DecoderConfig):
    """The resolved config.json of a checkpoint: see `DecoderConfig`.

    Attributes:
        local: which layers have a sliding window, and with it ``local_rope``.
        sandwich: attention and MLP have post-norms as well as pre-norms.
        scale: score scale.
        final_softcap: logits become ``c * tanh(logit / c)`` (None: no soft-cap).
    """

    local: tuple[bool, ...]
    rope: RopeConfig
    local_rope: RopeConfig
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
        kind = ConfigReader(config).choice("model_type", "gemma", tuple(_DEFAULTS))
        names = {} if kind == "gemma" else {"hidden_act": "hidden_activation"}
        read = ConfigReader(config, _DEFAULTS[kind], names)
        bidirectional = read.flag("use_bidirectional_attention", False)
        read.require(not bidirectional, "use_bidirectional_attention", "is no decoder")
        fields, local, bias = decoder_fields(read), _local(read, kind), read.flag("attention_bias", False)
        rope, local_rope = _ropes(read, kind, fields["max_position"], fields["head_dim"])
        if kind == "gemma" and fields["activation"] == "gelu":  # means the approximation here, as in `transformers`
            fields["activation"] = "gelu_pytorch_tanh"
        return GemmaConfig(
            **fields,
            layers=_layers(read, kind, local),
            local=local,
            rope=rope,
            local_rope=local_rope,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=kind == "gemma3_text",
            sandwich=kind != "gemma",
            scale=_scale(read, kind, fields["head_dim"]),
            final_softcap=_cap(read, "final_logit_softcapping", 30.0 if kind == "gemma2" else None, kind),
        )


def _local(read: ConfigReader, kind: str) -> tuple[bool, ...]:
    count = read.positive("num_hidden_layers")
    if kind == "gemma":
        return (False,) * count
    local = sliding_layers(read)
    if local is None:
        every = _PATTERN[kind] if kind == "gemma2" else read.positive("sliding_window_pattern", _PATTERN[kind])
        local = [(index + 1) % every != 0 for index in range(count)]
    return tuple(local)


def _layers(read: ConfigReader, kind: str, local: tuple[bool, ...]) -> tuple[LayerSpec, ...]:
    window = read.positive("sliding_window") if any(local) else None
    softcap = _cap(read, "attn_logit_softcapping", 50.0, kind) if kind == "gemma2" else None
    return tuple(LayerSpec(window if near else None, softcap) for near in local)


def _cap(read: ConfigReader, name: str, default: float | None, kind: str) -> float | None:
    """Read a soft-cap; null means none, whatever the default is."""
    if kind == "gemma" or read.fields.get(name, default) is None:
        return None
    cap = read.number(name, default)
    read.require(cap > 0.0, name, "must be > 0")
    return cap


def _scale(read: ConfigReader, kind: str, head_dim: int) -> float:
    scalar = head_dim if kind == "gemma" else read.number("query_pre_attn_scalar")
    read.require(scalar > 0, "query_pre_attn_scalar", "must be > 0")
    return float(scalar) ** -0.5


def _ropes(read: ConfigReader, kind: str, max_position: int, head_dim: int) -> tuple[RopeConfig, RopeConfig]:
    if kind == "gemma3_text":
        return two_ropes(read, max_position, head_dim)
    rope = rope_config(read, max_position, head_dim)
    return rope, rope


def two_ropes(read: ConfigReader, max_position: int, head_dim: int) -> tuple[RopeConfig, RopeConfig]:
    """Read the rotary embeddings of full-attention layers and of sliding-window layers."""
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


class GemmaBlock(Block):
    """A decoder layer. Subclass it and name it in `Gemma.overrides` to change what a layer does.

    ``local`` selects one of the two rotary embeddings.
    """

    config: GemmaConfig
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

    def __call__(self, x: Hidden, ropes: tuple[Any, Any], attend: Attend, cache: Any) -> HiddenAndCache:
        mixed, cache = self.attention(self.attention_norm(x), ropes[self.local], attend, cache)
        x = x + (self.attention_out_norm(mixed) if self.config.sandwich else mixed)
        changed = self.feed_forward(self.mlp_norm(x))
        return x + (self.mlp_out_norm(changed) if self.config.sandwich else changed), cache


class Gemma(Decoder):
    """The Gemma decoder: see `Decoder`. Its context is the cosines and sines of both rotary embeddings."""

    config: GemmaConfig
    block_type = GemmaBlock
    block_fields = ("layers", "local")

    def context(self, positions: Positions) -> tuple[Any, Any]:
        cfg = self.config
        wide = cfg.rope.angles(positions, cfg.head_dim)
        return wide, wide if cfg.local_rope == cfg.rope else cfg.local_rope.angles(positions, cfg.head_dim)

    def embed(self, tokens: Tokens, positions: Positions) -> Hidden:
        """Embed tokens, scaled by sqrt(d) rounded to the embeddings' dtype, as the checkpoints were trained."""
        x = super().embed(tokens, positions)
        return x * jnp.asarray(math.sqrt(self.config.hidden_size), x.dtype)

    def final_norm(self) -> Layer:
        return RMSNorm(self.config.norm_eps, _OFFSET, parent=None)

    def head(self, hidden: Hidden) -> Float[Array, "*batch vocab"]:
        logits, cap = super().head(hidden), self.config.final_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)


def param_specs(cfg: GemmaConfig) -> ParamTree:
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


GEMMA = Family(GemmaConfig.from_json, param_specs, cache_spec, Gemma)
