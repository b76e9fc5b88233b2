"""Gemma, of whose versions 3n and 4 have per-layer embeddings, sizes and RoPE."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from jaxinfer.weights.errors import CheckpointError
from jaxinfer.weights.gguf.arch import (
    WINDOW,
    Arch,
    count,
    first_rows,
    given,
    kinds_of_layers,
    number,
)
from jaxinfer.weights.gguf.fields import Json, expert_size, frame, layer_types, rope_scaling
from jaxinfer.weights.gguf.header_view import Described
from jaxinfer.weights.gguf.tensor_names import LAYER, WHOLE, Names, fused_kv_heads

_FREQUENCIES = "rope_freqs.weight"


def _score_size(model: Described, fields: Json) -> None:
    """Set ``query_pre_attn_scalar``; no key has it, and llama.cpp recognises the 27B models by their layer count."""
    by_width = model.layers == {"gemma2": 46, "gemma3": 62}[model.architecture]
    width = fields["hidden_size"] // model.heads
    fields["query_pre_attn_scalar"] = width if by_width else model.count("attention.key_length")


def _unscaled_frame(model: Described) -> Json:
    if rope_scaling(model) is not None:
        raise model.bad("rope.scaling.type", model.get("rope.scaling.type") or "linear")
    return frame(model)


def _layer_types(model: Described) -> list[str]:
    """Return the layer types; these files have a list of them and no default period."""
    if not isinstance(model.get("attention.sliding_window_pattern"), list):
        raise model.bad("attention.sliding_window_pattern", model.get("attention.sliding_window_pattern"))
    return layer_types(model, 0)


def _per_layer_vocabulary(model: Described) -> int | None:
    return model.rows("per_layer_token_embd.weight") if model.count("embedding_length_per_layer_input") else None


def _hidden_sizes(model: Described) -> list[int]:
    """Return the MLP size of each layer."""
    sizes = model.get("feed_forward_length")
    if not isinstance(sizes, list):
        return [model.count("feed_forward_length")] * model.layers
    if len(sizes) < model.layers or not all(type(size) is int for size in sizes):
        raise model.bad("feed_forward_length", sizes)
    return sizes[: model.layers]


def _sparsity(model: Described) -> list[float]:
    """Return the sparsity of each layer: the normal CDF of the scale in standard deviations; minus infinity means 0."""
    scales = model.get("activation_sparsity_scale")
    known = isinstance(scales, list) and all(type(scale) is float and scale < math.inf for scale in scales)
    if not known:
        raise model.bad("activation_sparsity_scale", scales)
    normal = statistics.NormalDist()
    return [0.0 if scale < -8 else round(normal.cdf(scale), 6) for scale in scales[: model.layers]]


def _gemma4(model: Described, fields: Json) -> None:
    head_dim, wide, sizes = fields["head_dim"], fields["global_head_dim"], _hidden_sizes(model)
    _expect(model, "rope.dimension_count_swa", head_dim)
    _expect(model, "attention.value_length_swa", head_dim)
    _expect(model, "attention.value_length", wide)
    if model.has("blk.0.ffn_gate_exps.weight"):
        raise CheckpointError(f"{model.path} has ffn_gate_exps and ffn_up_exps apart, which is not supported of gemma4")
    kinds = fields["layer_types"]
    near, whole = (_kv_heads(model, kinds, kind) for kind in ("sliding_attention", "full_attention"))
    full = kinds.index("full_attention") if "full_attention" in kinds else 0
    fields |= {
        "num_key_value_heads": near or whole,
        "num_global_key_value_heads": whole,
        "attention_k_eq_v": not any(model.has(f"blk.{full}.{name}.weight") for name in ("attn_v", "attn_qkv")),
        "intermediate_size": sizes[0] if sizes else 0,
        "use_double_wide_mlp": len(set(sizes)) > 1,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": _rotated(model, wide),
                "rope_theta": model.number("rope.freq_base"),
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": model.number("rope.freq_base_swa")},
        },
    }


def _expect(model: Described, key: str, value: int) -> None:
    if model.count(key, value) != value:
        raise model.bad(key, model.get(key))


def _kv_heads(model: Described, kinds: list[str], kind: str) -> int:
    """Return the KV heads of a kind of layer, from the shape of its keys, as the metadata may give unused values."""
    size = model.count(f"attention.key_length{'_swa' if kind.startswith('sliding') else ''}")
    if kind not in kinds:
        return 0
    layer = kinds.index(kind)
    if model.has(f"blk.{layer}.attn_qkv.weight"):
        return fused_kv_heads(model, layer)
    rows = model.rows(f"blk.{layer}.attn_k.weight")
    if not size or rows % size:
        raise model.bad("attention.key_length", size)
    return rows // size


def _rotated(model: Described, head_dim: int) -> float:
    """Return the rotated fraction of a head: the other frequencies have huge factors."""
    if model.shapes.get(_FREQUENCIES) != (head_dim // 2,):
        raise CheckpointError(f"{model.path} has not {head_dim // 2} numbers in {_FREQUENCIES}, one for each frequency")
    turning = model.read(_FREQUENCIES).astype(np.float64) == 1.0
    count = int(turning.sum())
    if not turning[:count].all():
        raise CheckpointError(f"{model.path} has numbers in {_FREQUENCIES} that are 1 behind others")
    return 2 * count / head_dim


_NAMES = Names(shift=-1.0)
_SANDWICH = dataclasses.replace(_NAMES, layer={**LAYER, "ffn_norm": "pre_feedforward_layernorm"})
_PER_LAYER = Names(
    {
        **_SANDWICH.layer,
        "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm",
    },
    {
        **WHOLE,
        "per_layer_token_embd": "model.embed_tokens_per_layer",
        "per_layer_model_proj": "model.per_layer_model_projection",
        "per_layer_proj_norm": "model.per_layer_projection_norm",
    },
)
_NOT_A_WEIGHT = {"plain": True}
_ALTUP = {
    "altup_correct_coef": "altup.correction_coefs",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router",
}
_GEMMA3N_NAMES = dataclasses.replace(
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
    changes=dict.fromkeys(("per_layer_token_embd", *_ALTUP), _NOT_A_WEIGHT),
)
_GEMMA4_NAMES = dataclasses.replace(
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
    stacks={},
    changes=dict.fromkeys(("per_layer_token_embd", "ffn_gate_inp"), _NOT_A_WEIGHT),
    fused_kv_heads=fused_kv_heads,
)

_FIELDS = {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh"}
_SOFT_CAP = {"final_logit_softcapping": given("final_logit_softcapping")}
_PER_LAYER_FIELDS = {
    "rms_norm_eps": number("attention.layer_norm_rms_epsilon"),
    "hidden_activation": "gelu_pytorch_tanh",
    **WINDOW,
    "layer_types": _layer_types,
    "num_kv_shared_layers": count("attention.shared_kv_layers"),
    "hidden_size_per_layer_input": count("embedding_length_per_layer_input"),
}
_PER_LAYER_OPTIONAL = {**_SOFT_CAP, "vocab_size_per_layer_input": _per_layer_vocabulary}

GEMMA: Mapping[str, Arch] = MappingProxyType(
    {
        "gemma": Arch("GemmaForCausalLM", "gemma", _FIELDS, _NAMES),
        "gemma2": Arch(
            "Gemma2ForCausalLM",
            "gemma2",
            {
                **_FIELDS,
                **WINDOW,
                "attn_logit_softcapping": number("attn_logit_softcapping"),
                "final_logit_softcapping": number("final_logit_softcapping"),
            },
            _SANDWICH,
            amend=_score_size,
        ),
        "gemma3": Arch(
            "Gemma3ForCausalLM",
            "gemma3_text",
            {
                **_FIELDS,
                **WINDOW,
                "layer_types": kinds_of_layers(6),
                "rope_local_base_freq": number("rope.freq_base_swa", 10000.0),
            },
            _SANDWICH,
            optional=_SOFT_CAP,
            amend=_score_size,
        ),
        "gemma3n": Arch(
            "Gemma3nForCausalLM",
            "gemma3n_text",
            {
                **_PER_LAYER_FIELDS,
                "num_key_value_heads": lambda model: model.kv_heads,
                "head_dim": count("attention.key_length"),
                "intermediate_size": _hidden_sizes,
                "rope_theta": number("rope.freq_base"),
                "rope_local_base_freq": number("rope.freq_base_swa", 10000.0),
                "activation_sparsity_pattern": _sparsity,
                "altup_active_idx": count("altup.active_idx"),
                "altup_num_inputs": count("altup.num_inputs"),
                "altup_correct_scale": True,
                "laurel_rank": first_rows("laurel_l.weight"),
            },
            _GEMMA3N_NAMES,
            _unscaled_frame,
            _PER_LAYER_OPTIONAL,
        ),
        "gemma4": Arch(
            "Gemma4ForCausalLM",
            "gemma4_text",
            {
                **_PER_LAYER_FIELDS,
                "head_dim": count("attention.key_length_swa"),
                "global_head_dim": count("attention.key_length"),
                "enable_moe_block": lambda model: model.experts > 0,
                "num_experts": lambda model: model.experts or None,
                "top_k_experts": lambda model: model.count("expert_used_count") if model.experts else None,
                "moe_intermediate_size": lambda model: expert_size(model) if model.experts else None,
            },
            _GEMMA4_NAMES,
            _unscaled_frame,
            _PER_LAYER_OPTIONAL,
            _gemma4,
        ),
    }
)
