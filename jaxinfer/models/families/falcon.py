"""Falcon (Almazrouei et al. 2023) in its three layouts: Falcon-RW, 7B (one KV head) and 40B/180B/11B (grouped).

Positions are rotary, or a bias that grows with the key's position (ALiBi, Press et al. 2022). The bias is an additional
element of every key, which queries multiply by 1: attention needs no support for it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxinfer.layers.attention import Attend, Attention
from jaxinfer.layers.base import Hidden, HiddenAndCache, Positions
from jaxinfer.layers.mlp import MLP
from jaxinfer.layers.norm import LayerNorm
from jaxinfer.layers.rope import RopeConfig, in_sequence
from jaxinfer.models.config import ConfigReader, DecoderConfig, decoder_fields, renamed, rope_config
from jaxinfer.models.decoder import Block, LayerNormDecoder
from jaxinfer.models.family import Family
from jaxinfer.models.specs import decoder, grouped_attention, layer_norm, plain_mlp
from jaxinfer.types import CacheSpec, LayerSpec, ParamTree

_NAMES = {
    "intermediate_size": "ffn_hidden_size",
    "num_key_value_heads": "num_attention_heads",  # see `_kv_heads`
    "rms_norm_eps": "layer_norm_epsilon",
    "hidden_act": "activation",
}
_DEFAULTS = {
    "vocab_size": 65024,
    "hidden_size": 4544,
    "num_hidden_layers": 32,
    "num_attention_heads": 71,
    "rms_norm_eps": 1e-5,
    "hidden_act": "gelu",
    "tie_word_embeddings": True,
}


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class FalconConfig(DecoderConfig):
    """The resolved config.json of a checkpoint: see `DecoderConfig`.

    Attributes:
        rope: None if positions are an ALiBi bias.
        parallel: attention and MLP both read the input of the layer.
        norms: layer norms per layer; 2: attention and MLP have one each.
    """

    rope: RopeConfig | None
    bias: bool
    parallel: bool
    norms: int

    @staticmethod
    def from_json(config: Mapping[str, Any]) -> FalconConfig:
        """Read config.json; raises as `decoder_fields` does."""
        read = ConfigReader(renamed(config, {"n_embed": "hidden_size"}), _DEFAULTS, _NAMES)
        new, parallel = read.flag("new_decoder_architecture", False), read.flag("parallel_attn", True)
        read.require(parallel or not new, "parallel_attn", "must be true where new_decoder_architecture is")
        kv_heads = _kv_heads(read, new)
        fields, alibi = decoder_fields(read, mlp_ratio=4, cut_heads=True), read.flag("alibi", False)
        read.require(not alibi or kv_heads == fields["heads"], "alibi", "is not supported where heads share keys")
        return FalconConfig(
            **fields | {"kv_heads": kv_heads},
            layers=(LayerSpec(),) * read.positive("num_hidden_layers"),
            rope=None if alibi else rope_config(read, fields["max_position"], fields["head_dim"]),
            bias=read.flag("bias", False),
            parallel=parallel,
            norms=_norms(read, new, parallel),
        )


def _kv_heads(read: ConfigReader, new: bool) -> int:
    if not new and read.flag("multi_query", True):
        return 1
    heads = read.positive("num_attention_heads")
    kv_heads = read.positive("num_kv_heads", heads)
    fits = heads % kv_heads == 0 if new else heads == kv_heads
    read.require(fits, "num_kv_heads", f"must {'divide' if new else 'be'} num_attention_heads ({heads})")
    return kv_heads


def _norms(read: ConfigReader, new: bool, parallel: bool) -> int:
    if not parallel:
        return 2
    norms = read.positive("num_ln_in_parallel_attn", 2 if new else 1)
    read.require(
        norms in ((1, 2) if new else (1,)), "num_ln_in_parallel_attn", "must be 1, or 2 in the new architecture"
    )
    return norms


def alibi_slopes(heads: int) -> Float[np.ndarray, " heads"]:
    """Return the ALiBi slopes of the heads: powers of 2^(-8 / n) for n heads, as float32.

    If n is no power of two, the slopes of the next smaller one are followed by every other slope of the next larger.
    """
    whole = 2 ** math.floor(math.log2(heads))
    powers = [(index + 1) * 8 / whole for index in range(whole)]
    powers += [(2 * index + 1) * 4 / whole for index in range(heads - whole)]
    return np.exp2(-np.asarray(powers)).astype(np.float32)


def alibi_bias(positions: Int[Array, "*batch"], heads: int) -> Float[Array, "*batch heads"]:
    """Return the ALiBi bias of the keys at ``positions``, float32.

    Slopes, positions and bias are each rounded to bfloat16, whatever the model dtype, as in training. XLA may remove a
    conversion to bfloat16 and back, but no `reduce_precision`.
    """
    slopes = _bfloat16(jnp.asarray(alibi_slopes(heads)))
    return _bfloat16(slopes * _bfloat16(positions[..., None].astype(jnp.float32)))


def _bfloat16(x: jax.Array) -> jax.Array:
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def _with_bias(attend: Attend, bias: Float[Array, "*batch heads"]) -> Attend:
    """Wrap ``attend`` to add a bias to the (unscaled) scores of each key."""

    def biased(
        q: jax.Array,
        k: jax.Array | None,
        v: jax.Array | None,
        cache: Any,
        layer: LayerSpec,
        scale: float,
        sinks: jax.Array | None = None,
        chosen: Any = None,
    ) -> tuple[jax.Array, Any]:
        assert k is not None
        assert v is not None
        assert chosen is None
        dim = q.shape[-1]
        q = _beside(q, jnp.ones_like(q[..., :1]))
        k = _beside(k, bias[..., None].astype(k.dtype))
        v = _beside(v, jnp.zeros_like(v[..., :1]))
        mixed, cache = attend(q, k, v, cache, layer, scale, sinks)
        return mixed[..., :dim], cache

    return biased


def _biased_dim(head_dim: int) -> int:
    """Return the size of a key with its bias: a multiple of 8, since GPU kernels read rows in units of 16 bytes."""
    return -(-(head_dim + 1) // 8) * 8


def _beside(x: Float[Array, "*batch heads dim"], last: Float[Array, "*batch heads 1"]) -> jax.Array:
    zeros = jnp.zeros((*x.shape[:-1], _biased_dim(x.shape[-1]) - x.shape[-1] - 1), x.dtype)
    return jnp.concatenate([x, last, zeros], axis=-1)


class FalconBlock(Block):
    """A decoder layer. ``context``: cosines and sines of rotary embeddings, or the ALiBi bias of the keys."""

    config: FalconConfig

    def setup(self) -> None:
        cfg = self.config
        self.attention_norm = LayerNorm(cfg.norm_eps)
        sizes = cfg.heads, cfg.kv_heads, cfg.head_dim, self.layer
        self.attention = Attention(*sizes, qkv_bias=cfg.bias, out_bias=cfg.bias)
        if cfg.norms == 2:
            self.mlp_norm = LayerNorm(cfg.norm_eps)
        self.mlp = MLP(cfg.activation, cfg.bias)

    def __call__(self, x: Hidden, context: Any, attend: Attend, cache: Any) -> HiddenAndCache:
        normal, rope = self.attention_norm(x), context
        if self.config.rope is None:
            attend, rope = _with_bias(attend, context), None
        mixed, cache = self.attention(normal, rope, attend, cache)
        if not self.config.parallel:
            x = x + mixed
            return x + self.feed_forward(self.mlp_norm(x)), cache
        if self.config.norms == 2:
            normal = self.mlp_norm(x)
        return self.feed_forward(normal) + mixed + x, cache


class Falcon(LayerNormDecoder):
    config: FalconConfig
    block_type = FalconBlock

    def context(self, positions: Positions) -> Any:
        if self.config.rope is not None:
            return self.config.rope.angles(positions, self.config.head_dim)
        return alibi_bias(in_sequence(positions), self.config.heads)


def cache_spec(cfg: FalconConfig) -> CacheSpec:
    """Return the KV cache spec; with ALiBi each key is stored with its bias."""
    return CacheSpec(cfg.layers, cfg.kv_heads, cfg.head_dim if cfg.rope else _biased_dim(cfg.head_dim))


def param_specs(cfg: FalconConfig) -> ParamTree:
    return decoder(
        cfg,
        lambda _, prefix: _block_specs(cfg, prefix),
        embed="transformer.word_embeddings.weight",
        layers="transformer.h",
        final_norm=layer_norm("transformer.ln_f", cfg.hidden_size),
    )


def _block_specs(cfg: FalconConfig, prefix: str) -> dict[str, Any]:
    d, mlp = cfg.hidden_size, f"{prefix}.mlp"
    attention_norm, mlp_norm = ("input_layernorm", "post_attention_layernorm")
    if cfg.parallel and cfg.norms == 2:
        attention_norm, mlp_norm = "ln_attn", "ln_mlp"
    tree = {
        "attention_norm": layer_norm(f"{prefix}.{attention_norm}", d),
        "attention": grouped_attention(f"{prefix}.self_attention", d, cfg.heads, cfg.kv_heads, cfg.head_dim, cfg.bias),
        "mlp": plain_mlp(f"{mlp}.dense_h_to_4h", f"{mlp}.dense_4h_to_h", d, cfg.intermediate_size, cfg.bias),
    }
    if cfg.norms == 2:
        tree["mlp_norm"] = layer_norm(f"{prefix}.{mlp_norm}", d)
    return tree


FALCON = Family(FalconConfig.from_json, param_specs, cache_spec, Falcon, prefix="transformer.")
