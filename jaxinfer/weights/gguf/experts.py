"""Config.json of mixture-of-experts architectures added to llama.cpp after those of Mistral, Qwen and DeepSeek."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from jaxinfer.weights.gguf.fields import (
    Json,
    biases,
    common,
    expert_size,
    layer_types,
    named,
    rotated_share,
)
from jaxinfer.weights.gguf.header_view import Described

SOFTMAX, SIGMOID = 1, 2  # llama.cpp's ids of router gates

_MAVERICK = 128  # number of experts of the Llama 4 without QK norm
_LLAMA4 = {"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1, "attn_temperature_tuning": True}


def _counts(model: Described, total: str, chosen: str = "num_experts_per_tok") -> Json:
    return {total: model.experts, chosen: model.count("expert_used_count")}


def _with_gate(model: Described, known: int) -> None:
    gate = model.count("expert_gating_func", known)
    if gate not in (0, known):
        raise model.bad("expert_gating_func", gate)


def _gpt_oss(model: Described) -> Json:
    """Return the config of gpt-oss; as in all published models, YaRN ramp ends are not rounded, the GLU is clamped."""
    fields = common(model)
    scaling = fields.pop("rope_scaling", {"rope_type": "default"})
    return {
        **fields,
        **_counts(model, "num_local_experts"),
        **biases(model, attention_bias="attn_q"),
        **named("GptOssForCausalLM", "gpt_oss"),
        "intermediate_size": expert_size(model),
        "rope_parameters": {**scaling, "rope_theta": fields["rope_theta"], "truncate": False},
        "sliding_window": model.count("attention.sliding_window"),
        "layer_types": layer_types(model, 2),
    }


def _llama4(model: Described) -> Json:
    """Return the config of Llama 4; chunk size and query scaling are those of the published models, as in llama.cpp."""
    fields = {
        **common(model),
        **_counts(model, "num_local_experts"),
        **biases(model, attention_bias="attn_q"),
        **named("Llama4ForCausalLM", "llama4_text"),
        **_LLAMA4,
        "intermediate_size_mlp": model.count("feed_forward_length"),
        "intermediate_size": expert_size(model),
        "interleave_moe_layer_step": model.count("interleave_moe_layer_step"),
        "use_qk_norm": model.experts != _MAVERICK,
    }
    if model.get("attention.sliding_window") == 0:
        raise model.bad("attention.sliding_window", 0)
    kinds = layer_types(model, 4)
    rotated = [int(kind == "sliding_attention") for kind in kinds]
    chunked = ["chunked_attention" if near else "full_attention" for near in rotated]
    return {**fields, "no_rope_layers": rotated, "layer_types": chunked}


def _glm4moe(model: Described) -> Json:
    _with_gate(model, SIGMOID)
    return {
        **common(model),
        **_counts(model, "n_routed_experts"),
        **biases(model, attention_bias="attn_q"),
        **named("Glm4MoeForCausalLM", "glm4_moe"),
        "partial_rotary_factor": rotated_share(model),
        "moe_intermediate_size": expert_size(model),
        "n_shared_experts": model.count("expert_shared_count"),
        "first_k_dense_replace": model.count("leading_dense_block_count", 0),
        "n_group": model.count("expert_group_count", 1),
        "topk_group": model.count("expert_group_used_count", 1),
        "routed_scaling_factor": model.number("expert_weights_scale", 1.0),
        "norm_topk_prob": bool(model.get("expert_weights_norm")),
        "use_qk_norm": model.has("blk.0.attn_q_norm.weight"),
        "num_nextn_predict_layers": model.count("nextn_predict_layers", 0),
    }


def _olmoe(model: Described) -> Json:
    return {
        **common(model),
        **_counts(model, "num_experts"),
        **biases(model, attention_bias="attn_q"),
        **named("OlmoeForCausalLM", "olmoe"),
        "intermediate_size": expert_size(model),
        "norm_topk_prob": False,
    }


def _phimoe(model: Described) -> Json:
    fields = common(model)
    scaling = fields.get("rope_scaling")
    if scaling is not None and "attention_factor" in scaling:
        scaling["short_mscale"] = scaling["long_mscale"] = scaling.pop("attention_factor")
    return {
        **fields,
        **_counts(model, "num_local_experts"),
        **biases(model, attention_bias="attn_q"),
        **named("PhimoeForCausalLM", "phimoe"),
        "intermediate_size": expert_size(model),
        "sliding_window": model.count("attention.sliding_window", 0) or None,
        "lm_head_bias": model.has("output.bias"),
    }


def _minimax_m2(model: Described) -> Json:
    _with_gate(model, SIGMOID)
    return {
        **common(model),
        **_counts(model, "num_local_experts"),
        **named("MiniMaxM2ForCausalLM", "minimax_m2"),
        "intermediate_size": expert_size(model),
        "partial_rotary_factor": rotated_share(model),
    }


def _ernie_moe(model: Described) -> Json:
    """Return the config of ERNIE 4.5 MoE; ``moe_layer_end_index`` is the last layer with a router."""
    sparse = [index for index in range(model.layers) if model.has(f"blk.{index}.ffn_gate_inp.weight")]
    return {
        **common(model),
        **_counts(model, "moe_num_experts", "moe_k"),
        **named("Ernie4_5_MoeForCausalLM", "ernie4_5_moe"),
        "moe_intermediate_size": expert_size(model),
        "moe_num_shared_experts": model.count("expert_shared_count", 0),
        "moe_layer_start_index": model.count("leading_dense_block_count", 0),
        "moe_layer_end_index": max(sparse, default=0),
        "moe_layer_interval": model.count("interleave_moe_layer_step"),
    }


EXPERTS: Mapping[str, Callable[[Described], Json]] = MappingProxyType(
    {
        "gpt-oss": _gpt_oss,
        "llama4": _llama4,
        "glm4moe": _glm4moe,
        "olmoe": _olmoe,
        "phimoe": _phimoe,
        "minimax-m2": _minimax_m2,
        "ernie4_5-moe": _ernie_moe,
    }
)
