"""Arcee: Llama with ungated feed-forward networks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.layers.base import Layer
from jaxinfer.layers.mlp import MLP
from jaxinfer.models.config import ConfigReader
from jaxinfer.models.families.llama import Llama, LlamaBlock, LlamaConfig, block_specs, llama_fields
from jaxinfer.models.family import Family
from jaxinfer.models.specs import cache_spec, decoder, plain_mlp
from jaxinfer.types import ParamTree

# Defaults of transformers for fields missing from config.json.
_DEFAULTS = {"hidden_act": "relu2", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5}


def config_from_json(config: Mapping[str, Any]) -> LlamaConfig:
    """Read config.json; raises as `decoder_fields` does."""
    return LlamaConfig(**llama_fields(ConfigReader(config, _DEFAULTS)))


class ArceeBlock(LlamaBlock):
    """A decoder layer."""

    def network(self) -> Layer:
        return MLP(self.config.activation, self.config.mlp_bias)


class Arcee(Llama):
    """The Arcee decoder: see `Decoder`."""

    block_type = ArceeBlock


def param_specs(cfg: LlamaConfig) -> ParamTree:

    def block(_: int, prefix: str) -> dict[str, Any]:
        mlp = f"{prefix}.mlp"
        sizes = cfg.hidden_size, cfg.intermediate_size, cfg.mlp_bias
        return block_specs(cfg, prefix, plain_mlp(f"{mlp}.up_proj", f"{mlp}.down_proj", *sizes))

    return decoder(cfg, block)


ARCEE = Family(config_from_json, param_specs, cache_spec, Arcee)
