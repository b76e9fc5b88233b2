"""Phi-3.5-MoE: two of sixteen experts by SparseMixer, and layer norms with biases."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxinfer.layers.base import Layer
from jaxinfer.layers.moe import RoutingRule
from jaxinfer.layers.norm import LayerNorm
from jaxinfer.layers.rope import RopeConfig
from jaxinfer.models.config import ConfigReader, rope_config
from jaxinfer.models.families import mixtral, sparse
from jaxinfer.models.families.deepseek import require_only
from jaxinfer.models.families.sparse import Sparse, SparseBlock, SparseConfig
from jaxinfer.models.family import Family
from jaxinfer.models.specs import cache_spec, layer_norm, plain
from jaxinfer.types import ParamTree

_DEFAULTS = {
    "num_key_value_heads": 8,
    "intermediate_size": 6400,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class PhiMoeConfig(SparseConfig):
    """The resolved config.json of a checkpoint: see `DecoderConfig`. ``head_bias``: see `Decoder`."""

    head_bias: bool = False

    @staticmethod
    def from_json(config: Mapping[str, Any]) -> PhiMoeConfig:
        """Read the config.json of a PhimoeForCausalLM; raises as `sparse.read_config` does."""
        read = sparse.reader(_with_factor(config), _DEFAULTS)
        require_only(read, "num_experts_per_tok", 2)
        bias, window = read.flag("attention_bias", False), read.positive("sliding_window", 2**31 - 1)
        windows = [window if window < read.positive("max_position_embeddings") else None]
        rule = RoutingRule(2, scores="sparsemixer", jitter=read.number("router_jitter_noise", 0.01))
        plain_config = sparse.read_config(
            read,
            windows * read.positive("num_hidden_layers"),
            rule,
            expert_size=read.positive("intermediate_size"),
            qkv_bias=bias,
            out_bias=bias,
        )
        values = {field.name: getattr(plain_config, field.name) for field in dataclasses.fields(plain_config)}
        rope = _rope(read, plain_config)
        return PhiMoeConfig(**values | {"rope": rope}, head_bias=read.flag("lm_head_bias", False))


def _with_factor(config: Mapping[str, Any]) -> dict[str, Any]:
    """Set the attention factor of LongRoPE from ``short_mscale``, which must equal ``long_mscale``."""
    fields = dict(config)
    for name in ("rope_scaling", "rope_parameters"):
        scaling = fields.get(name)
        if isinstance(scaling, dict) and scaling.get("rope_type", scaling.get("type")) == "longrope":
            inner = ConfigReader(scaling)
            factor = inner.number("short_mscale")
            same = inner.number("long_mscale") == factor
            inner.require(same, "long_mscale", f"must be short_mscale ({factor}): another one is not supported")
            fields[name] = {**scaling, "attention_factor": factor}
    return fields


def _rope(read: ConfigReader, cfg: SparseConfig) -> RopeConfig:
    rope = rope_config(read, cfg.max_position, cfg.head_dim)
    read.require(rope.kind in ("default", "longrope"), "rope_scaling", "must be longrope or nothing for Phi-3.5-MoE")
    return rope


class PhiMoeBlock(SparseBlock):
    """A decoder layer."""

    norm = LayerNorm


class PhiMoe(Sparse):
    """The PhiMoe decoder: see `Decoder`."""

    config: PhiMoeConfig
    block_type = PhiMoeBlock

    def final_norm(self) -> Layer:
        return LayerNorm(self.config.norm_eps, parent=None)


class PhiMoeWithHeadBias(PhiMoe):
    """A `PhiMoe` decoder whose LM head has a bias."""

    head_bias = True


def module(cfg: PhiMoeConfig) -> PhiMoe:
    return PhiMoeWithHeadBias(cfg) if cfg.head_bias else PhiMoe(cfg)


def param_specs(cfg: PhiMoeConfig) -> ParamTree:
    tree: dict[str, Any] = {**sparse.param_specs(cfg, mixtral.experts, layer_norm)}
    if cfg.head_bias:
        bias = plain("lm_head.bias", (cfg.vocab_size,), ("vocab",), "zeros")
        tree["head"] = {**tree.get("head", {}), "bias": bias}
    return tree


PHIMOE = Family(PhiMoeConfig.from_json, param_specs, cache_spec, module)
