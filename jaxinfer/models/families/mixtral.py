"""Mixtral (Jiang et al. 2024): a mixture of experts as each layer's feed-forward network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.layers.moe import RoutingRule
from jaxinfer.models.families import sparse
from jaxinfer.models.families.sparse import Sparse, SparseConfig
from jaxinfer.models.family import Family
from jaxinfer.models.specs import cache_spec, gated_experts, plain
from jaxinfer.types import ParamTree

_DEFAULTS = {
    "num_key_value_heads": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "max_position_embeddings": 131072,
}


def config_from_json(config: Mapping[str, Any]) -> SparseConfig:
    """Read config.json as `transformers` (old or new style) writes it; raises as `sparse.read_config` does."""
    read = sparse.reader(config, _DEFAULTS)
    window = None if read.fields.get("sliding_window") is None else read.positive("sliding_window")
    rule = RoutingRule(read.positive("num_experts_per_tok"), renormalise=True)
    windows = [window] * read.positive("num_hidden_layers")
    return sparse.read_config(read, windows, rule, expert_size=read.positive("intermediate_size"))


def param_specs(cfg: SparseConfig) -> ParamTree:
    return sparse.param_specs(cfg, experts)


def experts(cfg: SparseConfig, prefix: str) -> dict[str, Any]:
    """Return the parameters of `MoE` for the layer whose tensor names start with ``prefix``."""
    prefix, d = f"{prefix}.block_sparse_moe", cfg.hidden_size
    return {
        "router": plain(f"{prefix}.gate.weight", (cfg.experts, d), ("router", "embed")),
        **gated_experts(f"{prefix}.experts", cfg.experts, d, cfg.expert_size, ("w1", "w3", "w2")),
    }


MIXTRAL = Family(config_from_json, param_specs, cache_spec, Sparse)
