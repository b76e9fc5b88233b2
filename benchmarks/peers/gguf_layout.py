"""Names and layouts of a Llama's tensors in llama.cpp. Without the `gguf` package, so that a test can check them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

_WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def unsupported(config: Mapping[str, Any]) -> str | None:
    """Return why the writer does not support this model, or None."""
    if config.get("model_type") != "llama":
        return f"the GGUF writer knows model_type llama only, not {config.get('model_type')!r}"
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if scaling.get("rope_type", scaling.get("type", "default")) != "default":
        return f"the GGUF writer does not know RoPE scaling {scaling!r}"
    if config.get("attention_bias") or config.get("mlp_bias"):
        return "the GGUF writer does not know biases"
    return None


def gguf_name(name: str) -> str:
    """Translate a tensor name: ``model.layers.3.mlp.up_proj.weight`` to ``blk.3.ffn_up.weight``, and so on."""
    if name in _WHOLE:
        return _WHOLE[name]
    layer, part = name.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
    return f"blk.{layer}.{_LAYER[part]}.weight"


def rotate_pairs(name: str, values: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    """Reorder query and key rows for llama.cpp: it rotates neighbours (2i, 2i+1) where transformers rotates halves."""
    heads = config["num_attention_heads"]
    if name.endswith("k_proj.weight"):
        heads = config.get("num_key_value_heads") or heads
    elif not name.endswith("q_proj.weight"):
        return values
    rows, columns = values.shape
    halves = values.reshape(heads, 2, rows // heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, columns))
