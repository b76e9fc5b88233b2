"""Rotary position embeddings (Su et al. 2021) and the ways published checkpoints stretch them.

Frequencies are computed once on the host in float64 and rounded to float32; angles, cosines and the rotation are
float32 whatever the model's dtype.
"""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Position embedding of a checkpoint: ``kind`` is default, linear or llama3, with the parameters of config.json."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def inverse_frequencies(self, head_dim: int) -> np.ndarray:
        """[head_dim / 2] float32 radians per position."""
        exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
        inverse = 1.0 / (self.theta**exponents)
        if self.kind == "linear":
            inverse = inverse / self.factor
        if self.kind == "llama3":
            inverse = self._llama3(inverse)
        return inverse.astype(np.float32)

    def _llama3(self, inverse: np.ndarray) -> np.ndarray:
        """Llama 3.1: long wavelengths are stretched by ``factor``, short ones kept, those between interpolated."""
        wavelength = 2 * math.pi / inverse
        turns = self.original_max_position / wavelength
        smooth = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        smooth = np.clip(smooth, 0.0, 1.0)
        return (1 - smooth) * inverse / self.factor + smooth * inverse


def rope_angles(
    positions: Int[Array, "*batch"], inverse: Float[np.ndarray, " half"]
) -> tuple[Float[Array, "*batch half"], Float[Array, "*batch half"]]:
    """Cosine and sine of every position's angles, float32."""
    angles = positions.astype(jnp.float32)[..., None] * jnp.asarray(inverse)
    # Without the barrier XLA computes them again in every layer.
    return lax.optimization_barrier((jnp.cos(angles), jnp.sin(angles)))


def rotate(
    x: Float[Array, "*batch heads head_dim"],
    cos: Float[Array, "*batch half"],
    sin: Float[Array, "*batch half"],
    interleaved: bool = False,
) -> Float[Array, "*batch heads head_dim"]:
    """Rotate pairs of the first ``2 * half`` numbers of every head; what lies behind them stays (partial rotation).

    Pairs are (i, i + half), the layout of most Hugging Face checkpoints, or (2 i, 2 i + 1) if ``interleaved``.
    """
    half = cos.shape[-1]
    turned, rest = x[..., : 2 * half].astype(jnp.float32), x[..., 2 * half :]
    cos, sin = cos[..., None, :], sin[..., None, :]
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
        rotated = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1).reshape(turned.shape)
    else:
        first, second = jnp.split(turned, 2, axis=-1)
        rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    rotated = rotated.astype(x.dtype)
    return jnp.concatenate([rotated, rest], axis=-1) if rest.shape[-1] else rotated
