"""GPT-J (Wang & Komatsuzaki 2021): interleaved partial rotation, parallel attention and MLP after one layer norm."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from jaxinfer.layers.attention import Attention
from jaxinfer.layers.base import Positions
from jaxinfer.layers.mlp import MLP
from jaxinfer.layers.norm import LayerNorm
from jaxinfer.layers.rope import RopeConfig, in_sequence, rope_angles
from jaxinfer.models.config import ConfigReader, DecoderConfig, decoder_fields, renamed
from jaxinfer.models.decoder import LayerNormDecoder, ParallelBlock
from jaxinfer.models.families.gpt2 import GENERAL_NAMES, IGNORE, NAMES
from jaxinfer.models.family import Family
from jaxinfer.models.specs import attention, cache_spec, decoder, layer_norm, plain_mlp
from jaxinfer.types import LayerSpec, ParamTree

_DEFAULTS = {
    "vocab_size": 50400,
    "hidden_size": 4096,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "rms_norm_eps": 1e-5,
    "hidden_act": "gelu_new",
}


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class GPTJConfig(DecoderConfig):
    """The resolved config.json of a checkpoint: see `DecoderConfig`. ``rotary_dim``: rotated dims of a head."""

    rotary_dim: int

    @staticmethod
    def from_json(config: Mapping[str, Any]) -> GPTJConfig:
        """Read config.json; raises as `decoder_fields` does."""
        read = ConfigReader(renamed(config, GENERAL_NAMES), _DEFAULTS, NAMES)
        fields, layers = decoder_fields(read, mlp_ratio=4, cut_heads=True), read.positive("num_hidden_layers")
        return GPTJConfig(**fields, layers=(LayerSpec(),) * layers, rotary_dim=_rotary_dim(read, fields["head_dim"]))


def _rotary_dim(read: ConfigReader, head_dim: int) -> int:
    read.require(read.fields.get("rotary_dim", 64) is not None, "rotary_dim", "must be > 0")
    size = read.positive("rotary_dim", 64)
    read.require(size % 2 == 0 and size <= head_dim, "rotary_dim", f"must be even and at most {head_dim}")
    return size


class GPTJBlock(ParallelBlock):
    """A decoder layer: attention and MLP read the same normalised input."""

    config: GPTJConfig

    def setup(self) -> None:
        cfg = self.config
        self.norm = LayerNorm(cfg.norm_eps)
        self.attention = Attention(cfg.heads, cfg.kv_heads, cfg.head_dim, self.layer, interleaved=True)
        self.mlp = MLP(cfg.activation)


class GPTJ(LayerNormDecoder):
    config: GPTJConfig
    block_type = GPTJBlock
    head_bias = True

    def context(self, positions: Positions) -> tuple[jax.Array, jax.Array]:
        return rope_angles(in_sequence(positions), RopeConfig().inverse_frequencies(self.config.rotary_dim))


def param_specs(cfg: GPTJConfig) -> ParamTree:
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
    return {
        "norm": layer_norm(f"{prefix}.ln_1", d),
        "attention": attention(cfg, f"{prefix}.attn", out="out_proj"),
        "mlp": plain_mlp(f"{mlp}.fc_in", f"{mlp}.fc_out", d, cfg.intermediate_size),
    }


GPTJ_FAMILY = Family(GPTJConfig.from_json, param_specs, cache_spec, GPTJ, IGNORE, "transformer.")
