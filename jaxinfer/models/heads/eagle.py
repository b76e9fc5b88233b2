"""EAGLE draft heads: one decoder layer that continues a model's features (EAGLE-1/2, arXiv:2401.15077, 2406.16858) or
those of three of its layers (EAGLE-3, arXiv:2503.01840).

Formats: the authors' folders, SpecForge, and speculators, whose config.json nests the config of the layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxinfer.layers.attention import Attend, Attention
from jaxinfer.layers.base import Hidden, HiddenAndCache, Layer, Positions, Tokens
from jaxinfer.layers.mlp import GatedMLP
from jaxinfer.layers.norm import RMSNorm
from jaxinfer.layers.rope import RopeConfig
from jaxinfer.models.config import ConfigReader, decoder_fields, rope_config
from jaxinfer.models.families.llama import attention_specs
from jaxinfer.models.family import HeadFamily
from jaxinfer.models.head import DraftHead, HeadConfig, HeadFiles
from jaxinfer.models.specs import cache_spec, fused_qkv, gated_mlp, linear, plain, rms_norm, vocabulary
from jaxinfer.parallel.mesh import gathered_logits
from jaxinfer.quant import matmul, matmul_transposed
from jaxinfer.types import LayerSpec, ParamTree

IGNORE = ("t2d", "d2t", "embed_tokens.weight", "lm_head.weight")
MAP = "inverse"
"""Parameter of a reduced vocabulary: the head's id of each token of the model, -1 if it has none."""


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class EagleConfig(HeadConfig):
    """The resolved config.json of an EAGLE head.

    Attributes:
        prefix: name prefix of the layers' tensors.
        qkv_bias, out_bias, mlp_bias: as in `jaxinfer.models.families.llama.LlamaConfig`.
        fc_bias: whether ``fc`` has a bias (EAGLE-1 and 2).
        draft_vocab: size of the draft vocabulary (EAGLE-3).
        norm_before_residual: the residual of the EAGLE-3 layer is the normed feature.
        norm_before_fc: the three inputs of ``fc`` are normed together; ``fc_norm``: each is normed separately.
        norm_output: the state that is fed back is normed (EAGLE-3.1).
    """

    rope: RopeConfig
    prefix: str
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    fc_bias: bool = False
    draft_vocab: int = 0
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False


def eagle_config(files: HeadFiles) -> EagleConfig:
    """Read the config.json of an EAGLE-1 or 2 head.

    Raises:
        ConfigError: a field is missing, of the wrong type or not supported.
    """
    read, target = ConfigReader(files.config_json), files.target
    fields = _fields(read, files)
    read.require(
        fields["hidden_size"] == target.hidden_size, "hidden_size", f"must be {target.hidden_size}, the model's"
    )
    shares = _shared(files, fields) | {"head": files.head}
    return EagleConfig(
        **fields,
        features=target.hidden_size,
        shares=tuple(shares.items()),
        prefix="layers",
        fc_bias="fc.bias" in files.names,
    )


def eagle3_config(files: HeadFiles) -> EagleConfig:
    """Read the config.json of an EAGLE-3 head; raises as `eagle_config` does."""
    read, target = ConfigReader(_flat(files.config_json)), files.target
    fields = _fields(read, files)
    read.require(len(fields["layers"]) == 1, "num_hidden_layers", "must be 1")
    read.require(not read.flag("parallel_drafting", False), "parallel_drafting", "is not supported")
    width = read.positive("target_hidden_size", fields["hidden_size"])
    read.require(width == target.hidden_size, "target_hidden_size", f"must be {target.hidden_size}, the model's")
    return EagleConfig(
        **fields,
        features=3 * width,
        taps=_taps(read, len(target.layers)),
        shares=tuple(_shared(files, fields).items()),
        prefix="midlayer" if any(name.startswith("midlayer.") for name in files.names) else "layers.0",
        draft_vocab=read.positive("draft_vocab_size", fields["vocab_size"]),
        norm_before_residual=read.flag("norm_before_residual", False),
        norm_before_fc=read.flag("norm_before_fc", False),
        fc_norm=read.flag("fc_norm", False),
        norm_output=_norm_output(read),
    )


def _norm_output(read: ConfigReader) -> bool:
    """Return whether the state that is fed back is normed. In SpecForge's files the field declares whether there is a
    norm at all, which then only the LM head applies."""
    if "speculators_model_type" in read.fields:
        return read.flag("norm_output", False)
    read.require(read.flag("norm_output", True), "norm_output", "is not supported")
    return False


