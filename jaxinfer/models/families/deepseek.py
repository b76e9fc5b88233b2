"""DeepSeek-V2 and V3 (arXiv:2405.04434, 2412.19437): MLA, a few dense layers, then mixtures of experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxinfer.layers.attention import Attend
from jaxinfer.layers.base import Hidden, HiddenAndCache, Layer, Positions
from jaxinfer.layers.mla import LatentAttention
from jaxinfer.layers.mlp import GatedMLP
from jaxinfer.layers.moe import GLU, MoE, RoutingRule
from jaxinfer.layers.norm import RMSNorm
from jaxinfer.layers.rope import RopeConfig, in_sequence, yarn_mscale
from jaxinfer.models.config import ConfigReader, DecoderConfig, aliased, decoder_fields, rope_config
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.families.sparse import SparseContext
from jaxinfer.models.family import Family
from jaxinfer.models.specs import (
    cache_spec,
    correction_bias,
    decoder,
    gated_experts,
    gated_mlp,
    linear,
    plain,
    pre_norm,
    rms_norm,
)
from jaxinfer.types import LayerSpec, ParamSpec, ParamTree, Source

_ROPES = ("default", "linear", "yarn", "llama3")
# Defaults that differ between the two configurations of transformers.
_V2 = {"first_k_dense_replace": 0, "n_routed_experts": 64, "moe_intermediate_size": 1407, "n_shared_experts": 2}
_V3 = {
    "max_position_embeddings": 4096,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
}
_GLM = {
    "max_position_embeddings": 202752,
    "rms_norm_eps": 1e-5,
    "first_k_dense_replace": 1,
    "n_routed_experts": 64,
    "moe_intermediate_size": 1536,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 1.8,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
}
_NULLABLE = ("q_lora_rank",)
_YOUTU = {"max_position_embeddings": 131072, "tie_word_embeddings": True}


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class DeepseekConfig(DecoderConfig):
    """The resolved config.json of a checkpoint: see `DecoderConfig`.

    Attributes:
        q_rank, nope, rope_dim, value_dim: see `LatentAttention`; the rank of its latents is in ``layers``.
        scale: score scale.
        interleaved: see `rotate`.
        dense: number of leading layers without experts.
        rule: router of the other layers, for ``experts`` of ``expert_size``; ``shared_size``: of the shared expert.
        corrected: the router has a correction bias for the selection (`route`).
        predictors: MTP layers after the last layer (`jaxinfer.models.heads.mtp`).
    """

    q_rank: int | None
    nope: int
    rope_dim: int
    value_dim: int
    rope: RopeConfig
    scale: float
    interleaved: bool
    attention_bias: bool
    dense: int
    experts: int
    expert_size: int
    shared_size: int
    rule: RoutingRule
    corrected: bool
    predictors: int = dataclasses.field(default=0, compare=False)

    @property
    def ignored(self) -> tuple[str, ...]:
        """Patterns of tensors that the model does not load.

        V3 checkpoints have an MTP layer after the last one, even if config.json does not declare it, for drafting.
        """
        return tuple(f"model.layers.{len(self.layers) + index}.*" for index in range(max(1, self.predictors)))

    @property
    def rank(self) -> int:
        rank = self.layers[0].latent_rank
        assert rank is not None
        return rank

    @staticmethod
    def from_v2(config: Mapping[str, Any]) -> DeepseekConfig:
        """Read the config.json of a DeepseekV2ForCausalLM.

        Raises:
            ConfigError: a field is missing, of the wrong type or not supported.
        """
        read = ConfigReader(config, _V2)
        require_only(read, "scoring_func", "softmax")
        require_only(read, "mlp_bias", False)
        # transformers ignores it, and DeepSeek's own code does not scale the weights that it normalises.
        require_only(read, "norm_topk_prob", False)
        limited = read.choice("topk_method", "greedy", ("greedy", "group_limited_greedy")) != "greedy"
        rule = RoutingRule(read.positive("num_experts_per_tok"), scale=read.number("routed_scaling_factor", 1.0))
        if limited:
            rule = dataclasses.replace(rule, groups=read.positive("n_group"), top_groups=read.positive("topk_group"))
        return _common(read, rule, corrected=False, interleaved=True)

    @staticmethod
    def from_v3(config: Mapping[str, Any]) -> DeepseekConfig:
        """Read the config.json of a DeepseekV3ForCausalLM; raises as `from_v2` does."""
        read = ConfigReader(config, _V3)
        require_only(read, "scoring_func", "sigmoid")
        require_only(read, "topk_method", "noaux_tc")
        return _common(read, v3_rule(read), corrected=True, interleaved=read.flag("rope_interleave", True))

    @staticmethod
    def from_glm(config: Mapping[str, Any]) -> DeepseekConfig:
        """Read the config.json of a Glm4MoeLiteForCausalLM (GLM-4.7-Flash); raises as `from_v2` does."""
        return DeepseekConfig.from_v3(with_layer_types(config, _GLM))

    @staticmethod
    def from_youtu(config: Mapping[str, Any]) -> DeepseekConfig:
        """Read the config.json of a YoutuForCausalLM, which has no experts; raises as `from_v2` does."""
        layers = ConfigReader(config).positive("num_hidden_layers")
        return DeepseekConfig.from_v3({**_YOUTU, **config, "first_k_dense_replace": layers})


def with_layer_types(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ``config`` without nulls, with ``first_k_dense_replace`` set from ``mlp_layer_types``."""
    known = {name: value for name, value in config.items() if value is not None or name in _NULLABLE}
    fields = {**defaults, **known}
    read = ConfigReader(fields)
    kinds, count = read.get("mlp_layer_types"), read.positive("num_hidden_layers")
    if kinds is not None:
        dense = kinds.count("dense") if isinstance(kinds, list) else 0
        expected = ["dense"] * dense + ["sparse"] * (count - dense)
        read.require(kinds == expected, "mlp_layer_types", f"must be dense layers and then sparse ones, {count}")
        fields["first_k_dense_replace"] = dense
    return fields


