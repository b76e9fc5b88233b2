"""Per-token dynamic quantisation to 8 bits with one scale per token, as of W8A8 checkpoints.

scale = max(min(largest magnitude, bound), LEAST) / most
codes = number / scale, rounded to the nearest integer (a half: to the even one), or to the nearest float8
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Num

LEAST = 1e-30  # smallest numerator of a scale, so that a token of zeros has one, too
FLOAT8_MAX = 448.0


@dataclasses.dataclass(frozen=True)
class Rule:
    """The rule to quantise a token.

    Attributes:
        dtype: name of int8 or float8_e4m3fn.
        most: code of the largest number.
        bound: larger numbers are clipped to it; 0: there is none.
    """

    dtype: str
    most: float
    bound: float = 0.0

    def divided(self, largest: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return the numerator of the scale, which `most` divides, from a token's largest magnitude."""
        return jnp.maximum(jnp.minimum(largest, self.bound) if self.bound else largest, LEAST)

    def codes(self, numbers: Float[Array, "..."]) -> Num[Array, "..."]:
        """Convert numbers that were divided by their scale to 8 bits."""
        if self.dtype == "int8":
            rounded = lax.round(numbers, rounding_method=lax.RoundingMethod.TO_NEAREST_EVEN)
            return jnp.minimum(jnp.maximum(rounded, -128.0), 127.0).astype(self.dtype)
        return jnp.minimum(jnp.maximum(numbers, -FLOAT8_MAX), FLOAT8_MAX).astype(self.dtype)


def quantize(x: Float[np.ndarray, "rows k"], rule: Rule) -> tuple[Num[Array, "rows k"], Float[np.ndarray, " rows"]]:
    """Return codes and scales: ``x`` is about ``codes * scales``. In numpy, whose divisions are correctly rounded."""
    numbers = np.asarray(x, np.float32)
    scales = np.asarray(rule.divided(jnp.abs(numbers).max(-1))) / np.float32(rule.most)
    return rule.codes(jnp.asarray(numbers / scales[:, None])), scales
