"""AWQ (Lin et al. 2023): weight columns of large inputs are scaled up before rounding, then groups are clipped.

Outputs are x W^T = (x / s) (W s)^T. Rounding errors of W s have weight 1 / s in the output, so large inputs get a large
s = mean|x|^alpha, with the best alpha of a grid. All losses use the Gram matrix: ||x D^T||^2 = tr(D G D^T).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxinfer.quant.make.grid import IntegerGrid

POINTS = 20  # grid points of alpha, including 0: AWQ is never worse than rounding on its calibration data
_LEAST = 1e-4
_SHRINKS = 10  # clipping candidates: a group's largest value, reduced in steps of 5 %


@jax.jit
def candidates(magnitude: Float[Array, " k"]) -> Float[Array, "points k"]:
    """Return candidate scales from the mean absolute value of each input; their extremes are centred around 1."""
    alpha = jnp.arange(POINTS, dtype=jnp.float32)[:, None] / POINTS
    scales = jnp.maximum(magnitude, _LEAST) ** alpha
    return scales / jnp.sqrt(scales.max(axis=1, keepdims=True) * scales.min(axis=1, keepdims=True))


@functools.partial(jax.jit, static_argnames=("grid",))
def losses(
    weight: Float[Array, "out k"], gram: Float[Array, "k k"], scales: Float[Array, "points k"], grid: IntegerGrid
) -> Float[Array, " points"]:
    """Return the squared output error for each candidate scale; errors of weights that share inputs can be added."""
    weight = weight.astype(jnp.float32)
    groups = (weight.shape[0], -1, grid.width(weight.shape[1]))

    def loss(scale: Array) -> Array:
        rounded = grid.rounded((weight * scale).reshape(groups)).reshape(weight.shape) / scale
        error = rounded - weight
        return (jnp.matmul(error, gram, precision=lax.Precision.HIGHEST) * error).sum()

    return lax.map(loss, scales)


@functools.partial(jax.jit, static_argnames=("grid",))
def clipped(weight: Float[Array, "out k"], gram: Float[Array, "k k"], grid: IntegerGrid) -> Float[Array, "out k"]:
    """Clip each group to the limit with the least loss on that group's inputs alone, as in the paper."""
    weight = weight.astype(jnp.float32)
    out, inputs = weight.shape
    width = grid.width(inputs)
    groups = weight.reshape(out, -1, width)
    within = jnp.stack([lax.dynamic_slice(gram, (i, i), (width, width)) for i in range(0, inputs, width)])
    largest = jnp.abs(groups).max(axis=-1, keepdims=True)

    def limited(share: Array) -> Array:
        return jnp.clip(groups, -share * largest, share * largest)

    def loss(share: Array) -> Array:
        error = grid.rounded(limited(share)) - groups
        return jnp.einsum("ogi,gij,ogj->og", error, within, error, precision=lax.Precision.HIGHEST)

    shares = 1.0 - 0.05 * jnp.arange(_SHRINKS, dtype=jnp.float32)
    best = shares[jnp.argmin(lax.map(loss, shares), axis=0)]
    return limited(best[..., None]).reshape(out, inputs)
