"""The Llama family: Llama 2/3/3.1, Mistral, Qwen2/2.5, Qwen3 and all that share their shape.

One decoder: RMSNorm, rotary grouped-query attention, gated MLP, with switches for what differs between checkpoints
(biases, QK norm, sliding windows, RoPE scaling, tied embeddings).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxinfer.layers.attention import Attend, Attention
from jaxinfer.layers.base import Layer
from jaxinfer.layers.mlp import ACTIVATIONS, GatedMLP
from jaxinfer.layers.norm import RMSNorm
from jaxinfer.layers.rope import RopeConfig, rope_angles
from jaxinfer.models.config import ConfigReader, layer_windows, rope_config
from jaxinfer.quant import matmul_transposed, take
from jaxinfer.types import CacheSpec, LayerSpec, ParamSpec, ParamTree, Source


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """What a checkpoint's config.json says, resolved: no optional field is left open."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: tuple[LayerSpec, ...]
    max_position: int
    rope: RopeConfig
    norm_eps: float
    activation: str
    tied: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool

    @staticmethod
    def from_json(config: Mapping[str, Any]) -> LlamaConfig:
        """Read config.json as `transformers` (old or new style) writes it.

        Raises:
            ConfigError: a field is missing, of the wrong type or not supported.
        """
        read = ConfigReader(config)
        model_type = read.text("model_type", "llama")
        heads = read.positive("num_attention_heads")
        hidden = read.positive("hidden_size")
        kv_heads = read.positive("num_key_value_heads", heads)
        read.require(heads % kv_heads == 0, "num_key_value_heads", f"must divide num_attention_heads ({heads})")
        max_position = read.positive("max_position_embeddings", 2048)
        attention_bias = read.flag("attention_bias", False)
        return LlamaConfig(
            vocab_size=read.positive("vocab_size"),
            hidden_size=hidden,
            intermediate_size=read.positive("intermediate_size"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=read.positive("head_dim", 128 if model_type == "qwen3" else hidden // heads),
            layers=tuple(LayerSpec(window) for window in layer_windows(read, model_type)),
            max_position=max_position,
            rope=rope_config(read, max_position),
            norm_eps=read.number("rms_norm_eps", 1e-6),
            activation=read.choice("hidden_act", "silu", tuple(ACTIVATIONS)),
            tied=read.flag("tie_word_embeddings", False),
            qkv_bias=attention_bias or model_type == "qwen2",
            out_bias=attention_bias and model_type != "qwen2",
            mlp_bias=read.flag("mlp_bias", False),
            qk_norm=model_type == "qwen3",
        )


class LlamaBlock(Layer):
    """One decoder layer. Subclass it and name it in `Llama.overrides` to change what a layer does."""

    config: LlamaConfig
    layer: LayerSpec

    def setup(self) -> None:
        cfg = self.config
        self.attention_norm = RMSNorm(cfg.norm_eps)
        self.attention = Attention(
            heads=cfg.heads,
            kv_heads=cfg.kv_heads,
            head_dim=cfg.head_dim,
            layer=self.layer,
            qkv_bias=cfg.qkv_bias,
            out_bias=cfg.out_bias,
            qk_norm_eps=cfg.norm_eps if cfg.qk_norm else None,
        )
        self.mlp_norm = RMSNorm(cfg.norm_eps)
        self.mlp = GatedMLP(cfg.activation, cfg.mlp_bias)

    def __call__(
        self, x: Float[Array, "*batch d"], rope: tuple[jax.Array, jax.Array], attend: Attend, cache: Any
    ) -> tuple[Float[Array, "*batch d"], Any]:
        mixed, cache = self.attention(self.attention_norm(x), rope, attend, cache)
        x = x + mixed
        return x + self.feed_forward(self.mlp_norm(x)), cache

    def feed_forward(self, x: Float[Array, "*batch d"]) -> Float[Array, "*batch d"]:
        return self.mlp(x)


class Llama(Layer):
    """The whole decoder as a pure function of its parameters.

    ``overrides`` replaces the block of single layers: ``module.clone(overrides=((3, MyBlock),))``.
    """

    config: LlamaConfig
    overrides: tuple[tuple[int, type[LlamaBlock]], ...] = ()

    def __call__(
        self, tokens: Int[Array, "*batch"], positions: Int[Array, "*batch"], attend: Attend, cache: Any
    ) -> tuple[Float[Array, "*batch d"], Any]:
        """Hidden states after the final norm, and the caches (one entry a layer) with the new keys and values."""
        return self.forward(take(self.weight("embed")["table"], tokens), positions, attend, cache)

    def forward(
        self, x: Float[Array, "*batch d"], positions: Int[Array, "*batch"], attend: Attend, cache: Any
    ) -> tuple[Float[Array, "*batch d"], Any]:
        """The same from embeddings: what a gradient with respect to them goes through."""
        cfg = self.config
        rope = rope_angles(positions, cfg.rope.inverse_frequencies(cfg.head_dim))
        blocks = dict(self.overrides)
        compiled: dict[Any, Callable[..., Any]] = {}
        caches = []
        for index, layer in enumerate(cfg.layers):
            block = blocks.get(index, LlamaBlock)(cfg, layer, parent=None)
            # Equal blocks share one inner jit: traced and lowered once, however deep the model.
            run = compiled.setdefault((type(block), layer), _jit_block(block, attend))
            x, layer_cache = run(self.weight(f"layers_{index}"), x, rope, None if cache is None else cache[index])
            caches.append(layer_cache)
        norm: Any = RMSNorm(cfg.norm_eps, parent=None).apply
        return norm({"params": self.weight("final_norm")}, x), None if cache is None else caches

    def head(self, hidden: Float[Array, "*batch d"]) -> Float[Array, "*batch vocab"]:
        """Logits, float32. The table lies as [vocab, d], tied or not."""
        table = self.weight("embed" if self.config.tied else "head")["table"]
        return matmul_transposed(hidden, table).astype(jnp.float32)


def _jit_block(block: LlamaBlock, attend: Attend) -> Callable[..., Any]:
    def layer(params: Any, x: jax.Array, rope: tuple[jax.Array, jax.Array], cache: Any) -> Any:
        return block.apply({"params": params}, x, rope, attend, cache)

    return jax.jit(layer)


def cache_spec(cfg: LlamaConfig) -> CacheSpec:
    return CacheSpec(cfg.layers, cfg.kv_heads, cfg.head_dim)


def param_specs(cfg: LlamaConfig) -> ParamTree:
    """Every parameter with its shape, logical axes and the checkpoint tensors it is made of."""
    d, vocab = cfg.hidden_size, cfg.vocab_size
    tree: dict[str, Any] = {
        "embed": {"table": _plain("model.embed_tokens.weight", (vocab, d), ("vocab", "embed"))},
        "final_norm": {"scale": _norm("model.norm.weight", d)},
    }
    for index in range(len(cfg.layers)):
        tree[f"layers_{index}"] = _block_specs(cfg, f"model.layers.{index}")
    if not cfg.tied:
        tree["head"] = {"table": _plain("lm_head.weight", (vocab, d), ("vocab", "embed"))}
    return tree


def _block_specs(cfg: LlamaConfig, prefix: str) -> dict[str, Any]:
    return {
        "attention_norm": {"scale": _norm(f"{prefix}.input_layernorm.weight", cfg.hidden_size)},
        "attention": _attention_specs(cfg, f"{prefix}.self_attn"),
        "mlp_norm": {"scale": _norm(f"{prefix}.post_attention_layernorm.weight", cfg.hidden_size)},
        "mlp": _mlp_specs(cfg, f"{prefix}.mlp"),
    }


def _attention_specs(cfg: LlamaConfig, prefix: str) -> dict[str, Any]:
    d, kv, dim = cfg.hidden_size, cfg.kv_heads, cfg.head_dim
    group, width = cfg.heads // kv, cfg.heads * dim
    places: dict[str, slice | int] = {"q_proj": slice(0, group), "k_proj": group, "v_proj": group + 1}
    rows = {"q_proj": width, "k_proj": kv * dim, "v_proj": kv * dim}
    everything = slice(None)

    def fused(kind: str, lead: tuple[int, ...]) -> tuple[Source, ...]:
        return tuple(
            Source(
                f"{prefix}.{name}.{kind}",
                (rows[name], *lead),
                transpose=bool(lead),
                reshape=(*lead, kv, group, dim) if name == "q_proj" else (*lead, kv, dim),
                where=(*[everything] * len(lead), everything, place),
            )
            for name, place in places.items()
        )

    axes = ("kv_heads", "group", "head_dim")
    tree: dict[str, Any] = {
        "qkv": ParamSpec((d, kv, group + 2, dim), ("embed", *axes), sources=fused("weight", (d,))),
        "out": _linear(f"{prefix}.o_proj.weight", (width, d), ("heads", "embed")),
    }
    if cfg.qkv_bias:
        tree["qkv_bias"] = ParamSpec((kv, group + 2, dim), axes, init="zeros", sources=fused("bias", ()))
    if cfg.out_bias:
        tree["out_bias"] = _plain(f"{prefix}.o_proj.bias", (d,), ("embed",), "zeros")
    if cfg.qk_norm:
        tree["q_norm"] = {"scale": _norm(f"{prefix}.q_norm.weight", dim)}
        tree["k_norm"] = {"scale": _norm(f"{prefix}.k_norm.weight", dim)}
    return tree


def _mlp_specs(cfg: LlamaConfig, prefix: str) -> dict[str, Any]:
    d, hidden = cfg.hidden_size, cfg.intermediate_size
    names = ("gate_proj", "up_proj")
    weights = tuple(Source(f"{prefix}.{name}.weight", (hidden, d), where=(index,)) for index, name in enumerate(names))
    tree: dict[str, Any] = {
        "gate_up": ParamSpec((2, hidden, d), (None, "mlp", "embed"), sources=weights),
        "down": _linear(f"{prefix}.down_proj.weight", (hidden, d), ("mlp", "embed")),
    }
    if cfg.mlp_bias:
        biases = tuple(Source(f"{prefix}.{name}.bias", (hidden,), where=(index,)) for index, name in enumerate(names))
        tree["gate_up_bias"] = ParamSpec((2, hidden), (None, "mlp"), init="zeros", sources=biases)
        tree["down_bias"] = _plain(f"{prefix}.down_proj.bias", (d,), ("embed",), "zeros")
    return tree


def _plain(name: str, shape: tuple[int, ...], axes: tuple[str, ...], init: str = "normal") -> ParamSpec:
    return ParamSpec(shape, axes, init=init, sources=(Source(name, shape),))


def _linear(name: str, shape: tuple[int, int], axes: tuple[str, str]) -> ParamSpec:
    return ParamSpec(shape, axes, sources=(Source(name, shape[::-1], transpose=True),))


def _norm(name: str, size: int) -> ParamSpec:
    return _plain(name, (size,), ("norm",), "ones")
