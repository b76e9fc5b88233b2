"""MiniMax-M2: QK norm over all heads, partial rotation, experts by sigmoid with a correction bias."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.layers.moe import RoutingRule
from jaxinfer.models.config import ConfigReader
from jaxinfer.models.families import sparse
from jaxinfer.models.families.deepseek import require_only
from jaxinfer.models.families.sparse import Sparse, SparseConfig
from jaxinfer.models.family import Family
from jaxinfer.models.specs import cache_spec, correction_bias, gated_experts, plain
from jaxinfer.types import ParamTree

_DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 1536,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "max_position_embeddings": 196608,
    "rope_theta": 5e6,
}
# Fields of published configs whose values transformers assumes.
_ONLY = {
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "shared_intermediate_size": 0,
}
# MTP layers, not loaded.
IGNORE = ("model.mtp*", "mtp.*")


def config_from_json(config: Mapping[str, Any]) -> SparseConfig:
    """Read the config.json of a MiniMaxM2ForCausalLM; raises as `sparse.read_config` does."""
    read = sparse.reader(_partial(config), _DEFAULTS)
    for name, value in _ONLY.items():
        require_only(read, name, value)
    count = read.positive("num_hidden_layers")
    read.require(read.get("attn_type_list") in (None, [1] * count), "attn_type_list", f"must be {count} times 1")
    return sparse.read_config(
        read,
        [None] * count,
        RoutingRule(read.positive("num_experts_per_tok"), scores="sigmoid", renormalise=True),
        partial=True,
        expert_size=read.positive("intermediate_size"),
        corrected=True,
        qk_norm=True,
        qk_norm_whole=True,
    )


def _partial(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert ``rotary_dim`` (rotated dims of a head) to ``partial_rotary_factor``, unless the latter is given."""
    read = ConfigReader(config, _DEFAULTS)
    if read.get("rotary_dim") is None or read.get("partial_rotary_factor") is not None:
        return config
    rotated, head_dim = read.positive("rotary_dim"), read.positive("head_dim")
    read.require(rotated % 2 == 0 and rotated <= head_dim, "rotary_dim", f"must be even and at most {head_dim}")
    return {**config, "partial_rotary_factor": rotated / head_dim}


def param_specs(cfg: SparseConfig) -> ParamTree:
    return sparse.param_specs(cfg, _experts)


def _experts(cfg: SparseConfig, prefix: str) -> dict[str, Any]:
    prefix, d = f"{prefix}.block_sparse_moe", cfg.hidden_size
    return {
        "router": plain(f"{prefix}.gate.weight", (cfg.experts, d), ("router", "embed")),
        "correction": correction_bias(f"{prefix}.e_score_correction_bias", cfg.experts),
        **gated_experts(f"{prefix}.experts", cfg.experts, d, cfg.expert_size, ("w1", "w3", "w2")),
    }


MINIMAX_M2 = Family(config_from_json, param_specs, cache_spec, Sparse, IGNORE)
