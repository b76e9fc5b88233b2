"""Normalisation."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxinfer.layers.base import Layer


def unit_rms(x: Float[Array, "... d"], eps: float) -> Float[Array, "... d"]:
    """Divide by the root mean square over the last dimension, in float32: `RMSNorm` without a scale."""
    x32 = x.astype(jnp.float32)
    return (x32 * lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)).astype(x.dtype)


class RMSNorm(Layer):
    """Root mean square norm over the last dimension (Zhang & Sennrich 2019), computed in float32.

    ``offset`` is added to the stored scale: 1 in the checkpoints of Gemma.
    """

    eps: float
    offset: float = 0.0

    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        x32 = x.astype(jnp.float32)
        normal = x32 * lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        scale = self.weight("scale").astype(jnp.float32)
        return (normal * (scale + self.offset if self.offset else scale)).astype(x.dtype)


class LayerNorm(Layer):
    """Layer norm over the last dimension (Ba et al. 2016) with scale and bias, computed in float32."""

    eps: float

    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        x32 = x.astype(jnp.float32)
        centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
        normal = centred * lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + self.eps)
        scale, bias = (self.weight(name).astype(jnp.float32) for name in ("scale", "bias"))
        return (normal * scale + bias).astype(x.dtype)
