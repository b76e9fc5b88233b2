"""A short version of llama.cpp's conversion of newer architectures' tensors. The files of the converter have the same
bytes: ``tests/goldens/gguf`` has their checksums."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.weights.gguf.convert import COMMON, EXPERTS

Tensors = dict[str, np.ndarray]
Json = Mapping[str, Any]

_LATE = {"post_attention_layernorm": "post_attention_norm"}
_BEHIND = {**_LATE, "post_feedforward_layernorm": "post_ffw_norm"}
_FUSED_GATE = {"mlp.gate_up_proj": "ffn_up"}
_SHARED = {f"mlp.shared_experts.{ours}": f"ffn_{theirs}_shexp" for ours, theirs in EXPERTS.items()}
_ROUTER = {"mlp.gate": "ffn_gate_inp", "mlp.gate.e_score_correction_bias": "exp_probs_b.bias"}
_SPARSE_BLOCK = {
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.e_score_correction_bias": "exp_probs_b.bias",
}
_LATENT = {
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
}
OWN: dict[str, dict[str, str]] = {
    "gpt_oss": {**_LATE, "self_attn.sinks": "attn_sinks.weight", "mlp.router": "ffn_gate_inp"},
    "llama4_text": {
        "feed_forward.router": "ffn_gate_inp",
        **{f"feed_forward.{ours}": f"ffn_{theirs}" for ours, theirs in EXPERTS.items()},
        **{f"feed_forward.shared_expert.{ours}": f"ffn_{theirs}_shexp" for ours, theirs in EXPERTS.items()},
    },
    "olmo2": _BEHIND,
    "olmo3": _BEHIND,
    "exaone4": _BEHIND,
    "phi": {
        "self_attn.dense": "attn_output",
        "mlp.fc1": "ffn_up",
        "mlp.fc2": "ffn_down",
        "model.final_layernorm": "output_norm",
    },
    "glm": _FUSED_GATE,
    "glm4": {
        **_FUSED_GATE,
        "post_self_attn_layernorm": "post_attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "post_mlp_layernorm": "post_ffw_norm",
    },
    "ernie4_5_moe": {
        "mlp.gate": "ffn_gate_inp",
        "mlp.moe_statics.e_score_correction_bias": "exp_probs_b.bias",
        **_SHARED,
    },
    "hunyuan_v1_dense": {"self_attn.query_layernorm": "attn_q_norm", "self_attn.key_layernorm": "attn_k_norm"},
    "gpt_neox": {
        "gpt_neox.embed_in": "token_embd",
        "gpt_neox.final_layer_norm": "output_norm",
        "embed_out": "output",
        "attention.query_key_value": "attn_qkv",
        "attention.dense": "attn_output",
        "mlp.dense_h_to_4h": "ffn_up",
        "mlp.dense_4h_to_h": "ffn_down",
    },
    "starcoder2": {"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"},
    "seed_oss": _LATE,
    "glm4_moe": {**_LATE, **_ROUTER, **_SHARED},
    "olmoe": {"mlp.gate": "ffn_gate_inp"},
    "phimoe": _SPARSE_BLOCK,
    "minimax_m2": _SPARSE_BLOCK,
    "glm4_moe_lite": {**_LATENT, **_ROUTER, **_SHARED},
    "youtu": _LATENT,
}
_TURNED = ("granite", "ministral3", "smollm3")
_ONE_EXPERT = re.compile(r"model\.layers\.(\d+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")
_INNER = re.compile(r"(?:model|gpt_neox)\.layers\.(\d+)\.(.*)")


def tensors_of_file(config: Json, tensors: Mapping[str, np.ndarray]) -> Tensors:
    """Return the tensors of the GGUF file, without those of its rotary embedding."""
    made: Tensors = {}
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name, tensor in tensors.items():
        if found := _ONE_EXPERT.fullmatch(name):
            stack = f"blk.{found[1]}.ffn_{EXPERTS[found[3]]}_exps.weight"
            stacks.setdefault(stack, {})[int(found[2])] = tensor
        else:
            made |= _one(config, name, tensor)
    made |= {name: np.stack([experts[index] for index in sorted(experts)]) for name, experts in stacks.items()}
    return {name: np.ascontiguousarray(tensor) for name, tensor in made.items()}


def _one(config: Json, name: str, tensor: np.ndarray) -> Tensors:
    kind, found = config["model_type"], _INNER.fullmatch(name)
    layer, inner = (f"blk.{found[1]}.", found[2]) if found else ("", name)
    stem, _, ending = inner.rpartition(".")
    if ".experts." in inner:
        return {layer + part: array for part, array in _stack(kind, ending, tensor)}
    if stem == "self_attn.kv_b_proj":
        nope, heads = config["qk_nope_head_dim"], config["num_attention_heads"]
        parts = tensor.reshape(heads, -1, tensor.shape[-1])
        return {f"{layer}attn_k_b.weight": parts[:, :nope].swapaxes(1, 2), f"{layer}attn_v_b.weight": parts[:, nope:]}
    names = COMMON | OWN.get(kind, {})
    ours = names[inner] if inner in names else f"{names[stem]}.{ending}"
    return {layer + ours: _moved(config, kind, stem, tensor)}


def _moved(config: Json, kind: str, stem: str, tensor: np.ndarray) -> np.ndarray:
    heads = config["num_attention_heads"]
    counts = {"self_attn.q_proj": heads, "self_attn.k_proj": config.get("num_key_value_heads", heads)}
    if kind in _TURNED and stem in counts:
        return tensor.reshape(counts[stem], 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
    if stem == "attention.query_key_value":
        return tensor.reshape(heads, 3, -1, *tensor.shape[1:]).swapaxes(0, 1).reshape(tensor.shape)
    return tensor


def _stack(kind: str, ending: str, tensor: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """Return the expert tensors of gpt-oss, whose gate and up rows alternate, or of Llama 4, where they are halves."""
    bias, upright = ending.endswith("_bias"), tensor if ending.endswith("_bias") else tensor.swapaxes(1, 2)
    form = f"ffn_{{}}_exps.{'bias' if bias else 'weight'}"
    if ending.startswith("down_proj"):
        return [(form.format("down"), upright)]
    half = upright.shape[1] // 2
    cuts = (slice(0, None, 2), slice(1, None, 2)) if kind == "gpt_oss" else (slice(half), slice(half, None))
    return [(form.format(part), upright[:, cut]) for part, cut in zip(("gate", "up"), cuts, strict=True)]
