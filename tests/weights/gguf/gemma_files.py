"""What llama.cpp's converter makes of Gemma 3n and Gemma 4: restated from ``Gemma3NModel`` and ``Gemma4Model`` of its
text, with names and keys of its package ``gguf`` 0.19."""

import re
import statistics
from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.weights.gguf.convert import COMMON

Tensors = dict[str, np.ndarray]
Json = Mapping[str, Any]

_NAMES = COMMON | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "router.proj": "ffn_gate_inp",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "altup.correction_coefs": "altup_correct_coef",
    "altup.prediction_coefs": "altup_predict_coef",
    "altup.modality_router": "altup_router",
    "altup.router_norm": "altup_router_norm",
    "laurel.linear_left": "laurel_l",
    "laurel.linear_right": "laurel_r",
    "laurel.post_laurel_norm": "laurel_post_norm",
}
_WHOLE = {
    "altup.correct_output_scale": "altup_correct_scale.weight",
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
}
_INNER = re.compile(r"model\.layers\.(\d+)\.(.*)")
_STREAM = re.compile(r"model\.altup_(projections|unembed_projections)\.(\d+)\.weight")
_STREAMS = {"projections": "altup_proj.weight", "unembed_projections": "altup_unembd_proj.weight"}


def converted(config: Json, tensors: Mapping[str, np.ndarray]) -> tuple[dict[str, Any], Tensors]:
    """Metadata and tensors of the file. ``config``: of the text, with all fields that the converter asks for."""
    made: Tensors = {}
    stacks: dict[str, list[np.ndarray]] = {}
    for name, tensor in tensors.items():
        if found := _STREAM.fullmatch(name):
            stacks.setdefault(_STREAMS[found[1]], []).append(tensor)
            assert len(stacks[_STREAMS[found[1]]]) == int(found[2]) + 1
        else:
            made |= _one(name, tensor)
    made |= {name: np.stack(each) for name, each in stacks.items()}
    if "per_layer_token_embd.weight" in made and config["model_type"] == "gemma3n_text":
        table = made["per_layer_token_embd.weight"]
        made["per_layer_token_embd.weight"] = np.pad(table, ((0, config["vocab_size"] - len(table)), (0, 0)))
    if config["model_type"] == "gemma4_text":
        made["rope_freqs.weight"] = _frequencies(config)
    arch = config["model_type"].removesuffix("_text")
    keys = _keys(config) | (_of_gemma4(config) if arch == "gemma4" else _of_gemma3n(config))
    metadata = {f"{arch}.{key}": value for key, value in keys.items() if value is not None}
    arrays = {name: np.ascontiguousarray(tensor, np.float32) for name, tensor in made.items()}
    return {"general.architecture": arch, **metadata}, arrays


def _one(name: str, tensor: np.ndarray) -> Tensors:
    found = _INNER.fullmatch(name)
    layer, inner = (f"blk.{found[1]}.", found[2]) if found else ("", name)
    if inner in _WHOLE:
        return {layer + _WHOLE[inner]: tensor}
    stem, _, ending = inner.rpartition(".")
    return {f"{layer}{_NAMES[stem]}.{ending}": tensor}


def _keys(config: Json) -> dict[str, Any]:
    return {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config["layer_types"]],
        "attention.shared_kv_layers": config["num_kv_shared_layers"],
        "embedding_length_per_layer_input": config.get("hidden_size_per_layer_input") or 0,
        "final_logit_softcapping": config.get("final_logit_softcapping"),
    }


def _of_gemma3n(config: Json) -> dict[str, Any]:
    normal = statistics.NormalDist()
    shares = config["activation_sparsity_pattern"]
    return {
        "rope.freq_base": config["rope_theta"],
        "rope.freq_base_swa": config["rope_local_base_freq"],
        "altup.active_idx": config["altup_active_idx"],
        "altup.num_inputs": config["altup_num_inputs"],
        "activation_sparsity_scale": [normal.inv_cdf(share) if share else float("-inf") for share in shares],
    }


def _of_gemma4(config: Json) -> dict[str, Any]:
    wide, count, shared = config["global_head_dim"], config["num_hidden_layers"], config["num_kv_shared_layers"]
    own, hidden, near = config["num_key_value_heads"], config["intermediate_size"], config["layer_types"]
    more = config.get("num_global_key_value_heads")
    sizes = [hidden if index < count - shared else 2 * hidden for index in range(count)]
    rope = config["rope_parameters"]
    return {
        "attention.key_length": wide,
        "attention.value_length": wide,
        "attention.key_length_swa": config["head_dim"],
        "attention.value_length_swa": config["head_dim"],
        "feed_forward_length": sizes if config.get("use_double_wide_mlp") else hidden,
        "attention.head_count_kv": own if more is None else [own if kind[0] == "s" else more for kind in near],
        "rope.dimension_count": wide,
        "rope.dimension_count_swa": config["head_dim"],
        "rope.freq_base": rope["full_attention"]["rope_theta"],
        "rope.freq_base_swa": rope["sliding_attention"]["rope_theta"],
        "expert_count": config.get("num_experts"),
        "expert_used_count": config.get("top_k_experts"),
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
    }


def _frequencies(config: Json) -> np.ndarray:
    half = config["global_head_dim"] // 2
    turning = int(half * config["rope_parameters"]["full_attention"]["partial_rotary_factor"])
    return np.asarray([1.0] * turning + [1e30] * (half - turning), np.float32)
