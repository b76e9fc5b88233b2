"""Qwen3-Next and Qwen3.5: three layers of gated DeltaNet to one of gated attention; experts, or one dense MLP.

Norm scales are stored minus 1 (`RMSNorm.offset`), except those of the gated norms in the linear layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxinfer.layers.attention import Attend, Attention
from jaxinfer.layers.base import Hidden, HiddenAndCache, Layer
from jaxinfer.layers.delta_net import GatedDeltaNet, states
from jaxinfer.layers.mlp import GatedMLP
from jaxinfer.layers.moe import GLU, RoutingRule
from jaxinfer.layers.norm import RMSNorm
from jaxinfer.models.config import ConfigReader, decoder_fields, rope_config
from jaxinfer.models.families import qwen_moe, sparse
from jaxinfer.models.families.sparse import SparseBlock, SparseConfig, SparseContext
from jaxinfer.models.family import Family
from jaxinfer.models.specs import cache_spec, decoder, fused_qkv, gated_mlp, linear, plain, pre_norm, rms_norm
from jaxinfer.parallel.tokens import all_tokens, own_tokens
from jaxinfer.quant import matmul, plus_bias
from jaxinfer.types import LayerSpec, ParamSpec, ParamTree, Source

IGNORE = ("mtp.*",)
"""Patterns of MTP tensors, not loaded."""

_NEXT = {
    "num_key_value_heads": 2,
    "head_dim": 256,
    "intermediate_size": 5632,
    "partial_rotary_factor": 0.25,
    "max_position_embeddings": 32768,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
}
_DENSE = _NEXT | {"num_key_value_heads": 4, "intermediate_size": 12288}
_MOE = _NEXT | {"num_experts": 256, "num_experts_per_tok": 8}
_LINEAR = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Qwen3NextConfig(SparseConfig):
    """The resolved config.json of a checkpoint: see `SparseConfig`.

    Attributes:
        key_heads, value_heads, key_dim, value_dim, taps: sizes of the linear layers.
        apart: their projections are several tensors (Qwen3.5), not one tensor with rows grouped by head.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    apart: bool

    @property
    def values(self) -> int:
        """Value heads per key head."""
        return self.value_heads // self.key_heads

    @staticmethod
    def from_json(config: Mapping[str, Any]) -> Qwen3NextConfig:
        """Read the config.json of a Qwen3NextForCausalLM.

        Raises:
            ConfigError: a field is missing, of the wrong type or not supported.
        """
        return _experts_config(sparse.reader(config, _NEXT | _LINEAR), apart=False)

    @staticmethod
    def from_moe(config: Mapping[str, Any]) -> Qwen3NextConfig:
        """Read the config.json of a Qwen3_5MoeForCausalLM (expert weights always normalised); see `from_json`."""
        return _experts_config(sparse.reader({**config, "norm_topk_prob": True}, _MOE | _LINEAR), apart=True)

    @staticmethod
    def from_dense(config: Mapping[str, Any]) -> Qwen3NextConfig:
        """Read the config.json of a Qwen3_5ForCausalLM, which has no experts; see `from_json`."""
        read = ConfigReader(config, _DENSE | _LINEAR)
        fields = _common(read)
        none: dict[str, Any] = {
            "experts": 0,
            "expert_size": 0,
            "rule": RoutingRule(1),
            "glu": GLU(fields["activation"]),
        }
        return Qwen3NextConfig(**fields, **none, sparse=(False,) * len(fields["layers"]), apart=True)


def _experts_config(read: ConfigReader, *, apart: bool) -> Qwen3NextConfig:
    fields, experts, rule = _common(read), read.positive("num_experts"), qwen_moe.rule(read)
    read.require(rule.top_k <= experts, "num_experts_per_tok", f"must be at most the number of experts ({experts})")
    return Qwen3NextConfig(
        **fields,
        sparse=qwen_moe.sparse_layers(read),
        experts=experts,
        expert_size=read.positive("moe_intermediate_size"),
        rule=rule,
        glu=GLU(fields["activation"]),
        shared_size=read.positive("shared_expert_intermediate_size"),
        apart=apart,
    )


