"""Normalisation layers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxinfer.layers.base import Layer


def unit_rms(x: Float[Array, "... d"], eps: float) -> Float[Array, "... d"]:
    """Divide by the root mean square over the last dimension, in float32: `RMSNorm` without a scale."""
    return _unit(x, eps).astype(x.dtype)


class RMSNorm(Layer):
    """Root mean square norm over the last dimension (Zhang & Sennrich 2019), computed in float32.

    ``offset`` is added to the stored scale: 1 for Gemma checkpoints.
    """

    eps: float
    offset: float = 0.0

    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        normal, scale = _unit(x, self.eps), self.weight("scale").astype(jnp.float32)
        return (normal * (scale + self.offset if self.offset else scale)).astype(x.dtype)


class LayerNorm(Layer):
    """Layer norm over the last dimension (Ba et al. 2016) with scale and, unless ``bias`` is false, a bias, computed in
    float32. ``offset``: see `RMSNorm`."""

    eps: float
    bias: bool = True
    offset: float = 0.0

    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        scale = self.weight("scale").astype(jnp.float32)
        scaled = _standardised(x, self.eps) * (scale + self.offset if self.offset else scale)
        return (scaled + self.weight("bias").astype(jnp.float32) if self.bias else scaled).astype(x.dtype)


class HeadLayerNorm(Layer):
    """`LayerNorm` without bias over each head, with per-head scales: ``scale`` [heads, head_dim]."""

    eps: float

    def __call__(self, x: Float[Array, "... heads head_dim"]) -> Float[Array, "... heads head_dim"]:
        return (_standardised(x, self.eps) * _scales(self.weight("scale"), x)).astype(x.dtype)


class AllHeadsNorm(Layer):
    """`RMSNorm` over all heads together: ``scale`` [heads, head_dim]."""

    eps: float

    def __call__(self, x: Float[Array, "... heads head_dim"]) -> Float[Array, "... heads head_dim"]:
        return (_unit(x, self.eps, axis=(-2, -1)) * _scales(self.weight("scale"), x)).astype(x.dtype)


def _standardised(x: Float[Array, "... d"], eps: float) -> Float[Array, "... d"]:
    x32 = x.astype(jnp.float32)
    return _unit(x32 - jnp.mean(x32, axis=-1, keepdims=True), eps)


def _unit(x: Float[Array, "... d"], eps: float, axis: int | tuple[int, int] = -1) -> Float[Array, "... d"]:
    """Divide by the root mean square over ``axis``; float32."""
    x32 = x.astype(jnp.float32)
    return x32 * lax.rsqrt(jnp.mean(x32 * x32, axis=axis, keepdims=True) + eps)


def _scales(scale: Float[Array, "stored head_dim"], x: Float[Array, "... heads head_dim"]) -> jax.Array:
    """Return float32 scales for the heads of ``x``, repeated for adjacent copies of KV heads (`jaxinfer.parallel`)."""
    copies = x.shape[-2] // scale.shape[0]
    return (scale if copies == 1 else jnp.repeat(scale, copies, axis=0)).astype(jnp.float32)
