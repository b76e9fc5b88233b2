"""GPT-2 (Radford et al. 2019): learned positions, layer norms before attention and MLP, fused projections."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from jaxtyping import Array, Float, Int

from jaxinfer.layers.attention import Attend, Attention
from jaxinfer.layers.base import Layer
from jaxinfer.layers.mlp import ACTIVATIONS, MLP
from jaxinfer.layers.norm import LayerNorm
from jaxinfer.models.config import ConfigReader, renamed
from jaxinfer.models.decoder import LayerNormDecoder
from jaxinfer.models.specs import decoder, layer_norm, plain
from jaxinfer.quant import take
from jaxinfer.types import CacheSpec, LayerSpec, ParamSpec, ParamTree, Source

# Masks, which every reader makes for itself.
IGNORE = ("*.attn.bias", "*.attn.masked_bias")

GENERAL_NAMES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}


@dataclasses.dataclass(frozen=True)
class GPT2Config:
    """A checkpoint's config.json, resolved. ``scales``: of the attention scores, one a layer."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    layers: tuple[LayerSpec, ...]
    scales: tuple[float, ...]
    max_position: int
    norm_eps: float
    activation: str
    tied: bool

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.heads

    @staticmethod
    def from_json(config: Mapping[str, Any]) -> GPT2Config:
        """Read config.json.

        Raises:
            ConfigError: a field is of the wrong type or not supported.
        """
        read = ConfigReader(renamed(config, GENERAL_NAMES))
        hidden, heads = read.positive("n_embd", 768), read.positive("n_head", 12)
        read.require(hidden % heads == 0, "n_embd", f"must be a multiple of n_head ({heads})")
        read.require(not read.flag("add_cross_attention", False), "add_cross_attention", "is not supported")
        count = read.positive("n_layer", 12)
        return GPT2Config(
            vocab_size=read.positive("vocab_size", 50257),
            hidden_size=hidden,
            intermediate_size=read.positive("n_inner", 4 * hidden),
            heads=heads,
            layers=(LayerSpec(),) * count,
            scales=_scales(read, count, hidden // heads),
            max_position=read.positive("n_positions", 1024),
            norm_eps=read.number("layer_norm_epsilon", 1e-5),
            activation=read.choice("activation_function", "gelu_new", tuple(ACTIVATIONS)),
            tied=read.flag("tie_word_embeddings", True),
        )


def _scales(read: ConfigReader, count: int, head_dim: int) -> tuple[float, ...]:
    scale = head_dim**-0.5 if read.flag("scale_attn_weights", True) else 1.0
    by_layer = read.flag("scale_attn_by_inverse_layer_idx", False)
    return tuple(scale / (index + 1) if by_layer else scale for index in range(count))


class GPT2Block(Layer):
    """One decoder layer. ``scale`` is the scale of its attention scores."""

    config: GPT2Config
    layer: LayerSpec
    scale: float

    def setup(self) -> None:
        cfg = self.config
        self.attention_norm = LayerNorm(cfg.norm_eps)
        self.attention = Attention(
            heads=cfg.heads,
            kv_heads=cfg.heads,
            head_dim=cfg.head_dim,
            layer=self.layer,
            qkv_bias=True,
            out_bias=True,
            scale=self.scale,
        )
        self.mlp_norm = LayerNorm(cfg.norm_eps)
        self.mlp = MLP(cfg.activation)

    def __call__(
        self, x: Float[Array, "*batch d"], context: None, attend: Attend, cache: Any
    ) -> tuple[Float[Array, "*batch d"], Any]:
        mixed, cache = self.attention(self.attention_norm(x), context, attend, cache)
        x = x + mixed
        return x + self.feed_forward(self.mlp_norm(x)), cache

    def feed_forward(self, x: Float[Array, "*batch d"]) -> Float[Array, "*batch d"]:
        return self.mlp(x)


class GPT2(LayerNormDecoder):
    """The whole decoder: see `Decoder`. ``positions`` {table [max_position, d]} is added to the embeddings."""

    config: GPT2Config
    embeddings: ClassVar[tuple[str, ...]] = ("embed", "positions")

    def block(self, index: int, override: Callable[..., Layer] | None) -> Layer:
        return (override or GPT2Block)(self.config, self.config.layers[index], self.config.scales[index], parent=None)

    def context(self, positions: Int[Array, "*batch"]) -> None:
        del positions

    def embed(self, tokens: Int[Array, "*batch"], positions: Int[Array, "*batch"]) -> Float[Array, "*batch d"]:
        return super().embed(tokens, positions) + take(self.weight("positions")["table"], positions)


def cache_spec(cfg: GPT2Config) -> CacheSpec:
    return CacheSpec(cfg.layers, cfg.heads, cfg.head_dim)


def param_specs(cfg: GPT2Config) -> ParamTree:
    """Every parameter with its shape, logical axes and the checkpoint tensors it is made of."""
    tree = decoder(
        cfg,
        lambda _, prefix: _block_specs(cfg, prefix),
        embed="transformer.wte.weight",
        layers="transformer.h",
        final_norm=layer_norm("transformer.ln_f", cfg.hidden_size),
    )
    positions = plain("transformer.wpe.weight", (cfg.max_position, cfg.hidden_size), (None, "embed"))
    return tree | {"positions": {"table": positions}}


def _block_specs(cfg: GPT2Config, prefix: str) -> dict[str, Any]:
    d, hidden = cfg.hidden_size, cfg.intermediate_size
    attention = {
        "qkv": _split_qkv(cfg, f"{prefix}.attn.c_attn.weight", (d,)),
        "qkv_bias": _split_qkv(cfg, f"{prefix}.attn.c_attn.bias", ()),
        "out": _matrix(f"{prefix}.attn.c_proj.weight", (d, d), ("heads", "embed")),
        "out_bias": plain(f"{prefix}.attn.c_proj.bias", (d,), ("embed",), "zeros"),
    }
    # The checkpoint's matrices are [in, out]; `up` lies the other way round.
    up = Source(f"{prefix}.mlp.c_fc.weight", (d, hidden), transpose=True)
    mlp = {
        "up": ParamSpec((hidden, d), ("mlp", "embed"), sources=(up,), inputs=-1),
        "up_bias": plain(f"{prefix}.mlp.c_fc.bias", (hidden,), ("mlp",), "zeros"),
        "down": _matrix(f"{prefix}.mlp.c_proj.weight", (hidden, d), ("mlp", "embed")),
        "down_bias": plain(f"{prefix}.mlp.c_proj.bias", (d,), ("embed",), "zeros"),
    }
    return {
        "attention_norm": layer_norm(f"{prefix}.ln_1", d),
        "attention": attention,
        "mlp_norm": layer_norm(f"{prefix}.ln_2", d),
        "mlp": mlp,
    }


def _split_qkv(cfg: GPT2Config, name: str, lead: tuple[int, ...]) -> ParamSpec:
    """`Attention`'s ``qkv`` of a tensor [*lead, 3 d]: the queries of all heads, then their keys, then their values."""
    d, everything = cfg.hidden_size, (slice(None),) * len(lead)
    sources = tuple(
        Source(
            name,
            (*lead, 3 * d),
            part=(*everything, slice(index * d, (index + 1) * d)),
            reshape=(*lead, cfg.heads, cfg.head_dim),
            where=(*everything, slice(None), index),
        )
        for index in range(3)
    )
    axes = ("embed",) * len(lead) + ("kv_heads", "group", "head_dim")
    shape = (*lead, cfg.heads, 3, cfg.head_dim)
    if not lead:
        return ParamSpec(shape, axes, init="zeros", sources=sources)
    return ParamSpec(shape, axes, sources=sources, inputs=0)


def _matrix(name: str, shape: tuple[int, int], axes: tuple[str, str]) -> ParamSpec:
    """A matrix [in, out], stored so in the checkpoint."""
    return ParamSpec(shape, axes, sources=(Source(name, shape),), inputs=0)
