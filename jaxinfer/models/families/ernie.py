"""Ernie 4.5 dense models: Llama with interleaved rotary embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.models.config import ConfigReader
from jaxinfer.models.families.llama import Llama, LlamaBlock, LlamaConfig, llama_fields, param_specs
from jaxinfer.models.family import Family
from jaxinfer.models.specs import cache_spec

# Defaults of transformers for fields missing from config.json.
_DEFAULTS = {
    "vocab_size": 103424,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 18,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "head_dim": 128,
    "rope_theta": 5e5,
    "tie_word_embeddings": True,
}


def config_from_json(config: Mapping[str, Any]) -> LlamaConfig:
    """Read config.json; raises as `decoder_fields` does."""
    read = ConfigReader(config, _DEFAULTS, {"attention_bias": "use_bias"})
    if "head_dim" in config and config["head_dim"] is None:
        # null means hidden_size / heads, not the default
        plain = {name: value for name, value in _DEFAULTS.items() if name != "head_dim"}
        read = ConfigReader(read.fields, plain, read.names)
    fields = llama_fields(read)
    return LlamaConfig(**fields | {"mlp_bias": fields["qkv_bias"]})


class ErnieBlock(LlamaBlock):
    """A decoder layer."""

    def options(self) -> dict[str, Any]:
        return {"interleaved": True}


class Ernie(Llama):
    """The Ernie decoder: see `Decoder`."""

    block_type = ErnieBlock


ERNIE = Family(config_from_json, param_specs, cache_spec, Ernie)
