"""Grouped-query self-attention, independent of the KV cache: `attend` is passed in."""

from __future__ import annotations

import math
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxinfer.layers.base import Layer
from jaxinfer.layers.norm import AllHeadsNorm, LayerNorm, RMSNorm, unit_rms
from jaxinfer.layers.rope import rotate
from jaxinfer.parallel.tokens import all_tokens, own_tokens
from jaxinfer.quant import matmul, plus_bias
from jaxinfer.types import LayerSpec
from pallas_kernels import token_index
from pallas_kernels.token_index import Index


@runtime_checkable
class Attend(Protocol):
    """Attention backend of a layer: stores new keys and values in its cache and attends to all visible tokens."""

    def __call__(
        self,
        q: Float[Array, "*batch heads head_dim"],
        k: Float[Array, "*batch kv_heads head_dim"] | None,
        v: Float[Array, "*batch kv_heads head_dim"] | None,
        cache: Any,
        layer: LayerSpec,
        scale: float,
        sinks: Float[Array, " heads"] | None = None,
        chosen: Any = None,
    ) -> tuple[Float[Array, "*batch heads value_dim"], Any]:
        """Return the attention output and the updated cache.

        ``v`` is None for MLA latents (`LayerSpec.latent_rank`, then ``value_dim``). ``k`` and ``v`` are None if the
        layer reads another layer's cache (`LayerSpec.source`). ``sinks``: attention sink logit of each head, without a
        value. ``chosen``: the keys selected by sparse attention, in this backend's format; None: all.
        """


@runtime_checkable
class ChoosingAttend(Attend, Protocol):
    """An `Attend` that caches index keys. Backends without index keys run contiguous sequences: see `causal_choice`."""

    def choosing(
        self,
        q: Float[Array, "*batch heads head_dim"],
        k: Float[Array, "*batch 1 head_dim"],
        index: Index,
        cache: Any,
        layer: LayerSpec,
        scale: float,
    ) -> tuple[Float[Array, "*batch heads value_dim"], Any, Any]:
        """Store latents and index keys, and attend to the top ``layer.index_topk`` tokens of each query.

        Returns the output, the selected tokens (None: all) and the cache.
        """


@runtime_checkable
class FusedAttend(Attend, Protocol):
    """An `Attend` that may take the fused QKV projection as it is and apply RoPE while it writes keys and values."""

    def fused(
        self,
        qkv: Float[Array, "*batch kv_heads parts head_dim"],
        rope: tuple[jax.Array, jax.Array],
        interleaved: bool,
        cache: Any,
        layer: LayerSpec,
        scale: float,
        sinks: Float[Array, " heads"] | None = None,
    ) -> tuple[Float[Array, "*batch heads head_dim"], Any] | None:
        """Attend as `__call__`, with RoPE applied inside; None, without side effects, for unsupported operands."""


