"""GPT-J (Wang & Komatsuzaki 2021): interleaved partial rotary attention beside the MLP, both after one layer norm."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from jaxinfer.layers.attention import Attend, Attention
from jaxinfer.layers.base import Layer
from jaxinfer.layers.mlp import ACTIVATIONS, MLP
from jaxinfer.layers.norm import LayerNorm
from jaxinfer.layers.rope import RopeConfig, rope_angles
from jaxinfer.models.config import ConfigReader, renamed
from jaxinfer.models.decoder import LayerNormDecoder
from jaxinfer.models.gpt2 import GENERAL_NAMES
from jaxinfer.models.specs import decoder, fused_qkv, layer_norm, linear, plain_mlp
from jaxinfer.types import CacheSpec, LayerSpec, ParamTree


@dataclasses.dataclass(frozen=True)
class GPTJConfig:
    """A checkpoint's config.json, resolved. ``rotary_dim``: how many numbers of a head are rotated."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    rotary_dim: int
    layers: tuple[LayerSpec, ...]
    max_position: int
    norm_eps: float
    activation: str
    tied: bool

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.heads

    @staticmethod
    def from_json(config: Mapping[str, Any]) -> GPTJConfig:
        """Read config.json.

        Raises:
            ConfigError: a field is of the wrong type or not supported.
        """
        read = ConfigReader(renamed(config, GENERAL_NAMES))
        hidden, heads = read.positive("n_embd", 4096), read.positive("n_head", 16)
        read.require(hidden % heads == 0, "n_embd", f"must be a multiple of n_head ({heads})")
        return GPTJConfig(
            vocab_size=read.positive("vocab_size", 50400),
            hidden_size=hidden,
            intermediate_size=read.positive("n_inner", 4 * hidden),
            heads=heads,
            rotary_dim=_rotary_dim(read, hidden // heads),
            layers=(LayerSpec(),) * read.positive("n_layer", 28),
            max_position=read.positive("n_positions", 2048),
            norm_eps=read.number("layer_norm_epsilon", 1e-5),
            activation=read.choice("activation_function", "gelu_new", tuple(ACTIVATIONS)),
            tied=read.flag("tie_word_embeddings", False),
        )


def _rotary_dim(read: ConfigReader, head_dim: int) -> int:
    read.require(read.fields.get("rotary_dim", 64) is not None, "rotary_dim", "must be > 0")
    size = read.positive("rotary_dim", 64)
    read.require(size % 2 == 0 and size <= head_dim, "rotary_dim", f"must be even and at most {head_dim}")
    return size


class GPTJBlock(Layer):
    """One decoder layer: attention and MLP read the same normalised input."""

    config: GPTJConfig
    layer: LayerSpec

    def setup(self) -> None:
        cfg = self.config
        self.norm = LayerNorm(cfg.norm_eps)
        self.attention = Attention(cfg.heads, cfg.heads, cfg.head_dim, self.layer, interleaved=True)
        self.mlp = MLP(cfg.activation)

    def __call__(
        self, x: Float[Array, "*batch d"], rope: tuple[jax.Array, jax.Array], attend: Attend, cache: Any
    ) -> tuple[Float[Array, "*batch d"], Any]:
        normal = self.norm(x)
        mixed, cache = self.attention(normal, rope, attend, cache)
        return mixed + self.feed_forward(normal) + x, cache

    def feed_forward(self, x: Float[Array, "*batch d"]) -> Float[Array, "*batch d"]:
        return self.mlp(x)


class GPTJ(LayerNormDecoder):
    """The whole decoder: see `Decoder`."""

    config: GPTJConfig
    head_bias = True

    def block(self, index: int, override: Callable[..., Layer] | None) -> Layer:
        return (override or GPTJBlock)(self.config, self.config.layers[index], parent=None)

    def context(self, positions: Int[Array, "*batch"]) -> tuple[jax.Array, jax.Array]:
        return rope_angles(positions, RopeConfig().inverse_frequencies(self.config.rotary_dim))


def cache_spec(cfg: GPTJConfig) -> CacheSpec:
    return CacheSpec(cfg.layers, cfg.heads, cfg.head_dim)


def param_specs(cfg: GPTJConfig) -> ParamTree:
    """Every parameter with its shape, logical axes and the checkpoint tensors it is made of."""
    return decoder(
        cfg,
        lambda _, prefix: _block_specs(cfg, prefix),
        embed="transformer.wte.weight",
        layers="transformer.h",
        final_norm=layer_norm("transformer.ln_f", cfg.hidden_size),
        head_bias=True,
    )


def _block_specs(cfg: GPTJConfig, prefix: str) -> dict[str, Any]:
    d, mlp = cfg.hidden_size, f"{prefix}.mlp"
    attention = {
        "qkv": fused_qkv(f"{prefix}.attn", d, cfg.heads, cfg.heads, cfg.head_dim),
        "out": linear(f"{prefix}.attn.out_proj.weight", (d, d), ("heads", "embed")),
    }
    return {
        "norm": layer_norm(f"{prefix}.ln_1", d),
        "attention": attention,
        "mlp": plain_mlp(f"{mlp}.fc_in", f"{mlp}.fc_out", d, cfg.intermediate_size),
    }
