"""Cohere's Command-R, R7B and A: parallel attention and MLP after one layer norm without bias, scaled logits.

Command-R+ has a QK norm with per-head scales. The second generation has sliding windows in three of four layers; the
layers without a window have no position embedding (NoPE).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxtyping import Array, Float

from jaxinfer.layers.attention import Attend, Attention
from jaxinfer.layers.base import Hidden, HiddenAndCache, Layer
from jaxinfer.layers.mlp import GatedMLP
from jaxinfer.layers.norm import HeadLayerNorm, LayerNorm
from jaxinfer.models.config import ConfigReader
from jaxinfer.models.decoder import Block
from jaxinfer.models.families.llama import Llama, LlamaConfig, attention_specs, llama_fields
from jaxinfer.models.families.olmo import local_layers, windowed
from jaxinfer.models.family import Family
from jaxinfer.models.specs import cache_spec, decoder, gated_mlp, rms_norm
from jaxinfer.types import ParamSpec, ParamTree, Source

# Defaults of transformers for fields missing from config.json.
_DEFAULTS = {
    "vocab_size": 256_000,
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "logit_scale": 0.0625,
}
_THETA1 = 5e5  # RoPE theta of the first generation
_NAMES = {"rms_norm_eps": "layer_norm_eps"}
_PATTERN = 4


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class CohereConfig(LlamaConfig):
    """The resolved config.json of a checkpoint: see `DecoderConfig`.

    Attributes:
        rotated: whether each layer has rotary embeddings.
        head_norms: whether there is a QK norm with per-head scales.
        logit_scale: factor of the logits.
    """

    rotated: tuple[bool, ...]
    head_norms: bool
    logit_scale: float

    @staticmethod
    def from_cohere(config: Mapping[str, Any]) -> CohereConfig:
        """Read config.json; raises as `decoder_fields` does."""
        read = ConfigReader({**config, "mlp_bias": False}, {**_DEFAULTS, "rope_theta": _THETA1}, _NAMES)
        fields = llama_fields(read)
        scale, norms = read.number("logit_scale"), read.flag("use_qk_norm", False)
        return CohereConfig(**fields, rotated=(True,) * len(fields["layers"]), head_norms=norms, logit_scale=scale)

    @staticmethod
    def from_cohere2(config: Mapping[str, Any]) -> CohereConfig:
        """Read config.json; raises as `decoder_fields` does."""
        read = ConfigReader({**config, "mlp_bias": False}, _DEFAULTS, _NAMES)
        local = local_layers(read, read.positive("sliding_window_pattern", _PATTERN))
        fields = {**llama_fields(read), "layers": windowed(read, local)}
        scale = read.number("logit_scale")
        return CohereConfig(**fields, rotated=tuple(local), head_norms=False, logit_scale=scale)


class HeadNormAttention(Attention):
    """`Attention` with a QK layer norm that has per-head scales."""

    def norm(self, eps: float) -> Layer:
        return HeadLayerNorm(eps)


class CohereBlock(Block):
    """A decoder layer: attention and MLP read the same normalised input. ``rotated``: whether it uses RoPE."""

    config: CohereConfig
    rotated: bool

    def setup(self) -> None:
        cfg = self.config
        sizes, eps = (cfg.heads, cfg.kv_heads, cfg.head_dim, self.layer), cfg.norm_eps if cfg.head_norms else None
        self.norm = LayerNorm(cfg.norm_eps, bias=False)
        self.attention = HeadNormAttention(*sizes, cfg.qkv_bias, cfg.out_bias, qk_norm_eps=eps, interleaved=True)
        self.mlp = GatedMLP(cfg.activation)

    def __call__(self, x: Hidden, rope: Any, attend: Attend, cache: Any) -> HiddenAndCache:
        normal = self.norm(x)
        mixed, cache = self.attention(normal, rope if self.rotated else None, attend, cache)
        return x + mixed + self.feed_forward(normal), cache


class Cohere(Llama):
    """The Cohere decoder: see `Decoder`."""

    config: CohereConfig
    block_type = CohereBlock
    block_fields = ("layers", "rotated")

    def final_norm(self) -> Layer:
        return LayerNorm(self.config.norm_eps, bias=False, parent=None)

    def head(self, hidden: Hidden) -> Float[Array, "*batch vocab"]:
        return super().head(hidden) * self.config.logit_scale


def param_specs(cfg: CohereConfig) -> ParamTree:
    return decoder(cfg, lambda _, prefix: _block_specs(cfg, prefix))


def _block_specs(cfg: CohereConfig, prefix: str) -> dict[str, Any]:
    attention = attention_specs(cfg, f"{prefix}.self_attn")
    if cfg.head_norms:
        attention["q_norm"] = _head_norms(f"{prefix}.self_attn.q_norm.weight", cfg.heads, cfg.head_dim)
        attention["k_norm"] = _head_norms(f"{prefix}.self_attn.k_norm.weight", cfg.kv_heads, cfg.head_dim)
    return {
        "norm": rms_norm(f"{prefix}.input_layernorm", cfg.hidden_size),
        "attention": attention,
        "mlp": gated_mlp(f"{prefix}.mlp", cfg.hidden_size, cfg.intermediate_size),
    }


def _head_norms(name: str, heads: int, head_dim: int) -> dict[str, Any]:
    """Return the parameters of a `HeadLayerNorm`, stored as it is; replicated, since the scales of heads differ."""
    shape = (heads, head_dim)
    return {"scale": ParamSpec(shape, (None, "norm"), init="ones", sources=(Source(name, shape),))}


COHERE = Family(CohereConfig.from_cohere, param_specs, cache_spec, Cohere)
COHERE2 = dataclasses.replace(COHERE, config=CohereConfig.from_cohere2)
