"""LFM2 (arXiv:2511.23404): gated short convolutions and a few attention layers; dense, or with experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from jaxinfer.layers.attention import Attention
from jaxinfer.layers.base import Hidden, HiddenAndCache, Layer
from jaxinfer.layers.mlp import GatedMLP
from jaxinfer.layers.moe import GLU, RoutingRule
from jaxinfer.layers.norm import RMSNorm
from jaxinfer.layers.recurrent import recur, short_conv
from jaxinfer.models.config import ConfigReader, decoder_fields, rope_config
from jaxinfer.models.families import sparse
from jaxinfer.models.families.deepseek import count_of
from jaxinfer.models.families.sparse import SparseBlock, SparseConfig
from jaxinfer.models.family import Family
from jaxinfer.models.specs import (
    attention,
    cache_spec,
    correction_bias,
    decoder,
    gated_experts,
    gated_mlp,
    linear,
    plain,
    rms_norm,
)
from jaxinfer.parallel.tokens import all_tokens, own_tokens
from jaxinfer.quant import matmul, plus_bias
from jaxinfer.types import LayerSpec, ParamSpec, ParamTree, Source, StateSpec

# Defaults of transformers for fields missing from config.json.
_COMMON = {
    "vocab_size": 65536,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128_000,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
_DENSE = _COMMON | {"hidden_size": 2560, "intermediate_size": 12288}
_MOE = _COMMON | {
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "moe_intermediate_size": 1792,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "num_dense_layers": 2,
}
_NAMES = ("w1", "w3", "w2")
_SUM_EPS = 1e-6  # added to the sum that normalises expert weights


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Lfm2Config(SparseConfig):
    """The resolved config.json of a checkpoint: see `SparseConfig`.

    Attributes:
        taps: kernel size of the convolution, in tokens.
        conv_bias: the convolution and its projections have biases.
    """

    taps: int
    conv_bias: bool

    @staticmethod
    def from_dense(config: Mapping[str, Any]) -> Lfm2Config:
        """Read the config.json of a Lfm2ForCausalLM.

        Raises:
            ConfigError: a field is missing, of the wrong type or not supported.
        """
        read = _reader(config, _DENSE)
        attends = _named(read) if read.get("layer_types") is not None else _listed(read)
        fields = _common(read, attends)
        none = {"experts": 0, "expert_size": 0, "rule": RoutingRule(1), "sparse": (False,) * len(attends)}
        return Lfm2Config(**fields | none | {"intermediate_size": _hidden(read)})

    @staticmethod
    def from_moe(config: Mapping[str, Any]) -> Lfm2Config:
        """Read the config.json of a Lfm2MoeForCausalLM; raises as `from_dense` does."""
        read = _reader(config, _MOE)
        fields, experts, top_k = _common(read, _named(read)), *(read.positive(name) for name in _EXPERTS)
        read.require(top_k <= experts, "num_experts_per_tok", f"must be at most the number of experts ({experts})")
        scale = read.number("routed_scaling_factor", 1.0)
        rule = RoutingRule(top_k, "sigmoid", read.flag("norm_topk_prob", True), scale, norm_added=_SUM_EPS)
        dense = count_of(read, "num_dense_layers")
        return Lfm2Config(
            **fields,
            sparse=tuple(index >= dense for index in range(len(fields["layers"]))),
            experts=experts,
            expert_size=read.positive("moe_intermediate_size"),
            rule=rule,
            corrected=read.flag("use_expert_bias", True),
        )


_EXPERTS = ("num_experts", "num_experts_per_tok")


def _reader(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> ConfigReader:
    """Make a reader that prefers the same names as transformers if a field has two."""
    names = {"tie_word_embeddings": "tie_embedding", "intermediate_size": "block_ff_dim"}
    return ConfigReader(
        config,
        defaults,
        {"rms_norm_eps": "norm_eps"} | {name: other for name, other in names.items() if config.get(other) is not None},
    )


def _common(read: ConfigReader, attends: list[bool]) -> dict[str, Any]:
    """Read the fields common to models with and without experts."""
    fields, taps = decoder_fields(read), read.positive("conv_L_cache", 3)
    read.require(taps > 1, "conv_L_cache", "must be at least 2")
    conv = LayerSpec(attends=False, states=(StateSpec((fields["hidden_size"], taps - 1)),))
    return fields | {
        "layers": tuple(LayerSpec() if full else conv for full in attends),
        "rope": rope_config(read, fields["max_position"], fields["head_dim"]),
        "activation": "silu",
        "glu": GLU("silu"),
        "qk_norm": True,
        "taps": taps,
        "conv_bias": read.flag("conv_bias", False),
    }


def _named(read: ConfigReader) -> list[bool]:
    """Read which layers have attention, by the kind of each."""
    count, kinds = read.positive("num_hidden_layers"), read.get("layer_types")
    known = isinstance(kinds, list) and all(kind in ("conv", "full_attention") for kind in kinds)
    read.require(known and len(kinds) == count, "layer_types", f"must be {count} of conv, full_attention")
    return [kind == "full_attention" for kind in kinds]


def _listed(read: ConfigReader) -> list[bool]:
    """Read which layers have attention, by their indices; all layers if the field is missing."""
    layers, found = range(read.positive("num_hidden_layers")), read.get("full_attn_idxs")
    integers = found is None or (isinstance(found, list) and all(type(index) is int for index in found))
    read.require(integers, "full_attn_idxs", "must be a list of layers")
    return [found is None or index in found for index in layers]


def _hidden(read: ConfigReader) -> int:
    """Read the hidden size of the dense MLP, which config.json may give before its reduction to two thirds."""
    given = read.positive("intermediate_size")
    if not read.flag("block_auto_adjust_ff_dim", True):
        return given
    hidden, name = int(2 * given / 3), "block_ffn_dim_multiplier"
    if not (name in read.fields and read.fields[name] is None):
        many, wide = read.positive("block_multiple_of", 256), read.number(name, 1.0) * hidden
        read.require(0 <= wide < 2**31, name, f"comes to {wide:g} hidden numbers")
        hidden = -(-int(wide) // many) * many
    read.require(hidden > 0, read.spelled("intermediate_size"), f"with {name} comes to {hidden} hidden numbers")
    return hidden


class ShortConv(Layer):
    """Convolution over the last tokens, with a gate before it and a gate after it.

    Parameters: ``gated`` [d, 3, d], the gate before, the gate after, and the gated values, so that sharding over the
    last dimension keeps channels together; ``conv`` [d, taps]; ``out`` [d, d]; and with ``bias`` ``gated_bias`` [3, d],
    ``conv_bias`` [d], ``out_bias`` [d].

    Attributes:
        layer: has one state, the last inputs of the convolution.
    """

    layer: LayerSpec
    bias: bool

    def __call__(self, x: Hidden, rope: Any, attend: Any, cache: Any) -> HiddenAndCache:
        """Mix the last tokens into each token; called like `Attention`."""
        del rope
        rows, gated = x.shape[:-1], self._biased(matmul(all_tokens(x), self.weight("gated")), "gated_bias")
        before, behind, value = jnp.moveaxis(gated, -2, 0)
        function = short_conv(self.weight("conv"), self.weight("conv_bias") if self.bias else None)
        kept = None if cache is None else cache.states[0]
        mixed, conv = recur(attend, function, before * value, kept, self.layer.states[0], rows, x.dtype)
        out = self._biased(own_tokens(matmul(behind * mixed, self.weight("out"))), "out_bias")
        return out, None if cache is None else cache._replace(states=(conv,))

    def _biased(self, x: Array, name: str) -> Array:
        return plus_bias(x, self.weight(name)) if self.bias else x


class Lfm2Block(SparseBlock):
    """A decoder layer: attention or a convolution, then experts or a dense MLP."""

    config: Lfm2Config

    def setup(self) -> None:
        cfg = self.config
        self.attention_norm, self.mlp_norm = RMSNorm(cfg.norm_eps), RMSNorm(cfg.norm_eps)
        self.attention: Any = self._attention() if self.layer.attends else ShortConv(self.layer, cfg.conv_bias)
        self.mlp: Any = self._experts() if self.sparse else GatedMLP(cfg.activation)

    def _attention(self) -> Attention:
        cfg = self.config
        return Attention(cfg.heads, cfg.kv_heads, cfg.head_dim, self.layer, qk_norm_eps=cfg.norm_eps)


class Lfm2(sparse.Sparse):
    config: Lfm2Config
    block_type = Lfm2Block


def param_specs(cfg: Lfm2Config) -> ParamTree:
    """Return every parameter with its shape, logical axes and source checkpoint tensors."""
    d = cfg.hidden_size

    def block(index: int, prefix: str) -> dict[str, Any]:
        mixer = _attention_specs if cfg.layers[index].attends else _conv_specs
        return {
            "attention_norm": rms_norm(f"{prefix}.operator_norm", d),
            "attention": mixer(cfg, prefix),
            "mlp_norm": rms_norm(f"{prefix}.ffn_norm", d),
            "mlp": _mlp_specs(cfg, index, f"{prefix}.feed_forward"),
        }

    return decoder(cfg, block, final_norm=rms_norm("model.embedding_norm", d))


def _attention_specs(cfg: Lfm2Config, prefix: str) -> dict[str, Any]:
    prefix = f"{prefix}.self_attn"
    return {
        **attention(cfg, prefix, out="out_proj"),
        "q_norm": rms_norm(f"{prefix}.q_layernorm", cfg.head_dim),
        "k_norm": rms_norm(f"{prefix}.k_layernorm", cfg.head_dim),
    }


def _conv_specs(cfg: Lfm2Config, prefix: str) -> dict[str, Any]:
    prefix, d, taps = f"{prefix}.conv", cfg.hidden_size, cfg.taps
    gated = Source(f"{prefix}.in_proj.weight", (3 * d, d), transpose=True, reshape=(d, 3, d))
    conv = Source(f"{prefix}.conv.weight", (d, 1, taps), reshape=(d, taps))
    tree = {
        "gated": ParamSpec((d, 3, d), ("embed", None, "heads"), sources=(gated,), inputs=0),
        "conv": ParamSpec((d, taps), ("heads", None), sources=(conv,)),
        "out": linear(f"{prefix}.out_proj.weight", (d, d), ("heads", "embed")),
    }
    if cfg.conv_bias:
        bias = Source(f"{prefix}.in_proj.bias", (3 * d,), reshape=(3, d))
        tree["gated_bias"] = ParamSpec((3, d), (None, "heads"), init="zeros", sources=(bias,))
        tree["conv_bias"] = plain(f"{prefix}.conv.bias", (d,), ("heads",), "zeros")
        tree["out_bias"] = plain(f"{prefix}.out_proj.bias", (d,), ("embed",), "zeros")
    return tree


def _mlp_specs(cfg: Lfm2Config, index: int, prefix: str) -> dict[str, Any]:
    d = cfg.hidden_size
    if not cfg.sparse[index]:
        return gated_mlp(prefix, d, cfg.intermediate_size, names=_NAMES)
    bias = {"correction": correction_bias(f"{prefix}.expert_bias", cfg.experts)} if cfg.corrected else {}
    return {
        "router": plain(f"{prefix}.gate.weight", (cfg.experts, d), ("router", "embed")),
        **bias,
        **gated_experts(f"{prefix}.experts", cfg.experts, d, cfg.expert_size, _NAMES),
    }


LFM2 = Family(Lfm2Config.from_dense, param_specs, cache_spec, Lfm2)
LFM2_MOE = dataclasses.replace(LFM2, config=Lfm2Config.from_moe)
