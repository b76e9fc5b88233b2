"""GPT-2 (Radford et al. 2019): learned positions, layer norms before attention and MLP, fused projections."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from jaxinfer.layers.attention import Attention
from jaxinfer.layers.base import Hidden, Positions, Tokens
from jaxinfer.layers.mlp import MLP
from jaxinfer.layers.norm import LayerNorm
from jaxinfer.layers.rope import in_sequence
from jaxinfer.models.config import ConfigReader, DecoderConfig, decoder_fields, renamed
from jaxinfer.models.decoder import Block, LayerNormDecoder
from jaxinfer.models.family import Family
from jaxinfer.models.specs import cache_spec, decoder, layer_norm, plain
from jaxinfer.quant import take
from jaxinfer.types import LayerSpec, ParamSpec, ParamTree, Source

# Causal masks, which are not loaded.
IGNORE = ("*.attn.bias", "*.attn.masked_bias")

# GPT-2's names of common config fields; a file may use either name.
GENERAL_NAMES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
NAMES = GENERAL_NAMES | {
    "intermediate_size": "n_inner",
    "num_key_value_heads": "n_head",
    "rms_norm_eps": "layer_norm_epsilon",
    "hidden_act": "activation_function",
}
_DEFAULTS = {
    "vocab_size": 50257,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "hidden_act": "gelu_new",
    "tie_word_embeddings": True,
}


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class GPT2Config(DecoderConfig):
    """The resolved config.json of a checkpoint: see `DecoderConfig`. ``scales``: score scale of each layer."""

    scales: tuple[float, ...]

    @staticmethod
    def from_json(config: Mapping[str, Any]) -> GPT2Config:
        """Read config.json; raises as `decoder_fields` does."""
        read = ConfigReader(renamed(config, GENERAL_NAMES), _DEFAULTS, NAMES)
        read.require(not read.flag("add_cross_attention", False), "add_cross_attention", "is not supported")
        fields, count = decoder_fields(read, mlp_ratio=4, cut_heads=True), read.positive("num_hidden_layers")
        scales = _scales(read, count, fields["head_dim"])
        return GPT2Config(**fields, layers=(LayerSpec(),) * count, scales=scales)


def _scales(read: ConfigReader, count: int, head_dim: int) -> tuple[float, ...]:
    scale = head_dim**-0.5 if read.flag("scale_attn_weights", True) else 1.0
    by_layer = read.flag("scale_attn_by_inverse_layer_idx", False)
    return tuple(scale / (index + 1) if by_layer else scale for index in range(count))


class GPT2Block(Block):
    """A decoder layer. ``scale``: score scale of its attention."""

    config: GPT2Config
    scale: float

    def setup(self) -> None:
        cfg = self.config
        self.attention_norm = LayerNorm(cfg.norm_eps)
        sizes = cfg.heads, cfg.kv_heads, cfg.head_dim, self.layer
        self.attention = Attention(*sizes, qkv_bias=True, out_bias=True, scale=self.scale)
        self.mlp_norm = LayerNorm(cfg.norm_eps)
        self.mlp = MLP(cfg.activation)


class GPT2(LayerNormDecoder):
    """The GPT2 decoder: see `Decoder`. ``positions`` {table [max_position, d]} is added to the embeddings."""

    config: GPT2Config
    block_type = GPT2Block
    block_fields = ("layers", "scales")
    embeddings: ClassVar[tuple[str, ...]] = ("embed", "positions")

    def context(self, positions: Positions) -> None:
        del positions

    def embed(self, tokens: Tokens, positions: Positions) -> Hidden:
        return super().embed(tokens, positions) + take(self.weight("positions")["table"], in_sequence(positions))


def param_specs(cfg: GPT2Config) -> ParamTree:
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
    # The checkpoint's matrices are [in, out]; `up` is [out, in].
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
    """Return the ``qkv`` of `Attention` from a tensor [*lead, 3 d]: queries of all heads, then keys, then values."""
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
    """Return the spec of a matrix [in, out], stored as [in, out] in the checkpoint."""
    return ParamSpec(shape, axes, sources=(Source(name, shape),), inputs=0)


GPT2_FAMILY = Family(GPT2Config.from_json, param_specs, cache_spec, GPT2, IGNORE, "transformer.")