def v3_rule(read: ConfigReader) -> RoutingRule:
    """Read the router of DeepSeek-V3, which selects experts of the best groups with a correction bias."""
    return RoutingRule(
        read.positive("num_experts_per_tok", 8),
        scores="sigmoid",
        renormalise=read.flag("norm_topk_prob", True),
        scale=read.number("routed_scaling_factor", 2.5),
        groups=read.positive("n_group", 8),
        top_groups=read.positive("topk_group", 4),
        group_score="top2",
    )


def _common(read: ConfigReader, rule: RoutingRule, *, corrected: bool, interleaved: bool) -> DeepseekConfig:
    require_only(read, "num_key_value_heads", read.positive("num_attention_heads"))
    require_only(read, "moe_layer_freq", 1)
    nope, rope_dim = read.positive("qk_nope_head_dim", 128), read.positive("qk_rope_head_dim", 64)
    read.require(rope_dim % 2 == 0, "qk_rope_head_dim", "must be even")
    rank, count = read.positive("kv_lora_rank", 512), read.positive("num_hidden_layers")
    fields = decoder_fields(read, head_dim=rank + rope_dim) | {"kv_heads": 1}
    rope = rope_config(read, fields["max_position"], rope_dim)
    read.require(rope.kind in _ROPES, "rope_scaling", f"is not supported (known: {', '.join(_ROPES)})")
    expert_size = read.positive("moe_intermediate_size")
    return DeepseekConfig(
        **fields,
        layers=(LayerSpec(latent_rank=rank),) * count,
        q_rank=_q_rank(read),
        nope=nope,
        rope_dim=rope_dim,
        value_dim=read.positive("v_head_dim", 128),
        rope=rope,
        scale=(nope + rope_dim) ** -0.5 * _score_scale(read, rope),
        interleaved=interleaved,
        attention_bias=read.flag("attention_bias", False),
        dense=min(count_of(read, "first_k_dense_replace"), count),
        experts=routed_experts(read, rule),
        expert_size=expert_size,
        shared_size=expert_size * read.positive("n_shared_experts"),
        rule=rule,
        corrected=corrected,
        predictors=count_of(read, "num_nextn_predict_layers"),
    )


def require_only(read: ConfigReader, name: str, value: Any) -> None:
    """Reject any value of a field except the one that the models' published code implements."""
    read.require(read.fields.get(name) in (None, value), name, f"is not supported (known: {value})")


def _q_rank(read: ConfigReader) -> int | None:
    """Read the rank of the query latent: null means none; absent, it is transformers' default."""
    null = "q_lora_rank" in read.fields and read.fields["q_lora_rank"] is None
    return None if null else read.positive("q_lora_rank", 1536)


