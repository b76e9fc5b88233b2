"""A short version of llama.cpp's conversion of Gemma 3n and Gemma 4 tensors. The files of the converter have the same
bytes: ``tests/goldens/gguf`` has their checksums."""

import re
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


def tensors_of_file(config: Json, metadata: Json, tensors: Mapping[str, np.ndarray]) -> Tensors:
    """Return the tensors of the GGUF file that has ``metadata``."""
    made: Tensors = {}
    stacks: dict[str, list[np.ndarray]] = {}
    for name, tensor in tensors.items():
        if found := _STREAM.fullmatch(name):
            stacks.setdefault(_STREAMS[found[1]], []).append(tensor)
            assert len(stacks[_STREAMS[found[1]]]) == int(found[2]) + 1
        else:
            made |= _one(name, tensor)
    made |= {name: np.stack(each) for name, each in stacks.items()}
    if config["model_type"] == "gemma3n_text":
        table = made["per_layer_token_embd.weight"]
        made["per_layer_token_embd.weight"] = np.pad(table, ((0, config["vocab_size"] - len(table)), (0, 0)))
    else:
        share = config["rope_parameters"]["full_attention"]["partial_rotary_factor"]
        made["rope_freqs.weight"] = _frequencies(metadata["gemma4.attention.key_length"], share)
    return {name: np.ascontiguousarray(tensor, np.float32) for name, tensor in made.items()}


def _one(name: str, tensor: np.ndarray) -> Tensors:
    found = _INNER.fullmatch(name)
    layer, inner = (f"blk.{found[1]}.", found[2]) if found else ("", name)
    if inner in _WHOLE:
        return {layer + _WHOLE[inner]: tensor}
    stem, _, ending = inner.rpartition(".")
    return {f"{layer}{_NAMES[stem]}.{ending}": tensor}


def _frequencies(head_dim: int, share: float) -> np.ndarray:
    half = head_dim // 2
    turning = int(half * share)
    return np.asarray([1.0] * turning + [1e30] * (half - turning), np.float32)
