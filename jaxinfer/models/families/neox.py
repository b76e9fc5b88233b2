"""GPT-NeoX (Black et al. 2022) and Pythia: layer norms, partial rotation, parallel attention and MLP."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jaxtyping import Array, Float

from jaxinfer.layers.attention import Attend, Attention
from jaxinfer.layers.base import Layer
from jaxinfer.layers.mlp import MLP
from jaxinfer.layers.norm import LayerNorm
from jaxinfer.layers.rope import RopeConfig
from jaxinfer.models.config import ConfigReader, DecoderConfig, decoder_fields, rope_config
from jaxinfer.models.decoder import LayerNormDecoder
from jaxinfer.models.families.glm import even_rotation
from jaxinfer.models.family import Family
from jaxinfer.models.specs import cache_spec, decoder, layer_norm, linear, plain, plain_mlp, vocabulary
from jaxinfer.types import LayerSpec, ParamSpec, ParamTree, Source

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
        rope = rope_config(read, fields["max_position"], fields["head_dim"], partial=True)
        even_rotation(fields["head_dim"], rope.partial)
        return NeoXConfig(
            **fields,
            layers=(LayerSpec(),) * read.positive("num_hidden_layers"),
            rope=rope,
            bias=read.flag("attention_bias", True),
            parallel=read.flag("use_parallel_residual", True),
        )


class NeoXBlock(Layer):
    """A decoder layer."""

    config: NeoXConfig
    layer: LayerSpec

    def setup(self) -> None:
        cfg = self.config
        self.attention_norm, self.mlp_norm = LayerNorm(cfg.norm_eps), LayerNorm(cfg.norm_eps)
        self.attention = Attention(cfg.heads, cfg.kv_heads, cfg.head_dim, self.layer, cfg.bias, cfg.bias)
        self.mlp = MLP(cfg.activation)

    def __call__(
        self, x: Float[Array, "*batch d"], rope: tuple[jax.Array, jax.Array], attend: Attend, cache: Any
    ) -> tuple[Float[Array, "*batch d"], Any]:
        mixed, cache = self.attention(self.attention_norm(x), rope, attend, cache)
        if self.config.parallel:
            return self.feed_forward(self.mlp_norm(x)) + mixed + x, cache
        x = x + mixed
        return x + self.feed_forward(self.mlp_norm(x)), cache

    def feed_forward(self, x: Float[Array, "*batch d"]) -> Float[Array, "*batch d"]:
        return self.mlp(x)


class NeoX(LayerNormDecoder):
    config: NeoXConfig

    def block(self, index: int, override: Callable[..., Layer] | None) -> Layer:
        return (override or NeoXBlock)(self.config, self.config.layers[index], parent=None)


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
    return {
        "attention_norm": layer_norm(f"{prefix}.input_layernorm", d),
        "attention": _attention_specs(cfg, f"{prefix}.attention"),
        "mlp_norm": layer_norm(f"{prefix}.post_attention_layernorm", d),
        "mlp": plain_mlp(f"{mlp}.dense_h_to_4h", f"{mlp}.dense_4h_to_h", d, cfg.intermediate_size),
    }


def _attention_specs(cfg: NeoXConfig, prefix: str) -> dict[str, Any]:
    """Return the parameters of `Attention`: the fused projection is grouped by head (query, key, value)."""
    d, axes, form = cfg.hidden_size, ("kv_heads", "group", "head_dim"), (cfg.heads, 3, cfg.head_dim)
    fused = Source(f"{prefix}.query_key_value.weight", (3 * d, d), transpose=True, reshape=(d, *form))
    tree: dict[str, Any] = {
        "qkv": ParamSpec((d, *form), ("embed", *axes), sources=(fused,), inputs=0),
        "out": linear(f"{prefix}.dense.weight", (d, d), ("heads", "embed")),
    }
    if cfg.bias:
        bias = Source(f"{prefix}.query_key_value.bias", (3 * d,), reshape=form)
        tree["qkv_bias"] = ParamSpec(form, axes, init="zeros", sources=(bias,))
        tree["out_bias"] = plain(f"{prefix}.dense.bias", (d,), ("embed",), "zeros")
    return tree


NEOX = Family(NeoXConfig.from_json, param_specs, cache_spec, NeoX, IGNORE, "gpt_neox.")
