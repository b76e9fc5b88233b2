"""Names of google-tunix' models, the paths of their `nnx` parameters: llama3, qwen2, qwen3, gemma (1 and 2), gemma3."""

from __future__ import annotations

from collections.abc import Mapping

from jaxinfer.weights.trainers.dense import Dense, Place, Table, table_of
from jaxinfer.weights.trainers.rows import Template

_MLP = {
    "mlp.gate_proj.weight": Template("mlp.gate_proj.kernel", "DF", "FD"),
    "mlp.up_proj.weight": Template("mlp.up_proj.kernel", "DF", "FD"),
    "mlp.down_proj.weight": Template("mlp.down_proj.kernel", "FD", "DF"),
}
_EMBED = {"model.embed_tokens.weight": Template("embedder.input_embedding", "VD")}

_TOP = _EMBED | {
    "model.norm.weight": Template("final_norm.w", "D"),
    "lm_head.weight": Template("lm_head.w", "DV", "VD"),
}
_LAYER = _MLP | {
    "self_attn.q_proj.weight": Template("attn.q_proj.w", "DNH", "NHD"),
    "self_attn.k_proj.weight": Template("attn.k_proj.w", "DKH", "KHD"),
    "self_attn.v_proj.weight": Template("attn.v_proj.w", "DKH", "KHD"),
    "self_attn.o_proj.weight": Template("attn.o_proj.w", "NHD", "DNH"),
    "self_attn.q_proj.bias": Template("attn.q_bias", "Q"),
    "self_attn.k_proj.bias": Template("attn.k_bias", "P"),
    "self_attn.v_proj.bias": Template("attn.v_bias", "P"),
    "self_attn.q_norm.weight": Template("attn.q_norm.w", "H"),
    "self_attn.k_norm.weight": Template("attn.k_norm.w", "H"),
    "input_layernorm.weight": Template("input_layernorm.w", "D"),
    "post_attention_layernorm.weight": Template("post_attention_layernorm.w", "D"),
}

_GEMMA_TOP = _EMBED | {"model.norm.weight": Template("final_norm.scale", "D")}
_GEMMA_LAYER = _MLP | {
    "self_attn.o_proj.weight": Template("attn.attn_vec_einsum.w", "NHD", "DNH"),
    "self_attn.q_norm.weight": Template("attn._query_norm.scale", "H"),
    "self_attn.k_norm.weight": Template("attn._key_norm.scale", "H"),
    "input_layernorm.weight": Template("pre_attention_norm.scale", "D"),
    "pre_feedforward_layernorm.weight": Template("pre_ffw_norm.scale", "D"),
    "post_feedforward_layernorm.weight": Template("post_ffw_norm.scale", "D"),
}
_FUSED = {f"self_attn.{name}_proj.weight": Template("attn.qkv_einsum.w", "SNDH", "NHD") for name in "qkv"}
_GROUPED = {
    "self_attn.q_proj.weight": Template("attn.q_einsum.w", "NDH", "NHD"),
    **{f"self_attn.{name}_proj.weight": Template("attn.kv_einsum.w", "SKDH", "KHD") for name in "kv"},
}


def tables(dense: Dense) -> list[Table]:
    """Return the rows of a model."""
    top, layer = (_GEMMA_TOP, _gemma_layer(dense)) if dense.gemma else (_TOP, _LAYER)
    return [table_of(dense, top, layer, lambda index: Place(f"layers.{index}."))]


def _gemma_layer(dense: Dense) -> Mapping[str, Template]:
    projections = _FUSED if dense.sizes["N"] == dense.sizes["K"] else _GROUPED
    sandwich = dense.has("pre_feedforward_layernorm.weight")
    after = (
        ("post_attention_norm" if dense.has("self_attn.q_norm.weight") else "post_attn_norm")
        if sandwich
        else "pre_ffw_norm"
    )
    return {**_GEMMA_LAYER, **projections, "post_attention_layernorm.weight": Template(f"{after}.scale", "D")}
