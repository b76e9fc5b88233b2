"""Families by the architecture that config.json names: one row each, imported when it is looked up."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxinfer.models.config import ConfigError, shown
from jaxinfer.models.family import Family, HeadFamily
from jaxinfer.models.lazy import Lazy
from jaxinfer.models.nearest import nearest

__all__ = ["FAMILIES", "HEADS", "Family", "HeadFamily", "family_for"]


_ROWS = {
    "LlamaForCausalLM": "llama:LLAMA",
    "MistralForCausalLM": "llama:LLAMA",
    "Qwen2ForCausalLM": "llama:LLAMA",
    "Qwen3ForCausalLM": "llama:LLAMA",
    "SeedOssForCausalLM": "llama:LLAMA",
    "MiMoForCausalLM": "llama:MIMO",
    "InternLM3ForCausalLM": "internlm3:INTERNLM3",
    "ArceeForCausalLM": "arcee:ARCEE",
    "ApertusForCausalLM": "apertus:APERTUS",
    "NemotronForCausalLM": "nemotron:NEMOTRON",
    "Ministral3ForCausalLM": "ministral:MINISTRAL",
    "Olmo2ForCausalLM": "olmo:OLMO2",
    "Olmo3ForCausalLM": "olmo:OLMO3",
    "GraniteForCausalLM": "granite:GRANITE",
    "SmolLM3ForCausalLM": "smollm3:SMOLLM3",
    "CohereForCausalLM": "cohere:COHERE",
    "Cohere2ForCausalLM": "cohere:COHERE2",
    "GlmForCausalLM": "glm:GLM",
    "Glm4ForCausalLM": "glm:GLM",
    "Exaone4ForCausalLM": "exaone4:EXAONE4",
    "Ernie4_5ForCausalLM": "ernie:ERNIE",
    "HunYuanDenseV1ForCausalLM": "hunyuan:HUNYUAN",
    "GPTNeoXForCausalLM": "neox:NEOX",
    "Starcoder2ForCausalLM": "starcoder2:STARCODER2",
    "StableLmForCausalLM": "stablelm:STABLELM",
    "GemmaForCausalLM": "gemma:GEMMA",
    "Gemma2ForCausalLM": "gemma:GEMMA",
    "Gemma3ForCausalLM": "gemma:GEMMA",
    "Gemma3nForCausalLM": "gemma3n:GEMMA3N",
    "Gemma4ForCausalLM": "gemma4:GEMMA4",
    "Gemma4UnifiedForCausalLM": "gemma4:GEMMA4",
    "Phi3ForCausalLM": "phi3:PHI3",
    "GPT2LMHeadModel": "gpt2:GPT2_FAMILY",
    "GPTJForCausalLM": "gptj:GPTJ_FAMILY",
    "PhiForCausalLM": "phi:PHI",
    "FalconForCausalLM": "falcon:FALCON",
    "MixtralForCausalLM": "mixtral:MIXTRAL",
    "Qwen2MoeForCausalLM": "qwen_moe:QWEN2_MOE",
    "Qwen3MoeForCausalLM": "qwen_moe:QWEN3_MOE",
    "GptOssForCausalLM": "gpt_oss:GPT_OSS",
    "DeepseekV2ForCausalLM": "deepseek:DEEPSEEK_V2",
    "DeepseekV3ForCausalLM": "deepseek:DEEPSEEK_V3",
    "DeepseekV32ForCausalLM": "deepseek_sparse:DEEPSEEK_V32",
    "GlmMoeDsaForCausalLM": "deepseek_sparse:GLM_MOE_DSA",
    "Glm4MoeLiteForCausalLM": "deepseek:GLM4_MOE_LITE",
    "Glm4MoeForCausalLM": "glm4_moe:GLM4_MOE",
    "Dots1ForCausalLM": "dots1:DOTS1",
    "MiniMaxM2ForCausalLM": "minimax:MINIMAX_M2",
    "Llama4ForCausalLM": "llama4:LLAMA4",
    "OlmoeForCausalLM": "olmoe:OLMOE",
    "PhimoeForCausalLM": "phimoe:PHIMOE",
    "PhiMoEForCausalLM": "phimoe:PHIMOE",
    "Ernie4_5_MoeForCausalLM": "ernie_moe:ERNIE4_5_MOE",
    "GraniteMoeForCausalLM": "granite_moe:GRANITE_MOE",
    "GraniteMoeSharedForCausalLM": "granite_moe:GRANITE_MOE_SHARED",
    "YoutuForCausalLM": "deepseek:YOUTU",
    "Lfm2ForCausalLM": "lfm2:LFM2",
    "Lfm2MoeForCausalLM": "lfm2:LFM2_MOE",
    "Qwen3NextForCausalLM": "qwen3_next:QWEN3_NEXT",
    "Qwen3_5ForCausalLM": "qwen3_next:QWEN3_5",
    "Qwen3_5MoeForCausalLM": "qwen3_next:QWEN3_5_MOE",
    "GraniteMoeHybridForCausalLM": "granite_hybrid:GRANITE_HYBRID",
    "NemotronHForCausalLM": "nemotron_h:NEMOTRON_H",
    "FalconH1ForCausalLM": "falcon_h1:FALCON_H1",
}
FAMILIES: Mapping[str, Family] = Lazy("jaxinfer.models.families", _ROWS)

HEADS: Mapping[str, HeadFamily] = Lazy(
    "jaxinfer.models.heads",
    {
        "medusa": "medusa:MEDUSA",
        "eagle": "eagle:EAGLE",
        "eagle3": "eagle:EAGLE3",
        "mtp": "mtp:MTP",
    },
)
"""Draft heads by the name of their method (`SpeculativeConfig.speculative`)."""


_PAGE = "docs/models.md lists what is, docs/add_a_model.md says how to add one with --family"


def family_for(config_json: Mapping[str, Any], families: Mapping[str, Family] = MappingProxyType({})) -> Family:
    """Find the family of this checkpoint: in ``families`` first, then in `FAMILIES`.

    Raises:
        ConfigError: config.json names no architecture, or an unknown one; the message gives the nearest known ones and
            the differences.
    """
    known = {**FAMILIES, **families}
    names = config_json.get("architectures")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"config.json: architectures = {shown(names)} must be a list of names ({_PAGE})")
    for name in names:
        if name in known:
            return known[name]
    near = nearest(names[0], config_json, {name: family.config for name, family in FAMILIES.items()})
    beside = f"; the nearest: {'; '.join(map(str, near))}" if near else ""
    raise ConfigError(f"config.json: architectures = {shown(names)} is not supported{beside} ({_PAGE})")


def __getattr__(constant: str) -> Family:
    """Return a family by the name of its constant (``LLAMA``), for files of families that import it from here."""
    for architecture, row in _ROWS.items():
        if row.partition(":")[2] == constant:
            return FAMILIES[architecture]
    raise AttributeError(f"module {__name__!r} has no attribute {constant!r}")
