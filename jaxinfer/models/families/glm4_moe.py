"""GLM-4.5 to 4.7 (arXiv:2508.06471): grouped-query attention, a few dense layers, then the router of DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.models.config import ConfigReader, aliased
from jaxinfer.models.families import sparse
from jaxinfer.models.families.deepseek import count_of, moe_specs, routed_experts, v3_rule
from jaxinfer.models.families.sparse import Sparse, SparseConfig
from jaxinfer.models.family import Family
from jaxinfer.models.specs import cache_spec
from jaxinfer.types import ParamTree

_DEFAULTS = {
    "num_key_value_heads": 8,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 128,
    "num_experts": 128,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
}


def config_from_json(config: Mapping[str, Any]) -> SparseConfig:
    """Read the config.json of a Glm4MoeForCausalLM; raises as `sparse.read_config` does.

    A checkpoint has an MTP layer after the last one, even if config.json does not declare it. It is used for drafting.
    """
    read = ConfigReader(config, _DEFAULTS, {"num_experts": "n_routed_experts"})
    rule, count = v3_rule(read), read.positive("num_hidden_layers")
    experts, size, dense = routed_experts(read, rule), read.positive("moe_intermediate_size"), _dense(read, count)
    return sparse.read_config(
        read,
        [None] * count,
        rule,
        partial=True,
        sparse=tuple(index >= dense for index in range(count)),
        experts=experts,
        expert_size=size,
        shared_size=size * read.positive("n_shared_experts", 1),
        shared_gate=False,
        corrected=True,
        qkv_bias=read.flag("attention_bias", False),
        qk_norm=read.flag("use_qk_norm", False),
        predictors=max(1, count_of(read, "num_nextn_predict_layers")),
    )


def _dense(read: ConfigReader, count: int) -> int:
    return min(count_of(read, "first_k_dense_replace"), count)


def param_specs(cfg: SparseConfig) -> ParamTree:
    return sparse.param_specs(cfg, lambda cfg, prefix: moe_specs(cfg, f"{prefix}.mlp"))


GLM4_MOE = Family(aliased(config_from_json, {"num_local_experts": "n_routed_experts"}), param_specs, cache_spec, Sparse)
