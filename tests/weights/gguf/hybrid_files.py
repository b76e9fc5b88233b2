"""A restatement of llama.cpp's conversion of Qwen3-Next and Qwen3.5 (``Qwen3NextModel`` and
``_LinearAttentionVReorderBase``), with names and keys of its package ``gguf`` 0.19."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.weights.gguf.convert import COMMON, EXPERTS

Tensors = dict[str, np.ndarray]
Json = Mapping[str, Any]

ARCHITECTURES = {"qwen3_next": "qwen3next", "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe"}
_NAMES = COMMON | {
    "post_attention_layernorm": "post_attention_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{f"mlp.shared_expert.{ours}": f"ffn_{theirs}_shexp" for ours, theirs in EXPERTS.items()},
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
}
_EXPERT = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(\w+)\.weight")
_INNER = re.compile(r"model\.layers\.(\d+)\.(.*)")


def converted(config: Json, tensors: Mapping[str, np.ndarray]) -> tuple[dict[str, Any], Tensors]:
    """Return metadata and tensors of the file."""
    made: Tensors = {}
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name, tensor in tensors.items():
        if found := _EXPERT.fullmatch(name):
            stacks.setdefault(f"blk.{found[1]}.ffn_{EXPERTS[found[3]]}_exps.weight", {})[int(found[2])] = tensor
        else:
            made |= _one(config, name, tensor)
    made |= {name: np.stack([experts[index] for index in sorted(experts)]) for name, experts in stacks.items()}
    squeezed = {name: tensor.squeeze() for name, tensor in made.items()}
    return metadata(config), {name: np.ascontiguousarray(tensor, np.float32) for name, tensor in squeezed.items()}


def metadata(config: Json) -> dict[str, Any]:
    rope = config.get("rope_parameters") or config
    keys = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config.get("intermediate_size"),
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": rope["rope_theta"],
        "rope.dimension_count": int(config["head_dim"] * rope.get("partial_rotary_factor", 0.25)),
        "expert_count": config.get("num_experts"),
        "expert_used_count": config.get("num_experts_per_tok"),
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
        "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": config["linear_num_value_heads"],
        "ssm.inner_size": config["linear_value_head_dim"] * config["linear_num_value_heads"],
        "full_attention_interval": config.get("full_attention_interval", 4),
    }
    arch = ARCHITECTURES[config["model_type"]]
    if arch != "qwen3next":
        keys["rope.dimension_sections"] = [11, 11, 10, 0]
    named = {f"{arch}.{key}": value for key, value in keys.items() if value is not None}
    return {"general.architecture": arch, **named}


def _one(config: Json, name: str, tensor: np.ndarray) -> Tensors:
    found = _INNER.fullmatch(name)
    layer, inner = (f"blk.{found[1]}.", found[2]) if found else ("", name)
    if config["model_type"] != "qwen3_next" and inner.startswith("linear_attn."):
        tensor = _tiled(config, inner, tensor)
    if inner == "linear_attn.A_log":
        return {layer + "ssm_a": -np.exp(tensor)}
    if inner == "linear_attn.dt_bias":
        return {layer + "ssm_dt.bias": tensor}
    if inner == "linear_attn.in_proj_qkvz.weight":
        parts = _kinds(config, tensor)
        return {layer + "attn_qkv.weight": np.concatenate(parts[:3]), layer + "attn_gate.weight": parts[3]}
    stem, _, ending = inner.rpartition(".")
    if stem.endswith("norm") and stem != "linear_attn.norm":
        tensor = tensor + np.float32(1)
    return {f"{layer}{_NAMES[stem]}.{ending}": tensor}


def _kinds(config: Json, tensor: np.ndarray) -> list[np.ndarray]:
    """Split rows grouped by key head into queries, keys, values and gates of all heads."""
    keys, size = config["linear_num_key_heads"], config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] // keys * config["linear_value_head_dim"]
    parts = np.split(tensor.reshape(keys, -1, tensor.shape[-1]), [size, 2 * size, 2 * size + values], axis=1)
    return [part.reshape(-1, tensor.shape[-1]) for part in parts]


def _tiled(config: Json, name: str, tensor: np.ndarray) -> np.ndarray:
    keys = config["linear_num_key_heads"]
    values = config["linear_num_value_heads"] // keys
    first = 2 * keys * config["linear_key_head_dim"] if "in_proj_qkv" in name or "conv1d" in name else 0
    if name == "linear_attn.norm.weight":
        return tensor
    if name == "linear_attn.out_proj.weight":
        return tensor.reshape(tensor.shape[0], keys, values, -1).swapaxes(1, 2).reshape(tensor.shape)
    rest = tensor[first:]
    moved = rest.reshape(keys, values, -1, *rest.shape[1:]).swapaxes(0, 1).reshape(rest.shape)
    return np.concatenate([tensor[:first], moved])
