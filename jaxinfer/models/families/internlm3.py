"""InternLM3: Llama with other names for its bias switches."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxinfer.models.config import ConfigReader
from jaxinfer.models.families.llama import LLAMA, LlamaConfig, llama_fields

# Defaults of transformers for fields missing from config.json.
_DEFAULTS = {"num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5}
_NAMES = {"attention_bias": "qkv_bias", "mlp_bias": "bias"}


def config_from_json(config: Mapping[str, Any]) -> LlamaConfig:
    """Read config.json, by its own names or by those that `transformers` saves; raises as `decoder_fields` does."""
    names = {general: name for general, name in _NAMES.items() if name in config}
    read = ConfigReader(config, _DEFAULTS, names)
    fields = llama_fields(read)
    same = fields["qkv_bias"] == fields["mlp_bias"]
    read.require(same, "attention_bias", f"is not supported: it must be as {read.spelled('mlp_bias')} is")
    return LlamaConfig(**fields)


INTERNLM3 = dataclasses.replace(LLAMA, config=config_from_json)
