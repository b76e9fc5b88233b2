"""OLMoE (arXiv:2409.02060): 64 small experts, and a QK norm over all heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.layers.moe import RoutingRule
from jaxinfer.models.families import qwen_moe, sparse
from jaxinfer.models.families.deepseek import require_only
from jaxinfer.models.families.sparse import Sparse, SparseConfig
from jaxinfer.models.family import Family
from jaxinfer.models.specs import cache_spec
from jaxinfer.types import ParamTree

_DEFAULTS = {
    "intermediate_size": 2048,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}


def config_from_json(config: Mapping[str, Any]) -> SparseConfig:
    """Read the config.json of an OlmoeForCausalLM; raises as `sparse.read_config` does."""
    read = sparse.reader(config, _DEFAULTS)
    require_only(read, "clip_qkv", None)
    require_only(read, "head_dim", read.positive("hidden_size") // read.positive("num_attention_heads"))
    bias = read.flag("attention_bias", False)
    return sparse.read_config(
        read,
        [None] * read.positive("num_hidden_layers"),
        RoutingRule(read.positive("num_experts_per_tok"), renormalise=read.flag("norm_topk_prob", False)),
        expert_size=read.positive("intermediate_size"),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
        qk_norm_whole=True,
    )


def param_specs(cfg: SparseConfig) -> ParamTree:
    return qwen_moe.param_specs(cfg)


OLMOE = Family(config_from_json, param_specs, cache_spec, Sparse)
