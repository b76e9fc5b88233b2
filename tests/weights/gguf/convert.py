"""A short version of llama.cpp's converter from Hugging Face checkpoints to GGUF, to test the way back."""

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

Tensors = dict[str, np.ndarray]
Json = Mapping[str, Any]

COMMON = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
EXPERTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
_OWN: dict[str, dict[str, str]] = {
    "mixtral": {"block_sparse_moe.gate": "ffn_gate_inp"},
    "qwen2_moe": {
        "mlp.gate": "ffn_gate_inp",
        "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
        **{f"mlp.shared_expert.{ours}": f"ffn_{theirs}_shexp" for ours, theirs in EXPERTS.items()},
    },
    "qwen3_moe": {"mlp.gate": "ffn_gate_inp"},
    "gemma2": {
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
    "phi3": {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
    "gpt2": {
        "transformer.wte": "token_embd",
        "transformer.wpe": "position_embd",
        "transformer.ln_f": "output_norm",
        "ln_1": "attn_norm",
        "ln_2": "ffn_norm",
        "attn.c_attn": "attn_qkv",
        "attn.c_proj": "attn_output",
        "mlp.c_fc": "ffn_up",
        "mlp.c_proj": "ffn_down",
    },
    "falcon": {
        "transformer.word_embeddings": "token_embd",
        "transformer.ln_f": "output_norm",
        "ln_mlp": "attn_norm",
        "ln_attn": "attn_norm_2",
        "self_attention.query_key_value": "attn_qkv",
        "self_attention.dense": "attn_output",
        "mlp.dense_h_to_4h": "ffn_up",
        "mlp.dense_4h_to_h": "ffn_down",
    },
    "deepseek_v2": {
        "self_attn.q_a_proj": "attn_q_a",
        "self_attn.q_a_layernorm": "attn_q_a_norm",
        "self_attn.q_b_proj": "attn_q_b",
        "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
        "self_attn.kv_a_layernorm": "attn_kv_a_norm",
        "self_attn.kv_b_proj": "attn_kv_b",
        "mlp.gate": "ffn_gate_inp",
        "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
        **{f"mlp.shared_experts.{ours}": f"ffn_{theirs}_shexp" for ours, theirs in EXPERTS.items()},
    },
}
_OWN |= {"gemma3_text": _OWN["gemma2"], "deepseek_v3": _OWN["deepseek_v2"]}
_ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
}


def architecture(model_type: str) -> str:
    return _ARCHITECTURES.get(model_type, model_type)


_WINDOWED = ("mistral", "mixtral", "phi3", "gemma2", "gemma3_text")


def converted(
    config: Json, tensors: Mapping[str, np.ndarray], eps: float, split_latents: bool = False
) -> tuple[dict[str, Any], Tensors]:
    """Return metadata and tensors of the GGUF file.

    Args:
        eps: epsilon of the norms, which config.json may leave out.
        split_latents: split DeepSeek's ``kv_b_proj`` into keys and values, as newer converters do.
    """
    kind = config["model_type"]
    arch = architecture(kind)
    made: Tensors = {}
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name, tensor in tensors.items():
        found = re.fullmatch(r"model\.layers\.(\d+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight", name)
        if found:
            stack = f"blk.{found[1]}.ffn_{EXPERTS[found[3]]}_exps.weight"
            stacks.setdefault(stack, {})[int(found[2])] = tensor
        else:
            made |= _one(config, kind, name, tensor, split_latents)
    made |= {name: np.stack([experts[index] for index in sorted(experts)]) for name, experts in stacks.items()}
    values, factors = _metadata(config, kind, split_latents)
    values |= {f"attention.layer_norm{'' if kind in ('gpt2', 'falcon') else '_rms'}_epsilon": eps}
    return {"general.architecture": arch, **{f"{arch}.{key}": value for key, value in values.items()}}, made | factors


def _one(config: Json, kind: str, name: str, tensor: np.ndarray, split_latents: bool) -> Tensors:
    names = COMMON | _OWN.get(kind, {})
    found = re.fullmatch(r"(?:model\.layers|transformer\.h)\.(\d+)\.(.*)", name)
    layer, inner = (f"blk.{found[1]}.", found[2]) if found else ("", name)
    stem, _, ending = inner.rpartition(".")
    ours = layer + (names[inner] if inner in names else f"{names[stem]}.{ending}")
    heads = config.get("num_attention_heads")
    if kind in ("llama", "mistral", "mixtral") and stem in ("self_attn.q_proj", "self_attn.k_proj"):
        count = heads if stem == "self_attn.q_proj" else config.get("num_key_value_heads") or heads
        tensor = tensor.reshape(count, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
    if kind.startswith("gemma") and name.endswith("norm.weight"):
        tensor = tensor + np.float32(1)
    if kind == "gpt2" and tensor.ndim == 2 and layer:
        tensor = tensor.T
    if kind == "falcon" and "query_key_value" in name:
        kv_heads = _falcon_kv_heads(config)
        parts = tensor.reshape(kv_heads, heads // kv_heads + 2, -1, *tensor.shape[1:])
        tensor = np.concatenate(
            [part.reshape(-1, *tensor.shape[1:]) for part in (parts[:, :-2], parts[:, -2], parts[:, -1])]
        )
    if stem == "mlp.shared_expert_gate":
        tensor = tensor[0]
    if split_latents and stem == "self_attn.kv_b_proj":
        nope = config["qk_nope_head_dim"]
        parts = tensor.reshape(heads, -1, tensor.shape[-1])
        return {f"{layer}attn_k_b.weight": parts[:, :nope].swapaxes(1, 2), f"{layer}attn_v_b.weight": parts[:, nope:]}
    return {ours: np.ascontiguousarray(tensor)}


def _falcon_kv_heads(config: Json) -> int:
    if config.get("new_decoder_architecture"):
        return config.get("num_kv_heads") or config["num_attention_heads"]
    return 1 if config.get("multi_query", True) else config["num_attention_heads"]


def _metadata(config: Json, kind: str, split_latents: bool) -> tuple[dict[str, Any], Tensors]:
    def first(*names: str) -> Any:
        return next((config[name] for name in names if config.get(name) is not None), None)

    heads = first("num_attention_heads", "n_head")
    hidden = first("hidden_size", "n_embd")
    head_dim = first("head_dim") or hidden // heads
    kv_heads = _falcon_kv_heads(config) if kind == "falcon" else first("num_key_value_heads")
    values = {
        "block_count": first("num_hidden_layers", "n_layer"),
        "context_length": first("max_position_embeddings", "n_positions"),
        "embedding_length": hidden,
        "feed_forward_length": first("intermediate_size", "n_inner", "ffn_hidden_size") or 4 * hidden,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.sliding_window": first("sliding_window") if kind in _WINDOWED else None,
        "attn_logit_softcapping": first("attn_logit_softcapping"),
        "final_logit_softcapping": first("final_logit_softcapping"),
        "expert_count": first("num_local_experts", "num_experts", "n_routed_experts"),
        "expert_used_count": first("num_experts_per_tok"),
        "expert_feed_forward_length": first("moe_intermediate_size"),
    }
    if kind == "gemma3_text" and config.get("layer_types"):
        values["attention.sliding_window_pattern"] = [one == "sliding_attention" for one in config["layer_types"]]
    if kind.startswith("deepseek"):
        values |= _latent_values(config, split_latents)
    elif "head_dim" in config or kind.startswith("gemma"):
        values |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    scaling, factors = _rope(config, head_dim)
    return {key: value for key, value in (values | scaling).items() if value is not None}, factors


def _latent_values(config: Json, split_latents: bool) -> dict[str, Any]:
    rope, value = config["qk_rope_head_dim"], config["v_head_dim"]
    key = config["qk_nope_head_dim"] + rope
    own: dict[str, Any] = {"attention.key_length": key, "attention.value_length": value}
    if split_latents:
        own = {
            "attention.head_count_kv": 1,
            "attention.key_length": config["kv_lora_rank"] + rope,
            "attention.value_length": config["kv_lora_rank"],
            "attention.key_length_mla": key,
            "attention.value_length_mla": value,
        }
    return own | {
        "attention.q_lora_rank": config.get("q_lora_rank"),
        "attention.kv_lora_rank": config["kv_lora_rank"],
        "rope.dimension_count": rope,
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_weights_scale": float(config.get("routed_scaling_factor", 1.0)),
        "expert_weights_norm": config.get("norm_topk_prob", False),
        "expert_gating_func": 2 if config["model_type"] == "deepseek_v3" else 1,
        "expert_group_count": config.get("n_group"),
        "expert_group_used_count": config.get("topk_group"),
    }


def _rope(config: Json, head_dim: int) -> tuple[dict[str, Any], Tensors]:
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    own = given.get("full_attention", given)
    theta = own.get("rope_theta") or config.get("rope_theta") or 10000.0
    values: dict[str, Any] = {"rope.freq_base": float(theta)}
    if "sliding_attention" in given:
        values["rope.freq_base_swa"] = float(given["sliding_attention"]["rope_theta"])
    if config.get("rope_local_base_freq"):
        values["rope.freq_base_swa"] = float(config["rope_local_base_freq"])
    partial = own.get("partial_rotary_factor") or config.get("partial_rotary_factor")
    rotated = int(head_dim * partial) if partial else head_dim
    if partial:
        values["rope.dimension_count"] = rotated
    kind = own.get("rope_type", own.get("type", "default"))
    original = own.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    if kind in ("linear", "yarn"):
        values |= {"rope.scaling.type": kind, "rope.scaling.factor": float(own["factor"])}
    if kind == "yarn":
        values["rope.scaling.original_context_length"] = original or config["max_position_embeddings"]
        values |= {
            f"rope.scaling.yarn_{name}": float(own[name]) for name in ("beta_fast", "beta_slow") if own.get(name)
        }
        if own.get("mscale_all_dim"):
            values["rope.scaling.yarn_log_multiplier"] = 0.1 * own["mscale_all_dim"]
    if kind == "llama3":
        return values, {"rope_freqs.weight": factors_of_llama3(own, theta, head_dim)}
    if kind in ("longrope", "su"):
        values |= {"rope.scaling.type": "longrope", "rope.scaling.original_context_length": original}
        if own.get("attention_factor"):
            values["rope.scaling.attn_factor"] = own["attention_factor"]
        lists = {name: np.asarray(own[f"{name}_factor"], np.float32) for name in ("short", "long")}
        return values, {f"rope_factors_{name}.weight": factors for name, factors in lists.items()}
    return values, {}


def factors_of_llama3(own: Json, base: float, dim: int) -> np.ndarray:
    factors = []
    for index in range(0, dim, 2):
        wavelength = 2 * math.pi * base ** (index / dim)
        low = own["original_max_position_embeddings"] / own["low_freq_factor"]
        high = own["original_max_position_embeddings"] / own["high_freq_factor"]
        if wavelength < high:
            factors.append(1.0)
        elif wavelength > low:
            factors.append(own["factor"])
        else:
            turns = own["original_max_position_embeddings"] / wavelength
            smooth = (turns - own["low_freq_factor"]) / (own["high_freq_factor"] - own["low_freq_factor"])
            factors.append(1 / ((1 - smooth) / own["factor"] + smooth))
    return np.asarray(factors, np.float32)
