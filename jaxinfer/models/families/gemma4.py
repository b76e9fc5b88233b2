"""Gemma 4 (text): larger heads in full-attention layers, normalised values, per-layer embeddings.

The last layers may read the KV cache of earlier layers, keys may also serve as values, and layers may have experts
parallel to the MLP.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxinfer.layers.attention import Attend
from jaxinfer.layers.base import Hidden, HiddenAndCache, Layer
from jaxinfer.layers.mlp import GatedMLP
from jaxinfer.layers.moe import GLU, MoE, Routing, RoutingRule, route
from jaxinfer.layers.norm import RMSNorm, unit_rms
from jaxinfer.layers.rope import RopeConfig
from jaxinfer.models.config import ConfigReader, layer_rope, sliding_layers
from jaxinfer.models.family import Family
from jaxinfer.models.per_layer import (
    Context,
    EmbeddingGate,
    PerLayerConfig,
    PerLayerDecoder,
    common_fields,
    embedding_specs,
    gate_specs,
    head_dims,
    normed_attention,
    sandwich_specs,
    with_sources,
)
from jaxinfer.models.specs import cache_spec, decoder, gated_mlp, plain, rms_norm
from jaxinfer.quant import matmul_transposed
from jaxinfer.types import LayerSpec, ParamSpec, ParamTree, Source

# Defaults of transformers for fields missing from config.json.
_DEFAULTS = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
    "sliding_window": 512,
    "vocab_size_per_layer_input": 262_144,
    "hidden_size_per_layer_input": 256,
}
_UNIFIED = {"max_position_embeddings": 262_144, "sliding_window": 1024, "hidden_size_per_layer_input": 0}
_KINDS = {"gemma4_text": _DEFAULTS, "gemma4_unified_text": _DEFAULTS | _UNIFIED}
_PATTERN = 6  # period of full-attention layers
_ROPES: Mapping[str, Mapping[str, Any]] = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Gemma4Config(PerLayerConfig):
    """The resolved config.json of a checkpoint: see `DecoderConfig`.

    Attributes:
        key_is_value: in full-attention layers the value is the key before its norm.
        wide: MLPs of layers that read the KV cache of another layer are twice as wide.
        experts: number of experts per layer; 0: none.
        expert_size: hidden size of an expert.
        top_k: experts per token.
    """

    key_is_value: bool
    wide: bool
    experts: int = 0
    expert_size: int = 0
    top_k: int = 0

    @staticmethod
    def from_json(config: Mapping[str, Any]) -> Gemma4Config:
        """Read config.json as `transformers` writes it, or as published on the Hub.

        Raises:
            ConfigError: a field is missing, of the wrong type or not supported.
        """
        kind = ConfigReader(config).choice("model_type", "gemma4_text", tuple(_KINDS))
        read = ConfigReader(config, _KINDS[kind], {"hidden_act": "hidden_activation"})
        sees = read.get("use_bidirectional_attention")
        read.require(sees in (None, False, "vision"), "use_bidirectional_attention", "is no decoder")
        fields = common_fields(read)
        layers = _layers(read, fields["heads"], fields["kv_heads"], fields["head_dim"])
        rope, local_rope = _ropes(read, fields["max_position"], head_dims(layers, fields["head_dim"]))
        return Gemma4Config(
            **fields,
            layers=layers,
            rope=rope,
            local_rope=local_rope,
            key_is_value=read.flag("attention_k_eq_v", False),
            wide=read.flag("use_double_wide_mlp", False),
            **_experts(read),
        )


def _ropes(read: ConfigReader, max_position: int, dims: tuple[int, int]) -> tuple[RopeConfig, RopeConfig]:
    """Read the rotary embeddings of full-attention and of sliding-window layers, with head sizes ``dims``."""
    given = read.get("rope_parameters", {})
    read.require(isinstance(given, dict), "rope_parameters", "must be an object")
    both = [given.get(name) or fields for name, fields in _ROPES.items()]
    read.require(all(isinstance(fields, Mapping) for fields in both), "rope_parameters", "must hold objects")
    wide, near = (layer_rope(read, each, max_position, dim) for each, dim in zip(both, dims, strict=True))
    return wide, near


def _layers(read: ConfigReader, heads: int, kv_heads: int, head_dim: int) -> tuple[LayerSpec, ...]:
    count = read.positive("num_hidden_layers")
    local = sliding_layers(read) or [(index + 1) % _PATTERN != 0 for index in range(count)]
    local[-1] = False  # as in transformers, whatever config.json sets
    window = read.positive("sliding_window")
    found = []
    for index, near in enumerate(local):
        own_heads, own_dim = _sizes(read, index, near, kv_heads, head_dim)
        read.require(heads % own_heads == 0, "num_attention_heads", f"must be a multiple of {own_heads} KV heads")
        sizes = own_heads if own_heads != kv_heads else None, own_dim if own_dim != head_dim else None
        found.append(LayerSpec(window if near else None, kv_heads=sizes[0], head_dim=sizes[1]))
    alike = len({(layer.window, layer.kv_heads, layer.head_dim) for layer in found}) == len(set(local))
    read.require(alike, "per_layer_config", "must be the same for all layers of a kind")
    return with_sources(read, found, 0)


def _sizes(read: ConfigReader, index: int, near: bool, kv_heads: int, head_dim: int) -> tuple[int, int]:
    """Return the number and dim of a layer's KV heads, which newer files set per layer, others for full attention."""
    every = read.get("per_layer_config")
    if every is None:
        if near:
            return kv_heads, head_dim
        own = read.flag("attention_k_eq_v", False)
        heads = read.positive("num_global_key_value_heads", kv_heads) if own else kv_heads
        return heads, read.positive("global_head_dim")
    read.require(isinstance(every, dict), "per_layer_config", "must be an object")
    # Keys are layer indices, zero-padded to the digits of the last one: "05".
    fields: Any = next((each for name, each in every.items() if name.isdecimal() and int(name) == index), {})
    known = (
        all(map(str.isdecimal, every))
        and isinstance(fields, dict)
        and fields.keys() <= {"head_dim", "num_key_value_heads"}
    )
    read.require(known, "per_layer_config", "must name head_dim and num_key_value_heads of layers")
    own_fields = ConfigReader(fields)
    return own_fields.positive("num_key_value_heads", kv_heads), own_fields.positive("head_dim", head_dim)


