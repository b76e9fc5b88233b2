"""DeepSeek and the models of its architecture: GLM 4.7 Flash, Youtu."""

from __future__ import annotations

import dataclasses

from jaxinfer.weights.gguf.arch import Arch, count, experts, flag, nonzero, number
from jaxinfer.weights.gguf.fields import Json, expert_size, frame, rope_scaling
from jaxinfer.weights.gguf.header_view import Described
from jaxinfer.weights.gguf.tensor_names import Join, Names

SOFTMAX, SIGMOID = 1, 2  # llama.cpp's ids of router gates
_GROUP_LIMITED_V2 = 160  # number of experts of the V2 models with group-limited routing


def _latents(model: Described, fields: Json) -> None:
    """Set head dimensions and RoPE; in files with the "mla" keys, the other length keys are those of the latents."""
    key, fields["v_head_dim"] = (
        model.count(f"attention.{name}_length_mla", model.count(f"attention.{name}_length"))
        for name in ("key", "value")
    )
    fields["qk_nope_head_dim"] = key - fields["qk_rope_head_dim"]
    scaling = rope_scaling(model)
    if scaling is None:
        return
    fields["rope_scaling"] = scaling
    if scaling["rope_type"] == "yarn" and model.get("rope.scaling.yarn_log_multiplier") is not None:
        # the file has a tenth of it
        scaled = round(10 * model.number("rope.scaling.yarn_log_multiplier"), 6)
        scaling |= {"mscale": scaled, "mscale_all_dim": scaled}


def _groups(model: Described, fields: Json) -> None:
    _latents(model, fields)
    sigmoid = fields["scoring_func"] == "sigmoid"
    if model.get("expert_group_count") is not None:
        fields["n_group"] = model.count("expert_group_count")
        fields["topk_group"] = model.count("expert_group_used_count")
    elif sigmoid or model.experts == _GROUP_LIMITED_V2:
        raise model.bad("expert_group_count", None)
    softmax_method = "group_limited_greedy" if fields.get("n_group", 1) > 1 else "greedy"
    fields["topk_method"] = "noaux_tc" if sigmoid else softmax_method


_YOUTU = Arch(
    "YoutuForCausalLM",
    "youtu",
    {
        "intermediate_size": count("feed_forward_length"),
        "num_key_value_heads": lambda model: model.heads,
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "q_lora_rank": nonzero("attention.q_lora_rank"),
        "kv_lora_rank": count("attention.kv_lora_rank"),
        "qk_rope_head_dim": count("rope.dimension_count"),
        "rope_theta": number("rope.freq_base", 10000.0),
    },
    Names(joins=(Join("self_attn.kv_b_proj.weight", ("attn_k_b.weight", "attn_v_b.weight"), latents=True),)),
    frame,
    amend=_latents,
)
ROUTED = {
    **experts("n_routed_experts"),
    "n_shared_experts": count("expert_shared_count"),
    "moe_intermediate_size": expert_size,
    "first_k_dense_replace": count("leading_dense_block_count", 0),
    "routed_scaling_factor": number("expert_weights_scale", 1.0),
    "norm_topk_prob": flag("expert_weights_norm"),
    "num_nextn_predict_layers": count("nextn_predict_layers", 0),
}
_DEEPSEEK_V2 = dataclasses.replace(
    _YOUTU,
    name="DeepseekV2ForCausalLM",
    model_type="deepseek_v2",
    fields={**_YOUTU.fields, **ROUTED, "scoring_func": "softmax"},
    amend=_groups,
)
_DEEPSEEK_V3 = dataclasses.replace(
    _DEEPSEEK_V2,
    name="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    fields={**_DEEPSEEK_V2.fields, "scoring_func": "sigmoid"},
)


def deepseek2(model: Described) -> Arch:
    """Return the version; in files without a gate (GLM 4.7 Flash, older) a correction bias implies sigmoid: V3."""
    if not model.experts:
        return _YOUTU
    corrected = any(name.endswith(".exp_probs_b.bias") for name in model.shapes)
    gate = model.count("expert_gating_func", 0) or (SIGMOID if corrected else SOFTMAX)
    if gate not in (SOFTMAX, SIGMOID):
        raise model.bad("expert_gating_func", gate)
    return _DEEPSEEK_V3 if gate == SIGMOID else _DEEPSEEK_V2
