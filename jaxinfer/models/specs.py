"""Parameter specs common to many families: shapes, logical axes and the checkpoint tensors that fill them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from jaxinfer.models.config import DecoderConfig
from jaxinfer.types import CacheSpec, ParamSpec, Source

_GATED = ("gate_proj", "up_proj", "down_proj")


def plain(name: str, shape: tuple[int, ...], axes: tuple[str | None, ...], init: str = "normal") -> ParamSpec:
    """Return the spec of a parameter that is one checkpoint tensor, unchanged."""
    return ParamSpec(shape, axes, init=init, sources=(Source(name, shape),))


def linear(name: str, shape: tuple[int, int], axes: tuple[str | None, str | None]) -> ParamSpec:
    """Return the spec of a matrix [in, out], stored as [out, in] in the checkpoint."""
    return ParamSpec(shape, axes, sources=(Source(name, shape[::-1], transpose=True),), inputs=0)


def matrix(name: str, shape: tuple[int, int], axes: tuple[str | None, str | None]) -> ParamSpec:
    """Return the spec of a matrix [out, in], stored as [out, in] in the checkpoint."""
    return ParamSpec(shape, axes, sources=(Source(name, shape),), inputs=-1)


def rms_norm(prefix: str, size: int, init: str = "ones") -> dict[str, Any]:
    """Return the parameters of `RMSNorm`: ``prefix.weight``."""
    return {"scale": plain(f"{prefix}.weight", (size,), ("norm",), init)}


def layer_norm(prefix: str, size: int) -> dict[str, Any]:
    """Return the parameters of `LayerNorm`: ``prefix.weight`` and ``prefix.bias``."""
    return rms_norm(prefix, size) | {"bias": plain(f"{prefix}.bias", (size,), ("norm",), "zeros")}


def heads_norm(name: str, heads: int, head_dim: int) -> dict[str, Any]:
    """Return the parameters of `AllHeadsNorm` from one tensor: replicated, since the scales of heads differ."""
    shape = (heads, head_dim)
    source = Source(name, (heads * head_dim,), reshape=shape)
    return {"scale": ParamSpec(shape, ("all_heads", "norm"), init="ones", sources=(source,))}


def vocabulary(name: str, vocab: int, d: int) -> dict[str, Any]:
    """Return the parameters of an embedding table or LM head."""
    return {"table": matrix(name, (vocab, d), ("vocab", "embed"))}


def cache_spec(cfg: DecoderConfig) -> CacheSpec:
    """Return the spec of a KV cache that stores keys and values unchanged, of the layers that have their own."""
    return CacheSpec(tuple(layer for layer in cfg.layers if layer.source is None), cfg.kv_heads, cfg.head_dim)


def pre_norm(
    prefix: str,
    d: int,
    attention: dict[str, Any],
    mlp: dict[str, Any],
    norm: Callable[[str, int], dict[str, Any]] = rms_norm,
) -> dict[str, Any]:
    """Return the parameters of a `Block` with the usual names of its norms."""
    return {
        "attention_norm": norm(f"{prefix}.input_layernorm", d),
        "attention": attention,
        "mlp_norm": norm(f"{prefix}.post_attention_layernorm", d),
        "mlp": mlp,
    }


def decoder(
    cfg: Any,
    block: Callable[[int, str], dict[str, Any]],
    *,
    embed: str = "model.embed_tokens.weight",
    layers: str = "model.layers",
    final_norm: dict[str, Any] | None = None,
    head_bias: bool = False,
) -> dict[str, Any]:
    """Return the parameters of a `Decoder`, by the names that most checkpoints use.

    Args:
        block: returns the parameters of a layer from its index and the prefix of its tensor names.
        embed, layers: tensor name of the embedding table, and name prefix of all layers.
        final_norm: parameters of the final norm (default: of an `RMSNorm`).
        head_bias: see `Decoder`.
    """
    d, vocab = cfg.hidden_size, cfg.vocab_size
    tree: dict[str, Any] = {
        "embed": vocabulary(embed, vocab, d),
        "final_norm": final_norm or rms_norm("model.norm", d),
    }
    for index in range(len(cfg.layers)):
        tree[f"layers_{index}"] = block(index, f"{layers}.{index}")
    head = {} if cfg.tied else vocabulary("lm_head.weight", vocab, d)
    if head_bias:
        head["bias"] = plain("lm_head.bias", (vocab,), ("vocab",), "zeros")
    return tree | {"head": head} if head else tree


def fused_qkv(
    prefix: str,
    d: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    kind: str = "weight",
    names: tuple[str, str, str] = ("q_proj", "k_proj", "v_proj"),
) -> ParamSpec:
    """Return the ``qkv`` (``kind`` "weight") or ``qkv_bias`` ("bias") of `Attention` from three checkpoint tensors."""
    group, lead = heads // kv_heads, (d,) if kind == "weight" else ()
    everything = [slice(None)] * (len(lead) + 1)
    places: tuple[slice | int, ...] = (slice(0, group), group, group + 1)
    sources = tuple(
        Source(
            f"{prefix}.{name}.{kind}",
            ((heads if index == 0 else kv_heads) * head_dim, *lead),
            transpose=bool(lead),
            reshape=(*lead, kv_heads, group, head_dim) if index == 0 else (*lead, kv_heads, head_dim),
            where=(*everything, place),
        )
        for index, (name, place) in enumerate(zip(names, places, strict=True))
    )
    axes = ("kv_heads", "group", "head_dim")
    if kind == "weight":
        return ParamSpec((d, kv_heads, group + 2, head_dim), ("embed", *axes), sources=sources, inputs=0)
    return ParamSpec((kv_heads, group + 2, head_dim), axes, init="zeros", sources=sources)


def attention(
    cfg: Any, prefix: str, *, qkv_bias: bool = False, out_bias: bool = False, out: str = "o_proj"
) -> dict[str, Any]:
    """Return the projections of `Attention` from q_proj, k_proj, v_proj and ``out``."""
    d, sizes = cfg.hidden_size, (cfg.hidden_size, cfg.heads, cfg.kv_heads, cfg.head_dim)
    tree: dict[str, Any] = {
        "qkv": fused_qkv(prefix, *sizes),
        "out": linear(f"{prefix}.{out}.weight", (cfg.heads * cfg.head_dim, d), ("heads", "embed")),
    }
    if qkv_bias:
        tree["qkv_bias"] = fused_qkv(prefix, *sizes, kind="bias")
    if out_bias:
        tree["out_bias"] = plain(f"{prefix}.{out}.bias", (d,), ("embed",), "zeros")
    return tree


def grouped_attention(prefix: str, d: int, heads: int, kv_heads: int, head_dim: int, bias: bool) -> dict[str, Any]:
    """Return the parameters of `Attention` from a fused projection that is grouped by KV head (queries, key, value)."""
    axes, form = ("kv_heads", "group", "head_dim"), (kv_heads, heads // kv_heads + 2, head_dim)
    fused = Source(f"{prefix}.query_key_value.weight", (math.prod(form), d), transpose=True, reshape=(d, *form))
    tree: dict[str, Any] = {
        "qkv": ParamSpec((d, *form), ("embed", *axes), sources=(fused,), inputs=0),
        "out": linear(f"{prefix}.dense.weight", (d, d), ("heads", "embed")),
    }
    if bias:
        fused_bias = Source(f"{prefix}.query_key_value.bias", (math.prod(form),), reshape=form)
        tree["qkv_bias"] = ParamSpec(form, axes, init="zeros", sources=(fused_bias,))
        tree["out_bias"] = plain(f"{prefix}.dense.bias", (d,), ("embed",), "zeros")
    return tree


def plain_mlp(up: str, down: str, d: int, hidden: int, bias: bool = True, out: int | None = None) -> dict[str, Any]:
    """Return the parameters of `MLP` from two checkpoint layers, stored as [out, in]. ``out``: default ``d``."""
    out = d if out is None else out
    tree: dict[str, Any] = {
        "up": matrix(f"{up}.weight", (hidden, d), ("mlp", "embed")),
        "down": linear(f"{down}.weight", (hidden, out), ("mlp", "embed")),
    }
    if bias:
        tree["up_bias"] = plain(f"{up}.bias", (hidden,), ("mlp",), "zeros")
        tree["down_bias"] = plain(f"{down}.bias", (out,), ("embed",), "zeros")
    return tree


def gated_mlp(
    prefix: str, d: int, hidden: int, bias: bool = False, names: tuple[str, str, str] = _GATED
) -> dict[str, Any]:
    """Return the parameters of `GatedMLP` from three checkpoint layers: gate, up and down."""
    *wide, down = names
    weights = tuple(Source(f"{prefix}.{name}.weight", (hidden, d), where=(index,)) for index, name in enumerate(wide))
    tree: dict[str, Any] = {
        "gate_up": ParamSpec((2, hidden, d), (None, "mlp", "embed"), sources=weights, inputs=-1),
        "down": linear(f"{prefix}.{down}.weight", (hidden, d), ("mlp", "embed")),
    }
    if bias:
        biases = tuple(Source(f"{prefix}.{name}.bias", (hidden,), where=(index,)) for index, name in enumerate(wide))
        tree["gate_up_bias"] = ParamSpec((2, hidden), (None, "mlp"), init="zeros", sources=biases)
        tree["down_bias"] = plain(f"{prefix}.{down}.bias", (d,), ("embed",), "zeros")
    return tree


def gated_experts(
    prefix: str, experts: int, d: int, hidden: int, names: tuple[str, str, str] = _GATED
) -> dict[str, Any]:
    """Return the ``gate_up`` and ``down`` of `MoE` from one tensor each for the gate, up and down of every expert."""
    sources = tuple(
        Source(f"{prefix}.{expert}.{name}.weight", (hidden, d), where=(expert, index))
        for expert in range(experts)
        for index, name in enumerate(names[:2])
    )
    down = tuple(
        Source(f"{prefix}.{expert}.{names[2]}.weight", (d, hidden), where=(expert,)) for expert in range(experts)
    )
    return {
        "gate_up": ParamSpec(
            (experts, 2, hidden, d), ("expert", None, "expert_mlp", "embed"), sources=sources, inputs=-1
        ),
        "down": ParamSpec((experts, d, hidden), ("expert", "embed", "expert_mlp"), sources=down, inputs=-1),
    }


def fused_experts(gate_up: str, down: str, experts: int, d: int, hidden: int) -> dict[str, Any]:
    """Return the expert weights of `MoE` from tensors [experts, d, 2 hidden], gates first, and [experts, hidden, d]."""
    whole, every = (experts, d, 2 * hidden), slice(None)
    halves = (slice(0, hidden), slice(hidden, 2 * hidden))
    sources = tuple(
        Source(gate_up, whole, transpose=True, where=(expert, index), part=(expert, every, half))
        for expert in range(experts)
        for index, half in enumerate(halves)
    )
    downs = tuple(
        Source(down, (experts, hidden, d), transpose=True, where=(expert,), part=(expert,)) for expert in range(experts)
    )
    axes = ("expert", None, "expert_mlp", "embed")
    return {
        "gate_up": ParamSpec((experts, 2, hidden, d), axes, sources=sources, inputs=-1),
        "down": ParamSpec((experts, d, hidden), ("expert", "embed", "expert_mlp"), sources=downs, inputs=-1),
    }


def correction_bias(name: str, experts: int, form: tuple[int, ...] | None = None) -> ParamSpec:
    """Return the ``correction`` of `MoE`, trained in float32: rounding it changes which experts are selected.

    ``form``: shape of the tensor, if it is not [experts].
    """
    source = Source(name, form or (experts,), reshape=(experts,) if form else None)
    return ParamSpec((experts,), ("router",), init="zeros", sources=(source,), dtype="float32")
