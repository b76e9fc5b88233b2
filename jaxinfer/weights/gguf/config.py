"""Convert the metadata of a GGUF file to what `transformers` would write into config.json.

Keys are those of llama.cpp's writer (``gguf-py/gguf/constants.py``). What a key leaves open is taken as llama.cpp's
readers take it; where they have no answer either, the file is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxinfer.weights.errors import CheckpointError, quoted
from jaxinfer.weights.gguf.described import Described

Json = dict[str, Any]

# Llama 3.1 and later: the converter writes the factors that these give, and not the numbers themselves.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_SOFTMAX, _SIGMOID = 1, 2  # llama.cpp's numbers of DeepSeek's gates
_GROUP_LIMITED_V2 = 160  # experts of the V2 models that choose among groups


def config_json(model: Described) -> Json:
    """A config.json for the architecture.

    Raises:
        CheckpointError: the architecture is unknown, or its metadata lacks what our configuration needs.
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


def _common(model: Described) -> Json:
    """Fields that all descendants of Llama share."""
    heads, hidden = model.heads, model.count("embedding_length")
    head_dim = model.count("attention.key_length", hidden // heads)
    if model.count("attention.value_length", head_dim) != head_dim:
        raise model.bad("attention.value_length", model.get("attention.value_length"))
    return {
        "vocab_size": model.rows("token_embd.weight"),
        "hidden_size": hidden,
        "intermediate_size": model.count("feed_forward_length", 0) or None,
        "num_hidden_layers": model.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": model.count("context_length"),
        "rms_norm_eps": model.number("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        **_rope(model, head_dim),
    }


def _rope(model: Described, head_dim: int) -> Json:
    rotated = model.count("rope.dimension_count", head_dim)
    fields: Json = {"rope_theta": model.number("rope.freq_base", 10000.0)}
    if rotated != head_dim:
        fields["partial_rotary_factor"] = rotated / head_dim
    if model.has("rope_factors_long.weight"):
        return {**fields, **_longrope(model, rotated)}
    scaling = _scaling(model)
    if model.has("rope_freqs.weight"):
        if scaling is not None:
            raise CheckpointError(f"{model.path} has both rope_freqs.weight and a scaling of its rotary embedding")
        scaling = _by_factors(model, fields["rope_theta"], rotated)
    return fields if scaling is None else {**fields, "rope_scaling": scaling}


def _scaling(model: Described) -> Json | None:
    kind = model.get("rope.scaling.type")
    if kind is None and model.get("rope.scale_linear") is not None:
        return {"rope_type": "linear", "factor": model.number("rope.scale_linear")}
    if kind in (None, "none"):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": model.number("rope.scaling.factor")}
    if kind == "yarn":
        return _yarn(model)
    raise model.bad("rope.scaling.type", kind)


def _yarn(model: Described) -> Json:
    factor = model.number("rope.scaling.factor")
    scaling: Json = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": model.count("rope.scaling.original_context_length"),
    }
    for name in ("beta_fast", "beta_slow"):
        if model.get(f"rope.scaling.yarn_{name}") is not None:
            scaling[name] = model.number(f"rope.scaling.yarn_{name}")
    if model.get("rope.scaling.yarn_attn_factor") is not None:
        growth = 0.1 * math.log(factor) + 1.0 if factor > 1.0 else 1.0
        scaling["attention_factor"] = model.number("rope.scaling.yarn_attn_factor") * growth
    return scaling


def _longrope(model: Described, rotated: int) -> Json:
    """Two tensors of factors, and by how much cosines and sines grow."""
    scaling: Json = {"rope_type": "longrope"}
    for name in ("short", "long"):
        scaling[f"{name}_factor"] = _as_decimals(_factors(model, f"rope_factors_{name}.weight", rotated))
    if model.get("rope.scaling.attn_factor") is not None:
        scaling["attention_factor"] = model.number("rope.scaling.attn_factor")
    original = model.count("rope.scaling.original_context_length")
    return {"rope_scaling": scaling, "original_max_position_embeddings": original}


def _by_factors(model: Described, theta: float, rotated: int) -> Json:
    """Factors for each frequency: as Llama 3's where they are its, so that they are computed from the same numbers."""
    factors = _factors(model, "rope_freqs.weight", rotated)
    scaling: Json = {"rope_type": "llama3", "factor": float(factors[-1]), **_LLAMA3}
    if np.allclose(factors, _llama3_factors(scaling, theta, rotated), rtol=1e-5):
        return scaling
    listed = _as_decimals(factors)
    fixed = {"factor": 1.0, "attention_factor": 1.0, "original_max_position_embeddings": model.count("context_length")}
    return {"rope_type": "longrope", "short_factor": listed, "long_factor": listed, **fixed}


def _as_decimals(factors: np.ndarray) -> list[float]:
    return [float(str(np.float32(value))) for value in factors]


def _factors(model: Described, name: str, rotated: int) -> np.ndarray:
    if model.shapes.get(name) != (rotated // 2,):
        raise CheckpointError(f"{model.path} has not {rotated // 2} numbers in {name}, one for each frequency")
    factors = model.read(name).astype(np.float64)
    if not (np.isfinite(factors).all() and (factors > 0).all()):
        raise CheckpointError(f"{model.path} has numbers in {name} that are not finite or not above 0")
    return factors


def _llama3_factors(scaling: Json, theta: float, rotated: int) -> np.ndarray:
    """Divisors of the frequencies in `RopeConfig`'s "llama3"."""
    inverse = theta ** -(np.arange(0, rotated, 2, dtype=np.float64) / rotated)
    turns = scaling["original_max_position_embeddings"] * inverse / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    factors: np.ndarray = 1.0 / ((1 - smooth) / scaling["factor"] + smooth)
    return factors


def _llama(model: Described) -> Json:
    fields = _common(model)
    if model.experts:
        named = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
        experts = {
            "num_local_experts": model.experts,
            "num_experts_per_tok": model.count("expert_used_count"),
            "sliding_window": model.count("attention.sliding_window", 0) or None,
        }
        return {**fields, **named, **experts}
    biases = {
        "attention_bias": model.has("blk.0.attn_q.bias") or model.has("blk.0.attn_output.bias"),
        "mlp_bias": model.has("blk.0.ffn_down.bias"),
    }
    if model.count("attention.sliding_window", 0):
        window = {"sliding_window": model.count("attention.sliding_window")}
        return {**fields, **biases, **window, "architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    return {**fields, **biases, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}


def _qwen(name: str, model_type: str) -> Callable[[Described], Json]:
    def fields(model: Described) -> Json:
        made = {**_common(model), "architectures": [name], "model_type": model_type, "use_sliding_window": False}
        return made | {"attention_bias": model.has("blk.0.attn_output.bias")}

    return fields


def _qwen_moe(name: str, model_type: str, renormalised: bool) -> Callable[[Described], Json]:
    def fields(model: Described) -> Json:
        dense = [index for index in range(model.layers) if not model.has(f"blk.{index}.ffn_gate_inp.weight")]
        made = {
            **_qwen(name, model_type)(model),
            "num_experts": model.experts,
            "num_experts_per_tok": model.count("expert_used_count"),
            "moe_intermediate_size": _expert_size(model),
            "norm_topk_prob": renormalised,
            "decoder_sparse_step": 1,
            "mlp_only_layers": dense,
        }
        if model_type == "qwen2_moe":
            made["qkv_bias"] = model.has("blk.0.attn_q.bias")
            made["shared_expert_intermediate_size"] = _rows_of_first(model, "ffn_gate_shexp.weight")
        return made

    return fields


def _expert_size(model: Described) -> int:
    """The first converters do not write it; the experts' own shape says it, too."""
    if model.get("expert_feed_forward_length") is not None:
        return model.count("expert_feed_forward_length")
    return _rows_of_first(model, "ffn_gate_exps.weight")


def _rows_of_first(model: Described, tensor: str) -> int:
    for index in range(model.layers):
        shape = model.shapes.get(f"blk.{index}.{tensor}", ())
        if len(shape) >= 2:
            return shape[-2]
    raise CheckpointError(f"{model.path} has no tensor blk.*.{tensor}")


def _gemma(name: str, model_type: str) -> Callable[[Described], Json]:
    def fields(model: Described) -> Json:
        made = {**_common(model), "architectures": [name], "model_type": model_type}
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
        **_pattern(model),
        "rope_local_base_freq": model.number("rope.freq_base_swa", 10000.0),
    }
    if model.get("final_logit_softcapping") is not None:
        made["final_logit_softcapping"] = model.number("final_logit_softcapping")
    return made


def _pattern(model: Described) -> Json:
    """Period of the layers without a sliding window, or the type of each layer."""
    windows = model.get("attention.sliding_window_pattern")
    if not isinstance(windows, list):
        return {"sliding_window_pattern": model.count("attention.sliding_window_pattern", 6)}
    if len(windows) != model.layers:
        raise model.bad("attention.sliding_window_pattern", windows)
    return {"layer_types": ["sliding_attention" if window else "full_attention" for window in windows]}


def _score_size(model: Described, largest: int) -> int:
    """Square of the scores' divisor: no key says it; llama.cpp knows the 27B models by their layers."""
    heads, hidden = model.heads, model.count("embedding_length")
    by_width = model.layers == largest
    return hidden // heads if by_width else model.count("attention.key_length")


def _phi3(model: Described) -> Json:
    made = {**_common(model), "architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}
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
    # The keys with "mla" are of files whose other lengths are those of the latents.
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
        "first_k_dense_replace": model.count("leading_dense_block_count", 0),
        "n_routed_experts": model.experts,
        "num_experts_per_tok": model.count("expert_used_count"),
        "n_shared_experts": model.count("expert_shared_count"),
        "moe_intermediate_size": _expert_size(model),
        "routed_scaling_factor": model.number("expert_weights_scale", 1.0),
        "norm_topk_prob": bool(model.get("expert_weights_norm")),
        "rope_theta": model.number("rope.freq_base", 10000.0),
        **_deepseek_rope(model),
        **_deepseek_gate(model),
    }


def _deepseek_rope(model: Described) -> Json:
    scaling = _scaling(model)
    if scaling is None or scaling["rope_type"] != "yarn":
        return {} if scaling is None else {"rope_scaling": scaling}
    if model.get("rope.scaling.yarn_log_multiplier") is not None:
        # written as a tenth of it
        scale = round(10 * model.number("rope.scaling.yarn_log_multiplier"), 6)
        scaling |= {"mscale": scale, "mscale_all_dim": scale}
    return {"rope_scaling": scaling}


def _deepseek_gate(model: Described) -> Json:
    gate = model.count("expert_gating_func", 0) or _SOFTMAX
    groups: Json = {}
    if model.get("expert_group_count") is not None:
        groups = {"n_group": model.count("expert_group_count"), "topk_group": model.count("expert_group_used_count")}
    if not groups and (gate == _SIGMOID or model.experts == _GROUP_LIMITED_V2):
        raise model.bad("expert_group_count", None)
    if gate == _SIGMOID:
        named = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
        return {**named, **groups, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    if gate != _SOFTMAX:
        raise model.bad("expert_gating_func", gate)
    method = "group_limited_greedy" if groups.get("n_group", 1) > 1 else "greedy"
    named = {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2"}
    return {**named, **groups, "scoring_func": "softmax", "topk_method": method}


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
    }
)
