"""The Llama family: Llama 2/3/3.1, Mistral, Qwen2/2.5, Qwen3, Seed-OSS, MiMo and other models with their structure.

One decoder: RMSNorm, rotary grouped-query attention, gated MLP, with switches for differences between checkpoints
(biases, QK norm, sliding windows, RoPE scaling, tied embeddings).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from jaxinfer.layers.attention import Attention
from jaxinfer.layers.base import Layer
from jaxinfer.layers.mlp import GatedMLP
from jaxinfer.layers.norm import RMSNorm
from jaxinfer.layers.rope import RopeConfig
from jaxinfer.models.config import (
    SLIDING_WINDOW,
    ConfigReader,
    DecoderConfig,
    decoder_fields,
    max_window_layers,
    qwen_window,
    rope_config,
    sliding_layers,
)
from jaxinfer.models.decoder import Block, Decoder
from jaxinfer.models.family import Family
from jaxinfer.models.specs import attention, cache_spec, decoder, gated_mlp, heads_norm, pre_norm, rms_norm
from jaxinfer.types import LayerSpec, ParamTree

# Defaults of transformers for fields missing from config.json.
_QWEN = {"num_key_value_heads": 32, "max_position_embeddings": 32768}
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "mistral": {"num_key_value_heads": 8, "max_position_embeddings": 131072},
    "qwen2": _QWEN,
    "mimo": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128},
    "seed_oss": {
        "num_key_value_heads": 8,
        "max_position_embeddings": 524288,
        "head_dim": 128,
        "attention_bias": True,
    },
}
# MTP layers of MiMo, not loaded.
IGNORE = ("model.mtp_layers.*",)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class LlamaConfig(DecoderConfig):
    """The resolved config.json of a checkpoint: see `DecoderConfig`."""

    rope: RopeConfig
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    @staticmethod
    def from_json(config: Mapping[str, Any]) -> LlamaConfig:
        """Read config.json as `transformers` (old or new style) writes it.

        Raises:
            ConfigError: a field is missing, of the wrong type or not supported.
        """
        model_type = ConfigReader(config).text("model_type", "llama")
        read = ConfigReader(config, _DEFAULTS.get(model_type, {}))
        # transformers ignores it for Mistral
        attention_bias = read.flag("attention_bias", False) and model_type != "mistral"
        fields = decoder_fields(read)
        out_bias = attention_bias and model_type not in ("qwen2", "mimo")
        return LlamaConfig(
            **fields,
            layers=tuple(LayerSpec(window) for window in _windows(read, model_type)),
            rope=_rope(read, fields["max_position"], fields["head_dim"]),
            qkv_bias=attention_bias or model_type in ("qwen2", "mimo"),
            out_bias=read.flag("attention_out_bias", False) if model_type == "seed_oss" else out_bias,
            mlp_bias=read.flag("mlp_bias", False),
            qk_norm=model_type == "qwen3",
        )


def llama_fields(read: ConfigReader) -> dict[str, Any]:
    """Read the fields of `LlamaConfig` for a derived family: as Llama's, with full attention in all layers.

    Raises:
        ConfigError: a field is missing, of the wrong type or not supported.
    """
    fields, bias = decoder_fields(read), read.flag("attention_bias", False)
    return fields | {
        "layers": (LayerSpec(),) * read.positive("num_hidden_layers"),
        "rope": _rope(read, fields["max_position"], fields["head_dim"]),
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": read.flag("mlp_bias", False),
    }


def _rope(read: ConfigReader, max_position: int, head_dim: int) -> RopeConfig:
    """Read the rotary embedding: the default one of transformers ignores partial_rotary_factor."""
    rope = rope_config(read, max_position, head_dim, partial=True)
    known = rope.kind == "default" or rope.partial == 1.0
    read.require(known, "partial_rotary_factor", f"is not supported for rope_type {rope.kind}")
    return dataclasses.replace(rope, partial=1.0)


def _windows(read: ConfigReader, model_type: str) -> list[int | None]:
    """Read the sliding window of each layer in tokens, None for full attention."""
    count = read.positive("num_hidden_layers")
    if model_type == "mistral":
        null = "sliding_window" in read.fields and read.fields["sliding_window"] is None
        return [None if null else read.positive("sliding_window", SLIDING_WINDOW)] * count
    window = qwen_window(read) if model_type in ("qwen2", "qwen3", "mimo") else None
    if window is None:
        return [None] * count
    local = sliding_layers(read)
    if local is None:
        first = max_window_layers(read)
        local = [index >= first for index in range(count)]
    return [window if near else None for near in local]


class LlamaBlock(Block):
    """A decoder layer. Subclass it and name it in `Llama.overrides` to change what a layer does."""

    config: LlamaConfig

    kind: ClassVar[type[Attention]] = Attention

    def options(self) -> dict[str, Any]:
        """Return further arguments of a family's attention."""
        return {}

    def setup(self) -> None:
        cfg, eps = self.config, self.config.norm_eps if self.config.qk_norm else None
        sizes = cfg.heads, cfg.kv_heads, cfg.head_dim, self.layer
        self.attention_norm: Any = self.norm()
        self.attention = self.kind(*sizes, cfg.qkv_bias, cfg.out_bias, eps, **self.options())
        self.mlp_norm: Any = self.norm()
        self.mlp: Any = self.network()

    def norm(self) -> Layer:
        """Make a norm."""
        return RMSNorm(self.config.norm_eps)

    def network(self) -> Layer:
        """Make the feed-forward network."""
        return GatedMLP(self.config.activation, self.config.mlp_bias)


class Llama(Decoder):
    """The Llama decoder: see `Decoder`. Its context is the cosines and sines of the rotary embedding."""

    config: LlamaConfig
    block_type: ClassVar[Any] = LlamaBlock


def param_specs(cfg: LlamaConfig) -> ParamTree:

    def block(_: int, prefix: str) -> dict[str, Any]:
        mlp = gated_mlp(f"{prefix}.mlp", cfg.hidden_size, cfg.intermediate_size, cfg.mlp_bias)
        return block_specs(cfg, prefix, mlp)

    return decoder(cfg, block)


def block_specs(
    cfg: Any, prefix: str, mlp: dict[str, Any], norm: Callable[[str, int], dict[str, Any]] = rms_norm
) -> dict[str, Any]:
    """Return the parameters of a pre-norm layer: `attention_specs` and ``mlp``, each after a norm."""
    return pre_norm(prefix, cfg.hidden_size, attention_specs(cfg, f"{prefix}.self_attn"), mlp, norm)


def attention_specs(cfg: Any, prefix: str, norms: str = "ones") -> dict[str, Any]:
    """Return `Attention` parameters from q_proj, k_proj, v_proj and o_proj; ``cfg`` has the size and switch fields of
    `LlamaConfig`. ``norms``: initialisation of the QK norm."""
    dim = cfg.head_dim
    tree = attention(cfg, prefix, qkv_bias=cfg.qkv_bias, out_bias=cfg.out_bias)
    if cfg.qk_norm:
        tree |= {name: rms_norm(f"{prefix}.{name}", dim, norms) for name in ("q_norm", "k_norm")}
    if cfg.qk_norm and getattr(cfg, "qk_norm_whole", False):
        tree |= {
            "q_norm": heads_norm(f"{prefix}.q_norm.weight", cfg.heads, dim),
            "k_norm": heads_norm(f"{prefix}.k_norm.weight", cfg.kv_heads, dim),
        }
    return tree


LLAMA = Family(LlamaConfig.from_json, param_specs, cache_spec, Llama)
MIMO = dataclasses.replace(LLAMA, ignore=IGNORE)
