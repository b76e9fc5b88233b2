"""Conversion of GGUF metadata to the config.json that `transformers` would write.

Keys are those of llama.cpp's writer (``gguf-py/gguf/constants.py``). Missing keys take the defaults of llama.cpp's
readers; where there is no default either, the file is rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from jaxinfer.weights.errors import CheckpointError, quoted
from jaxinfer.weights.gguf.dense import DENSE, llama_biases
from jaxinfer.weights.gguf.experts import EXPERTS, SIGMOID, SOFTMAX
from jaxinfer.weights.gguf.fields import (
    Json,
    common,
    expert_size,
    layer_types,
    named,
    rope_scaling,
    rotated_share,
    rows_of_first,
)
from jaxinfer.weights.gguf.header_view import Described
from jaxinfer.weights.gguf.per_layer import PER_LAYER
from jaxinfer.weights.gguf.recurrent import Heads


def _hybrid(architecture: str, model_type: str) -> Callable[[Described], Json]:
    """Return a config builder; a layer is recurrent if it has a convolution tensor, and MoE if it has a router."""

    def fields(model: Described) -> Json:
        recurrent = [model.has(f"blk.{index}.ssm_conv1d.weight") for index in range(model.layers)]
        attends = recurrent.index(False) if False in recurrent else 0
        made = {
            **common(model),
            **Heads.of(model).fields(model),
            **named(architecture, model_type),
            "layer_types": ["linear_attention" if each else "full_attention" for each in recurrent],
            "partial_rotary_factor": rotated_share(model),
            "attention_bias": model.has(f"blk.{attends}.attn_output.bias"),
        }
        return made | (_experts(model) if model.experts else {})

    return fields


def _experts(model: Described) -> Json:
    """Return the fields of the experts; routing weights are always normalised."""
    return {
        "num_experts": model.experts,
        "num_experts_per_tok": model.count("expert_used_count"),
        "moe_intermediate_size": expert_size(model),
        "shared_expert_intermediate_size": rows_of_first(model, "ffn_gate_shexp.weight"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [
            index for index in range(model.layers) if not model.has(f"blk.{index}.ffn_gate_inp.weight")
        ],
    }


HYBRIDS: Mapping[str, Callable[[Described], Json]] = MappingProxyType(
    {
        "qwen3next": _hybrid("Qwen3NextForCausalLM", "qwen3_next"),
        "qwen35": _hybrid("Qwen3_5ForCausalLM", "qwen3_5_text"),
        "qwen35moe": _hybrid("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"),
    }
)


_GROUP_LIMITED_V2 = 160  # number of experts of the V2 models with group-limited routing


def config_json(model: Described) -> Json:
    """Return a config.json for the architecture.

    Raises:
        CheckpointError: the architecture is unknown, or its metadata lacks a key that the configuration needs.
    """
    architecture = model.architecture
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise CheckpointError(
            f"{model.path} holds a model of the architecture {quoted(architecture)}, which is not supported "
            f"(known: {known})"
        )
    ids = {name: model.metadata.get(f"tokenizer.ggml.{key}") for name, key in _TOKEN_IDS.items()}
    known_ids = {name: value for name, value in ids.items() if type(value) is int}
    return {**ARCHITECTURES[architecture](model), **known_ids, "tie_word_embeddings": not model.has("output.weight")}


_TOKEN_IDS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}


def _llama(model: Described) -> Json:
    fields = common(model)
    if model.experts:
        experts = {
            "num_local_experts": model.experts,
            "num_experts_per_tok": model.count("expert_used_count"),
            "sliding_window": model.count("attention.sliding_window", 0) or None,
        }
        return {**fields, **experts, **named("MixtralForCausalLM", "mixtral")}
    biases = llama_biases(model)
    if model.count("attention.sliding_window", 0):
        window = {"sliding_window": model.count("attention.sliding_window")}
        return {**fields, **biases, **window, "architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    return {**fields, **biases, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}


def _qwen(name: str, model_type: str) -> Callable[[Described], Json]:
    def fields(model: Described) -> Json:
        made = {**common(model), "architectures": [name], "model_type": model_type, "use_sliding_window": False}
        return made | {"attention_bias": model.has("blk.0.attn_output.bias")}

    return fields


def _qwen_moe(name: str, model_type: str, renormalised: bool) -> Callable[[Described], Json]:
    def fields(model: Described) -> Json:
        dense = [index for index in range(model.layers) if not model.has(f"blk.{index}.ffn_gate_inp.weight")]
        made = {
            **_qwen(name, model_type)(model),
            "num_experts": model.experts,
            "num_experts_per_tok": model.count("expert_used_count"),
            "moe_intermediate_size": expert_size(model),
            "norm_topk_prob": renormalised,
            "decoder_sparse_step": 1,
            "mlp_only_layers": dense,
        }
        if model_type == "qwen2_moe":
            made["qkv_bias"] = model.has("blk.0.attn_q.bias")
            made["shared_expert_intermediate_size"] = rows_of_first(model, "ffn_gate_shexp.weight")
        return made

    return fields


def _gemma(name: str, model_type: str) -> Callable[[Described], Json]:
    def fields(model: Described) -> Json:
        made = {**common(model), "architectures": [name], "model_type": model_type}
        made["hidden_activation"] = made["hidden_act"] = "gelu_pytorch_tanh"
        return made

    return fields


def _gemma2(model: Described) -> Json:
    return {
        **_gemma("Gemma2ForCausalLM", "gemma2")(model),
        "query_pre_attn_scalar": _score_size(model, largest=46),
        "sliding_window": model.count("attention.sliding_window"),
        "attn_logit_softcapping": model.number("attn_logit_softcapping"),
        "final_logit_softcapping": model.number("final_logit_softcapping"),
    }


def _gemma3(model: Described) -> Json:
    made = {
        **_gemma("Gemma3ForCausalLM", "gemma3_text")(model),
        "query_pre_attn_scalar": _score_size(model, largest=62),
        "sliding_window": model.count("attention.sliding_window"),
        "layer_types": layer_types(model, 6),
        "rope_local_base_freq": model.number("rope.freq_base_swa", 10000.0),
    }
    if model.get("final_logit_softcapping") is not None:
        made["final_logit_softcapping"] = model.number("final_logit_softcapping")
    return made


def _score_size(model: Described, largest: int) -> int:
    """Return ``query_pre_attn_scalar``; no key has it, and llama.cpp recognises the 27B models by their layer count."""
    heads, hidden = model.heads, model.count("embedding_length")
    by_width = model.layers == largest
    return hidden // heads if by_width else model.count("attention.key_length")


def _phi3(model: Described) -> Json:
    made = {**common(model), "architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}
    if model.count("attention.sliding_window", 0):
        made["sliding_window"] = model.count("attention.sliding_window")
    return made


def _gpt2(model: Described) -> Json:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": model.rows("token_embd.weight"),
        "n_embd": model.count("embedding_length"),
        "n_inner": model.count("feed_forward_length"),
        "n_layer": model.layers,
        "n_head": model.heads,
        "n_positions": model.count("context_length"),
        "layer_norm_epsilon": model.number("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
    }


def _falcon(model: Described) -> Json:
    heads = model.heads
    kv_heads = model.kv_heads
    return {
        "architectures": ["FalconForCausalLM"],
        "model_type": "falcon",
        "vocab_size": model.rows("token_embd.weight"),
        "hidden_size": model.count("embedding_length"),
        "ffn_hidden_size": model.count("feed_forward_length"),
        "num_hidden_layers": model.layers,
        "num_attention_heads": heads,
        "num_kv_heads": kv_heads,
        "multi_query": kv_heads == 1,
        "new_decoder_architecture": kv_heads != 1,
        "num_ln_in_parallel_attn": 2 if model.has("blk.0.attn_norm_2.weight") else 1,
        "parallel_attn": True,
        "alibi": False,
        "bias": model.has("blk.0.attn_qkv.bias"),
        "max_position_embeddings": model.count("context_length"),
        "layer_norm_epsilon": model.number("attention.layer_norm_epsilon"),
        "rope_theta": model.number("rope.freq_base", 10000.0),
    }


def _deepseek2(model: Described) -> Json:
    heads, rope = model.heads, model.count("rope.dimension_count")
    # In files with the "mla" keys, the other length keys are those of the latents.
    key, value = (
        model.count(f"attention.{name}_length_mla", model.count(f"attention.{name}_length"))
        for name in ("key", "value")
    )
    return {
        "vocab_size": model.rows("token_embd.weight"),
        "hidden_size": model.count("embedding_length"),
        "intermediate_size": model.count("feed_forward_length"),
        "num_hidden_layers": model.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": model.count("context_length"),
        "rms_norm_eps": model.number("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "q_lora_rank": model.count("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": model.count("attention.kv_lora_rank"),
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": key - rope,
        "v_head_dim": value,
        "rope_theta": model.number("rope.freq_base", 10000.0),
        **_deepseek_rope(model),
        **(_deepseek_experts(model) if model.experts else named("YoutuForCausalLM", "youtu")),
    }


def _deepseek_rope(model: Described) -> Json:
    scaling = rope_scaling(model)
    if scaling is None or scaling["rope_type"] != "yarn":
        return {} if scaling is None else {"rope_scaling": scaling}
    if model.get("rope.scaling.yarn_log_multiplier") is not None:
        # the file has a tenth of it
        scale = round(10 * model.number("rope.scaling.yarn_log_multiplier"), 6)
        scaling |= {"mscale": scale, "mscale_all_dim": scale}
    return {"rope_scaling": scaling}


def _deepseek_experts(model: Described) -> Json:
    return {
        "first_k_dense_replace": model.count("leading_dense_block_count", 0),
        "n_routed_experts": model.experts,
        "num_experts_per_tok": model.count("expert_used_count"),
        "n_shared_experts": model.count("expert_shared_count"),
        "moe_intermediate_size": expert_size(model),
        "routed_scaling_factor": model.number("expert_weights_scale", 1.0),
        "norm_topk_prob": bool(model.get("expert_weights_norm")),
        "num_nextn_predict_layers": model.count("nextn_predict_layers", 0),
        **_deepseek_gate(model),
    }


def _deepseek_gate(model: Described) -> Json:
    """Return the router fields; in files without a gate (GLM 4.7 Flash, older) a correction bias implies sigmoid."""
    corrected = any(name.endswith(".exp_probs_b.bias") for name in model.shapes)
    gate = model.count("expert_gating_func", 0) or (SIGMOID if corrected else SOFTMAX)
    groups: Json = {}
    if model.get("expert_group_count") is not None:
        groups = {"n_group": model.count("expert_group_count"), "topk_group": model.count("expert_group_used_count")}
    if not groups and (gate == SIGMOID or model.experts == _GROUP_LIMITED_V2):
        raise model.bad("expert_group_count", None)
    if gate == SIGMOID:
        fields = named("DeepseekV3ForCausalLM", "deepseek_v3")
        return {**fields, **groups, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    if gate != SOFTMAX:
        raise model.bad("expert_gating_func", gate)
    method = "group_limited_greedy" if groups.get("n_group", 1) > 1 else "greedy"
    fields = named("DeepseekV2ForCausalLM", "deepseek_v2")
    return {**fields, **groups, "scoring_func": "softmax", "topk_method": method}


ARCHITECTURES: Mapping[str, Callable[[Described], Json]] = MappingProxyType(
    {
        "llama": _llama,
        "qwen2": _qwen("Qwen2ForCausalLM", "qwen2"),
        "qwen3": _qwen("Qwen3ForCausalLM", "qwen3"),
        "qwen2moe": _qwen_moe("Qwen2MoeForCausalLM", "qwen2_moe", renormalised=False),
        "qwen3moe": _qwen_moe("Qwen3MoeForCausalLM", "qwen3_moe", renormalised=True),
        "gemma": _gemma("GemmaForCausalLM", "gemma"),
        "gemma2": _gemma2,
        "gemma3": _gemma3,
        "phi3": _phi3,
        "gpt2": _gpt2,
        "falcon": _falcon,
        "deepseek2": _deepseek2,
        **DENSE,
        **EXPERTS,
        **HYBRIDS,
        **PER_LAYER,
    }
)
