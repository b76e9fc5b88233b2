"""Llama 4 (text): NoPE layers between RoPE layers, and experts whose inputs are scaled by their router scores.

RoPE layers attend within chunks of the text. Within one chunk that is full attention; longer texts are rejected.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxinfer.layers.attention import Attend, Attention
from jaxinfer.layers.base import Hidden, HiddenAndCache, Layer, Positions
from jaxinfer.layers.mlp import GatedMLP
from jaxinfer.layers.moe import MoE, RoutingRule
from jaxinfer.layers.norm import RMSNorm
from jaxinfer.layers.rope import in_sequence
from jaxinfer.models.config import ConfigReader
from jaxinfer.models.families import sparse
from jaxinfer.models.families.llama import block_specs
from jaxinfer.models.families.sparse import Sparse, SparseConfig
from jaxinfer.models.family import Family
from jaxinfer.models.specs import cache_spec, decoder, fused_experts, gated_mlp, plain
from jaxinfer.types import LayerSpec, ParamTree

_DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 8192,
    "num_experts": 16,
    "num_experts_per_tok": 1,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
}
_KINDS = ("chunked_attention", "full_attention")


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Llama4Config(SparseConfig):
    """The resolved config.json of a checkpoint: see `DecoderConfig`.

    Attributes:
        rotated: whether each layer has rotary embeddings.
        unit_heads: rotated queries and keys are scaled to a root mean square of 1.
        tuned: temperature tuning: in NoPE layers the query at position p is multiplied by ``1 + growth * log(1 +
            floor((p + 1) / floor_scale))``.
        chunk: attention chunk size in tokens; None: no layer is chunked.
    """

    rotated: tuple[bool, ...]
    unit_heads: bool
    tuned: bool
    growth: float
    floor_scale: int
    chunk: int | None

    @staticmethod
    def from_json(config: Mapping[str, Any]) -> Llama4Config:
        """Read the config.json of a Llama4ForCausalLM; raises as `sparse.read_config` does."""
        heads = ("num_key_value_heads", "head_dim")  # null: derived from the query heads
        known = {name: value for name, value in _DEFAULTS.items() if name not in heads or name not in config}
        read = ConfigReader(config, known, {"num_experts": "num_local_experts"})
        count, bias = read.positive("num_hidden_layers"), read.flag("attention_bias", False)
        plain_config = sparse.read_config(
            read,
            [None] * count,
            RoutingRule(read.positive("num_experts_per_tok"), scores="sigmoid of chosen"),
            sparse=_sparse_layers(read, count),
            intermediate_size=read.positive("intermediate_size_mlp", 16384),
            expert_size=read.positive("intermediate_size"),
            shared_size=read.positive("intermediate_size"),
            shared_gate=False,
            interleaved=True,
            qkv_bias=bias,
            out_bias=bias,
        )
        values = {field.name: getattr(plain_config, field.name) for field in dataclasses.fields(plain_config)}
        rotated = _rotated(read, count)
        chunk = _chunk(read, rotated)
        return Llama4Config(
            **values | {"max_position": min(plain_config.max_position, chunk or plain_config.max_position)},
            rotated=rotated,
            unit_heads=read.flag("use_qk_norm", True),
            tuned=read.flag("attn_temperature_tuning", True),
            growth=read.number("attn_scale", 0.1),
            floor_scale=read.positive("floor_scale", 8192),
            chunk=chunk,
        )


def _sparse_layers(read: ConfigReader, count: int) -> tuple[bool, ...]:
    step = read.positive("interleave_moe_layer_step", 1)
    chosen = read.get("moe_layers", list(range(step - 1, count, step)))
    read.require(_integers(chosen), "moe_layers", "must be a list of layers")
    return tuple(index in chosen for index in range(count))


def _rotated(read: ConfigReader, count: int) -> tuple[bool, ...]:
    step = read.positive("no_rope_layer_interval", 4)
    chosen = read.get("no_rope_layers") or [int((index + 1) % step != 0) for index in range(count)]
    read.require(_integers(chosen) and len(chosen) >= count, "no_rope_layers", f"must have 0 or 1 for {count} layers")
    return tuple(bool(each) for each in chosen[:count])


def _chunk(read: ConfigReader, rotated: tuple[bool, ...]) -> int | None:
    """Read the chunk size; None if it is null or no layer is chunked."""
    count, kinds = len(rotated), read.get("layer_types")
    known = kinds is None or (isinstance(kinds, list) and len(kinds) == count and all(kind in _KINDS for kind in kinds))
    read.require(known, "layer_types", f"must name {count} chunked or full attentions")
    chunked = any(rotated) if kinds is None else _KINDS[0] in kinds
    null = "attention_chunk_size" in read.fields and read.fields["attention_chunk_size"] is None
    size = None if null else read.positive("attention_chunk_size", 8192)
    return size if chunked else None


def _integers(value: Any) -> bool:
    return isinstance(value, list) and all(type(each) is int for each in value)


class Context(NamedTuple):
    """Input common to all layers: as `SparseContext`, and the query temperature of NoPE layers."""

    rope: tuple[jax.Array, jax.Array]
    live: Bool[Array, "*batch"]
    temperature: Float[Array, "*batch"] | None


class Llama4Block(Layer):
    """A decoder layer: attention, then experts, or a dense MLP where ``sparse`` is False."""

    config: Llama4Config
    layer: LayerSpec
    sparse: bool
    rotated: bool

    def setup(self) -> None:
        cfg, unit = self.config, self.config.unit_heads and self.rotated
        sizes, biases = (cfg.heads, cfg.kv_heads, cfg.head_dim, self.layer), (cfg.qkv_bias, cfg.out_bias)
        self.attention_norm = RMSNorm(cfg.norm_eps)
        self.attention = Attention(*sizes, *biases, qk_l2_eps=cfg.norm_eps if unit else None, interleaved=True)
        self.mlp_norm = RMSNorm(cfg.norm_eps)
        self.mlp: Any = self._experts() if self.sparse else GatedMLP(cfg.activation)

    def _experts(self) -> MoE:
        cfg = self.config
        return MoE(cfg.rule, cfg.glu, shared_activation=cfg.activation, scaled_inputs=True)

    def __call__(self, x: Hidden, context: Context, attend: Attend, cache: Any) -> HiddenAndCache:
        rope, temperature = (context.rope, None) if self.rotated else (None, context.temperature)
        mixed, cache = self.attention(self.attention_norm(x), rope, attend, cache, temperature)
        x = x + mixed
        normal = self.mlp_norm(x)
        return x + (self.mlp(normal, context.live) if self.sparse else self.mlp(normal)), cache


class Llama4(Sparse):
    """The Llama4 decoder: see `Decoder`."""

    config: Llama4Config

    block_type = Llama4Block
    block_fields = ("layers", "sparse", "rotated")

    def context(self, positions: Positions) -> Any:
        cfg = self.config
        turns = jnp.floor(
            (in_sequence(positions).astype(jnp.float32) + 1.0) / cfg.floor_scale
        )  # padding has position -1
        temperature = 1.0 + cfg.growth * jnp.log1p(turns) if cfg.tuned else None
        return Context(*super().context(positions), temperature)

    def forward(self, x: Any, positions: Any, attend: Attend, cache: Any, images: Any = None) -> Any:
        """Run as `Decoder.forward`; a text without a cache must not be longer than a chunk (ValueError)."""
        chunk, length = self.config.chunk, x.shape[-2]
        if cache is None and chunk is not None and length > chunk:
            raise ValueError(f"{length} tokens are more than attention_chunk_size ({chunk}): that is not supported")
        return super().forward(x, positions, attend, cache, images)


def param_specs(cfg: Llama4Config) -> ParamTree:
    return decoder(cfg, lambda index, prefix: _block_specs(cfg, index, prefix))


def _block_specs(cfg: Llama4Config, index: int, prefix: str) -> dict[str, Any]:
    d, mlp = cfg.hidden_size, f"{prefix}.feed_forward"
    experts = _experts(cfg, mlp) if cfg.sparse[index] else gated_mlp(mlp, d, cfg.intermediate_size)
    return block_specs(cfg, prefix, experts)


def _experts(cfg: Llama4Config, prefix: str) -> dict[str, Any]:
    d, size, fused = cfg.hidden_size, cfg.expert_size, f"{prefix}.experts"
    return {
        "router": plain(f"{prefix}.router.weight", (cfg.experts, d), ("router", "embed")),
        **fused_experts(f"{fused}.gate_up_proj", f"{fused}.down_proj", cfg.experts, d, size),
        "shared": gated_mlp(f"{prefix}.shared_expert", d, size),
    }


LLAMA4 = Family(Llama4Config.from_json, param_specs, cache_spec, Llama4)