def count_of(read: ConfigReader, name: str, default: int = 0) -> int:
    """Read a number of layers, ``default`` if the field is missing."""
    value = read.get(name, default)
    read.require(type(value) is int and 0 <= value <= 1024, name, "must be >= 0 and at most 1024")
    return value


def routed_experts(read: ConfigReader, rule: RoutingRule) -> int:
    """Read the number of experts, which must be divisible by the groups."""
    count = read.positive("n_routed_experts")
    least = 2 if rule.group_score == "top2" else 1
    read.require(
        count % rule.groups == 0 and count >= least * rule.groups, "n_group", f"does not divide {count} experts"
    )
    read.require(rule.top_groups <= rule.groups, "topk_group", f"must be at most n_group ({rule.groups})")
    allowed = count // rule.groups * rule.top_groups
    read.require(rule.top_k <= allowed, "num_experts_per_tok", f"must be at most {allowed}, the experts of its groups")
    return count


def _score_scale(read: ConfigReader, rope: RopeConfig) -> float:
    """Return YaRN's score scale for long contexts, which these models apply in addition to scaled cosines and sines."""
    scaling = ConfigReader(read.fields.get("rope_scaling") or read.fields.get("rope_parameters") or {})
    all_dim = scaling.number("mscale_all_dim", 0.0)
    return yarn_mscale(rope.factor, all_dim) ** 2 if all_dim and rope.kind != "default" else 1.0


class DeepseekBlock(Layer):
    """A decoder layer with a mixture of experts, or with an MLP if it is ``dense``."""

    config: DeepseekConfig
    layer: LayerSpec
    dense: bool

    def setup(self) -> None:
        cfg = self.config
        self.attention_norm = RMSNorm(cfg.norm_eps)
        self.attention = self.make_attention(LatentAttention)
        self.mlp_norm = RMSNorm(cfg.norm_eps)
        glu = GLU(cfg.activation)
        self.mlp: Any = (
            GatedMLP(cfg.activation)
            if self.dense
            else MoE(cfg.rule, glu, correction=cfg.corrected, shared_activation=cfg.activation)
        )

    def make_attention(self, kind: Callable[..., Layer], **options: Any) -> Any:
        """Make the attention with the sizes of the config; ``options``: further arguments of this ``kind``."""
        cfg = self.config
        sizes = {"heads": cfg.heads, "nope": cfg.nope, "rope": cfg.rope_dim, "q_rank": cfg.q_rank}
        switches = {"scale": cfg.scale, "bias": cfg.attention_bias, "interleaved": cfg.interleaved}
        return kind(layer=self.layer, **sizes, **switches, **options)

    def __call__(self, x: Hidden, context: SparseContext, attend: Attend, cache: Any) -> HiddenAndCache:
        mixed, cache = self.attention(self.attention_norm(x), context.rope, attend, cache)
        return self.fed_forward(x + mixed, context), cache

    def fed_forward(self, x: Hidden, context: SparseContext) -> Hidden:
        normal = self.mlp_norm(x)
        return x + (self.mlp(normal) if self.dense else self.mlp(normal, context.live))


class Deepseek(Decoder):
    config: DeepseekConfig

    def block(self, index: int, override: Callable[..., Layer] | None) -> Layer:
        make = override or DeepseekBlock
        return make(self.config, self.config.layers[index], index < self.config.dense, parent=None)

    def context(self, positions: Positions) -> SparseContext:
        return SparseContext(self.config.rope.angles(positions, self.config.rope_dim), in_sequence(positions) >= 0)


def param_specs(cfg: DeepseekConfig) -> ParamTree:
    return decoder(cfg, lambda index, prefix: block_specs(cfg, prefix, index < cfg.dense))


def block_specs(cfg: DeepseekConfig, prefix: str, dense: bool) -> dict[str, Any]:
    d, mlp = cfg.hidden_size, f"{prefix}.mlp"
    network = gated_mlp(mlp, d, cfg.intermediate_size) if dense else moe_specs(cfg, mlp)
    return pre_norm(prefix, d, _attention_specs(cfg, f"{prefix}.self_attn"), network)


def moe_specs(cfg: Any, prefix: str) -> dict[str, Any]:
    """Return the parameters of `MoE`; ``cfg`` has the size and switch fields of `DeepseekConfig`."""
    d = cfg.hidden_size
    tree: dict[str, Any] = {
        "router": plain(f"{prefix}.gate.weight", (cfg.experts, d), ("router", "embed")),
        **gated_experts(f"{prefix}.experts", cfg.experts, d, cfg.expert_size),
        "shared": gated_mlp(f"{prefix}.shared_experts", d, cfg.shared_size),
    }
    if cfg.corrected:
        tree["correction"] = correction_bias(f"{prefix}.gate.e_score_correction_bias", cfg.experts)
    return tree


