"""Common code of Gemma 3n and 4: per-layer embeddings, normalised values, layers that read another layer's KV cache."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from jaxinfer.layers.attention import Attend, Attention
from jaxinfer.layers.base import Hidden, Layer, Positions, Tokens
from jaxinfer.layers.mlp import ACTIVATIONS
from jaxinfer.layers.norm import RMSNorm, unit_rms
from jaxinfer.layers.rope import RopeConfig, in_sequence, rotate
from jaxinfer.models.config import ConfigReader, DecoderConfig, decoder_fields
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.specs import fused_qkv, linear, plain, rms_norm
from jaxinfer.quant import matmul, take
from jaxinfer.types import LayerSpec, ParamSpec, Source


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class PerLayerConfig(DecoderConfig):
    """Config fields common to Gemma 3n and Gemma 4: see `DecoderConfig`.

    Attributes:
        rope, local_rope: RoPE of full-attention layers, and of sliding-window layers.
        per_layer_size: width of per-layer embeddings; 0: none.
        per_layer_vocab: number of tokens with per-layer embeddings; all others use those of token 0.
        final_softcap: logits become ``c * tanh(logit / c)`` (None: no soft-cap).
    """

    rope: RopeConfig
    local_rope: RopeConfig
    per_layer_size: int
    per_layer_vocab: int
    final_softcap: float | None

    @property
    def ignored(self) -> tuple[str, ...]:
        """Patterns of tensors that the model does not load: checkpoints have keys and values for all layers."""
        layers = [index for index, layer in enumerate(self.layers) if layer.source is not None]
        names = ("k_proj", "v_proj", "k_norm", "v_norm")
        return tuple(f"model.layers.{index}.self_attn.{name}.*" for index in layers for name in names)


def common_fields(read: ConfigReader, most: float | None = None) -> dict[str, Any]:
    """Read the fields of `PerLayerConfig` except ``layers`` and the ropes; ``most``: default soft-cap of the logits."""
    read.require(not read.flag("attention_bias", False), "attention_bias", "is not supported")
    name = "hidden_size_per_layer_input"
    given = read.fields.get(name, read.get(name))
    size = 0 if given is None else given  # null means none, whatever the default is
    read.require(type(size) is int and 0 <= size < 2**31, name, "must be >= 0")
    cap = read.fields.get("final_logit_softcapping", most)
    cap = None if cap is None else read.number("final_logit_softcapping", most)
    read.require(cap is None or cap > 0.0, "final_logit_softcapping", "must be > 0")
    per_layer = {"per_layer_size": size, "per_layer_vocab": read.positive("vocab_size_per_layer_input")}
    return {**decoder_fields(read), **per_layer, "final_softcap": cap}


def with_sources(read: ConfigReader, layers: list[LayerSpec], default: int) -> tuple[LayerSpec, ...]:
    """Return the layers; the last ``num_kv_shared_layers`` read the KV cache of the last earlier one of their kind."""
    shared = read.get("num_kv_shared_layers", default)
    read.require(type(shared) is int and 0 <= shared < len(layers), "num_kv_shared_layers", "must be less than layers")
    first = len(layers) - shared
    kinds = {layer.window: index for index, layer in enumerate(layers[:first])}
    known = all(layer.window in kinds for layer in layers)
    read.require(known, "num_kv_shared_layers", "leaves no layer of each kind in layer_types that has keys of its own")
    reading = [dataclasses.replace(layer, source=kinds[layer.window]) for layer in layers[first:]]
    return (*layers[:first], *reading)


def head_dims(layers: tuple[LayerSpec, ...], head_dim: int) -> tuple[int, int]:
    """Return the head dims of full-attention and of sliding-window layers; ``head_dim``: the default."""
    found = {layer.window is not None: layer.head_dim or head_dim for layer in layers}
    return found.get(False, head_dim), found.get(True, head_dim)


class Context(NamedTuple):
    """Input common to all layers; each layer gets only its own embeddings.

    Attributes:
        ropes: cosines and sines of full-attention layers, and of sliding-window layers.
        live: whether each token is real, not padding.
        embeddings: [*batch, layers, size], or those of one layer; None: there are none.
    """

    ropes: tuple[Any, Any]
    live: Bool[Array, "*batch"]
    embeddings: Any = None


class NormedAttention(Attention):
    """Attention with norms of queries, keys and values, and unscaled scores.

    Attributes:
        key_is_value: ``qkv`` has one member for both: [d, kv_heads, group + 1, head_dim].

    If its layer reads the KV cache of another layer, it only has queries: ``q`` [d, heads, head_dim].
    """

    key_is_value: bool = False

    def setup(self) -> None:
        assert self.qk_norm_eps is not None
        self.q_norm = RMSNorm(self.qk_norm_eps)
        if self.layer.source is None:
            self.k_norm = RMSNorm(self.qk_norm_eps)

    def _project(self, x: Hidden) -> Float[Array, "*batch heads_or_kv_heads *members"]:
        return matmul(x, self.weight("qkv" if self.layer.source is None else "q"))

    def _attended(
        self, qkv: jax.Array, rope: Any, attend: Attend, cache: Any, temperature: jax.Array | None
    ) -> tuple[jax.Array, Any]:
        del temperature
        if self.layer.source is not None:
            return attend(rotate(self.q_norm(qkv), *rope), None, None, cache, self.layer, 1.0)
        others = 1 if self.key_is_value else 2
        q = qkv[..., :-others, :].reshape(*qkv.shape[:-3], self.heads, self.head_dim)
        q, k = rotate(self.q_norm(q), *rope), rotate(self.k_norm(qkv[..., -others, :]), *rope)
        return attend(q, k, unit_rms(qkv[..., -1, :], self.q_norm.eps), cache, self.layer, 1.0)


class EmbeddingGate(Layer):
    """Gate of per-layer embeddings: norm(out(act(gate(x)) * embedding)). ``gate`` is [d, size], ``out`` [size, d]."""

    activation: str
    eps: float

    def setup(self) -> None:
        self.norm = RMSNorm(self.eps)

    def __call__(self, x: Hidden, embedding: Float[Array, "*batch size"]) -> Hidden:
        gate = matmul(x, self.weight("gate")).astype(jnp.float32)
        hidden = ACTIVATIONS[self.activation](gate).astype(x.dtype) * embedding
        return self.norm(matmul(hidden, self.weight("out")))


def normed_attention(cfg: PerLayerConfig, layer: LayerSpec, **options: Any) -> NormedAttention:
    kv_heads, head_dim = layer.kv_heads or cfg.kv_heads, layer.head_dim or cfg.head_dim
    return NormedAttention(cfg.heads, kv_heads, head_dim, layer, qk_norm_eps=cfg.norm_eps, **options)


class PerLayerDecoder(Decoder):
    """A decoder with optional per-layer embeddings: see `Decoder`.

    Parameters in addition to those of `Decoder`: ``layer_embed`` {table [vocab, layers * size]}, ``layer_projection``
    [d, layers * size] and ``layer_norm`` {scale [size]}.
    """

    config: PerLayerConfig

    embeddings: ClassVar[tuple[str, ...]] = ("embed", "layer_embed", "layer_projection", "layer_norm")

    @property
    def bound(self) -> str | None:
        return "embeddings of their own" if self.config.per_layer_size else super().bound

    def context(self, positions: Positions) -> Context:
        cfg = self.config
        wide, near = head_dims(cfg.layers, cfg.head_dim)
        return Context(
            (cfg.rope.angles(positions, wide), cfg.local_rope.angles(positions, near)), in_sequence(positions) >= 0
        )

    def embed(self, tokens: Tokens, positions: Positions) -> Float[Array, "*batch d_and_all"]:
        """Embed tokens, scaled by sqrt(d) rounded to the embeddings' dtype; per-layer embeddings are appended."""
        cfg = self.config
        x = _scaled(super().embed(tokens, positions), cfg.hidden_size)
        if not cfg.per_layer_size:
            return x
        known = tokens if cfg.per_layer_vocab >= cfg.vocab_size else jnp.where(tokens < cfg.per_layer_vocab, tokens, 0)
        own = _scaled(take(self.weight("layer_embed")["table"], known), cfg.per_layer_size)
        return jnp.concatenate([x, own], axis=-1)

    def entered(self, x: Array, positions: Positions) -> tuple[Array, Context]:
        cfg, context = self.config, self.context(positions)
        if not cfg.per_layer_size:
            return x, context
        x, own = x[..., : cfg.hidden_size], x[..., cfg.hidden_size :]
        form = (*own.shape[:-1], len(cfg.layers), cfg.per_layer_size)
        projected = (matmul(x, self.weight("layer_projection")) * cfg.hidden_size**-0.5).reshape(form)
        norm: Any = RMSNorm(cfg.norm_eps, parent=None).apply
        projected = norm({"params": self.weight("layer_norm")}, projected)
        # The barrier keeps XLA from projecting for each layer alone, which would not be batch-invariant.
        embeddings = lax.optimization_barrier((projected + own.reshape(form)) * 2.0**-0.5)
        return x, context._replace(embeddings=embeddings)

    def told(self, context: Context, index: int) -> Context:
        return context._replace(embeddings=context.embeddings[..., index, :]) if self.config.per_layer_size else context

    def head(self, hidden: Hidden) -> Float[Array, "*batch vocab"]:
        logits, cap = super().head(hidden), self.config.final_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)


