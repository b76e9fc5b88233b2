"""Text models within multimodal checkpoints: config.json has a ``text_config``, and tensor names have a prefix. No jax.

Other components of such a checkpoint (the vision tower, the projector) are not loaded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

_TEXT = {
    "gemma3_text": ("Gemma3ForCausalLM", "gemma3_text"),
    "gemma3n_text": ("Gemma3nForCausalLM", "gemma3n_text"),
    "gemma4_text": ("Gemma4ForCausalLM", "gemma4_text"),
    "gemma4_unified_text": ("Gemma4UnifiedForCausalLM", "gemma4_unified_text"),
    "llama": ("LlamaForCausalLM", "llama"),
    "mistral": ("MistralForCausalLM", "mistral"),
    "ministral3": ("Ministral3ForCausalLM", "ministral3"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen2_vl_text": ("Qwen2ForCausalLM", "qwen2"),
    "qwen2_5_vl_text": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3_vl_text": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3_vl_moe_text": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "llama4_text": ("Llama4ForCausalLM", "llama4_text"),
    "deepseek_v3": ("DeepseekV3ForCausalLM", "deepseek_v3"),
    "qwen3_5_text": ("Qwen3_5ForCausalLM", "qwen3_5_text"),
    "qwen3_5_moe_text": ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"),
    "kimi_k2": ("DeepseekV3ForCausalLM", "deepseek_v3"),
}
"""Architecture and model type of the text model alone, by the model type in ``text_config``."""

_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "mistral": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    },
    "qwen2_vl_text": {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_key_value_heads": 8},
    "qwen2_5_vl_text": {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_key_value_heads": 8},
    "qwen3_vl_text": {"rope_theta": 5e5, "max_position_embeddings": 128000},
    "qwen3_vl_moe_text": {
        "rope_theta": 5e5,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "num_key_value_heads": 16,
        "intermediate_size": 5632,
        "moe_intermediate_size": 1408,
        "max_position_embeddings": 128000,
    },
}
"""Defaults of transformers for fields missing in such a ``text_config``, where the text model alone has another default
or requires the field: transformers saves only the fields of a nested text model that differ from these."""

_FIXED: Mapping[str, Mapping[str, Any]] = {"qwen3_vl_moe_text": {"norm_topk_prob": True}}
"""Values that transformers uses regardless of such a ``text_config``."""

_MROPE: Mapping[str, tuple[list[int], bool]] = {
    "qwen2_vl_text": ([16, 24, 24], False),
    "qwen2_5_vl_text": ([16, 24, 24], False),
    "qwen3_vl_text": ([24, 20, 20], True),
    "qwen3_vl_moe_text": ([24, 20, 20], True),
    "qwen3_5_text": ([11, 11, 10], True),
    "qwen3_5_moe_text": ([11, 11, 10], True),
}
"""Default ``mrope_section`` of such a ``text_config``, and whether its axes are interleaved, whatever it says."""

_WRAPPERS = {
    "Gemma3ForConditionalGeneration": "gemma3_text",
    "Gemma3nForConditionalGeneration": "gemma3n_text",
    "Gemma4ForConditionalGeneration": "gemma4_text",
    "Gemma4UnifiedForConditionalGeneration": "gemma4_unified_text",
    "Mistral3ForConditionalGeneration": "mistral",
    "LlavaForConditionalGeneration": "llama",
    "Idefics3ForConditionalGeneration": "llama",
    "SmolVLMForConditionalGeneration": "llama",
    "Qwen2VLForConditionalGeneration": "qwen2_vl_text",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl_text",
    "Qwen3VLForConditionalGeneration": "qwen3_vl_text",
    "Qwen3_5ForConditionalGeneration": "qwen3_5_text",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe_text",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl_moe_text",
    "Llama4ForConditionalGeneration": "llama4_text",
    "KimiK25ForConditionalGeneration": "deepseek_v3",
    "Kimi_K25ForConditionalGeneration": "deepseek_v3",
}
"""Wrapper architectures whose output for a text without images equals that of their text model, with the model type if
``text_config`` names none."""

_TIED: Mapping[str, bool] = {
    "Gemma3ForConditionalGeneration": True,
    "Gemma3nForConditionalGeneration": True,
    "Gemma4ForConditionalGeneration": True,
    "Gemma4UnifiedForConditionalGeneration": True,
    "Mistral3ForConditionalGeneration": True,
    "KimiK25ForConditionalGeneration": True,
    "Kimi_K25ForConditionalGeneration": True,
    "Idefics3ForConditionalGeneration": False,
    "SmolVLMForConditionalGeneration": False,
    "Qwen3VLForConditionalGeneration": False,
    "Qwen3VLMoeForConditionalGeneration": False,
    "Qwen3_5ForConditionalGeneration": False,
    "Qwen3_5MoeForConditionalGeneration": False,
}
"""Wrappers whose own ``tie_word_embeddings`` overrides ``text_config``, with the default of transformers."""

_TIED_EITHER = (
    "LlavaForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
)
"""Wrappers that tie embeddings if their own field or that of ``text_config`` is true; for all others only
``text_config`` counts."""

_SPELLINGS: tuple[Mapping[str, str], ...] = (
    {"model.": "model.language_model."},
    {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
    {"model.": "language_model."},
    {"model.": "model.text_model."},
)
"""Prefix substitutions by which a wrapper may rename the text model's tensors."""