def _fields(read: ConfigReader, files: HeadFiles) -> dict[str, Any]:
    """Read the fields of the layer. Tensor names decide its biases and norms: configs name them in many ways."""
    fields = decoder_fields(read) | {"tied": False}
    parts = {
        "qkv_bias": "q_proj.bias",
        "out_bias": "o_proj.bias",
        "mlp_bias": "up_proj.bias",
        "qk_norm": "q_norm.weight",
    }
    return {
        **fields,
        "layers": files.layers(read.positive("num_hidden_layers", 1)),
        "rope": rope_config(read, fields["max_position"], fields["head_dim"]),
        **{field: any(name.endswith(f".{part}") for name in files.names) for field, part in parts.items()},
    }


def _shared(files: HeadFiles, fields: Mapping[str, Any]) -> dict[str, str]:
    """Map the embeddings to those of the model, unless the head has its own."""
    own = "embed_tokens.weight" in files.names
    ConfigReader(files.config_json).require(
        own or fields["hidden_size"] == files.target.hidden_size,
        "hidden_size",
        f"must be {files.target.hidden_size}, the model's: there is no embed_tokens.weight",
    )
    return {} if own else {"embed": "embed"}


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten the fields of all formats to one level, including the nested objects of speculators and SpecForge."""
    nested = [config.get(name) for name in ("transformer_layer_config", "eagle_config")]
    return {**{name: each for part in nested if isinstance(part, dict) for name, each in part.items()}, **config}


def _taps(read: ConfigReader, count: int) -> tuple[int, ...]:
    """Read the layers whose inputs the head reads. Files list layers by output: the layers one before."""
    ids = read.get("eagle_aux_hidden_state_layer_ids", [1, count // 2 - 1, count - 4])
    numbers = isinstance(ids, list) and all(type(each) is int and -1 <= each < count - 1 for each in ids)
    name = "eagle_aux_hidden_state_layer_ids"
    read.require(numbers and len(set(ids)) == 3, name, f"must name three of the model's {count} layers, not the last")
    return tuple(each + 1 for each in sorted(ids))


class EagleLayer(Layer):
    """A decoder layer. ``wide``: its attention reads the token's embedding concatenated with the feature (EAGLE-3)."""

    config: EagleConfig
    layer: LayerSpec
    wide: bool = False
    normed: bool = True

    def setup(self) -> None:
        cfg, eps = self.config, self.config.norm_eps if self.config.qk_norm else None
        sizes = cfg.heads, cfg.kv_heads, cfg.head_dim, self.layer
        self.attention = Attention(*sizes, qkv_bias=cfg.qkv_bias, out_bias=cfg.out_bias, qk_norm_eps=eps)
        self.mlp_norm, self.mlp = RMSNorm(cfg.norm_eps), GatedMLP(cfg.activation, cfg.mlp_bias)
        if self.normed:
            self.attention_norm = RMSNorm(cfg.norm_eps)
        if self.wide:
            self.hidden_norm = RMSNorm(cfg.norm_eps)

    def __call__(
        self, x: Hidden, embedded: Any, rope: tuple[jax.Array, jax.Array], attend: Attend, cache: Any
    ) -> HiddenAndCache:
        residual = x
        if self.wide:
            normal = self.hidden_norm(x)
            residual = normal if self.config.norm_before_residual else x
            entering = jnp.concatenate([self.attention_norm(embedded), normal], axis=-1)
        else:
            entering = self.attention_norm(x) if self.normed else x
        mixed, cache = self.attention(entering, rope, attend, cache)
        x = residual + mixed
        return x + self.mlp(self.mlp_norm(x)), cache


class Eagle(DraftHead):
    """EAGLE-1 and 2 heads: the layer reads a projection of embedding and feature; the model's own LM head makes logits.

    Parameters: ``fc`` [2 d, d], ``fc_bias``, ``layers_0`` ..., and the model's ``embed`` and ``head``.
    """

    config: EagleConfig

    def __call__(
        self, tokens: Tokens, hidden: Hidden, positions: Positions, attend: Attend, cache: Any
    ) -> HiddenAndCache:
        x = matmul(jnp.concatenate([self.embed(tokens).astype(hidden.dtype), hidden], axis=-1), self.weight("fc"))
        if self.config.fc_bias:
            x = x + self.weight("fc_bias").astype(x.dtype)
        rope, caches = self.config.rope.angles(positions, self.config.head_dim), []
        for index, spec in enumerate(self.config.layers):
            layer: Any = EagleLayer(self.config, spec, normed=index > 0, parent=None).apply
            x, kept = layer({"params": self.weight(f"layers_{index}")}, x, None, rope, attend, _of(cache, index))
            caches.append(kept)
        return x, None if cache is None else caches


