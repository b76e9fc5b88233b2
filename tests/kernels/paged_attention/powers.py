"""A stand-in for exp2 that scales exactly, as on GPUs and unlike XLA on CPUs."""

import math

import jax.numpy as jnp
from jax import lax

LN_2 = math.log(2.0)


def power(numbers):
    """Return 2**numbers; adding an integer to a number scales its result exactly; results below 2**-126 are zero."""
    whole = jnp.clip(jnp.round(numbers), -127, 127)
    scale = lax.bitcast_convert_type((whole.astype(jnp.int32) + 127) << 23, jnp.float32)
    return scale * jnp.exp(jnp.maximum(numbers - whole, -1.0) * LN_2)
