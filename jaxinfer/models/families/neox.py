"""GPT-NeoX (Black et al. 2022) and Pythia: layer norms, partial rotation, parallel attention and MLP."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from jaxinfer.layers.attention import Attend, Attention
from jaxinfer.layers.base import Hidden, HiddenAndCache
from jaxinfer.layers.mlp import MLP
from jaxinfer.layers.norm import LayerNorm
from jaxinfer.layers.rope import RopeConfig
from jaxinfer.models.config import ConfigReader, DecoderConfig, decoder_fields, partial_rope
from jaxinfer.models.decoder import Block, LayerNormDecoder
from jaxinfer.models.family import Family
from jaxinfer.models.specs import cache_spec, decoder, grouped_attention, layer_norm, plain_mlp, pre_norm, vocabulary
from jaxinfer.types import LayerSpec, ParamTree

# Defaults of transformers for fields missing from config.json.
_DEFAULTS = {
    "vocab_size": 50432,
    "hidden_size": 6144,
    "intermediate_size": 24576,
    "num_hidden_layers": 44,
    "num_attention_heads": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "gelu",
    "partial_rotary_factor": 0.25,
}
_NAMES = {
    "rms_norm_eps": "layer_norm_eps",
    "rope_theta": "rotary_emb_base",
    "partial_rotary_factor": "rotary_pct",
    "num_key_value_heads": "num_attention_heads",
}
# Masks and RoPE frequencies of old checkpoints, not loaded.
IGNORE = ("*.attention.bias", "*.attention.masked_bias", "*.rotary_emb.inv_freq")


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class NeoXConfig(DecoderConfig):
    """The resolved config.json of a checkpoint: see `DecoderConfig`.

    Attributes:
        bias: the projections of attention have biases.
        parallel: attention and MLP both read the input of the layer.
    """

    rope: RopeConfig
    bias: bool
    parallel: bool

    @staticmethod
    def from_json(config: Mapping[str, Any]) -> NeoXConfig:
        """Read config.json; raises as `decoder_fields` does."""
        read = ConfigReader(config, _DEFAULTS, _NAMES)
        fields = decoder_fields(read, cut_heads=True)
        return NeoXConfig(
            **fields,
            layers=(LayerSpec(),) * read.positive("num_hidden_layers"),
            rope=partial_rope(read, fields),
            bias=read.flag("attention_bias", True),
            parallel=read.flag("use_parallel_residual", True),
        )


class NeoXBlock(Block):
    """A decoder layer."""

    config: NeoXConfig

    def setup(self) -> None:
        cfg = self.config
        self.attention_norm, self.mlp_norm = LayerNorm(cfg.norm_eps), LayerNorm(cfg.norm_eps)
        self.attention = Attention(cfg.heads, cfg.kv_heads, cfg.head_dim, self.layer, cfg.bias, cfg.bias)
        self.mlp = MLP(cfg.activation)

    def __call__(self, x: Hidden, rope: tuple[jax.Array, jax.Array], attend: Attend, cache: Any) -> HiddenAndCache:
        if not self.config.parallel:
            return super().__call__(x, rope, attend, cache)
        mixed, cache = self.attention(self.attention_norm(x), rope, attend, cache)
        return self.feed_forward(self.mlp_norm(x)) + mixed + x, cache


class NeoX(LayerNormDecoder):
    config: NeoXConfig
    block_type = NeoXBlock


def param_specs(cfg: NeoXConfig) -> ParamTree:
    tree = decoder(
        cfg,
        lambda _, prefix: _block_specs(cfg, prefix),
        embed="gpt_neox.embed_in.weight",
        layers="gpt_neox.layers",
        final_norm=layer_norm("gpt_neox.final_layer_norm", cfg.hidden_size),
    )
    return tree if cfg.tied else tree | {"head": vocabulary("embed_out.weight", cfg.vocab_size, cfg.hidden_size)}


def _block_specs(cfg: NeoXConfig, prefix: str) -> dict[str, Any]:
    d, mlp = cfg.hidden_size, f"{prefix}.mlp"
    attention = grouped_attention(f"{prefix}.attention", d, cfg.heads, cfg.heads, cfg.head_dim, cfg.bias)
    network = plain_mlp(f"{mlp}.dense_h_to_4h", f"{mlp}.dense_4h_to_h", d, cfg.intermediate_size)
    return pre_norm(prefix, d, attention, network, layer_norm)


NEOX = Family(NeoXConfig.from_json, param_specs, cache_spec, NeoX, IGNORE, "gpt_neox.")
