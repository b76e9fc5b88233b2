"""Tensor names by architecture: of GGUF files (``gguf-py/gguf/tensor_mapping.py``) and of checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from jaxinfer.weights.gguf.name_rules import Names, fused_kv_heads, grouped, in_numbers, turned_keys, turned_queries
from jaxinfer.weights.gguf.recurrent import (
    by_heads,
    channels,
    decays,
    tiled,
    tiled_channels,
    tiled_columns,
    tiled_decays,
    tiled_values,
)

_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
}
_QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GATED = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_SHARED = {f"{ours}_shexp": theirs.replace("mlp.", "mlp.{}.", 1) for ours, theirs in _GATED.items()}
_STACKS = {f"{ours}_exps": theirs.replace("mlp.", "mlp.experts.{}.", 1) + ".weight" for ours, theirs in _GATED.items()}
_MIXTRAL = {
    f"{ours}_exps": f"block_sparse_moe.experts.{{}}.{theirs}.weight"
    for ours, theirs in (("ffn_gate", "w1"), ("ffn_up", "w3"), ("ffn_down", "w2"))
}

_DECODER = Names(_WHOLE, "model.layers", _ATTENTION | _GATED)
_QWEN3 = dataclasses.replace(_DECODER, layer=_ATTENTION | _QK_NORM | _GATED)
_LLAMA = dataclasses.replace(
    _DECODER,
    layer=_ATTENTION | _GATED | {"ffn_gate_inp": "block_sparse_moe.gate"},
    stacks=_MIXTRAL,
    orders={"attn_q": turned_queries, "attn_k": turned_keys},
)
_ROUTER = {"ffn_gate_inp": "mlp.gate"}
_QWEN2_SHARED = {ours: theirs.format("shared_expert") for ours, theirs in _SHARED.items()} | {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate"
}
_GEMMA = dataclasses.replace(_DECODER, shift=-1.0)
_SANDWICH = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA3 = dataclasses.replace(_GEMMA, layer=_ATTENTION | _QK_NORM | _GATED | _SANDWICH)
_PHI3 = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}
_GPT2 = Names(
    {
        "token_embd": "transformer.wte",
        "position_embd": "transformer.wpe",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
    },
    "transformer.h",
    {
        "attn_norm": "ln_1",
        "attn_qkv": "attn.c_attn",
        "attn_output": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn_up": "mlp.c_fc",
        "ffn_down": "mlp.c_proj",
    },
    transposed=("attn_qkv", "attn_output", "ffn_up", "ffn_down"),
)
_FALCON = Names(
    {"token_embd": "transformer.word_embeddings", "output_norm": "transformer.ln_f", "output": "lm_head"},
    "transformer.h",
    {
        "attn_norm": "input_layernorm",
        "attn_qkv": "self_attention.query_key_value",
        "attn_output": "self_attention.dense",
        "ffn_up": "mlp.dense_h_to_4h",
        "ffn_down": "mlp.dense_4h_to_h",
    },
    orders={"attn_qkv": grouped},
)
# In a layer with two norms, the first is that of the MLP.
FALCON_40B = dataclasses.replace(_FALCON, layer={**_FALCON.layer, "attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"})
_SHARED_EXPERTS = {ours: theirs.format("shared_experts") for ours, theirs in _SHARED.items()}
# Additional tensors of multi-token prediction layers, which no parameter requests.
_PREDICTORS = {
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.shared_head_head": "shared_head.head",
    "nextn.shared_head_norm": "shared_head.norm",
}
_DEEPSEEK = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
    **_SHARED_EXPERTS,
    **_PREDICTORS,
}

_TURNED = {"attn_q": turned_queries, "attn_k": turned_keys}
_TURNED_LLAMA = dataclasses.replace(_DECODER, orders=_TURNED)
_BEHIND = {  # post-norm: norms after attention and MLP, none before them
    **{ours: theirs for ours, theirs in _ATTENTION.items() if not ours.endswith("norm")},
    **_QK_NORM,
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    **_GATED,
}
_LATE_NORM = {**_ATTENTION, "post_attention_norm": "post_attention_layernorm"}
_FUSED_GATE = {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}
_GLM4 = {
    "post_attention_norm": "post_self_attn_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}
_PHI2 = Names(
    {**_WHOLE, "output_norm": "model.final_layernorm"},
    "model.layers",
    {**_ATTENTION, "attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
)
_NEOX = Names(
    {"token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm", "output": "embed_out"},
    "gpt_neox.layers",
    {
        "attn_norm": "input_layernorm",
        "attn_qkv": "attention.query_key_value",
        "attn_output": "attention.dense",
        "ffn_norm": "post_attention_layernorm",
        "ffn_up": "mlp.dense_h_to_4h",
        "ffn_down": "mlp.dense_4h_to_h",
    },
    orders={"attn_qkv": grouped},
)
_STABLELM = dataclasses.replace(
    _DECODER,
    stacks={f"attn_{part}_norm": f"self_attn.{part}_layernorm.norms.{{}}.weight" for part in "qk"},
)
_HUNYUAN = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
_GPT_OSS = dataclasses.replace(
    _DECODER,
    layer={**_LATE_NORM, "attn_sinks": "self_attn.sinks", "ffn_gate_inp": "mlp.router"},
    joins={
        "mlp.experts.gate_up_proj": ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
        "mlp.experts.gate_up_proj_bias": ("ffn_gate_exps.bias", "ffn_up_exps.bias"),
        "mlp.experts.down_proj": ("ffn_down_exps.weight",),
        "mlp.experts.down_proj_bias": ("ffn_down_exps.bias",),
    },
    interleaved=True,
)
_LLAMA4 = dataclasses.replace(
    _DECODER,
    layer={
        **_ATTENTION,
        **{ours: theirs.replace("mlp.", "feed_forward.") for ours, theirs in _GATED.items()},
        **{ours: theirs.replace("mlp.{}", "feed_forward.shared_expert") for ours, theirs in _SHARED.items()},
        "ffn_gate_inp": "feed_forward.router",
    },
    joins={
        "feed_forward.experts.gate_up_proj": ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
        "feed_forward.experts.down_proj": ("ffn_down_exps.weight",),
    },
)
_GLM4_MOE = dataclasses.replace(
    _DECODER,
    layer={
        **_LATE_NORM,
        **_QK_NORM,
        **_GATED,
        **_ROUTER,
        **_SHARED_EXPERTS,
        **_PREDICTORS,
        "exp_probs_b": "mlp.gate.e_score_correction_bias",
    },
    stacks=_STACKS,
)
_ERNIE_MOE = dataclasses.replace(
    _DECODER,
    layer={
        **_DECODER.layer,
        **_ROUTER,
        **_SHARED_EXPERTS,
        "exp_probs_b": "mlp.moe_statics.e_score_correction_bias",
    },
    stacks=_STACKS,
    vectors=("exp_probs_b",),
)
_SPARSE_BLOCK = {**_ATTENTION, **_QK_NORM, "ffn_gate_inp": "block_sparse_moe.gate"}
_MINIMAX = {**_SPARSE_BLOCK, "exp_probs_b": "block_sparse_moe.e_score_correction_bias"}
_HYBRID = Names(
    _WHOLE,
    "model.layers",
    {
        **_LATE_NORM,
        **_QK_NORM,
        **_GATED,
        **_ROUTER,
        **_QWEN2_SHARED,
        **_PREDICTORS,
        "ssm_a": "linear_attn.A_log",
        "ssm_dt": "linear_attn.dt_bias",
        "ssm_conv1d": "linear_attn.conv1d",
        "ssm_norm": "linear_attn.norm",
        "ssm_out": "linear_attn.out_proj",
    },
    stacks=_STACKS,
    vectors=("ffn_gate_inp_shexp",),
    shift=-1.0,
    kept=("ssm_norm",),
    behind="mtp.layers",
)
_QWEN3_NEXT = dataclasses.replace(
    _HYBRID,
    layer={**_HYBRID.layer, "ssm_in": "linear_attn.in_proj_qkvz", "ssm_ba": "linear_attn.in_proj_ba"},
    joins={"linear_attn.in_proj_qkvz.weight": ("attn_qkv.weight", "attn_gate.weight")},
    row_orders={"linear_attn.in_proj_qkvz.weight": by_heads},
    amended={"ssm_a": decays, "ssm_conv1d": channels},
)
_QWEN35 = dataclasses.replace(
    _HYBRID,
    layer={
        **_HYBRID.layer,
        "attn_qkv": "linear_attn.in_proj_qkv",
        "attn_gate": "linear_attn.in_proj_z",
        "ssm_alpha": "linear_attn.in_proj_a",
        "ssm_beta": "linear_attn.in_proj_b",
    },
    amended={
        "ssm_a": tiled_decays,
        "ssm_conv1d": tiled_channels,
        "ssm_out": tiled_columns,
        "attn_qkv": tiled_values,
        **dict.fromkeys(("ssm_dt", "attn_gate", "ssm_alpha", "ssm_beta"), tiled),
    },
)
_PER_LAYER = dataclasses.replace(
    _DECODER,
    whole={
        **_WHOLE,
        "per_layer_token_embd": "model.embed_tokens_per_layer",
        "per_layer_model_proj": "model.per_layer_model_projection",
        "per_layer_proj_norm": "model.per_layer_projection_norm",
    },
    layer={
        **_GEMMA3.layer,
        "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm",
    },
    amended={"per_layer_token_embd": in_numbers},
)
_ALTUP = {
    "altup_correct_coef": "altup.correction_coefs",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router",
}
_GEMMA3N = dataclasses.replace(
    _PER_LAYER,
    layer={
        **_PER_LAYER.layer,
        **_ALTUP,
        "altup_correct_scale": "altup.correct_output_scale",
        "altup_router_norm": "altup.router_norm",
        "laurel_l": "laurel.linear_left",
        "laurel_r": "laurel.linear_right",
        "laurel_post_norm": "laurel.post_laurel_norm",
    },
    stacks={
        "altup_proj": "model.altup_projections.{}.weight",
        "altup_unembd_proj": "model.altup_unembed_projections.{}.weight",
    },
    amended={**_PER_LAYER.amended, **dict.fromkeys(_ALTUP, in_numbers)},
)
_GEMMA4 = dataclasses.replace(
    _PER_LAYER,
    layer={
        **_PER_LAYER.layer,
        "layer_output_scale": "layer_scalar",
        "ffn_gate_inp": "router.proj",
        "ffn_gate_inp.scale": "router.scale",
        "ffn_down_exps.scale": "router.per_expert_scale",
        "ffn_gate_up_exps": "experts.gate_up_proj",
        "ffn_down_exps": "experts.down_proj",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
    },
    amended={**_PER_LAYER.amended, "ffn_gate_inp": in_numbers},
    fused_kv_heads=fused_kv_heads,
)

TABLES: Mapping[str, Names] = MappingProxyType(
    {
        "llama": _LLAMA,
        "qwen2": _DECODER,
        "qwen3": _QWEN3,
        "qwen2moe": dataclasses.replace(
            _DECODER,
            layer={**_DECODER.layer, **_ROUTER, **_QWEN2_SHARED},
            stacks=_STACKS,
            vectors=("ffn_gate_inp_shexp",),
        ),
        "qwen3moe": dataclasses.replace(_QWEN3, layer={**_QWEN3.layer, **_ROUTER}, stacks=_STACKS),
        "gemma": _GEMMA,
        "gemma2": _GEMMA3,
        "gemma3": _GEMMA3,
        "phi3": dataclasses.replace(_DECODER, layer=_ATTENTION | _PHI3),
        "gpt2": _GPT2,
        "falcon": _FALCON,
        "deepseek2": dataclasses.replace(_DECODER, layer=_ATTENTION | _GATED | _ROUTER | _DEEPSEEK, stacks=_STACKS),
        "mistral3": _TURNED_LLAMA,
        "granite": _TURNED_LLAMA,
        "olmo2": dataclasses.replace(_DECODER, layer=_BEHIND),
        "smollm3": _TURNED_LLAMA,
        "phi2": _PHI2,
        "command-r": _QWEN3,
        "cohere2": _DECODER,
        "chatglm": dataclasses.replace(_DECODER, layer=_ATTENTION | _FUSED_GATE),
        "glm4": dataclasses.replace(_DECODER, layer=_ATTENTION | _GLM4 | _FUSED_GATE),
        "exaone4": dataclasses.replace(_DECODER, layer=_BEHIND),
        "ernie4_5": _DECODER,
        "hunyuan-dense": dataclasses.replace(_DECODER, layer=_ATTENTION | _HUNYUAN | _GATED),
        "gptneox": _NEOX,
        "starcoder2": dataclasses.replace(
            _DECODER, layer={**_ATTENTION, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
        ),
        "stablelm": _STABLELM,
        "seed_oss": dataclasses.replace(_DECODER, layer=_LATE_NORM | _GATED),
        "gpt-oss": _GPT_OSS,
        "llama4": _LLAMA4,
        "glm4moe": _GLM4_MOE,
        "olmoe": dataclasses.replace(_QWEN3, layer={**_QWEN3.layer, **_ROUTER}, stacks=_STACKS),
        "phimoe": dataclasses.replace(_DECODER, layer=_SPARSE_BLOCK, stacks=_MIXTRAL),
        "minimax-m2": dataclasses.replace(_DECODER, layer=_MINIMAX, stacks=_MIXTRAL),
        "ernie4_5-moe": _ERNIE_MOE,
        "gemma3n": _GEMMA3N,
        "gemma4": _GEMMA4,
        "qwen3next": _QWEN3_NEXT,
        "qwen35": _QWEN35,
        "qwen35moe": _QWEN35,
    }
)
