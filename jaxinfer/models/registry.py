"""From config.json to a family: the four things that a model is made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn

from jaxinfer.models import gemma, llama, phi3
from jaxinfer.models.config import ConfigError
from jaxinfer.types import CacheSpec, ParamTree


@dataclasses.dataclass(frozen=True)
class Family:
    """What a family supplies: its config from config.json, its parameters, its cache and its forward pass."""

    config: Callable[[Mapping[str, Any]], Any]
    param_specs: Callable[[Any], ParamTree]
    cache_spec: Callable[[Any], CacheSpec]
    module: Callable[[Any], nn.Module]


LLAMA = Family(llama.LlamaConfig.from_json, llama.param_specs, llama.cache_spec, llama.Llama)
GEMMA = Family(gemma.GemmaConfig.from_json, gemma.param_specs, gemma.cache_spec, gemma.Gemma)
PHI3 = Family(phi3.config_from_json, phi3.param_specs, llama.cache_spec, llama.Llama)

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": LLAMA,
    "Qwen2ForCausalLM": LLAMA,
    "Qwen3ForCausalLM": LLAMA,
    "GemmaForCausalLM": GEMMA,
    "Gemma2ForCausalLM": GEMMA,
    "Gemma3ForCausalLM": GEMMA,
    "Phi3ForCausalLM": PHI3,
}


def family_for(config_json: Mapping[str, Any]) -> Family:
    """The family that serves this checkpoint.

    Raises:
        ConfigError: config.json names no architecture, or none that is known; the message lists the known ones.
    """
    names = config_json.get("architectures")
    if not isinstance(names, list) or not names:
        raise ConfigError(f"config.json: architectures = {names!r} must name one of {', '.join(FAMILIES)}")
    for name in names:
        if name in FAMILIES:
            return FAMILIES[name]
    raise ConfigError(f"config.json: architectures = {names!r} is not supported (known: {', '.join(FAMILIES)})")
