"""SmoothQuant (Xiao et al. 2022): moves outliers of activations into the weights, which are easier to round."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

_LEAST = 1e-5


@jax.jit
def smoothing(
    inputs: Float[Array, " k"], weights: Float[Array, " k"], alpha: float | Float[Array, ""]
) -> Float[Array, " k"]:
    """Return s_j = max|x_j|^alpha / max|w_j|^(1 - alpha): the divisor of inputs and multiplier of weights.

    Args:
        inputs: the largest absolute value of each input.
        weights: the largest absolute value of each input's column, over all weights that read it.
        alpha: 0 leaves all difficulty to the activations, 1 to the weights.
    """
    inputs, weights = jnp.maximum(inputs, _LEAST), jnp.maximum(weights, _LEAST)
    return jnp.maximum(inputs**alpha / weights ** (1.0 - alpha), _LEAST)
