"""Normalisation."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxinfer.layers.base import Layer


class RMSNorm(Layer):
    """Root mean square norm over the last dimension (Zhang & Sennrich 2019), computed in float32."""

    eps: float

    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        x32 = x.astype(jnp.float32)
        normal = x32 * lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        return (normal * self.weight("scale").astype(jnp.float32)).astype(x.dtype)
