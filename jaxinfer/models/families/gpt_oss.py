"""gpt-oss (arXiv:2508.10925): attention with sinks and alternating windows, experts with biases and a clamped GLU.

Expert weights may be unquantized or in MXFP4 (`jaxinfer.weights.formats.mxfp4`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.layers.moe import ClampedGLU, RoutingRule
from jaxinfer.models.config import ConfigReader, sliding_layers
from jaxinfer.models.families import sparse
from jaxinfer.models.families.sparse import Sparse, SparseConfig
from jaxinfer.models.family import Family
from jaxinfer.models.specs import cache_spec, plain
from jaxinfer.types import ParamSpec, ParamTree, Source

_DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_experts": 128,
    "num_experts_per_tok": 4,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "max_position_embeddings": 131072,
}
_WINDOW = 128
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def config_from_json(config: Mapping[str, Any]) -> SparseConfig:
    """Read config.json as `transformers` (old or new style) writes it; raises as `sparse.read_config` does."""
    scaled = any(config.get(name) is not None for name in ("rope_parameters", "rope_scaling"))
    read = sparse.reader(config if scaled else {**config, "rope_parameters": _ROPE}, _DEFAULTS)
    bias = read.flag("attention_bias", True)
    return sparse.read_config(
        read,
        _windows(read),
        RoutingRule(read.positive("num_experts_per_tok"), scores="softmax of chosen"),
        expert_size=read.positive("intermediate_size"),
        glu=ClampedGLU(read.number("swiglu_alpha", 1.702), read.number("swiglu_limit", 7.0)),
        qkv_bias=bias,
        out_bias=bias,
        sinks=True,
        expert_bias=True,
    )


def _windows(read: ConfigReader) -> list[int | None]:
    """Read the window of each layer: the first has one, the second none, and so on, unless ``layer_types`` is set."""
    null = "sliding_window" in read.fields and read.fields["sliding_window"] is None
    window, local = None if null else read.positive("sliding_window", _WINDOW), sliding_layers(read)
    local = [index % 2 == 0 for index in range(read.positive("num_hidden_layers"))] if local is None else local
    return [window if near else None for near in local]


def param_specs(cfg: SparseConfig) -> ParamTree:
    tree: dict[str, Any] = {**sparse.param_specs(cfg, _experts)}
    for index in range(len(cfg.layers)):
        name = f"model.layers.{index}.self_attn.sinks"
        tree[f"layers_{index}"]["attention"]["sinks"] = plain(name, (cfg.heads,), ("heads",))
    return tree


def _experts(cfg: SparseConfig, prefix: str) -> dict[str, Any]:
    prefix, d, hidden, count = f"{prefix}.mlp", cfg.hidden_size, cfg.expert_size, cfg.experts
    return {
        "router": plain(f"{prefix}.router.weight", (count, d), ("router", "embed")),
        "router_bias": plain(f"{prefix}.router.bias", (count,), ("router",), "zeros"),
        "gate_up": _gate_up(f"{prefix}.experts.gate_up_proj", count, d, hidden),
        "gate_up_bias": _gate_up_bias(f"{prefix}.experts.gate_up_proj_bias", count, hidden),
        "down": _down(f"{prefix}.experts.down_proj", count, d, hidden),
        "down_bias": plain(f"{prefix}.experts.down_proj_bias", (count, d), ("expert", "embed"), "zeros"),
    }


def _gate_up(name: str, count: int, d: int, hidden: int) -> ParamSpec:
    """Return the ``gate_up`` of `MoE` from one tensor [experts, d, 2 hidden] with interleaved columns."""
    sources = tuple(
        Source(
            name,
            (count, d, 2 * hidden),
            transpose=True,
            where=(expert, index),
            part=(expert, slice(None), slice(index, None, 2)),
        )
        for expert in range(count)
        for index in range(2)
    )
    return ParamSpec((count, 2, hidden, d), ("expert", None, "expert_mlp", "embed"), sources=sources, inputs=-1)


def _gate_up_bias(name: str, count: int, hidden: int) -> ParamSpec:
    shape, every = (count, 2 * hidden), slice(None)
    sources = tuple(Source(name, shape, where=(every, i), part=(every, slice(i, None, 2))) for i in range(2))
    return ParamSpec((count, 2, hidden), ("expert", None, "expert_mlp"), init="zeros", sources=sources)


def _down(name: str, count: int, d: int, hidden: int) -> ParamSpec:
    sources = tuple(
        Source(name, (count, hidden, d), transpose=True, where=(expert,), part=(expert,)) for expert in range(count)
    )
    return ParamSpec((count, d, hidden), ("expert", "embed", "expert_mlp"), sources=sources, inputs=-1)


GPT_OSS = Family(config_from_json, param_specs, cache_spec, Sparse)
