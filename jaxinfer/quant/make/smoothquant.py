"""SmoothQuant (Xiao et al. 2022): what makes activations hard to round goes into the weights, which bear it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

_LEAST = 1e-5


@jax.jit
def smoothing(
    inputs: Float[Array, " k"], weights: Float[Array, " k"], alpha: float | Float[Array, ""]
) -> Float[Array, " k"]:
    """s_j = max|x_j|^alpha / max|w_j|^(1 - alpha): inputs are to be divided by it, weights multiplied.

    Args:
        inputs: the largest absolute value of each input.
        weights: the same of the column of each input, over all weights that read it.
        alpha: 0 leaves all difficulty to the activations, 1 to the weights.
    """
    inputs, weights = jnp.maximum(inputs, _LEAST), jnp.maximum(weights, _LEAST)
    return jnp.maximum(inputs**alpha / weights ** (1.0 - alpha), _LEAST)
