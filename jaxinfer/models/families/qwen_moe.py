"""Qwen2-MoE and Qwen3-MoE: many small experts; Qwen2 adds a shared expert with a gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.layers.moe import RoutingRule
from jaxinfer.models.config import ConfigReader, max_window_layers, qwen_window, sliding_layers
from jaxinfer.models.families import sparse
from jaxinfer.models.families.sparse import Sparse, SparseConfig
from jaxinfer.models.family import Family
from jaxinfer.models.specs import cache_spec, gated_experts, gated_mlp, plain
from jaxinfer.types import ParamTree

_QWEN2 = {
    "num_key_value_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 32768,
    "intermediate_size": 5632,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
}
_QWEN3 = {
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "max_position_embeddings": 32768,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
}


def qwen2_from_json(config: Mapping[str, Any]) -> SparseConfig:
    """Read the config.json of a Qwen2MoeForCausalLM, old or new style; raises as `sparse.read_config` does."""
    read = sparse.reader(config, _QWEN2)
    return sparse.read_config(
        read,
        _qwen2_windows(read),
        rule(read),
        sparse=sparse_layers(read),
        expert_size=read.positive("moe_intermediate_size"),
        shared_size=read.positive("shared_expert_intermediate_size"),
        qkv_bias=read.flag("qkv_bias", True),
    )


def qwen3_from_json(config: Mapping[str, Any]) -> SparseConfig:
    """Read the config.json of a Qwen3MoeForCausalLM; raises as `sparse.read_config` does."""
    read = sparse.reader(config, _QWEN3)
    bias = read.flag("attention_bias", False)
    return sparse.read_config(
        read,
        [qwen_window(read)] * read.positive("num_hidden_layers"),
        rule(read),
        sparse=sparse_layers(read),
        expert_size=read.positive("moe_intermediate_size"),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
    )


def rule(read: ConfigReader) -> RoutingRule:
    """Read the routing rule."""
    return RoutingRule(read.positive("num_experts_per_tok"), renormalise=read.flag("norm_topk_prob", False))


def _qwen2_windows(read: ConfigReader) -> list[int | None]:
    """Read windows as transformers does: every second of the first ``max_window_layers``; or from ``layer_types``."""
    window, local = qwen_window(read), sliding_layers(read)
    if local is None:
        most = max_window_layers(read)
        local = [index % 2 == 0 and index < most for index in range(read.positive("num_hidden_layers"))]
    return [window if near else None for near in local]


def sparse_layers(read: ConfigReader) -> tuple[bool, ...]:
    """Read which layers have experts."""
    step, dense = read.positive("decoder_sparse_step", 1), read.fields.get("mlp_only_layers") or []
    integers = isinstance(dense, list) and all(type(index) is int for index in dense)
    read.require(integers, "mlp_only_layers", "must be a list of layers")
    layers = range(read.positive("num_hidden_layers"))
    return tuple(index not in dense and (index + 1) % step == 0 for index in layers)


def param_specs(cfg: SparseConfig) -> ParamTree:
    return sparse.param_specs(cfg, experts)


def experts(cfg: SparseConfig, prefix: str) -> dict[str, Any]:
    """Return the parameters of `MoE` for a layer, with those of its shared expert."""
    prefix, d = f"{prefix}.mlp", cfg.hidden_size
    tree: dict[str, Any] = {
        "router": plain(f"{prefix}.gate.weight", (cfg.experts, d), ("router", "embed")),
        **gated_experts(f"{prefix}.experts", cfg.experts, d, cfg.expert_size),
    }
    if cfg.shared_size is not None:
        tree["shared"] = gated_mlp(f"{prefix}.shared_expert", d, cfg.shared_size)
        tree["shared_gate"] = plain(f"{prefix}.shared_expert_gate.weight", (1, d), (None, "embed"))
    return tree


QWEN2_MOE = Family(qwen2_from_json, param_specs, cache_spec, Sparse)
QWEN3_MOE = Family(qwen3_from_json, param_specs, cache_spec, Sparse)
