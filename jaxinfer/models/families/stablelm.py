"""StableLM: Llama with layer norms and a quarter of each head rotated; attention and MLP may be parallel."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from jaxinfer.layers.attention import Attend
from jaxinfer.layers.base import Hidden, HiddenAndCache
from jaxinfer.layers.mlp import GatedMLP
from jaxinfer.layers.norm import LayerNorm
from jaxinfer.layers.rope import RopeConfig
from jaxinfer.models.config import ConfigReader, DecoderConfig, decoder_fields, partial_rope
from jaxinfer.models.decoder import Block, LayerNormDecoder
from jaxinfer.models.families.cohere import HeadNormAttention
from jaxinfer.models.family import Family
from jaxinfer.models.specs import attention, cache_spec, decoder, gated_mlp, layer_norm
from jaxinfer.types import LayerSpec, ParamSpec, ParamTree, Source

# Defaults of transformers for fields missing from config.json.
_DEFAULTS = {
    "vocab_size": 50304,
    "hidden_size": 2560,
    "intermediate_size": 6912,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 0.25,
}


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class StableLmConfig(DecoderConfig):
    """The resolved config.json of a checkpoint: see `DecoderConfig`.

    Attributes:
        head_norms: whether there is a QK norm with per-head scales.
        parallel: attention and MLP read the same normalised input.
    """

    rope: RopeConfig
    qkv_bias: bool
    head_norms: bool
    parallel: bool

    @staticmethod
    def from_json(config: Mapping[str, Any]) -> StableLmConfig:
        """Read config.json; raises as `decoder_fields` does."""
        read = ConfigReader(config, _DEFAULTS, {"rms_norm_eps": "layer_norm_eps"})
        fields = decoder_fields(read, cut_heads=True)
        return StableLmConfig(
            **fields,
            layers=(LayerSpec(),) * read.positive("num_hidden_layers"),
            rope=partial_rope(read, fields),
            qkv_bias=read.flag("use_qkv_bias", False),
            head_norms=read.flag("qk_layernorm", False),
            parallel=read.flag("use_parallel_residual", False),
        )


class StableLmBlock(Block):
    """A decoder layer."""

    config: StableLmConfig

    def setup(self) -> None:
        cfg = self.config
        sizes, eps = (cfg.heads, cfg.kv_heads, cfg.head_dim, self.layer), cfg.norm_eps if cfg.head_norms else None
        self.attention_norm = LayerNorm(cfg.norm_eps)
        self.attention = HeadNormAttention(*sizes, qkv_bias=cfg.qkv_bias, qk_norm_eps=eps)
        if not cfg.parallel:
            self.mlp_norm = LayerNorm(cfg.norm_eps)
        self.mlp = GatedMLP(cfg.activation)

    def __call__(self, x: Hidden, rope: tuple[jax.Array, jax.Array], attend: Attend, cache: Any) -> HiddenAndCache:
        normal = self.attention_norm(x)
        mixed, cache = self.attention(normal, rope, attend, cache)
        x = x + mixed
        return x + self.feed_forward(normal if self.config.parallel else self.mlp_norm(x)), cache


class StableLm(LayerNormDecoder):
    config: StableLmConfig
    block_type = StableLmBlock


def param_specs(cfg: StableLmConfig) -> ParamTree:
    return decoder(
        cfg, lambda _, prefix: _block_specs(cfg, prefix), final_norm=layer_norm("model.norm", cfg.hidden_size)
    )


def _block_specs(cfg: StableLmConfig, prefix: str) -> dict[str, Any]:
    d = cfg.hidden_size
    tree = {
        "attention_norm": layer_norm(f"{prefix}.input_layernorm", d),
        "attention": _attention_specs(cfg, f"{prefix}.self_attn"),
        "mlp": gated_mlp(f"{prefix}.mlp", d, cfg.intermediate_size),
    }
    return tree if cfg.parallel else tree | {"mlp_norm": layer_norm(f"{prefix}.post_attention_layernorm", d)}


def _attention_specs(cfg: StableLmConfig, prefix: str) -> dict[str, Any]:
    tree = attention(cfg, prefix, qkv_bias=cfg.qkv_bias)
    if cfg.head_norms:
        tree["q_norm"] = _head_norms(f"{prefix}.q_layernorm", cfg.heads, cfg.head_dim)
        tree["k_norm"] = _head_norms(f"{prefix}.k_layernorm", cfg.kv_heads, cfg.head_dim)
    return tree


def _head_norms(prefix: str, heads: int, dim: int) -> dict[str, Any]:
    """Return the parameters of a `HeadLayerNorm` from one tensor per head; replicated, since head scales differ."""
    sources = tuple(Source(f"{prefix}.norms.{head}.weight", (dim,), where=(head,)) for head in range(heads))
    return {"scale": ParamSpec((heads, dim), (None, "norm"), init="ones", sources=sources)}


STABLELM = Family(StableLmConfig.from_json, param_specs, cache_spec, StableLm)