class Eagle3(DraftHead):
    """EAGLE-3 head: ``fc`` fuses the inputs of three layers into one state; logits are over the draft vocabulary.

    Parameters: ``fc`` [3 d', d], ``layers_0``, ``final_norm``, ``head`` {table [draft vocab, d]}, ``inverse`` [vocab]
    for a reduced vocabulary, ``fc_norm`` or ``fc_norm_0`` ... for its inputs, and ``embed``, its own or the model's.
    """

    config: EagleConfig

    def first(self, features: Float[Array, "*batch features"]) -> Hidden:
        if self.config.norm_before_fc:
            features = self.normed(features, "fc_norm")
        if self.config.fc_norm:
            parts = jnp.split(features, 3, axis=-1)
            normal = [self.normed(part, f"fc_norm_{index}") for index, part in enumerate(parts)]
            features = jnp.concatenate(normal, axis=-1)
        return matmul(features, self.weight("fc"))

    def __call__(
        self, tokens: Tokens, hidden: Hidden, positions: Positions, attend: Attend, cache: Any
    ) -> HiddenAndCache:
        rope = self.config.rope.angles(positions, self.config.head_dim)
        layer: Any = EagleLayer(self.config, self.config.layers[0], wide=True, parent=None).apply
        entering = hidden, self.embed(tokens).astype(hidden.dtype), rope, attend, _of(cache, 0)
        x, kept = layer({"params": self.weight("layers_0")}, *entering)
        return self.normed(x) if self.config.norm_output else x, None if cache is None else [kept]

    def head(self, hidden: Hidden) -> Float[Array, "*batch vocab"]:
        normal = hidden if self.config.norm_output else self.normed(hidden)
        logits = gathered_logits(matmul_transposed(normal, self.weight("head")["table"]).astype(jnp.float32))
        if self.config.draft_vocab == self.config.vocab_size:
            return logits
        places = self.weight(MAP)
        return jnp.where(places >= 0, jnp.take(logits, jnp.maximum(places, 0), axis=-1), -jnp.inf)


def _of(cache: Any, index: int) -> Any:
    return None if cache is None else cache[index]


def eagle_specs(cfg: EagleConfig) -> ParamTree:
    d = cfg.hidden_size
    tree: dict[str, Any] = {**_embed_specs(cfg), "fc": linear("fc.weight", (2 * d, d), (None, "embed"))}
    if cfg.fc_bias:
        tree["fc_bias"] = plain("fc.bias", (d,), ("embed",), "zeros")
    for index in range(len(cfg.layers)):
        prefix = f"layers.{index}"
        norm = {"attention_norm": rms_norm(f"{prefix}.input_layernorm", d)} if index else {}
        tree[f"layers_{index}"] = {
            **norm,
            "attention": attention_specs(cfg, f"{prefix}.self_attn"),
            **_feed_forward(cfg, prefix),
        }
    return tree


def eagle3_specs(cfg: EagleConfig) -> ParamTree:
    d, prefix = cfg.hidden_size, cfg.prefix
    attention = attention_specs(cfg, f"{prefix}.self_attn")
    attention["qkv"] = fused_qkv(f"{prefix}.self_attn", 2 * d, cfg.heads, cfg.kv_heads, cfg.head_dim)
    width = cfg.features // 3
    norms = {f"fc_norm_{index}": rms_norm(f"fc_norm.{index}", width) for index in range(3 if cfg.fc_norm else 0)}
    return {
        **_embed_specs(cfg),
        **norms,
        **({"fc_norm": rms_norm("input_norm", cfg.features)} if cfg.norm_before_fc else {}),
        "fc": linear("fc.weight", (cfg.features, d), (None, "embed")),
        "layers_0": {
            "attention_norm": rms_norm(f"{prefix}.input_layernorm", d),
            "hidden_norm": rms_norm(f"{prefix}.hidden_norm", d),
            "attention": attention,
            **_feed_forward(cfg, prefix),
        },
        "final_norm": rms_norm("norm", d),
        "head": vocabulary("lm_head.weight", cfg.draft_vocab, d),
    }


def _embed_specs(cfg: EagleConfig) -> dict[str, Any]:
    own = "embed" not in dict(cfg.shares)
    return {"embed": vocabulary("embed_tokens.weight", cfg.vocab_size, cfg.hidden_size)} if own else {}


def _feed_forward(cfg: EagleConfig, prefix: str) -> dict[str, Any]:
    return {
        "mlp_norm": rms_norm(f"{prefix}.post_attention_layernorm", cfg.hidden_size),
        "mlp": gated_mlp(f"{prefix}.mlp", cfg.hidden_size, cfg.intermediate_size, cfg.mlp_bias),
    }


EAGLE = HeadFamily(eagle_config, eagle_specs, cache_spec, Eagle, IGNORE)
EAGLE3 = HeadFamily(eagle3_config, eagle3_specs, cache_spec, Eagle3, IGNORE)