def _scaled(x: jax.Array, size: int) -> jax.Array:
    return x * jnp.asarray(math.sqrt(size), x.dtype)


def embedding_specs(cfg: PerLayerConfig) -> dict[str, Any]:
    """Return the parameters that `PerLayerDecoder` adds to `Decoder`."""
    size, every = cfg.per_layer_size, len(cfg.layers) * cfg.per_layer_size
    if not size:
        return {}
    projection = linear("model.per_layer_model_projection.weight", (cfg.hidden_size, every), ("embed", None))
    # The table is in no matrix product, so neither adapters nor quantised storages replace it.
    table = plain("model.embed_tokens_per_layer.weight", (cfg.per_layer_vocab, every), ("vocab", "embed"))
    return {
        "layer_embed": {"table": table},
        "layer_projection": projection,
        "layer_norm": rms_norm("model.per_layer_projection_norm", size),
    }


def sandwich_specs(cfg: PerLayerConfig, layer: LayerSpec, prefix: str, *, key_is_value: bool = False) -> dict[str, Any]:
    """Return the parameters of attention, and of the norms before and after it and the MLP."""
    d = cfg.hidden_size
    return {
        "attention_norm": rms_norm(f"{prefix}.input_layernorm", d),
        "attention": _attention_specs(cfg, layer, f"{prefix}.self_attn", key_is_value),
        "attention_out_norm": rms_norm(f"{prefix}.post_attention_layernorm", d),
        "mlp_norm": rms_norm(f"{prefix}.pre_feedforward_layernorm", d),
        "mlp_out_norm": rms_norm(f"{prefix}.post_feedforward_layernorm", d),
    }


