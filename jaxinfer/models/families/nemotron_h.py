"""Nemotron-H and Nemotron 3 (arXiv:2504.03624): each layer is one of Mamba-2, attention, an ungated MLP, or experts of
such MLPs, which may work in a narrower latent.

Only the order of states encodes positions.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxinfer.layers.attention import Attend, Attention
from jaxinfer.layers.base import Hidden, HiddenAndCache, Layer, Positions
from jaxinfer.layers.mamba2 import Mamba2, MambaSizes
from jaxinfer.layers.mlp import ACTIVATIONS, MLP
from jaxinfer.layers.moe import MoE, RoutingRule, Ungated, run_sharded_experts
from jaxinfer.layers.norm import RMSNorm
from jaxinfer.layers.rope import in_sequence
from jaxinfer.models import mamba
from jaxinfer.models.config import ConfigReader, DecoderConfig, decoder_fields, renamed
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.families.deepseek import require_only, routed_experts, v3_rule
from jaxinfer.models.family import Family
from jaxinfer.models.specs import (
    attention,
    cache_spec,
    correction_bias,
    decoder,
    linear,
    plain,
    plain_mlp,
    rms_norm,
)
from jaxinfer.parallel.tokens import all_tokens, own_tokens
from jaxinfer.quant import matmul
from jaxinfer.types import LayerSpec, ParamSpec, ParamTree, Source

IGNORE = ("mtp.*",)
"""Patterns of MTP tensors, not loaded."""

_DEFAULTS = {
    "vocab_size": 131072,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 21504,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "mamba_n_heads": 128,
    "mamba_d_head": 64,
    "mamba_n_groups": 8,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
}
_NAMES = {
    "rms_norm_eps": "layer_norm_epsilon",
    "mamba_n_heads": "mamba_num_heads",
    "mamba_d_head": "mamba_head_dim",
    "mamba_n_groups": "n_groups",
    "mamba_d_state": "ssm_state_size",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_proj_bias": "use_bias",
    "hidden_act": "mamba_hidden_act",
}
_OLD_NAMES = {
    "attention_head_dim": "head_dim",
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_limit": "time_step_limit",
    "mamba_conv_bias": "use_conv_bias",
    "layer_types": "layers_block_type",
    "num_local_experts": "n_routed_experts",
}
MAMBA, ATTENTION, DENSE, EXPERTS = "M", "*", "-", "E"
_KINDS = {
    **dict.fromkeys(("mamba", "linear_attention"), MAMBA),
    **dict.fromkeys(("attention", "full_attention"), ATTENTION),
    "mlp": DENSE,
    "moe": EXPERTS,
}
_MOST_LAYERS = 1024


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class NemotronHConfig(DecoderConfig):
    """The resolved config.json of a checkpoint: see `DecoderConfig`.

    Attributes:
        kinds: a letter for each layer, as in ``hybrid_override_pattern``.
        mamba: sizes of the Mamba layers.
        mlp_bias: whether MLPs and the projections to and from the latent have biases.
        experts, expert_size, rule: number, hidden size and router of the experts.
        shared_size: hidden size of the shared expert.
        latent: width of the inputs of experts; None: the hidden size.
    """

    kinds: str
    mamba: MambaSizes
    mlp_bias: bool
    experts: int
    expert_size: int
    rule: RoutingRule
    shared_size: int
    latent: int | None

    @staticmethod
    def from_json(config: Mapping[str, Any]) -> NemotronHConfig:
        """Read the config.json of a NemotronHForCausalLM; raises as `decoder_fields` does."""
        read = ConfigReader(renamed(config, _OLD_NAMES), _DEFAULTS, _NAMES)
        for name in ("attention_bias", "residual_in_fp32", "tie_word_embeddings"):
            require_only(read, name, False)
        kinds, sizes, rule = _kinds(read), _mamba(read), v3_rule(read)
        specs = {MAMBA: LayerSpec(attends=False, states=sizes.states), ATTENTION: LayerSpec()}
        experts = EXPERTS in kinds
        return NemotronHConfig(
            **decoder_fields(read) | {"activation": read.choice("mlp_hidden_act", "relu2", tuple(ACTIVATIONS))},
            layers=tuple(specs.get(kind, LayerSpec(attends=False)) for kind in kinds),
            kinds=kinds,
            mamba=sizes,
            mlp_bias=read.flag("mlp_bias", False),
            experts=routed_experts(read, rule) if experts else 0,
            expert_size=read.positive("moe_intermediate_size", 7688),
            rule=rule,
            shared_size=read.positive("moe_shared_expert_intermediate_size", 7688),
            latent=None if read.get("moe_latent_size") is None else read.positive("moe_latent_size"),
        )


def _mamba(read: ConfigReader) -> MambaSizes:
    """Read the sizes of the Mamba layers.

    ``time_step_min`` only affects their initialisation. transformers 5 clips the time steps of prompts to it, but not
    those of generated tokens; these models were trained without.
    """
    inner = read.positive("mamba_n_heads") * read.positive("mamba_d_head")
    return mamba.mamba_sizes(read, inner, out_bias=read.flag("mamba_proj_bias", False))


def _kinds(read: ConfigReader) -> str:
    """Read the kinds of layers: a list of names, or a pattern with a letter for each layer."""
    listed = read.get("layers_block_type")
    if listed is None:
        pattern = read.get("hybrid_override_pattern")
        known = isinstance(pattern, str) and 0 < len(pattern) <= _MOST_LAYERS and set(pattern) <= set(_KINDS.values())
        read.require(known, "hybrid_override_pattern", "must have one of M * - E for each layer, 1 to 1024")
        kinds = str(pattern)
    else:
        known = (
            isinstance(listed, list)
            and 0 < len(listed) <= _MOST_LAYERS
            and all(each in tuple(_KINDS) for each in listed)
        )
        read.require(known, "layers_block_type", f"must name 1 to {_MOST_LAYERS} of {', '.join(_KINDS)}")
        kinds = "".join(_KINDS[each] for each in listed)
    name = "layers_block_type" if listed is not None else "hybrid_override_pattern"
    read.require(ATTENTION in kinds, name, "is not supported: a layer at least must have attention")
    return kinds


class LatentMoE(MoE):
    """`MoE` with experts in a latent of ``narrow`` [d, latent], projected back by ``wide`` [latent, d]; with
    ``latent_bias`` both have biases (``narrow_bias``, ``wide_bias``)."""

    latent_bias: bool = False

    def __call__(self, x: Hidden, live: Bool[Array, "*batch"]) -> Hidden:
        flat = all_tokens(x).reshape(-1, x.shape[-1])
        routing, no_expert = self.routed(flat), jnp.iinfo(jnp.int32).max
        routing = routing._replace(experts=jnp.where(live.reshape(-1, 1), routing.experts, no_expert))
        mixed = run_sharded_experts(self._linear(flat, "narrow"), routing, self.experts(), self.glu)
        return own_tokens(self._linear(mixed, "wide").reshape(x.shape))

    def _linear(self, x: Float[Array, "tokens d"], name: str) -> Float[Array, "tokens out"]:
        return matmul(x, self.weight(name), self.weight(f"{name}_bias") if self.latent_bias else None)


class NemotronHBlock(Layer):
    """A layer: a norm and one of Mamba-2, attention, MLP or experts."""

    config: NemotronHConfig
    layer: LayerSpec
    kind: str

    def setup(self) -> None:
        cfg = self.config
        self.norm = RMSNorm(cfg.norm_eps)
        if self.kind == MAMBA:
            self.mixer: Any = Mamba2(cfg.mamba, self.layer, cfg.norm_eps)
        elif self.kind == ATTENTION:
            self.mixer = Attention(cfg.heads, cfg.kv_heads, cfg.head_dim, self.layer)
        elif self.kind == DENSE:
            self.mixer = MLP(cfg.activation, cfg.mlp_bias)
        else:
            self.mixer, self.shared = self._experts(), MLP(cfg.activation, cfg.mlp_bias)

    def _experts(self) -> MoE:
        cfg = self.config
        make = MoE if cfg.latent is None else functools.partial(LatentMoE, latent_bias=cfg.mlp_bias)
        return make(cfg.rule, Ungated(cfg.activation), correction=True)

    def __call__(self, x: Hidden, live: Bool[Array, "*batch"], attend: Attend, cache: Any) -> HiddenAndCache:
        normal = self.norm(x)
        if self.kind == MAMBA:
            mixed, cache = self.mixer(normal, attend, cache)
        elif self.kind == ATTENTION:
            mixed, cache = self.mixer(normal, None, attend, cache)
        elif self.kind == DENSE:
            mixed = self.mixer(normal)
        else:
            mixed = self.mixer(normal, live) + self.shared(normal)
        return x + mixed, cache


class NemotronH(Decoder):
    config: NemotronHConfig
    block_type = NemotronHBlock
    block_fields = ("layers", "kinds")

    def context(self, positions: Positions) -> Bool[Array, "*batch"]:
        """Return which tokens are real: padding is routed to no expert."""
        return in_sequence(positions) >= 0


def param_specs(cfg: NemotronHConfig) -> ParamTree:
    """Return every parameter with its shape, logical axes and source checkpoint tensors."""
    d = cfg.hidden_size

    def block(index: int, prefix: str) -> dict[str, Any]:
        tree, mixer = {"norm": rms_norm(f"{prefix}.norm", d)}, f"{prefix}.mixer"
        return tree | _MIXERS[cfg.kinds[index]](cfg, mixer)

    final_norm, embed = rms_norm("backbone.norm_f", d), "backbone.embeddings.weight"
    return decoder(cfg, block, embed=embed, layers="backbone.layers", final_norm=final_norm)


def _mamba_specs(cfg: NemotronHConfig, prefix: str) -> dict[str, Any]:
    return {"mixer": mamba.mamba_specs(cfg.mamba, prefix, cfg.hidden_size)}


def _attention_specs(cfg: NemotronHConfig, prefix: str) -> dict[str, Any]:
    return {"mixer": attention(cfg, prefix)}


def _dense_specs(cfg: NemotronHConfig, prefix: str) -> dict[str, Any]:
    return {"mixer": _plain(cfg, prefix, cfg.intermediate_size)}


def _plain(cfg: NemotronHConfig, prefix: str, hidden: int) -> dict[str, Any]:
    return plain_mlp(f"{prefix}.up_proj", f"{prefix}.down_proj", cfg.hidden_size, hidden, cfg.mlp_bias)


def _experts_specs(cfg: NemotronHConfig, prefix: str) -> dict[str, Any]:
    d, width, count, hidden = cfg.hidden_size, cfg.latent or cfg.hidden_size, cfg.experts, cfg.expert_size
    names, experts = [f"{prefix}.experts.{expert}" for expert in range(count)], range(count)
    ups = tuple(Source(f"{names[each]}.up_proj.weight", (hidden, width), where=(each, 0)) for each in experts)
    downs = tuple(Source(f"{names[each]}.down_proj.weight", (width, hidden), where=(each,)) for each in experts)
    axes = ("expert", None, "expert_mlp", "embed")
    tree: dict[str, Any] = {
        "router": plain(f"{prefix}.gate.weight", (count, d), ("router", "embed")),
        "correction": correction_bias(f"{prefix}.gate.e_score_correction_bias", count),
        "gate_up": ParamSpec((count, 1, hidden, width), axes, sources=ups, inputs=-1),
        "down": ParamSpec((count, width, hidden), ("expert", "embed", "expert_mlp"), sources=downs, inputs=-1),
    }
    if cfg.latent is not None:
        for name, tensor, sizes in (("narrow", "fc1_latent_proj", (d, width)), ("wide", "fc2_latent_proj", (width, d))):
            tree[name] = linear(f"{prefix}.{tensor}.weight", sizes, ("embed", None))
            if cfg.mlp_bias:
                tree[f"{name}_bias"] = plain(f"{prefix}.{tensor}.bias", sizes[1:], (None,), "zeros")
    return {"mixer": tree, "shared": _plain(cfg, f"{prefix}.shared_experts", cfg.shared_size)}


_MIXERS = {MAMBA: _mamba_specs, ATTENTION: _attention_specs, DENSE: _dense_specs, EXPERTS: _experts_specs}


NEMOTRON_H = Family(NemotronHConfig.from_json, param_specs, cache_spec, NemotronH, IGNORE, "backbone.")
