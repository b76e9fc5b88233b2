"""Ernie 4.5 MoE: a few dense layers, then experts by softmax with a correction bias, and shared experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.layers.moe import RoutingRule
from jaxinfer.models.config import ConfigReader, aliased
from jaxinfer.models.families import sparse
from jaxinfer.models.families.deepseek import count_of, require_only
from jaxinfer.models.families.sparse import Sparse, SparseConfig
from jaxinfer.models.family import Family
from jaxinfer.models.specs import cache_spec, correction_bias, gated_experts, gated_mlp, plain
from jaxinfer.types import ParamTree

_DEFAULTS = {
    "num_key_value_heads": 4,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_experts": 64,
    "num_experts_per_tok": 6,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": -1,
    "moe_layer_interval": 1,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "tie_word_embeddings": True,
}
_NAMES = {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"}
# MTP layers, not loaded.
IGNORE = ("model.mtp*", "mtp*")


def config_from_json(config: Mapping[str, Any]) -> SparseConfig:
    """Read the config.json of an Ernie4_5_MoeForCausalLM; raises as `sparse.read_config` does."""
    heads = {"num_key_value_heads"} & config.keys()  # null: as many as query heads
    read = ConfigReader(config, {name: value for name, value in _DEFAULTS.items() if name not in heads}, _NAMES)
    require_only(read, "use_bias", False)
    size = read.positive("moe_intermediate_size")
    least = read.number("moe_norm_min", 1e-12)
    read.require(least >= 0.0, "moe_norm_min", "must be >= 0")
    return sparse.read_config(
        read,
        [None] * read.positive("num_hidden_layers"),
        RoutingRule(read.positive("num_experts_per_tok"), renormalise=True, norm_min=least),
        sparse=_sparse_layers(read),
        expert_size=size,
        shared_size=size * count_of(read, "moe_num_shared_experts") or None,
        shared_gate=False,
        corrected=True,
        interleaved=True,
    )


def _sparse_layers(read: ConfigReader) -> tuple[bool, ...]:
    count, step = read.positive("num_hidden_layers"), read.positive("moe_layer_interval")
    first, last = (read.get(f"moe_layer_{name}_index") for name in ("start", "end"))
    for name, value in (("start", first), ("end", last)):
        read.require(type(value) is int, f"moe_layer_{name}_index", "must be the number of a layer")
    last = count - 1 if last == -1 else last
    return tuple((index + 1) % step == 0 and first <= index <= last for index in range(count))


def param_specs(cfg: SparseConfig) -> ParamTree:
    return sparse.param_specs(cfg, _experts)


def _experts(cfg: SparseConfig, prefix: str) -> dict[str, Any]:
    prefix, d = f"{prefix}.mlp", cfg.hidden_size
    correction = f"{prefix}.moe_statics.e_score_correction_bias"
    tree: dict[str, Any] = {
        "router": plain(f"{prefix}.gate.weight", (cfg.experts, d), ("router", "embed")),
        "correction": correction_bias(correction, cfg.experts, (1, cfg.experts)),
        **gated_experts(f"{prefix}.experts", cfg.experts, d, cfg.expert_size),
    }
    if cfg.shared_size is not None:
        tree["shared"] = gated_mlp(f"{prefix}.shared_experts", d, cfg.shared_size)
    return tree


ERNIE4_5_MOE = Family(
    aliased(config_from_json, {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"}),
    param_specs,
    cache_spec,
    Sparse,
    IGNORE,
)
