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
    """Store the new keys and values in this layer's cache and attend to all that a token may see."""

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
        """``v`` is None where the keys are latents (`LayerSpec.latent_rank`), and ``value_dim`` that rank then. Both
        are None where the cache is another layer's, which has stored them (`LayerSpec.source`).

        ``sinks`` are scores that every query gives to nothing: they stand in the softmax's sum and have no value.
        ``chosen``: the only keys that queries attend to, as this attention chooses them; None: all.
        """
        ...


@runtime_checkable
class ChoosingAttend(Attend, Protocol):
    """An `Attend` with a cache of index keys. One that is none is over contiguous sequences: see `causal_choice`."""

    def choosing(
        self,
        q: Float[Array, "*batch heads head_dim"],
        k: Float[Array, "*batch 1 head_dim"],
        index: Index,
        cache: Any,
        layer: LayerSpec,
        scale: float,
    ) -> tuple[Float[Array, "*batch heads value_dim"], Any, Any]:
        """Store latents and index keys, and attend to the ``layer.index_topk`` tokens that each query chooses.

        Returns the result, the choice (None: all tokens) and the cache.
        """
        ...


@runtime_checkable
class FusedAttend(Attend, Protocol):
    """An `Attend` that may take a fused projection as it is, and rotate while it writes keys and values."""

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
        """Attend as by `__call__` with the rotated parts; None, and nothing done: not for these operands."""
        ...


class Attention(Layer):
    """Multi-head attention with ``heads`` query and ``kv_heads`` key/value heads (GQA, Ainslie et al. 2023).

    Parameters: ``qkv`` [d, kv_heads, group + 2, head_dim], each group's queries followed by its key and value, so
    that sharding over kv_heads keeps a group together; ``out`` [heads * head_dim, d].

    Attributes:
        qk_l2_eps: rotated queries and keys are divided by their root mean square, without weights (Llama 4).
        scale: of the scores; None: 1 / sqrt(head_dim).
        qk_norm_eps: queries and keys are normalised over head_dim before they are rotated.
        norm_offset: see `RMSNorm`, of these two norms.
        qk_layer_norm: they are `LayerNorm` instead.
        qk_norm_whole: they are over all heads together: their weights are [heads, head_dim], [kv_heads, head_dim].
        interleaved: see `rotate`.
        sinks: a learned score for nothing, one a head (``sinks`` [heads]).
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
        """Attend.

        Args:
            rope: cosines and sines of `rope_angles`; None where positions are encoded otherwise.
            temperature: queries are multiplied by it, after their rotation.
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
        """Queries and keys as they meet: normalised, then rotated."""
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
        """Make the norm of queries, or of keys: of [..., heads, head_dim]."""
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
) -> tuple[Float[Array, "*batch time heads value_dim"], tuple[jax.Array, jax.Array]]:
    """Attention over one contiguous sequence per batch entry: differentiable, the plain equation. The cache is its keys
    and values."""
    if k is None:
        assert cache is not None, layer
        k, v = cache
    v = k[..., : layer.latent_rank] if v is None else v
    at = jnp.arange(q.shape[-3])
    return distant_attend(q, k, v, at[:, None] - at[None, :], layer, scale, sinks, chosen)[0], (k, v)


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
    """The plain equation of attention and its weights (float32), where each query is ``distance`` tokens behind each
    key: below 0 it does not see it. The result of a query that sees nothing is finite, and nobody reads it."""
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
    """The keys that each query attends to, of one contiguous sequence unless a ``distance`` says what it sees (as
    `distant_attend`); no gradient flows through a choice."""
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
