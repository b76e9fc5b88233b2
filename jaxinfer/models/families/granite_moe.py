"""Granite 3 MoE: Granite's four multipliers, experts in one tensor, with or without a shared expert."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from jaxinfer.layers.attention import Attend
from jaxinfer.layers.base import Hidden, HiddenAndCache
from jaxinfer.layers.moe import RoutingRule
from jaxinfer.models.config import ConfigReader
from jaxinfer.models.families import granite, sparse
from jaxinfer.models.families.sparse import Sparse, SparseBlock, SparseConfig, SparseContext
from jaxinfer.models.family import Family
from jaxinfer.models.specs import cache_spec, linear, plain
from jaxinfer.types import ParamSpec, ParamTree, Source

_DEFAULTS = {
    **granite.DEFAULTS,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 2048,
}


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class GraniteMoeConfig(SparseConfig):
    """The resolved config.json of a checkpoint: see `SparseConfig`, and `GraniteConfig` for the multipliers."""

    embedding_multiplier: float
    residual_multiplier: float
    scale: float
    logits_scaling: float

    @staticmethod
    def from_json(config: Mapping[str, Any]) -> GraniteMoeConfig:
        """Read the config.json of a GraniteMoeForCausalLM; raises as `sparse.read_config` does."""
        return _read(sparse.reader(config, _DEFAULTS), None)

    @staticmethod
    def from_shared(config: Mapping[str, Any]) -> GraniteMoeConfig:
        """Read the config.json of a GraniteMoeSharedForCausalLM (shared expert optional); see `from_json`."""
        read = sparse.reader(config, _DEFAULTS)
        given = read.get("shared_intermediate_size", 0) != 0
        return _read(read, read.positive("shared_intermediate_size") if given else None)


def _read(read: ConfigReader, shared: int | None) -> GraniteMoeConfig:
    bias = read.flag("attention_bias", False)
    common = sparse.read_config(
        read,
        [None] * read.positive("num_hidden_layers"),
        RoutingRule(read.positive("num_experts_per_tok"), scores="softmax of chosen"),
        expert_size=read.positive("intermediate_size"),
        qkv_bias=bias,
        out_bias=bias,
        shared_size=shared,
        shared_gate=False,
    )
    fields = {field.name: getattr(common, field.name) for field in dataclasses.fields(common)}
    return GraniteMoeConfig(**fields, **granite.multipliers(read))


class GraniteMoeBlock(SparseBlock):
    """A decoder layer."""

    config: GraniteMoeConfig

    def options(self) -> dict[str, Any]:
        return {"scale": self.config.scale}

    def __call__(self, x: Hidden, context: SparseContext, attend: Attend, cache: Any) -> HiddenAndCache:
        share = self.config.residual_multiplier
        mixed, cache = self.attention(self.attention_norm(x), context.rope, attend, cache)
        x = x + mixed * share
        return x + self.mlp(self.mlp_norm(x), context.live) * share, cache


class GraniteMoe(granite.ScaledDecoder, Sparse):
    """The GraniteMoe decoder: see `Decoder`."""

    config: GraniteMoeConfig
    block_type: ClassVar[Any] = GraniteMoeBlock


def param_specs(cfg: GraniteMoeConfig) -> ParamTree:
    return sparse.param_specs(cfg, experts)


def experts(cfg: SparseConfig, prefix: str) -> dict[str, Any]:
    """Return the parameters of `MoE`. Each tensor has gates before ups, so it is the parameter in another shape."""
    moe, count, d, hidden = f"{prefix}.block_sparse_moe", cfg.experts, cfg.hidden_size, cfg.expert_size
    both = Source(f"{moe}.input_linear.weight", (count, 2 * hidden, d), reshape=(count, 2, hidden, d))
    down = Source(f"{moe}.output_linear.weight", (count, d, hidden))
    axes = ("expert", None, "expert_mlp", "embed")
    tree: dict[str, Any] = {
        "router": plain(f"{moe}.router.layer.weight", (count, d), ("router", "embed")),
        "gate_up": ParamSpec((count, 2, hidden, d), axes, sources=(both,), inputs=-1),
        "down": ParamSpec((count, d, hidden), ("expert", "embed", "expert_mlp"), sources=(down,), inputs=-1),
    }
    return tree if cfg.shared_size is None else tree | {"shared": shared(f"{prefix}.shared_mlp", d, cfg.shared_size)}


def shared(prefix: str, d: int, hidden: int) -> dict[str, Any]:
    """Return the parameters of `GatedMLP`."""
    both = Source(f"{prefix}.input_linear.weight", (2 * hidden, d), reshape=(2, hidden, d))
    return {
        "gate_up": ParamSpec((2, hidden, d), (None, "mlp", "embed"), sources=(both,), inputs=-1),
        "down": linear(f"{prefix}.output_linear.weight", (hidden, d), ("mlp", "embed")),
    }


GRANITE_MOE = Family(GraniteMoeConfig.from_json, param_specs, cache_spec, GraniteMoe)
GRANITE_MOE_SHARED = dataclasses.replace(GRANITE_MOE, config=GraniteMoeConfig.from_shared)
