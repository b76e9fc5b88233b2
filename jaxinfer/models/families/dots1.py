"""dots.llm1 (arXiv:2506.05767): the attention of Qwen3, a few dense layers, then the router of DeepSeek-V3."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxinfer.models.config import SLIDING_WINDOW, ConfigReader, aliased, sliding_layers
from jaxinfer.models.families import sparse
from jaxinfer.models.families.deepseek import count_of, require_only, routed_experts, v3_rule
from jaxinfer.models.families.glm4_moe import GLM4_MOE
from jaxinfer.models.families.sparse import SparseConfig

# Defaults of transformers for fields missing from config.json.
_DEFAULTS = {
    "num_key_value_heads": 32,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": False,
    "max_position_embeddings": 2048,
}
_MAX_WINDOW_LAYERS = 62


def config_from_json(config: Mapping[str, Any]) -> SparseConfig:
    """Read the config.json of a Dots1ForCausalLM; raises as `sparse.read_config` does."""
    read = ConfigReader(config, _DEFAULTS, {"num_experts": "n_routed_experts"})
    require_only(read, "scoring_func", "sigmoid")
    require_only(read, "moe_layer_freq", 1)
    rule, windows = v3_rule(read), _windows(read)
    size, dense = read.positive("moe_intermediate_size"), count_of(read, "first_k_dense_replace")
    bias = read.flag("attention_bias", False)
    return sparse.read_config(
        read,
        windows,
        rule,
        sparse=tuple(index >= dense for index in range(len(windows))),
        experts=routed_experts(read, rule),
        expert_size=size,
        shared_size=size * read.positive("n_shared_experts"),
        shared_gate=False,
        corrected=True,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
    )


def _windows(read: ConfigReader) -> list[int | None]:
    """Read the sliding window of each layer: from ``layer_types``, else for layers from ``max_window_layers`` on."""
    null = "sliding_window" in read.fields and read.fields["sliding_window"] is None
    count = read.positive("num_hidden_layers")
    local = sliding_layers(read)
    if local is None:
        first = count_of(read, "max_window_layers") if "max_window_layers" in read.fields else _MAX_WINDOW_LAYERS
        local = [not null and index >= first for index in range(count)]
    if not any(local):
        return [None] * count
    window = read.positive("sliding_window", SLIDING_WINDOW)
    return [window if near else None for near in local]


DOTS1 = dataclasses.replace(GLM4_MOE, config=aliased(config_from_json, {"num_local_experts": "n_routed_experts"}))