def _attention_specs(cfg: DeepseekConfig, prefix: str) -> dict[str, Any]:
    d, query, heads = cfg.hidden_size, cfg.nope + cfg.rope_dim, cfg.heads
    latents = [("kv_a_proj_with_mqa", cfg.rank + cfg.rope_dim)]
    if cfg.q_rank is not None:
        latents = [("q_a_proj", cfg.q_rank), *latents]
    q, q_in = (f"{prefix}.q_proj.weight", d) if cfg.q_rank is None else (f"{prefix}.q_b_proj.weight", cfg.q_rank)
    q_source = Source(q, (heads * query, q_in), transpose=True, reshape=(q_in, heads, query))
    tree: dict[str, Any] = {
        "down": _side_by_side(prefix, latents, d, "weight"),
        "kv_norm": rms_norm(f"{prefix}.kv_a_layernorm", cfg.rank),
        "q": ParamSpec((q_in, heads, query), (None, "heads", "head_dim"), sources=(q_source,), inputs=0),
        **_up_specs(cfg, f"{prefix}.kv_b_proj.weight"),
        "out": linear(f"{prefix}.o_proj.weight", (heads * cfg.value_dim, d), ("heads", "embed")),
    }
    if cfg.q_rank is not None:
        tree["q_norm"] = rms_norm(f"{prefix}.q_a_layernorm", cfg.q_rank)
    if cfg.attention_bias:
        tree["down_bias"] = _side_by_side(prefix, latents, d, "bias")
        tree["out_bias"] = plain(f"{prefix}.o_proj.bias", (d,), ("embed",), "zeros")
    return tree


def _side_by_side(prefix: str, parts: list[tuple[str, int]], d: int, kind: str) -> ParamSpec:
    """Return projections of one input concatenated to a matrix [d, sum of sizes], or their biases to a vector."""
    weight, sources, at = kind == "weight", [], 0
    for name, size in parts:
        place = slice(at, at + size)
        shape, where = ((size, d), (slice(None), place)) if weight else ((size,), (place,))
        sources.append(Source(f"{prefix}.{name}.{kind}", shape, transpose=weight, where=where))
        at += size
    if weight:
        return ParamSpec((d, at), ("embed", None), sources=tuple(sources), inputs=0)
    return ParamSpec((at,), (None,), init="zeros", sources=tuple(sources))


def _up_specs(cfg: DeepseekConfig, name: str) -> dict[str, Any]:
    """Return ``up_key`` and ``up_value`` from ``kv_b_proj``, whose rows are grouped by head, keys first."""
    size, shape = cfg.nope + cfg.value_dim, (cfg.heads * (cfg.nope + cfg.value_dim), cfg.rank)

    def rows(head: int, first: int, last: int, transpose: bool) -> Source:
        part = (slice(head * size + first, head * size + last),)
        return Source(name, shape, transpose=transpose, where=(head,), part=part)

    heads, axes = range(cfg.heads), ("heads", None, None)
    return {
        "up_key": ParamSpec(
            (cfg.heads, cfg.nope, cfg.rank), axes, sources=tuple(rows(head, 0, cfg.nope, False) for head in heads)
        ),
        "up_value": ParamSpec(
            (cfg.heads, cfg.rank, cfg.value_dim),
            axes,
            sources=tuple(rows(head, cfg.nope, size, True) for head in heads),
        ),
    }


DEEPSEEK_V2 = Family(
    aliased(DeepseekConfig.from_v2, {"num_experts": "n_routed_experts"}), param_specs, cache_spec, Deepseek
)
DEEPSEEK_V3 = Family(
    aliased(DeepseekConfig.from_v3, {"num_local_experts": "n_routed_experts"}), param_specs, cache_spec, Deepseek
)
GLM4_MOE_LITE = dataclasses.replace(
    DEEPSEEK_V3,
    config=aliased(DeepseekConfig.from_glm, {"num_local_experts": "n_routed_experts", "head_dim": "qk_rope_head_dim"}),
)
YOUTU = dataclasses.replace(DEEPSEEK_V3, config=DeepseekConfig.from_youtu)
