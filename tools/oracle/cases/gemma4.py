"""Gemma 3n and Gemma 4 as text models, alone and inside multimodal models of images and audio."""

import dataclasses
from typing import Any

from tools.oracle.cases.case import Case, sizes

ARCHITECTURES = {
    "gemma3n_text": "Gemma3nForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4_unified_text": "Gemma4UnifiedForCausalLM",
    "gemma4": "Gemma4ForConditionalGeneration",
}

COMMON: dict[str, dict] = {name: {"max_position_embeddings": 256} for name in ARCHITECTURES}
COMMON["gemma4"] = {}

_S, _F = "sliding_attention", "full_attention"
_NONE: dict[str, Any] = {"hidden_size_per_layer_input": 0}
_EMBEDDED: dict[str, Any] = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64}
_ROPES = {
    _F: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    _S: {"rope_type": "default", "rope_theta": 1e4},
}
_EFFECTIVE: dict[str, Any] = {  # E2B
    **_EMBEDDED,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 8,
    "layer_types": [_S, _F, _S, _F],
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "final_logit_softcapping": 2.0,
    "rope_parameters": _ROPES,
}
_EXPERTS: dict[str, Any] = {  # 26B-A4B
    **_NONE,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "sliding_window": 8,
    "layer_types": [_S, _F],
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 3,
    "moe_intermediate_size": 12,
}

GEMMA4 = (
    Case(
        "gemma4_text-effective-hub",
        sizes(64, 40, 4, 4, 1, **_EFFECTIVE),
        style="hub",
        prompt_length=40,
        served=True,
        overlooked={"final_logit_softcapping": None},
    ),
    Case(
        "gemma4_text-experts",
        sizes(48, 40, 2, 4, 2, **_EXPERTS),
        prompt_length=30,
        shards=2,
        overlooked={"top_k_experts": 2},
    ),
    Case(
        "gemma4_text-pattern-hub",
        sizes(40, 48, 7, 4, 2, **_NONE, head_dim=12, global_head_dim=20, sliding_window=12, use_cache=True),
        style="hub",
        prompt_length=20,
        overlooked={"sliding_window": 13},
    ),
    Case(
        "gemma4_text-embedded-untied",
        sizes(40, 48, 3, 2, 1, **_EMBEDDED, head_dim=16, global_head_dim=16, tie_word_embeddings=False)
        | {"layer_types": [_F, _S, _F], "sliding_window": 16, "num_kv_shared_layers": 1},
        overlooked={"rope_parameters": {**_ROPES, _F: {"rope_type": "proportional", "rope_theta": 1e6}}},
    ),
    Case(
        "gemma4_unified_text-hub",
        sizes(48, 40, 3, 4, 2, head_dim=16, global_head_dim=32, num_global_key_value_heads=1, attention_k_eq_v=True)
        | {"layer_types": [_S, _S, _F], "sliding_window": 8, "use_bidirectional_attention": "vision"}
        | {"rope_parameters": _ROPES, "final_logit_softcapping": 2.0},
        style="hub",
        prompt_length=33,
        served=True,
        overlooked={"rope_parameters": {**_ROPES, _F: {"rope_type": "default", "rope_theta": 1e6}}},
    ),
)

_STREAMS: dict[str, Any] = {
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 60,  # of 64: ids beyond use the first token's
    "head_dim": 16,
    "sliding_window": 8,
    "layer_types": [_S, _F, _S, _F],
    "num_kv_shared_layers": 2,
    "laurel_rank": 6,
}

GEMMA3N = (
    Case(
        "gemma3n_text-hub",
        sizes(48, [120] * 4, 4, 4, 2, **_STREAMS, rope_theta=1e6, rope_local_base_freq=1e4, rope_scaling=None)
        | {"activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0], "final_logit_softcapping": 2.0}
        | {"altup_num_inputs": 4, "altup_active_idx": 0, "altup_coef_clip": 120.0, "altup_correct_scale": True},
        style="hub",
        prompt_length=40,
        served=True,
        overlooked={"activation_sparsity_pattern": None},
    ),
    Case(
        "gemma3n_text-three-streams",
        sizes(40, [24, 40, 32], 3, 4, 1, **{**_STREAMS, "layer_types": [_F, _S, _F], "num_kv_shared_layers": 1})
        | {"altup_num_inputs": 3, "altup_active_idx": 1, "altup_correct_scale": False, "tie_word_embeddings": False}
        | {"activation_sparsity_pattern": [0.0, 0.7, 0.0]},
        shards=2,
        overlooked={"altup_active_idx": 0},
    ),
    Case(
        "gemma3n_text-default-pattern-hub",
        sizes(32, 40, 7, 2, 1, **{name: _STREAMS[name] for name in ("hidden_size_per_layer_input", "laurel_rank")})
        | {"vocab_size_per_layer_input": 64, "head_dim": 12, "sliding_window": 12, "num_kv_shared_layers": 2},
        style="hub",
        prompt_length=20,
        overlooked={"rope_local_base_freq": 1e6},
    ),
)

_TOWER = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}

WRAPPED = (
    Case(
        "gemma4-hub",
        {
            "text_config": {
                "model_type": "gemma4_text",
                "max_position_embeddings": 256,
                **sizes(48, 40, 2, 4, 2, **_EXPERTS, use_bidirectional_attention="vision", rope_parameters=_ROPES),
            },
            "vision_config": {
                "model_type": "gemma4_vision",
                **_TOWER,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "patch_size": 4,
                "position_embedding_size": 8,
            },
            "audio_config": None,
            "tie_word_embeddings": True,
        },
        style="hub",
        served=True,
    ),
)

CASES = tuple(dataclasses.replace(case, query_share=0.25) for case in (*GEMMA3N, *GEMMA4, *WRAPPED))
