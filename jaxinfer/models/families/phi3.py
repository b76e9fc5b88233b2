"""Phi-3: Llama with fused projections in its checkpoints, partial rotation, LongRoPE and sliding windows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.models.config import ConfigReader, decoder_fields, rope_config
from jaxinfer.models.families.llama import Llama, LlamaConfig
from jaxinfer.models.family import Family
from jaxinfer.models.specs import cache_spec, decoder, linear, pre_norm
from jaxinfer.types import LayerSpec, ParamSpec, ParamTree, Source

# Defaults of transformers for fields missing from config.json.
_DEFAULTS = {
    "vocab_size": 32064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}


def config_from_json(config: Mapping[str, Any]) -> LlamaConfig:
    """Read config.json as `transformers` (old or new style) writes it; raises as `LlamaConfig.from_json` does."""
    read = ConfigReader(_as_longrope(config), _DEFAULTS)
    fields = decoder_fields(read)
    rope = rope_config(read, fields["max_position"], fields["head_dim"], partial=True)
    read.require(rope.kind in ("default", "longrope"), "rope_scaling", "must be longrope or nothing for Phi-3")
    layers = (_layer(read, fields["max_position"]),) * read.positive("num_hidden_layers")
    return LlamaConfig(**fields, layers=layers, rope=rope)


def _as_longrope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rename LongRoPE, which the first checkpoints call "su" or "yarn"."""
    fields = dict(config)
    for name in ("rope_scaling", "rope_parameters"):
        scaling = fields.get(name)
        if isinstance(scaling, dict) and scaling.get("rope_type", scaling.get("type")) in ("su", "yarn"):
            fields[name] = {**scaling, "rope_type": "longrope"}
    return fields


def _layer(read: ConfigReader, max_position: int) -> LayerSpec:
    """Read the sliding window of a layer; at least ``max_position`` tokens mean full attention."""
    window = read.positive("sliding_window", 2**31 - 1)
    return LayerSpec(window if window < max_position else None)


def param_specs(cfg: LlamaConfig) -> ParamTree:
    return decoder(cfg, lambda _, prefix: _block_specs(cfg, prefix))


def _block_specs(cfg: LlamaConfig, prefix: str) -> dict[str, Any]:
    d, hidden = cfg.hidden_size, cfg.intermediate_size
    attention = {
        "qkv": _qkv(cfg, f"{prefix}.self_attn.qkv_proj.weight"),
        "out": linear(f"{prefix}.self_attn.o_proj.weight", (cfg.heads * cfg.head_dim, d), ("heads", "embed")),
    }
    return pre_norm(prefix, d, attention, fused_mlp(f"{prefix}.mlp", d, hidden))


def _qkv(cfg: LlamaConfig, name: str) -> ParamSpec:
    """Return the ``qkv`` of `Attention` from one tensor: rows of all queries, then of all keys, then of all values."""
    d, kv_heads, dim = cfg.hidden_size, cfg.kv_heads, cfg.head_dim
    group, queries, keys = cfg.heads // kv_heads, cfg.heads * dim, kv_heads * dim
    whole, everything = (queries + 2 * keys, d), (slice(None),) * 2
    parts: tuple[tuple[slice, slice | int, tuple[int, ...]], ...] = (
        (slice(0, queries), slice(0, group), (d, kv_heads, group, dim)),
        (slice(queries, queries + keys), group, (d, kv_heads, dim)),
        (slice(queries + keys, queries + 2 * keys), group + 1, (d, kv_heads, dim)),
    )
    sources = tuple(
        Source(name, whole, transpose=True, reshape=form, where=(*everything, place), part=(rows,))
        for rows, place, form in parts
    )
    return ParamSpec(
        (d, kv_heads, group + 2, dim), ("embed", "kv_heads", "group", "head_dim"), sources=sources, inputs=0
    )


def fused_mlp(prefix: str, d: int, hidden: int) -> dict[str, Any]:
    """Return the parameters of `GatedMLP`; one tensor has the rows of the gate, then of up."""
    name, rows = f"{prefix}.gate_up_proj.weight", (slice(0, hidden), slice(hidden, 2 * hidden))
    sources = tuple(Source(name, (2 * hidden, d), where=(index,), part=(part,)) for index, part in enumerate(rows))
    return {
        "gate_up": ParamSpec((2, hidden, d), (None, "mlp", "embed"), sources=sources, inputs=-1),
        "down": linear(f"{prefix}.down_proj.weight", (hidden, d), ("mlp", "embed")),
    }


PHI3 = Family(config_from_json, param_specs, cache_spec, Llama)