class Attention(Layer):
    """Multi-head attention with ``heads`` query and ``kv_heads`` key/value heads (GQA, Ainslie et al. 2023).

    Parameters: ``qkv`` [d, kv_heads, group + 2, head_dim], the queries of each group followed by its key and value, so
    that sharding over kv_heads keeps a group together; ``out`` [heads * head_dim, d].

    Attributes:
        qk_l2_eps: epsilon of an RMS norm without weights, applied to rotated queries and keys (Llama 4).
        scale: score scale; None: 1 / sqrt(head_dim).
        qk_norm_eps: epsilon of the QK norm over head_dim, applied before RoPE; None: no QK norm.
        norm_offset: offset of the QK norm, see `RMSNorm`.
        qk_layer_norm: the QK norm is a `LayerNorm`.
        qk_norm_whole: the QK norm is over all heads together: its weights are [heads, head_dim], [kv_heads, head_dim].
        interleaved: see `rotate`.
        sinks: each head has a learned attention sink logit (``sinks`` [heads]).
    """

    heads: int
    kv_heads: int
    head_dim: int
    layer: LayerSpec
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm_eps: float | None = None
    norm_offset: float = 0.0
    qk_layer_norm: bool = False
    qk_norm_whole: bool = False
    qk_l2_eps: float | None = None
    scale: float | None = None
    interleaved: bool = False
    sinks: bool = False

    def setup(self) -> None:
        if self.qk_norm_eps is not None:
            self.q_norm, self.k_norm = self.norm(self.qk_norm_eps), self.norm(self.qk_norm_eps)

    def __call__(
        self,
        x: Float[Array, "*batch d"],
        rope: tuple[jax.Array, jax.Array] | None,
        attend: Attend,
        cache: Any,
        temperature: Float[Array, "*batch"] | None = None,
    ) -> tuple[Float[Array, "*batch out"], Any]:
        """Run self-attention.

        Args:
            rope: cosines and sines of `rope_angles`; None: no rotary embedding.
            temperature: factor of the queries after RoPE.
        """
        mixed, cache = self._attended(self._project(all_tokens(x)), rope, attend, cache, temperature)
        out = own_tokens(matmul(mixed.reshape(*x.shape[:-1], -1), self.weight("out")))
        if self.out_bias:
            out = plus_bias(out, self.weight("out_bias"))
        return out, cache

    def _attended(
        self,
        qkv: jax.Array,
        rope: tuple[jax.Array, jax.Array] | None,
        attend: Attend,
        cache: Any,
        temperature: jax.Array | None,
    ) -> tuple[jax.Array, Any]:
        scale = 1.0 / math.sqrt(self.head_dim) if self.scale is None else self.scale
        rest = (cache, self.layer, scale, self.weight("sinks") if self.sinks else None)
        plain = self.qk_norm_eps is None and self.qk_l2_eps is None and temperature is None
        if rope is not None and plain and isinstance(attend, FusedAttend):
            done = attend.fused(qkv, rope, self.interleaved, *rest)
            if done is not None:
                return done
        q, k, v = qkv[..., :-2, :].reshape(*qkv.shape[:-3], self.heads, self.head_dim), qkv[..., -2, :], qkv[..., -1, :]
        q, k = self.encoded(q, k, rope)
        if temperature is not None:
            q = (q * temperature[..., None, None]).astype(q.dtype)
        return attend(q, k, v, *rest)

    def encoded(
        self, q: jax.Array, k: jax.Array, rope: tuple[jax.Array, jax.Array] | None
    ) -> tuple[jax.Array, jax.Array]:
        """Return queries and keys after normalisation and RoPE."""
        if self.qk_norm_eps is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = self.rotated(q, k, rope)
        if self.qk_l2_eps is not None:
            q, k = unit_rms(q, self.qk_l2_eps), unit_rms(k, self.qk_l2_eps)
        return q, k

    def rotated(self, q: jax.Array, k: jax.Array, rope: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return rotate(q, *rope, interleaved=self.interleaved), rotate(k, *rope, interleaved=self.interleaved)

    def norm(self, eps: float) -> Layer:
        """Make the norm of queries or keys [..., heads, head_dim]."""
        if self.qk_norm_whole:
            return AllHeadsNorm(eps)
        return LayerNorm(eps) if self.qk_layer_norm else RMSNorm(eps, self.norm_offset)

    def _project(self, x: Float[Array, "*batch d"]) -> Float[Array, "*batch kv_heads parts head_dim"]:
        return matmul(x, self.weight("qkv"), self.weight("qkv_bias") if self.qkv_bias else None)


def causal_attend(
    q: Float[Array, "*batch time heads head_dim"],
    k: Float[Array, "*batch time kv_heads head_dim"] | None,
    v: Float[Array, "*batch time kv_heads head_dim"] | None,
    cache: tuple[jax.Array, jax.Array] | None,
    layer: LayerSpec,
    scale: float,
    sinks: Float[Array, " heads"] | None = None,
    chosen: Bool[Array, "*batch time time"] | None = None,
    ends: Int[Array, "*#batch time"] | None = None,
) -> tuple[Float[Array, "*batch time heads value_dim"], tuple[jax.Array, jax.Array]]:
    """Attend over one contiguous sequence per batch entry: the reference formula, differentiable. The cache is the keys
    and values. ``ends``: last position that each token sees, in an image with attention in both directions; None: its
    own."""
    if k is None:
        assert cache is not None, layer
        k, v = cache
    v = k[..., : layer.latent_rank] if v is None else v
    at = jnp.arange(q.shape[-3])
    distance = at[:, None] - at[None, :]
    if ends is not None:
        distance = jnp.where(at <= ends[..., None], jnp.maximum(distance, 0), distance)
    return distant_attend(q, k, v, distance, layer, scale, sinks, chosen)[0], (k, v)


def distant_attend(
    q: Float[Array, "*batch time heads head_dim"],
    k: Float[Array, "*batch keys kv_heads head_dim"],
    v: Float[Array, "*batch keys kv_heads value_dim"],
    distance: Int[Array, "*#batch time keys"],
    layer: LayerSpec,
    scale: float,
    sinks: Float[Array, " heads"] | None = None,
    chosen: Bool[Array, "*batch time keys"] | None = None,
) -> tuple[Float[Array, "*batch time heads value_dim"], Float[Array, "*batch heads time keys"]]:
    """Compute attention by the reference formula, with its weights (float32), where each query is ``distance`` tokens
    after each key: a negative distance is masked. The output of a fully masked query is finite and unused."""
    heads, kv_heads = q.shape[-2], k.shape[-2]
    grouped = q.reshape(*q.shape[:-2], kv_heads, heads // kv_heads, q.shape[-1])
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else lax.Precision.DEFAULT
    scores = jnp.einsum("...qhgd,...khd->...hgqk", grouped, k, preferred_element_type=jnp.float32, precision=precision)
    scores = scores * scale
    if layer.softcap is not None:
        scores = layer.softcap * jnp.tanh(scores / layer.softcap)
    visible = distance >= 0 if layer.window is None else (distance >= 0) & (distance < layer.window)
    visible = (visible if chosen is None else visible & chosen)[..., None, None, :, :]
    weights = _softmax(jnp.where(visible, scores, jnp.finfo(scores.dtype).min), sinks, kv_heads)
    mixed = jnp.einsum("...hgqk,...khd->...qhgd", weights.astype(v.dtype), v, precision=precision)
    return mixed.reshape(*q.shape[:-1], v.shape[-1]), weights.reshape(*q.shape[:-3], heads, *weights.shape[-2:])


def causal_choice(
    index: Index, layer: LayerSpec, distance: Int[Array, "*#batch time keys"] | None = None
) -> Bool[Array, "*batch time keys"] | None:
    """Return the keys selected by each query of one contiguous sequence (None: all); a ``distance`` replaces the causal
    mask, as in `distant_attend`. No gradient flows through the selection."""
    keys = index.k.shape[-2]
    if layer.index_topk is None or keys <= layer.index_topk:
        return None
    scores = token_index.scores(*map(lax.stop_gradient, index))
    visible = jnp.tri(keys, dtype=bool) if distance is None else distance >= 0
    return token_index.top_keys(scores, jnp.broadcast_to(visible, scores.shape), layer.index_topk)


def _softmax(
    scores: Float[Array, "*batch kv_heads group q k"], sinks: Float[Array, " heads"] | None, kv_heads: int
) -> Float[Array, "*batch kv_heads group q k"]:
    if sinks is None:
        return jax.nn.softmax(scores, axis=-1)
    column = sinks.astype(scores.dtype).reshape(kv_heads, -1, 1, 1)
    with_sinks = jnp.concatenate([scores, jnp.broadcast_to(column, (*scores.shape[:-1], 1))], axis=-1)
    return jax.nn.softmax(with_sinks, axis=-1)[..., :-1]
