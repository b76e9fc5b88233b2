"""Granite 4: Mamba-2 in most layers and attention in a few, with Granite's multipliers; a shared MLP, and experts in
some."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxinfer.layers.attention import Attend, Attention
from jaxinfer.layers.base import Hidden, HiddenAndCache
from jaxinfer.layers.mamba2 import Mamba2, MambaSizes
from jaxinfer.layers.mlp import GatedMLP
from jaxinfer.layers.moe import GLU, RoutingRule
from jaxinfer.layers.norm import RMSNorm
from jaxinfer.models import mamba
from jaxinfer.models.config import ConfigReader, decoder_fields, rope_config
from jaxinfer.models.families import granite, granite_moe
from jaxinfer.models.families.deepseek import count_of
from jaxinfer.models.families.granite_moe import GraniteMoeConfig
from jaxinfer.models.families.llama import block_specs
from jaxinfer.models.families.sparse import SparseBlock, SparseContext
from jaxinfer.models.family import Family
from jaxinfer.models.specs import cache_spec, decoder, pre_norm
from jaxinfer.types import LayerSpec, ParamTree

_DEFAULTS = mamba.DEFAULTS | {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 1024,
}
_KINDS = {"mamba": True, "linear_attention": True, "attention": False, "full_attention": False}


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class GraniteHybridConfig(GraniteMoeConfig):
    """The resolved config.json of a checkpoint: see `GraniteMoeConfig`.

    Attributes:
        mamba: sizes of the layers without attention.
        rotated: attention uses RoPE; otherwise only the order of Mamba states encodes positions.
    """

    mamba: MambaSizes
    rotated: bool

    @staticmethod
    def from_json(config: Mapping[str, Any]) -> GraniteHybridConfig:
        """Read the config.json of a GraniteMoeHybridForCausalLM; raises as `decoder_fields` does."""
        read = ConfigReader(config, _DEFAULTS)
        fields, bias, sizes = decoder_fields(read), read.flag("attention_bias", False), _mamba(read)
        recurrent = LayerSpec(attends=False, states=sizes.states)
        layers = tuple(recurrent if kind else LayerSpec() for kind in _mamba_layers(read))
        return GraniteHybridConfig(
            **fields,
            **_experts(read, fields["activation"], len(layers)),
            layers=layers,
            rope=rope_config(read, fields["max_position"], fields["head_dim"]),
            rotated=read.get("position_embedding_type") == "rope",
            qkv_bias=bias,
            out_bias=bias,
            mamba=sizes,
            **granite.multipliers(read),
        )


def _mamba(read: ConfigReader) -> MambaSizes:
    inner = read.positive("mamba_expand") * read.positive("hidden_size")
    return mamba.mamba_sizes(read, inner, out_bias=read.flag("mamba_proj_bias", False))


def _mamba_layers(read: ConfigReader) -> list[bool]:
    """Read which layers are Mamba layers, by either of the two names of each kind."""
    count, kinds = read.positive("num_hidden_layers"), read.get("layer_types", read.get("layers_block_type"))
    known = isinstance(kinds, list) and all(kind in tuple(_KINDS) for kind in kinds) and len(kinds) == count
    read.require(known, "layer_types", f"must be {count} of {', '.join(_KINDS)}")
    found = [_KINDS[kind] for kind in kinds]
    read.require(not all(found), "layer_types", "is not supported: a layer at least must have attention")
    return found


def _experts(read: ConfigReader, activation: str, layers: int) -> dict[str, Any]:
    count = count_of(read, "num_local_experts")
    chosen = read.positive("num_experts_per_tok") if count else 0  # also set in models without experts
    read.require(chosen <= count, "num_experts_per_tok", f"must be at most num_local_experts ({count})")
    return {
        "sparse": (count > 0,) * layers,
        "experts": count,
        "expert_size": read.positive("intermediate_size"),
        "rule": RoutingRule(chosen, "softmax of chosen"),
        "glu": GLU(activation),
        "shared_size": read.positive("shared_intermediate_size"),
        "shared_gate": False,
    }


class GraniteHybridBlock(SparseBlock):
    """A decoder layer: attention or Mamba-2, then experts and the shared MLP."""

    config: GraniteHybridConfig

    def setup(self) -> None:
        cfg = self.config
        self.attention_norm, self.mlp_norm = RMSNorm(cfg.norm_eps), RMSNorm(cfg.norm_eps)
        sizes, biases = (cfg.heads, cfg.kv_heads, cfg.head_dim, self.layer), (cfg.qkv_bias, cfg.out_bias)
        self.attention: Any = (
            Attention(*sizes, *biases, scale=cfg.scale)
            if self.layer.attends
            else Mamba2(cfg.mamba, self.layer, cfg.norm_eps)
        )
        self.mlp: Any = self._experts() if self.sparse else GatedMLP(cfg.activation)

    def __call__(self, x: Hidden, context: SparseContext, attend: Attend, cache: Any) -> HiddenAndCache:
        normal, share = self.attention_norm(x), self.config.residual_multiplier
        if self.layer.attends:
            mixed, cache = self.attention(normal, context.rope if self.config.rotated else None, attend, cache)
        else:
            mixed, cache = self.attention(normal, attend, cache)
        x = x + mixed * share
        normal = self.mlp_norm(x)
        return x + (self.mlp(normal, context.live) if self.sparse else self.mlp(normal)) * share, cache


class GraniteHybrid(granite_moe.GraniteMoe):
    config: GraniteHybridConfig
    block_type = GraniteHybridBlock


def param_specs(cfg: GraniteHybridConfig) -> ParamTree:
    """Return every parameter with its shape, logical axes and source checkpoint tensors."""

    def block(index: int, prefix: str) -> dict[str, Any]:
        if cfg.layers[index].attends:
            return block_specs(cfg, prefix, _mlp_specs(cfg, prefix))
        mixer = mamba.mamba_specs(cfg.mamba, f"{prefix}.mamba", cfg.hidden_size)
        return pre_norm(prefix, cfg.hidden_size, mixer, _mlp_specs(cfg, prefix))

    return decoder(cfg, block)


def _mlp_specs(cfg: GraniteHybridConfig, prefix: str) -> dict[str, Any]:
    if cfg.experts:
        return granite_moe.experts(cfg, prefix)
    assert cfg.shared_size is not None
    return granite_moe.shared(f"{prefix}.shared_mlp", cfg.hidden_size, cfg.shared_size)


GRANITE_HYBRID = Family(GraniteHybridConfig.from_json, param_specs, cache_spec, GraniteHybrid)
