"""Nemotron-4 and Minitron (arXiv:2402.16819): layer norms with scales stored minus 1, partial rotation, and MLPs with
squared ReLU and no gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.layers.base import Layer
from jaxinfer.layers.mlp import MLP
from jaxinfer.layers.norm import LayerNorm
from jaxinfer.models.config import ConfigReader, decoder_fields, partial_rope
from jaxinfer.models.families.llama import Llama, LlamaBlock, LlamaConfig, block_specs
from jaxinfer.models.family import Family
from jaxinfer.models.specs import cache_spec, decoder, layer_norm, plain_mlp, rms_norm
from jaxinfer.types import LayerSpec, ParamTree

# Defaults of transformers for fields missing from config.json.
_DEFAULTS = {"hidden_act": "relu2", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5}
_OFFSET = 1.0
_NAMES = {"rms_norm_eps": "norm_eps"}


def config_from_json(config: Mapping[str, Any]) -> LlamaConfig:
    """Read config.json; raises as `decoder_fields` does."""
    read = ConfigReader(config, _DEFAULTS, _NAMES)
    fields, bias = decoder_fields(read), read.flag("attention_bias", False)
    return LlamaConfig(
        **fields,
        layers=(LayerSpec(),) * read.positive("num_hidden_layers"),
        rope=partial_rope(read, fields),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=read.flag("mlp_bias", False),
    )


class NemotronBlock(LlamaBlock):
    """A decoder layer."""

    def norm(self) -> Layer:
        return LayerNorm(self.config.norm_eps, offset=_OFFSET)

    def network(self) -> Layer:
        return MLP(self.config.activation, self.config.mlp_bias)


class Nemotron(Llama):
    """The Nemotron decoder: see `Decoder`."""

    def final_norm(self) -> Layer:
        return LayerNorm(self.config.norm_eps, offset=_OFFSET, parent=None)

    block_type = NemotronBlock


def param_specs(cfg: LlamaConfig) -> ParamTree:

    def block(_: int, prefix: str) -> dict[str, Any]:
        mlp = f"{prefix}.mlp"
        sizes = cfg.hidden_size, cfg.intermediate_size, cfg.mlp_bias
        return block_specs(cfg, prefix, plain_mlp(f"{mlp}.up_proj", f"{mlp}.down_proj", *sizes), _norm)

    return decoder(cfg, block, final_norm=_norm("model.norm", cfg.hidden_size))


def _norm(prefix: str, size: int) -> dict[str, Any]:
    return layer_norm(prefix, size) | rms_norm(prefix, size, "zeros")


NEMOTRON = Family(config_from_json, param_specs, cache_spec, Nemotron)