def _experts(read: ConfigReader) -> dict[str, Any]:
    if not read.flag("enable_moe_block", False):
        return {}
    experts, top_k = read.positive("num_experts"), read.positive("top_k_experts")
    read.require(top_k <= experts, "top_k_experts", f"must be at most num_experts ({experts})")
    return {"experts": experts, "top_k": top_k, "expert_size": read.positive("moe_intermediate_size")}


class ScaledMoE(MoE):
    """`MoE` whose experts read tokens after a norm, ``norm``, and whose router reads tokens of root mean square 1.

    Parameters in addition to `MoE`: ``router_scale`` [d], factor of the router input; ``expert_scale`` [experts],
    factor of the expert weights.
    """

    eps: float = 1e-6

    def setup(self) -> None:
        self.norm = RMSNorm(self.eps)

    def seen(self, x: Float[Array, "tokens d"]) -> Float[Array, "tokens d"]:
        return self.norm(x)

    def routing(self, x: Float[Array, "tokens d"]) -> Routing:
        scale = self.weight("router_scale").astype(jnp.float32) * x.shape[-1] ** -0.5
        logits = matmul_transposed(unit_rms(x.astype(jnp.float32), self.eps) * scale, self.weight("router"))
        routing = route(logits, self.rule, given=self.given())
        each = self.weight("expert_scale").astype(jnp.float32)[routing.experts]
        return routing._replace(weights=routing.weights * each)


