"""Mixtral (Jiang et al. 2024): each layer's feed-forward network is one of several experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.layers.moe import RoutingRule
from jaxinfer.models import sparse
from jaxinfer.models.config import ConfigReader
from jaxinfer.models.sparse import Defaults, SparseConfig
from jaxinfer.models.specs import gated_experts, plain
from jaxinfer.types import ParamTree

_DEFAULTS = Defaults(kv_heads=8, experts=8, top_k=2, norm_eps=1e-5, theta=1e6, max_position=131072)


def config_from_json(config: Mapping[str, Any]) -> SparseConfig:
    """Read config.json as `transformers` (old or new style) writes it.

    Raises:
        ConfigError: a field is missing, of the wrong type or not supported.
    """
    read = ConfigReader(config)
    window = None if read.fields.get("sliding_window") is None else read.positive("sliding_window")
    size = read.positive("intermediate_size")
    return sparse.read_config(
        read,
        _DEFAULTS,
        [window] * read.positive("num_hidden_layers"),
        RoutingRule(read.positive("num_experts_per_tok", _DEFAULTS.top_k), renormalise=True),
        intermediate_size=size,
        expert_size=size,
    )


def param_specs(cfg: SparseConfig) -> ParamTree:
    """Every parameter with its shape, logical axes and the checkpoint tensors it is made of."""
    return sparse.param_specs(cfg, _experts)


def _experts(cfg: SparseConfig, prefix: str) -> dict[str, Any]:
    prefix, d = f"{prefix}.block_sparse_moe", cfg.hidden_size
    return {
        "router": plain(f"{prefix}.gate.weight", (cfg.experts, d), ("router", "embed")),
        **gated_experts(f"{prefix}.experts", cfg.experts, d, cfg.expert_size, ("w1", "w3", "w2")),
    }