def _common(read: ConfigReader) -> dict[str, Any]:
    """Read the fields common to models with and without experts."""
    fields, bias = decoder_fields(read), read.flag("attention_bias", False)
    key_heads, value_heads = read.positive("linear_num_key_heads"), read.positive("linear_num_value_heads")
    what = f"must be a multiple of linear_num_key_heads ({key_heads})"
    read.require(value_heads % key_heads == 0, "linear_num_value_heads", what)
    key, value, taps = (read.positive(name) for name in list(_LINEAR)[2:])
    read.require(taps > 1, "linear_conv_kernel_dim", "must be at least 2")
    kept = states(key_heads, value_heads // key_heads, key, value, taps)
    recurrent = LayerSpec(attends=False, states=kept)
    return fields | {
        "layers": tuple(recurrent if linear else LayerSpec() for linear in _linear_layers(read)),
        "rope": rope_config(read, fields["max_position"], fields["head_dim"], partial=True),
        "qkv_bias": bias,
        "out_bias": bias,
        "qk_norm": True,
        "key_heads": key_heads,
        "value_heads": value_heads,
        "key_dim": key,
        "value_dim": value,
        "taps": taps,
    }


def _linear_layers(read: ConfigReader) -> list[bool]:
    count, kinds = read.positive("num_hidden_layers"), read.fields.get("layer_types")
    if kinds is None:
        every = read.positive("full_attention_interval", 4)
        return [(index + 1) % every != 0 for index in range(count)]
    known = isinstance(kinds, list) and all(kind in ("linear_attention", "full_attention") for kind in kinds)
    read.require(known and len(kinds) == count, "layer_types", f"must be {count} of linear_attention, full_attention")
    return [kind == "linear_attention" for kind in kinds]


class GatedAttention(Attention):
    """`Attention` with output gates, sigmoids of the token: ``qkv`` [d, kv_heads, 2 group + 2, head_dim] has the gate
    of each query after it."""

    def __call__(
        self,
        x: Hidden,
        rope: tuple[jax.Array, jax.Array] | None,
        attend: Attend,
        cache: Any,
        temperature: Float[Array, "*batch"] | None = None,
    ) -> tuple[Float[Array, "*batch out"], Any]:
        parts = self._project(all_tokens(x))
        qkv = jnp.concatenate([parts[..., :-2:2, :], parts[..., -2:, :]], axis=-2)
        mixed, cache = self._attended(qkv, rope, attend, cache, temperature)
        mixed = mixed * jax.nn.sigmoid(parts[..., 1:-2:2, :].reshape(mixed.shape))
        out = own_tokens(matmul(mixed.reshape(*x.shape[:-1], -1), self.weight("out")))
        return plus_bias(out, self.weight("out_bias")) if self.out_bias else out, cache


class Qwen3NextBlock(SparseBlock):
    """A decoder layer: linear or full attention, then experts or a dense MLP."""

    config: Qwen3NextConfig

    def setup(self) -> None:
        cfg = self.config
        self.attention_norm, self.mlp_norm = RMSNorm(cfg.norm_eps, 1.0), RMSNorm(cfg.norm_eps, 1.0)
        self.attention: Any = self._attention() if self.layer.attends else self._linear()
        self.mlp: Any = self._experts() if self.sparse else GatedMLP(cfg.activation)

    def _attention(self) -> GatedAttention:
        cfg = self.config
        sizes, biases = (cfg.heads, cfg.kv_heads, cfg.head_dim, self.layer), (cfg.qkv_bias, cfg.out_bias)
        return GatedAttention(*sizes, *biases, qk_norm_eps=cfg.norm_eps, norm_offset=1.0)

    def _linear(self) -> GatedDeltaNet:
        cfg = self.config
        sizes = cfg.key_heads, cfg.values, cfg.key_dim, cfg.value_dim
        return GatedDeltaNet(*sizes, self.layer, cfg.norm_eps, cfg.activation)

    def __call__(self, x: Hidden, context: SparseContext, attend: Attend, cache: Any) -> HiddenAndCache:
        normal = self.attention_norm(x)
        if self.layer.attends:
            mixed, cache = self.attention(normal, context.rope, attend, cache)
        else:
            mixed, cache = self.attention(normal, attend, cache)
        x = x + mixed
        normal = self.mlp_norm(x)
        return x + (self.mlp(normal, context.live) if self.sparse else self.mlp(normal)), cache


class Qwen3Next(sparse.Sparse):
    config: Qwen3NextConfig
    block_type = Qwen3NextBlock

    def final_norm(self) -> Layer:
        return RMSNorm(self.config.norm_eps, 1.0, parent=None)


def param_specs(cfg: Qwen3NextConfig) -> ParamTree:
    """Return every parameter with its shape, logical axes and source checkpoint tensors."""
    d = cfg.hidden_size

    def block(index: int, prefix: str) -> dict[str, Any]:
        of_attention = _attention_specs if cfg.layers[index].attends else _linear_specs
        return pre_norm(prefix, d, of_attention(cfg, prefix), _mlp_specs(cfg, index, prefix), _norm)

    return decoder(cfg, block, final_norm=_norm("model.norm", d))


def _norm(prefix: str, size: int) -> dict[str, Any]:
    return rms_norm(prefix, size, "zeros")


def _mlp_specs(cfg: Qwen3NextConfig, index: int, prefix: str) -> dict[str, Any]:
    if cfg.sparse[index]:
        return qwen_moe.experts(cfg, prefix)
    return gated_mlp(f"{prefix}.mlp", cfg.hidden_size, cfg.intermediate_size)


def _attention_specs(cfg: Qwen3NextConfig, prefix: str) -> dict[str, Any]:
    prefix, d = f"{prefix}.self_attn", cfg.hidden_size
    sizes = d, 2 * cfg.heads, cfg.kv_heads, cfg.head_dim
    tree: dict[str, Any] = {
        "qkv": fused_qkv(prefix, *sizes),
        "out": linear(f"{prefix}.o_proj.weight", (cfg.heads * cfg.head_dim, d), ("heads", "embed")),
        **{name: rms_norm(f"{prefix}.{name}", cfg.head_dim, "zeros") for name in ("q_norm", "k_norm")},
    }
    if cfg.qkv_bias:
        tree["qkv_bias"] = fused_qkv(prefix, *sizes, kind="bias")
        tree["out_bias"] = plain(f"{prefix}.o_proj.bias", (d,), ("embed",), "zeros")
    return tree


def _linear_specs(cfg: Qwen3NextConfig, prefix: str) -> dict[str, Any]:
    prefix, d, heads, inner = f"{prefix}.linear_attn", cfg.hidden_size, cfg.key_heads, cfg.value_heads * cfg.value_dim
    widths = {"q": cfg.key_dim, "k": cfg.key_dim, "v": cfg.values * cfg.value_dim}
    channels = sum(widths.values())
    qkvz = _apart(cfg, prefix, widths) if cfg.apart else _together(cfg, prefix, channels)
    conv = tuple(
        Source(
            f"{prefix}.conv1d.weight",
            (heads * channels, 1, cfg.taps),
            reshape=(heads, width, cfg.taps),
            where=(slice(None), slice(first, first + width)),
            part=(slice(heads * first, heads * (first + width)),),
        )
        for first, width in _places(widths)
    )
    each = {
        name: ParamSpec(
            (heads, cfg.values),
            ("heads", None),
            init="zeros",
            sources=(Source(f"{prefix}.{tensor}", (cfg.value_heads,), reshape=(heads, cfg.values)),),
            dtype="float32",
        )
        for name, tensor in (("log_decay", "A_log"), ("dt_bias", "dt_bias"))
    }
    return {
        **qkvz,
        **each,
        "conv": ParamSpec((heads, channels, cfg.taps), ("heads", None, None), sources=conv),
        "norm": plain(f"{prefix}.norm.weight", (cfg.value_dim,), ("norm",), "ones"),
        "out": linear(f"{prefix}.out_proj.weight", (inner, d), ("heads", "embed")),
    }


def _places(widths: Mapping[str, int]) -> list[tuple[int, int]]:
    """Return the offset and width of each slice of a head."""
    sizes = list(widths.values())
    return [(sum(sizes[:index]), size) for index, size in enumerate(sizes)]


def _together(cfg: Qwen3NextConfig, prefix: str, channels: int) -> dict[str, Any]:
    """Return projections that are one tensor each, with rows grouped by key head."""
    wide = channels + cfg.values * cfg.value_dim
    shapes = {"qkvz": ("in_proj_qkvz", wide), "ba": ("in_proj_ba", 2 * cfg.values)}
    return {
        name: _projection(cfg, width, [_rows(cfg, f"{prefix}.{tensor}", width, 0, width)])
        for name, (tensor, width) in shapes.items()
    }


def _apart(cfg: Qwen3NextConfig, prefix: str, widths: Mapping[str, int]) -> dict[str, Any]:
    """Return projections that are several tensors: the queries of all heads precede all keys."""
    heads, channels = cfg.key_heads, sum(widths.values())
    name, whole = f"{prefix}.in_proj_qkv.weight", (heads * channels, cfg.hidden_size)
    parts = [
        Source(
            name,
            whole,
            transpose=True,
            reshape=(cfg.hidden_size, heads, width),
            where=(slice(None), slice(None), slice(first, first + width)),
            part=(slice(heads * first, heads * (first + width)),),
        )
        for first, width in _places(widths)
    ]
    gate, both = widths["v"], 2 * cfg.values
    gates = [
        _rows(cfg, f"{prefix}.in_proj_{name}", cfg.values, index * cfg.values, both) for index, name in enumerate("ba")
    ]
    z = _rows(cfg, f"{prefix}.in_proj_z", gate, channels, channels + gate)
    return {"qkvz": _projection(cfg, channels + gate, [*parts, z]), "ba": _projection(cfg, both, gates)}


def _rows(cfg: Qwen3NextConfig, tensor: str, width: int, first: int, whole: int) -> Source:
    """Return the source of ``width`` rows per head, at offset ``first`` of the ``whole`` in the parameter."""
    heads, d = cfg.key_heads, cfg.hidden_size
    where = () if width == whole else (slice(None), slice(None), slice(first, first + width))
    form = (d, heads, width)
    return Source(f"{tensor}.weight", (heads * width, d), transpose=True, reshape=form, where=where)


def _projection(cfg: Qwen3NextConfig, width: int, sources: list[Source]) -> ParamSpec:
    shape = (cfg.hidden_size, cfg.key_heads, width)
    return ParamSpec(shape, ("embed", "heads", None), sources=tuple(sources), inputs=0)


QWEN3_NEXT = Family(Qwen3NextConfig.from_json, param_specs, cache_spec, Qwen3Next, IGNORE)
QWEN3_5_MOE = dataclasses.replace(QWEN3_NEXT, config=Qwen3NextConfig.from_moe)
QWEN3_5 = dataclasses.replace(QWEN3_NEXT, config=Qwen3NextConfig.from_dense)
