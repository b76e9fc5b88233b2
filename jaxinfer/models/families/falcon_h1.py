"""Falcon-H1 (arXiv:2507.22448): parallel attention and Mamba-2 in each layer, with muP multipliers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxinfer.layers.attention import Attend, Attention
from jaxinfer.layers.base import Hidden, HiddenAndCache, Layer, Positions, Tokens
from jaxinfer.layers.mamba2 import Mamba2, MambaSizes
from jaxinfer.layers.mlp import GatedMLP
from jaxinfer.layers.norm import RMSNorm
from jaxinfer.models import mamba
from jaxinfer.models.config import ConfigReader, decoder_fields, rope_config
from jaxinfer.models.families.llama import Llama, LlamaConfig, attention_specs
from jaxinfer.models.family import Family
from jaxinfer.models.specs import cache_spec, decoder, gated_mlp, rms_norm
from jaxinfer.types import LayerSpec, ParamTree

_DEFAULTS = mamba.DEFAULTS | {
    "vocab_size": 128000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
}


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class FalconH1Config(LlamaConfig):
    """The resolved config.json of a checkpoint: see `LlamaConfig`.

    Attributes:
        mamba: sizes of the Mamba-2 mixer.
        embedding_multiplier, attention_in, attention_out, mamba_in, mamba_out, mlp_gate, mlp_out, logits_multiplier:
            factors of the tensors that they name.
        scale: score scale, which includes the multiplier of keys.
    """

    mamba: MambaSizes
    embedding_multiplier: float
    attention_in: float
    attention_out: float
    mamba_in: float
    mamba_out: float
    mlp_gate: float
    mlp_out: float
    logits_multiplier: float
    scale: float

    @staticmethod
    def from_json(config: Mapping[str, Any]) -> FalconH1Config:
        """Read config.json; raises as `decoder_fields` does."""
        read = ConfigReader(config, _DEFAULTS)
        fields, bias, sizes = decoder_fields(read), read.flag("attention_bias", False), _mamba(read)
        gate, out = _numbers(read, "mlp_multipliers", 2)
        return FalconH1Config(
            **fields,
            layers=(LayerSpec(states=sizes.states),) * read.positive("num_hidden_layers"),
            rope=rope_config(read, fields["max_position"], fields["head_dim"]),
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=read.flag("mlp_bias", False),
            mamba=sizes,
            embedding_multiplier=read.number("embedding_multiplier", 1.0),
            attention_in=read.number("attention_in_multiplier", 1.0),
            attention_out=read.number("attention_out_multiplier", 1.0),
            mamba_in=read.number("ssm_in_multiplier", 1.0),
            mamba_out=read.number("ssm_out_multiplier", 1.0),
            mlp_gate=gate,
            mlp_out=out,
            logits_multiplier=read.number("lm_head_multiplier", 1.0),
            scale=read.number("key_multiplier", 1.0) / math.sqrt(fields["head_dim"]),
        )


def _mamba(read: ConfigReader) -> MambaSizes:
    null = "mamba_d_ssm" in read.fields and read.fields["mamba_d_ssm"] is None
    expanded = read.positive("mamba_expand") * read.positive("hidden_size")
    first = read.flag("mamba_norm_before_gate", True)
    return mamba.mamba_sizes(
        read,
        expanded if null else read.positive("mamba_d_ssm", 1024),
        out_bias=read.flag("projectors_bias", False),
        norm=("before gate" if first else "gated") if read.flag("mamba_rms_norm", False) else None,
        multipliers=_numbers(read, "ssm_multipliers", 5),
    )


def _numbers(read: ConfigReader, name: str, count: int) -> tuple[float, ...]:
    values = read.get(name, [1.0] * count)
    known = isinstance(values, list) and len(values) == count and all(type(value) in (int, float) for value in values)
    read.require(known, name, f"must be {count} numbers")
    return tuple(map(float, values))


class FalconH1Block(Layer):
    """A decoder layer: parallel attention and Mamba-2, then a gated MLP."""

    config: FalconH1Config
    layer: LayerSpec

    def setup(self) -> None:
        cfg = self.config
        sizes = cfg.heads, cfg.kv_heads, cfg.head_dim, self.layer
        self.attention_norm, self.mlp_norm = RMSNorm(cfg.norm_eps), RMSNorm(cfg.norm_eps)
        self.attention = Attention(*sizes, cfg.qkv_bias, cfg.out_bias, scale=cfg.scale)
        self.mamba = Mamba2(cfg.mamba, self.layer, cfg.norm_eps)
        self.mlp = GatedMLP(cfg.activation, cfg.mlp_bias, cfg.mlp_gate)

    def __call__(self, x: Hidden, rope: tuple[jax.Array, jax.Array], attend: Attend, cache: Any) -> HiddenAndCache:
        cfg, normal = self.config, self.attention_norm(x)
        pages = None if cache is None else cache.pages
        attended, pages = self.attention(normal * cfg.attention_in, rope, attend, pages)
        mixed, cache = self.mamba(normal * cfg.mamba_in, attend, cache)
        x = x + mixed * cfg.mamba_out + attended * cfg.attention_out
        x = x + self.mlp(self.mlp_norm(x)) * cfg.mlp_out
        return x, None if cache is None else cache._replace(pages=pages)


class FalconH1(Llama):
    config: FalconH1Config
    block_type = FalconH1Block

    def embed(self, tokens: Tokens, positions: Positions) -> Hidden:
        x = super().embed(tokens, positions)
        return x * jnp.asarray(self.config.embedding_multiplier, x.dtype)

    def head(self, hidden: Hidden) -> Float[Array, "*batch vocab"]:
        return super().head(hidden) * self.config.logits_multiplier


def param_specs(cfg: FalconH1Config) -> ParamTree:
    d = cfg.hidden_size

    def block(_: int, prefix: str) -> dict[str, Any]:
        return {
            "attention_norm": rms_norm(f"{prefix}.input_layernorm", d),
            "attention": attention_specs(cfg, f"{prefix}.self_attn"),
            "mamba": mamba.mamba_specs(cfg.mamba, f"{prefix}.mamba", d),
            "mlp_norm": rms_norm(f"{prefix}.pre_ff_layernorm", d),
            "mlp": gated_mlp(f"{prefix}.feed_forward", d, cfg.intermediate_size, cfg.mlp_bias),
        }

    return decoder(cfg, block, final_norm=rms_norm("model.final_layernorm", d))


FALCON_H1 = Family(FalconH1Config.from_json, param_specs, cache_spec, FalconH1)
