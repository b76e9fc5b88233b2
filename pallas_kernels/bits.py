"""float8 pools as bytes: a uint8 array holds the bits of float8_e4m3fn.

XLA:CPU widens float8 for everything except conversions: to write one token into a pool, it would convert the whole pool
and back. It moves bytes unchanged. So pools on CPU are bytes, and the XLA paths take them; kernels take float8 itself.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Num


def meant(dtype: Any) -> jnp.dtype:
    """Return the dtype of the numbers that an array of ``dtype`` holds."""
    return jnp.dtype(jnp.float8_e4m3fn if jnp.dtype(dtype) == jnp.uint8 else dtype)


def numbers(x: Num[Array, "*shape"]) -> Num[Array, "*shape"]:
    """Return the numbers that ``x`` holds, in the dtype of `meant`."""
    return lax.bitcast_convert_type(x, meant(x.dtype)) if x.dtype == jnp.uint8 else x


def widened(x: Num[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Return the numbers in float32. float8 bits are converted via float16 bits: the same three mantissa bits and an
    exponent that is 8 less, exact for subnormal numbers too. XLA:CPU's own conversion takes twice as long.

    The two codes for NaN become 480. `kv_write` writes one only together with a scale that is NaN itself.
    """
    if x.dtype != jnp.uint8:
        return x.astype(jnp.float32)
    wide = x.astype(jnp.uint16)
    halves = lax.bitcast_convert_type(((wide & 0x80) << 8) | ((wide & 0x7F) << 7), jnp.float16)
    return halves.astype(jnp.float32) * 256.0


def held(x: Num[Array, "*shape"], dtype: Any) -> jax.Array:
    """Return numbers in the dtype of `meant` as an array of ``dtype`` holds them: the inverse of `numbers`."""
    return lax.bitcast_convert_type(x, jnp.uint8) if jnp.dtype(dtype) == jnp.uint8 else x
