"""Grouped-query self-attention. Where keys and values live is not its business: `attend` is passed in."""

from __future__ import annotations

import math
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxinfer.layers.base import Layer
from jaxinfer.layers.norm import RMSNorm
from jaxinfer.layers.rope import rotate
from jaxinfer.quant import matmul
from jaxinfer.types import LayerSpec


@runtime_checkable
class Attend(Protocol):
    """Stores the new keys and values in this layer's cache and attends to all that a token may see."""

    def __call__(
        self,
        q: Float[Array, "*batch heads head_dim"],
        k: Float[Array, "*batch kv_heads head_dim"],
        v: Float[Array, "*batch kv_heads head_dim"],
        cache: Any,
        layer: LayerSpec,
        scale: float,
    ) -> tuple[Float[Array, "*batch heads head_dim"], Any]: ...


class Attention(Layer):
    """Multi-head attention with ``heads`` query and ``kv_heads`` key/value heads (GQA, Ainslie et al. 2023).

    Parameters: ``qkv`` [d, kv_heads, group + 2, head_dim], each group's queries followed by its key and value, so
    that sharding over kv_heads keeps a group together; ``out`` [heads * head_dim, d].
    """

    heads: int
    kv_heads: int
    head_dim: int
    layer: LayerSpec
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm_eps: float | None = None

    def setup(self) -> None:
        if self.qk_norm_eps is not None:
            self.q_norm, self.k_norm = RMSNorm(self.qk_norm_eps), RMSNorm(self.qk_norm_eps)

    def __call__(
        self, x: Float[Array, "*batch d"], rope: tuple[jax.Array, jax.Array], attend: Attend, cache: Any
    ) -> tuple[Float[Array, "*batch d"], Any]:
        q, k, v = self._project(x)
        if self.qk_norm_eps is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, *rope), rotate(k, *rope)
        mixed, cache = attend(q, k, v, cache, self.layer, 1.0 / math.sqrt(self.head_dim))
        out = matmul(mixed.reshape(*x.shape[:-1], -1), self.weight("out"))
        if self.out_bias:
            out = out + self.weight("out_bias").astype(x.dtype)
        return out, cache

    def _project(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        qkv = matmul(x, self.weight("qkv"))
        if self.qkv_bias:
            qkv = qkv + self.weight("qkv_bias").astype(x.dtype)
        q = qkv[..., :-2, :].reshape(*x.shape[:-1], self.heads, self.head_dim)
        return q, qkv[..., -2, :], qkv[..., -1, :]


def causal_attend(
    q: Float[Array, "*batch time heads head_dim"],
    k: Float[Array, "*batch time kv_heads head_dim"],
    v: Float[Array, "*batch time kv_heads head_dim"],
    cache: None,
    layer: LayerSpec,
    scale: float,
) -> tuple[Float[Array, "*batch time heads head_dim"], None]:
    """Attention over one contiguous sequence per batch entry: no cache, differentiable, the plain equation."""
    time, heads, head_dim = q.shape[-3:]
    kv_heads = k.shape[-2]
    grouped = q.reshape(*q.shape[:-2], kv_heads, heads // kv_heads, head_dim)
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else lax.Precision.DEFAULT
    scores = jnp.einsum("...qhgd,...khd->...hgqk", grouped, k, preferred_element_type=jnp.float32, precision=precision)
    distance = jnp.arange(time)[:, None] - jnp.arange(time)[None, :]
    visible = distance >= 0 if layer.window is None else (distance >= 0) & (distance < layer.window)
    weights = jax.nn.softmax(jnp.where(visible, scores * scale, -jnp.inf), axis=-1).astype(v.dtype)
    mixed = jnp.einsum("...hgqk,...khd->...qhgd", weights, v, precision=precision)
    return mixed.reshape(q.shape), None