def gate_specs(cfg: PerLayerConfig, prefix: str) -> dict[str, Any]:
    """Return the parameters of `EmbeddingGate`."""
    d, size = cfg.hidden_size, cfg.per_layer_size
    return {
        "gate": linear(f"{prefix}.per_layer_input_gate.weight", (d, size), ("embed", None)),
        "out": linear(f"{prefix}.per_layer_projection.weight", (size, d), (None, "embed")),
        "norm": rms_norm(f"{prefix}.post_per_layer_input_norm", d),
    }


def _attention_specs(cfg: PerLayerConfig, layer: LayerSpec, prefix: str, key_is_value: bool) -> dict[str, Any]:
    d, heads, kv_heads, dim = cfg.hidden_size, cfg.heads, layer.kv_heads or cfg.kv_heads, layer.head_dim or cfg.head_dim
    tree = {
        "q_norm": rms_norm(f"{prefix}.q_norm", dim),
        "out": linear(f"{prefix}.o_proj.weight", (heads * dim, d), ("heads", "embed")),
    }
    if layer.source is not None:
        source = Source(f"{prefix}.q_proj.weight", (heads * dim, d), transpose=True, reshape=(d, heads, dim))
        q = ParamSpec((d, heads, dim), ("embed", "heads", "head_dim"), sources=(source,), inputs=0)
        return tree | {"q": q}
    tree["k_norm"] = rms_norm(f"{prefix}.k_norm", dim)
    sizes = (d, heads, kv_heads, dim)
    return tree | {"qkv": _fused_qk(prefix, *sizes) if key_is_value else fused_qkv(prefix, *sizes)}


def _fused_qk(prefix: str, d: int, heads: int, kv_heads: int, dim: int) -> ParamSpec:
    """Return `fused_qkv` for keys that also serve as values."""
    group, every = heads // kv_heads, slice(None)
    forms = (
        ("q_proj", heads, (d, kv_heads, group, dim), slice(0, group)),
        ("k_proj", kv_heads, (d, kv_heads, dim), group),
    )
    sources = tuple(
        Source(f"{prefix}.{name}.weight", (count * dim, d), transpose=True, reshape=form, where=(every, every, place))
        for name, count, form, place in forms
    )
    return ParamSpec((d, kv_heads, group + 1, dim), ("embed", "heads", None, "head_dim"), sources=sources, inputs=0)
