"""Cohere's Command-R, R7B and A: attention beside the MLP, one layer norm without bias before both, scaled logits.

Command-R+ normalises each head of queries and keys with scales of its own. The second generation has windows in three
layers of four; those that have none do not know positions (NoPE).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxtyping import Array, Float

from jaxinfer.layers.attention import Attend, Attention
from jaxinfer.layers.base import Layer
from jaxinfer.layers.mlp import GatedMLP
from jaxinfer.layers.norm import HeadLayerNorm, LayerNorm
from jaxinfer.models.config import ConfigReader
from jaxinfer.models.llama import Llama, LlamaConfig, attention_specs, llama_fields
from jaxinfer.models.olmo import local_layers, windowed
from jaxinfer.models.specs import decoder, gated_mlp, rms_norm
from jaxinfer.types import LayerSpec, ParamSpec, ParamTree, Source

# What transformers takes where config.json leaves these out.
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
_THETA1 = 5e5  # of the first generation
_NAMES = {"rms_norm_eps": "layer_norm_eps"}
_PATTERN = 4


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class CohereConfig(LlamaConfig):
    """A checkpoint's config.json, resolved: see `DecoderConfig`.

    Attributes:
        rotated: whether each layer knows positions.
        head_norms: queries and keys are normalised, each head with a scale of its own.
        logit_scale: of the logits.
    """

    rotated: tuple[bool, ...]
    head_norms: bool
    logit_scale: float

    @staticmethod
    def from_cohere(config: Mapping[str, Any]) -> CohereConfig:
        """Read config.json; errors as of `decoder_fields`."""
        read = ConfigReader({**config, "mlp_bias": False}, {**_DEFAULTS, "rope_theta": _THETA1}, _NAMES)
        fields = llama_fields(read)
        scale, norms = read.number("logit_scale"), read.flag("use_qk_norm", False)
        return CohereConfig(**fields, rotated=(True,) * len(fields["layers"]), head_norms=norms, logit_scale=scale)

    @staticmethod
    def from_cohere2(config: Mapping[str, Any]) -> CohereConfig:
        """Read config.json; errors as of `decoder_fields`."""
        read = ConfigReader({**config, "mlp_bias": False}, _DEFAULTS, _NAMES)
        local = local_layers(read, read.positive("sliding_window_pattern", _PATTERN))
        fields = {**llama_fields(read), "layers": windowed(read, local)}
        scale = read.number("logit_scale")
        return CohereConfig(**fields, rotated=tuple(local), head_norms=False, logit_scale=scale)


class HeadNormAttention(Attention):
    """`Attention` whose queries and keys are normalised by layer norms, each head with a scale of its own."""

    def norm(self, eps: float) -> Layer:
        return HeadLayerNorm(eps)


class CohereBlock(Layer):
    """One decoder layer: attention and MLP read the same normalised input. ``rotated``: whether it knows positions."""

    config: CohereConfig
    layer: LayerSpec
    rotated: bool

    def setup(self) -> None:
        cfg = self.config
        sizes, eps = (cfg.heads, cfg.kv_heads, cfg.head_dim, self.layer), cfg.norm_eps if cfg.head_norms else None
        self.norm = LayerNorm(cfg.norm_eps, bias=False)
        self.attention = HeadNormAttention(*sizes, cfg.qkv_bias, cfg.out_bias, qk_norm_eps=eps, interleaved=True)
        self.mlp = GatedMLP(cfg.activation)

    def __call__(
        self, x: Float[Array, "*batch d"], rope: Any, attend: Attend, cache: Any
    ) -> tuple[Float[Array, "*batch d"], Any]:
        normal = self.norm(x)
        mixed, cache = self.attention(normal, rope if self.rotated else None, attend, cache)
        return x + mixed + self.feed_forward(normal), cache

    def feed_forward(self, x: Float[Array, "*batch d"]) -> Float[Array, "*batch d"]:
        return self.mlp(x)


class Cohere(Llama):
    """The whole decoder: see `Decoder`."""

    config: CohereConfig

    def block(self, index: int, override: Callable[..., Layer] | None) -> Layer:
        cfg = self.config
        return (override or CohereBlock)(cfg, cfg.layers[index], cfg.rotated[index], parent=None)

    def final_norm(self) -> Layer:
        return LayerNorm(self.config.norm_eps, bias=False, parent=None)

    def head(self, hidden: Float[Array, "*batch d"]) -> Float[Array, "*batch vocab"]:
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
    """`HeadLayerNorm`, stored as it is; whole on every device, since heads are not alike."""
    shape = (heads, head_dim)
    return {"scale": ParamSpec(shape, (None, "norm"), init="ones", sources=(Source(name, shape),))}
