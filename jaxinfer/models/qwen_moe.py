"""Qwen2-MoE and Qwen3-MoE: many small experts; in Qwen2 beside one that all tokens share, behind a gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.layers.moe import RoutingRule
from jaxinfer.models import sparse
from jaxinfer.models.config import ConfigReader
from jaxinfer.models.sparse import Defaults, SparseConfig
from jaxinfer.models.specs import gated_experts, gated_mlp, plain
from jaxinfer.types import ParamTree

_QWEN2 = Defaults(kv_heads=16, experts=60, top_k=4, norm_eps=1e-6, theta=1e4, max_position=32768)
_QWEN3 = Defaults(kv_heads=4, experts=128, top_k=8, norm_eps=1e-6, theta=1e4, max_position=32768)
_SLIDING_WINDOW = 4096
_MAX_WINDOW_LAYERS = 28


def qwen2_from_json(config: Mapping[str, Any]) -> SparseConfig:
    """Read the config.json of a Qwen2MoeForCausalLM, old or new style.

    Raises:
        ConfigError: a field is missing, of the wrong type or not supported.
    """
    read = ConfigReader(config)
    return sparse.read_config(
        read,
        _QWEN2,
        _qwen2_windows(read),
        _rule(read, _QWEN2),
        sparse=_sparse_layers(read),
        intermediate_size=read.positive("intermediate_size", 5632),
        expert_size=read.positive("moe_intermediate_size", 1408),
        shared_size=read.positive("shared_expert_intermediate_size", 5632),
        qkv_bias=read.flag("qkv_bias", True),
    )


def qwen3_from_json(config: Mapping[str, Any]) -> SparseConfig:
    """Read the config.json of a Qwen3MoeForCausalLM; errors as in `qwen2_from_json`."""
    read = ConfigReader(config)
    bias = read.flag("attention_bias", False)
    return sparse.read_config(
        read,
        _QWEN3,
        [_window(read)] * read.positive("num_hidden_layers"),
        _rule(read, _QWEN3),
        sparse=_sparse_layers(read),
        intermediate_size=read.positive("intermediate_size", 6144),
        expert_size=read.positive("moe_intermediate_size", 768),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
    )


def _rule(read: ConfigReader, defaults: Defaults) -> RoutingRule:
    renormalise = read.flag("norm_topk_prob", False)
    return RoutingRule(read.positive("num_experts_per_tok", defaults.top_k), renormalise=renormalise)


def _window(read: ConfigReader) -> int | None:
    """Read the window: null is none; a window that is not used may be 0."""
    if not read.flag("use_sliding_window", False) or read.fields.get("sliding_window", _SLIDING_WINDOW) is None:
        return None
    return read.positive("sliding_window", _SLIDING_WINDOW)


def _qwen2_windows(read: ConfigReader) -> list[int | None]:
    """Read windows as transformers: every second of the first ``max_window_layers``; or from ``layer_types``."""
    window, count = _window(read), read.positive("num_hidden_layers")
    kinds = read.fields.get("layer_types")
    if kinds is not None:
        known = isinstance(kinds, list) and set(kinds) <= {"full_attention", "sliding_attention"}
        read.require(known and len(kinds) == count, "layer_types", f"must name {count} full or sliding attentions")
        return [window if kind == "sliding_attention" else None for kind in kinds]
    most = read.fields.get("max_window_layers", _MAX_WINDOW_LAYERS)
    read.require(type(most) is int and most >= 0, "max_window_layers", "must be >= 0")
    return [window if index % 2 == 0 and index < most else None for index in range(count)]


def _sparse_layers(read: ConfigReader) -> tuple[bool, ...]:
    step, dense = read.positive("decoder_sparse_step", 1), read.fields.get("mlp_only_layers") or []
    integers = isinstance(dense, list) and all(type(index) is int for index in dense)
    read.require(integers, "mlp_only_layers", "must be a list of layers")
    layers = range(read.positive("num_hidden_layers"))
    return tuple(index not in dense and (index + 1) % step == 0 for index in layers)


def param_specs(cfg: SparseConfig) -> ParamTree:
    """Every parameter with its shape, logical axes and the checkpoint tensors it is made of."""
    return sparse.param_specs(cfg, _experts)


def _experts(cfg: SparseConfig, prefix: str) -> dict[str, Any]:
    prefix, d = f"{prefix}.mlp", cfg.hidden_size
    tree: dict[str, Any] = {
        "router": plain(f"{prefix}.gate.weight", (cfg.experts, d), ("router", "embed")),
        **gated_experts(f"{prefix}.experts", cfg.experts, d, cfg.expert_size),
    }
    if cfg.shared_size is not None:
        tree["shared"] = gated_mlp(f"{prefix}.shared_expert", d, cfg.shared_size)
        tree["shared_gate"] = plain(f"{prefix}.shared_expert_gate.weight", (1, d), (None, "embed"))
    return tree
