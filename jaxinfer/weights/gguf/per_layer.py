"""Config.json of Gemma 3n and Gemma 4, which have per-layer embeddings, sizes and RoPE."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from jaxinfer.weights.errors import CheckpointError
from jaxinfer.weights.gguf.fields import Json, expert_size, layer_types, named, rope_scaling, rows_of_first
from jaxinfer.weights.gguf.header_view import Described
from jaxinfer.weights.gguf.name_rules import fused_kv_heads

_FREQUENCIES = "rope_freqs.weight"


def _common(model: Described) -> Json:
    if rope_scaling(model) is not None:
        raise model.bad("rope.scaling.type", model.get("rope.scaling.type") or "linear")
    fields = {
        "vocab_size": model.rows("token_embd.weight"),
        "hidden_size": model.count("embedding_length"),
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "max_position_embeddings": model.count("context_length"),
        "rms_norm_eps": model.number("attention.layer_norm_rms_epsilon"),
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": model.count("attention.sliding_window"),
        "layer_types": _layer_types(model),
        "num_kv_shared_layers": model.count("attention.shared_kv_layers"),
        "hidden_size_per_layer_input": model.count("embedding_length_per_layer_input"),
    }
    if fields["hidden_size_per_layer_input"]:
        fields["vocab_size_per_layer_input"] = model.rows("per_layer_token_embd.weight")
    if model.get("final_logit_softcapping") is not None:
        fields["final_logit_softcapping"] = model.number("final_logit_softcapping")
    return fields


def _layer_types(model: Described) -> list[str]:
    """Return the layer types; these files have a list of them and no default period."""
    if not isinstance(model.get("attention.sliding_window_pattern"), list):
        raise model.bad("attention.sliding_window_pattern", model.get("attention.sliding_window_pattern"))
    return layer_types(model, 0)


def _hidden_sizes(model: Described) -> list[int]:
    """Return the MLP size of each layer."""
    sizes = model.get("feed_forward_length")
    if not isinstance(sizes, list):
        return [model.count("feed_forward_length")] * model.layers
    if len(sizes) < model.layers or not all(type(size) is int for size in sizes):
        raise model.bad("feed_forward_length", sizes)
    return sizes[: model.layers]


def _gemma3n(model: Described) -> Json:
    return {
        **_common(model),
        **named("Gemma3nForCausalLM", "gemma3n_text"),
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.count("attention.key_length"),
        "intermediate_size": _hidden_sizes(model),
        "rope_theta": model.number("rope.freq_base"),
        "rope_local_base_freq": model.number("rope.freq_base_swa", 10000.0),
        "activation_sparsity_pattern": _sparsity(model),
        "altup_active_idx": model.count("altup.active_idx"),
        "altup_num_inputs": model.count("altup.num_inputs"),
        "altup_correct_scale": True,
        "laurel_rank": rows_of_first(model, "laurel_l.weight"),
    }


def _sparsity(model: Described) -> list[float]:
    """Return the sparsity of each layer: the normal CDF of the scale in standard deviations; minus infinity means 0."""
    scales = model.get("activation_sparsity_scale")
    known = isinstance(scales, list) and all(type(scale) is float and scale < math.inf for scale in scales)
    if not known:
        raise model.bad("activation_sparsity_scale", scales)
    normal = statistics.NormalDist()
    return [0.0 if scale < -8 else round(normal.cdf(scale), 6) for scale in scales[: model.layers]]


def _gemma4(model: Described) -> Json:
    fields, sizes = _common(model), _hidden_sizes(model)
    head_dim, wide = model.count("attention.key_length_swa"), model.count("attention.key_length")
    _expect(model, "rope.dimension_count_swa", head_dim)
    _expect(model, "attention.value_length_swa", head_dim)
    _expect(model, "attention.value_length", wide)
    if model.has("blk.0.ffn_gate_exps.weight"):
        raise CheckpointError(f"{model.path} has ffn_gate_exps and ffn_up_exps apart, which is not supported of gemma4")
    kinds = fields["layer_types"]
    near, whole = (_kv_heads(model, kinds, kind) for kind in ("sliding_attention", "full_attention"))
    full = kinds.index("full_attention") if "full_attention" in kinds else 0
    experts = {
        "enable_moe_block": model.experts > 0,
        "num_experts": model.experts or None,
        "top_k_experts": model.count("expert_used_count") if model.experts else None,
        "moe_intermediate_size": expert_size(model) if model.experts else None,
    }
    return {
        **fields,
        **experts,
        **named("Gemma4ForCausalLM", "gemma4_text"),
        "head_dim": head_dim,
        "global_head_dim": wide,
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


PER_LAYER: Mapping[str, Callable[[Described], Json]] = MappingProxyType({"gemma3n": _gemma3n, "gemma4": _gemma4})