_SAVED = dict.fromkeys(("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration"), _SPELLINGS[3])
"""Those of architectures that transformers does not save by the first of these."""

_TOWER_SPELLINGS: tuple[Mapping[str, str], ...] = (
    {"visual.": "model.visual."},
    {"model.visual.": "visual."},
    {"vision_tower.vision_model.": "vision_tower."},
    {"vision_tower.": "model.vision_tower.", "multi_modal_projector.": "model.multi_modal_projector."},
    {"vision_tower.vision_model.": "model.vision_tower."},
)
"""The same for the tensors of a vision tower and its projector."""

INNER_SPELLINGS = tuple(tuple(spelled.items()) for spelled in _SPELLINGS)
"""`_SPELLINGS` as pairs: the prefix of a name within the text model, and within a wrapper."""

OTHERS = (
    *("vision_tower", "vision_model", "visual", "multi_modal_projector", "mm_projector", "connector"),
    *("audio_tower", "embed_vision", "embed_audio", "vision_embedder", "audio_embedder"),
)
OTHER_TENSORS = tuple(f"{before}{name}.*" for name in OTHERS for before in ("", "model."))
"""Patterns of tensors that the text model does not use."""


def text_model(config_json: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config.json of the text model alone; a model that is not a wrapper is returned unchanged.

    Fields that only the wrapper has (the dtype, the quantisation config) apply to the text model, too; whether
    embeddings are tied is read from the same config as in transformers.
    """
    known = next((name for name in _named(config_json) if name in _WRAPPERS), None)
    if known is None:
        return config_json
    inner = config_json.get("text_config")
    # Qwen2-VL and 2.5-VL put the fields of the text model next to those of the tower.
    outer = {name: value for name, value in config_json.items() if name not in ("text_config", "vision_config")}
    kind = (inner.get("model_type") if isinstance(inner, dict) else None) or _WRAPPERS[known]
    if kind not in _TEXT:
        return config_json
    said = inner if isinstance(inner, dict) else {}
    fields = {**_DEFAULTS.get(kind, {}), **outer, **said, **_tie(known, outer, said)}
    fields |= _FIXED.get(kind, {})
    architecture, model_type = _TEXT[kind]
    return {**fields, **_rope(fields, kind), "architectures": [architecture], "model_type": model_type}


def wrapped_name(config_json: Mapping[str, Any], name: str) -> str:
    """Return the name, within a wrapper, of a text model's tensor; those of a vision tower stay as they are."""
    spelled = next((_SAVED[known] for known in _named(config_json) if known in _SAVED), _SPELLINGS[0])
    return name if _is_other(name) else _respelled(name, spelled)


def _is_other(name: str) -> bool:
    return component(name) in OTHERS


def component(name: str) -> str:
    """Return the first component of a tensor's name, as "visual", after the prefix of the whole model."""
    return name.removeprefix("model.").partition(".")[0]


def is_wrapper(config_json: Mapping[str, Any]) -> bool:
    """Return whether the checkpoint wraps a text model in another one."""
    return any(name in _WRAPPERS for name in _named(config_json))


def spellings(prefix: str, wrapped: bool) -> tuple[Callable[[str], str], ...]:
    """Return functions that map a text model's tensor name to its possible names in a checkpoint; identity first.

    Args:
        prefix: prefix of the decoder's tensors; a checkpoint of the bare decoder omits it.
        wrapped: whether the checkpoint is that of a wrapper.
    """
    tables = ({}, *((*_SPELLINGS, *_TOWER_SPELLINGS) if wrapped else ()), {prefix: ""})
    return tuple(functools.partial(_respelled, spelled=table) for table in tables)


def spelling(names: Collection[str], wanted: Collection[str], prefix: str, wrapped: bool) -> Callable[[str], str]:
    """Return the mapping from a text model's tensor name to its name in a checkpoint with these tensor names.

    A tensor missing under the most common spelling is looked up in the other spellings.

    Args:
        wanted: names of the text model's tensors.
        prefix, wrapped: see `spellings`.
    """
    known = spellings(prefix, wrapped)
    # A tower's tensors have one spelling each, which says nothing about that of the text model.
    text = [name for name in wanted if not _is_other(name)]
    found = [sum(spell(name) in names for name in text) for spell in known]
    most = known[found.index(max(found))]

    def spell(name: str) -> str:
        return next((other for other in (most(name), *(each(name) for each in known)) if other in names), most(name))

    return spell


def names_of(module: str) -> tuple[str, ...]:
    """Return the names of a module in a text model and in a wrapper of each spelling, the given name first.

    Args:
        module: its name in any of them, such as "model.layers.0.mlp.up_proj" or "language_model.lm_head".
    """
    own = f"{module}."
    for spelled in _SPELLINGS:
        own = _respelled(own, {other: name for name, other in spelled.items()})
    spelt = (own, *(_respelled(own, spelled) for spelled in _SPELLINGS))
    return tuple(dict.fromkeys((module, *(name.removesuffix(".") for name in spelt))))


def _respelled(name: str, spelled: Mapping[str, str]) -> str:
    for begin, other in spelled.items():
        if name.startswith(begin):
            return other + name.removeprefix(begin)
    return name


def _tie(architecture: str, outer: Mapping[str, Any], inner: Mapping[str, Any]) -> dict[str, Any]:
    """Return whether the embeddings are tied; None if the default of the text model decides."""
    name = "tie_word_embeddings"
    if architecture in _TIED:
        return {name: outer.get(name, _TIED[architecture])}
    if architecture in _TIED_EITHER and outer.get(name):
        return {name: True}
    return {name: inner.get(name)}


def _rope(fields: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return the RoPE settings with the type "default" for multimodal RoPE (mrope), and its sections."""
    found = {name: fields[name] for name in ("rope_scaling", "rope_parameters") if isinstance(fields.get(name), dict)}
    if kind in _MROPE:
        section, interleaved = _MROPE[kind]
        found = {
            name: {"mrope_section": section, **scaling, "mrope_interleaved": interleaved}
            for name, scaling in (found or {"rope_scaling": {}}).items()
        }
    return {
        name: {key: "default" if value == "mrope" else value for key, value in scaling.items()}
        for name, scaling in found.items()
    }


def _named(config_json: Mapping[str, Any]) -> list[str]:
    names = config_json.get("architectures")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