class Gemma4Block(Layer):
    """A decoder layer. Subclass it and name it in `Gemma4.overrides` to change what a layer does."""

    config: Gemma4Config
    layer: LayerSpec

    def setup(self) -> None:
        cfg, eps = self.config, self.config.norm_eps
        self.attention_norm, self.attention_out_norm, self.mlp_norm, self.mlp_out_norm = (
            RMSNorm(eps) for _ in range(4)
        )
        self.attention = normed_attention(cfg, self.layer, key_is_value=_key_is_value(cfg, self.layer))
        self.mlp = GatedMLP(cfg.activation)
        if cfg.experts:
            rule = RoutingRule(cfg.top_k, renormalise=True)
            self.experts = ScaledMoE(rule, GLU(cfg.activation), eps=eps)
            self.dense_norm, self.experts_norm = RMSNorm(eps), RMSNorm(eps)
        if cfg.per_layer_size:
            self.embedding = EmbeddingGate(cfg.activation, eps)

    def __call__(self, x: Hidden, context: Context, attend: Attend, cache: Any) -> HiddenAndCache:
        rope = context.ropes[self.layer.window is not None]
        mixed, cache = self.attention(self.attention_norm(x), rope, attend, cache)
        x = x + self.attention_out_norm(mixed)
        x = x + self.mlp_out_norm(self.feed_forward(x, context))
        if self.config.per_layer_size:
            x = x + self.embedding(x, context.embeddings)
        return x * self.weight("scale"), cache

    def feed_forward(self, x: Hidden, context: Context) -> Hidden:
        changed = self.mlp(self.mlp_norm(x))
        if not self.config.experts:
            return changed
        return self.dense_norm(changed) + self.experts_norm(self.experts(x, context.live))


def _key_is_value(cfg: Gemma4Config, layer: LayerSpec) -> bool:
    return cfg.key_is_value and layer.window is None


class Gemma4(PerLayerDecoder):
    """The Gemma4 decoder: see `PerLayerDecoder`."""

    config: Gemma4Config
    block_type = Gemma4Block


def param_specs(cfg: Gemma4Config) -> ParamTree:
    return decoder(cfg, lambda index, prefix: _block_specs(cfg, cfg.layers[index], prefix)) | embedding_specs(cfg)


def _block_specs(cfg: Gemma4Config, layer: LayerSpec, prefix: str) -> dict[str, Any]:
    d, hidden = cfg.hidden_size, cfg.intermediate_size * (2 if cfg.wide and layer.source is not None else 1)
    tree = {
        **sandwich_specs(cfg, layer, prefix, key_is_value=_key_is_value(cfg, layer)),
        "mlp": gated_mlp(f"{prefix}.mlp", d, hidden),
        "scale": plain(f"{prefix}.layer_scalar", (1,), (None,), "ones"),
    }
    if cfg.experts:
        tree["experts"] = _expert_specs(cfg, prefix)
        tree["dense_norm"] = rms_norm(f"{prefix}.post_feedforward_layernorm_1", d)
        tree["experts_norm"] = rms_norm(f"{prefix}.post_feedforward_layernorm_2", d)
    return tree | ({"embedding": gate_specs(cfg, prefix)} if cfg.per_layer_size else {})


def _expert_specs(cfg: Gemma4Config, prefix: str) -> dict[str, Any]:
    d, count, size, name = cfg.hidden_size, cfg.experts, cfg.expert_size, f"{prefix}.experts"
    gate_up = Source(f"{name}.gate_up_proj", (count, 2 * size, d), reshape=(count, 2, size, d))
    down = Source(f"{name}.down_proj", (count, d, size))
    axes = ("expert", None, "expert_mlp", "embed")
    return {
        "router": plain(f"{prefix}.router.proj.weight", (count, d), ("router", "embed")),
        "router_scale": plain(f"{prefix}.router.scale", (d,), ("norm",), "ones"),
        "expert_scale": plain(f"{prefix}.router.per_expert_scale", (count,), ("router",), "ones"),
        "norm": rms_norm(f"{prefix}.pre_feedforward_layernorm_2", d),
        "gate_up": ParamSpec((count, 2, size, d), axes, sources=(gate_up,), inputs=-1),
        "down": ParamSpec((count, d, size), ("expert", "embed", "expert_mlp"), sources=(down,), inputs=-1),
    }


GEMMA4 = Family(Gemma4Config.from_json, param_specs, cache_spec, Gemma4)
