"""Decoder of most mixtures of experts, from Mixtral to MiniMax-M2: a Llama with experts for feed-forward layers.

The module of a family reads its config.json into a `SparseConfig` and names the tensors of its experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import jax
from jaxtyping import Array, Bool

from jaxinfer.layers.attention import Attend, Attention
from jaxinfer.layers.base import Hidden, HiddenAndCache, Layer, Positions
from jaxinfer.layers.mlp import GatedMLP
from jaxinfer.layers.moe import GLU, ClampedGLU, MoE, RoutingRule
from jaxinfer.layers.norm import LayerNorm, RMSNorm
from jaxinfer.layers.rope import RopeConfig, in_sequence
from jaxinfer.models.config import ConfigReader, DecoderConfig, decoder_fields, rope_config
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.families.llama import block_specs
from jaxinfer.models.specs import decoder, gated_mlp, rms_norm
from jaxinfer.types import LayerSpec, ParamTree


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class SparseConfig(DecoderConfig):
    """The resolved config.json of a checkpoint: see `DecoderConfig`.

    Attributes:
        sparse: whether each layer has experts, or a dense MLP of ``intermediate_size``.
        expert_size: hidden size of an expert.
        expert_bias: router and experts have biases.
        shared_size: hidden size of the shared expert; None: no shared expert.
        shared_gate: see `MoE`; only with a shared expert.
        corrected: the router has a correction bias for the selection (`route`).
        sinks, qk_norm_whole, interleaved: see `Attention`.
        predictors: MTP layers after the last layer, which are not loaded.
    """

    sparse: tuple[bool, ...]
    rope: RopeConfig
    experts: int
    expert_size: int
    rule: RoutingRule
    glu: GLU | ClampedGLU
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    qk_norm_whole: bool = False
    interleaved: bool = False
    sinks: bool = False
    expert_bias: bool = False
    shared_size: int | None = None
    shared_gate: bool = True
    corrected: bool = False
    predictors: int = dataclasses.field(default=0, compare=False)

    @property
    def ignored(self) -> tuple[str, ...]:
        """Patterns of tensors that the model does not load: those of ``predictors``."""
        return tuple(f"model.layers.{len(self.layers) + index}.*" for index in range(self.predictors))


def reader(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> ConfigReader:
    """Make a reader with the defaults of transformers, which accepts either name for the number of experts."""
    heads = ("num_key_value_heads", "head_dim")  # null: derived from the query heads, not the default
    known = {name: value for name, value in defaults.items() if name not in heads or name not in config}
    local = config.get("num_local_experts") is not None
    return ConfigReader(config, known, {"num_experts": "num_local_experts"} if local else {})


def read_config(
    read: ConfigReader, windows: list[int | None], rule: RoutingRule, *, partial: bool = False, **switches: Any
) -> SparseConfig:
    """Read the fields that all families name identically.

    Args:
        partial: see `rope_config`.
        switches: the other fields of `SparseConfig`.

    Raises:
        ConfigError: a field is missing, of the wrong type or not supported.
    """
    fields, experts = decoder_fields(read), read.positive("num_experts")
    read.require(rule.top_k <= experts, "num_experts_per_tok", f"must be at most the number of experts ({experts})")
    common = {
        **fields,
        "layers": tuple(LayerSpec(window) for window in windows),
        "sparse": (True,) * len(windows),
        "rope": rope_config(read, fields["max_position"], partial=partial),
        "experts": experts,
        "rule": rule,
        "glu": GLU(fields["activation"]),
    }
    return SparseConfig(**common | switches)


class SparseContext(NamedTuple):
    """Cosines and sines of the rotary embedding, and which tokens are real: padding is routed to no expert."""

    rope: tuple[jax.Array, jax.Array]
    live: Bool[Array, "*batch"]


class SparseBlock(Layer):
    """A decoder layer: attention, then experts, or a dense MLP where ``sparse`` is False."""

    config: SparseConfig
    layer: LayerSpec
    sparse: bool

    norm: ClassVar[type[RMSNorm] | type[LayerNorm]] = RMSNorm

    def setup(self) -> None:
        cfg, eps = self.config, self.config.norm_eps if self.config.qk_norm else None
        sizes, biases = (cfg.heads, cfg.kv_heads, cfg.head_dim, self.layer), (cfg.qkv_bias, cfg.out_bias)
        self.attention_norm = self.norm(cfg.norm_eps)
        others = {name: getattr(cfg, name) for name in ("sinks", "qk_norm_whole", "interleaved")} | self.options()
        self.attention = Attention(*sizes, *biases, qk_norm_eps=eps, **others)
        self.mlp_norm = self.norm(cfg.norm_eps)
        self.mlp: Any = self._experts() if self.sparse else GatedMLP(cfg.activation)

    def options(self) -> dict[str, Any]:
        """Return further arguments of `Attention`."""
        return {}

    def _experts(self) -> MoE:
        cfg, shared = self.config, self.config.shared_size is not None
        beside = (cfg.activation, cfg.shared_gate) if shared else (None, False)
        return MoE(cfg.rule, cfg.glu, cfg.expert_bias, cfg.corrected, *beside)

    def __call__(self, x: Hidden, context: SparseContext, attend: Attend, cache: Any) -> HiddenAndCache:
        mixed, cache = self.attention(self.attention_norm(x), context.rope, attend, cache)
        x = x + mixed
        normal = self.mlp_norm(x)
        return x + (self.mlp(normal, context.live) if self.sparse else self.mlp(normal)), cache


class Sparse(Decoder):
    config: SparseConfig
    block_type: ClassVar[Any] = SparseBlock
    block_fields: ClassVar[tuple[str, ...]] = ("layers", "sparse")

    def context(self, positions: Positions) -> SparseContext:
        return SparseContext(self.config.rope.angles(positions, self.config.head_dim), in_sequence(positions) >= 0)


def param_specs(
    cfg: SparseConfig,
    experts: Callable[[SparseConfig, str], dict[str, Any]],
    norm: Callable[[str, int], dict[str, Any]] = rms_norm,
) -> ParamTree:
    """Return every parameter with its shape, logical axes and source checkpoint tensors.

    Args:
        experts: returns the parameters of `MoE` for the layer whose tensor names start with a prefix.
        norm: returns the parameters of a norm.
    """

    def block(index: int, prefix: str) -> dict[str, Any]:
        dense = f"{prefix}.mlp", cfg.hidden_size, cfg.intermediate_size
        return block_specs(cfg, prefix, experts(cfg, prefix) if cfg.sparse[index] else gated_mlp(*dense), norm)

    return decoder(cfg, block, final_norm=norm("model.norm", cfg.hidden_size))
