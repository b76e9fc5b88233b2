"""Rotary position embeddings (Su et al. 2021) and the context extensions of published checkpoints.

Frequencies are computed once on the host in float64 and rounded to float32; angles, cosines and the rotation are
float32 whatever the model dtype.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxinfer.brief import ShortRepr


class AxisPositions(NamedTuple):
    """Positions of tokens, with the three axes of multimodal rotary embeddings (Wang et al. 2024, Qwen2-VL).

    Attributes:
        at: positions in the sequence; -1: padding.
        axes: rotary positions: time, height and width. All three are equal for text.
    """

    at: Int[Array, "*batch"]
    axes: Int[Array, "3 *batch"]


def in_sequence(positions: Int[Array, "*batch"] | AxisPositions) -> Int[Array, "*batch"]:
    """Return positions in the sequence; -1: padding."""
    return positions.at if isinstance(positions, AxisPositions) else positions


@dataclasses.dataclass(frozen=True, repr=False)
class RopeConfig(ShortRepr):
    """RoPE settings of a checkpoint, with the parameters of config.json.

    Attributes:
        kind: "default", "linear" (Chen et al. 2023), "llama3", "yarn" (Peng et al. 2023), "longrope" (Ding et al.
            2024), "dynamic" or "proportional" (see `docs/rope.md`).
        partial: fraction of a head that is rotated; for proportional, the fraction of nonzero frequencies.
        attention_factor: factor of cosines and sines, so that its square scales the scores (yarn, longrope).
        beta_fast, beta_slow, truncate: yarn: frequencies with between this many turns over the original context are
            interpolated; ``truncate`` rounds the two ends outwards.
        short_factor, long_factor: longrope: one factor per frequency.
        original_max_position: context length in training; for dynamic, the context length of the model.
        long: longrope: which factors apply; None: the long ones if a position is beyond the original context.
        sections: frequencies that turn with time, height and width, of `AxisPositions`; none: all turn with positions.
        interleaved_sections: the axes alternate (Qwen3-VL) instead of having one range of frequencies each (Qwen2-VL).
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    partial: float = 1.0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    long: bool | None = None
    sections: tuple[int, ...] = ()
    interleaved_sections: bool = False

    def angles(
        self, positions: Int[Array, "*batch"] | AxisPositions, head_dim: int
    ) -> tuple[Float[Array, "*batch half"], Float[Array, "*batch half"]]:
        """Return cosines and sines of every position's angles for `rotate`, times ``attention_factor``; float32."""
        inverse: np.ndarray | Array = self.inverse_frequencies(head_dim)
        if isinstance(positions, AxisPositions):
            if self.sections:
                return _turned(self._on_axes(positions.axes, inverse), self.attention_factor)
            positions = positions.at
        if self.kind == "longrope" and self.long is None:
            stretched = dataclasses.replace(self, long=True).inverse_frequencies(head_dim)
            inverse = jnp.where(jnp.max(positions) >= self.original_max_position, stretched, inverse)
        elif self.kind == "dynamic":
            inverse = inverse * self._shrink(jnp.max(positions) + 1, int(head_dim * self.partial))
        return rope_angles(positions, inverse, self.attention_factor)

    def _on_axes(
        self, axes: Int[Array, "3 *batch"], inverse: Float[np.ndarray | Array, " half"]
    ) -> Float[Array, "*batch half"]:
        """Return the angle of each frequency, by the position on its own axis."""
        axis = np.zeros(inverse.size, np.int32)
        if self.interleaved_sections:
            for index in (1, 2):
                axis[index : 3 * self.sections[index] : 3] = index
        else:
            axis = np.repeat(np.arange(3), self.sections)
            if axis.size != inverse.size:
                raise ValueError(f"mrope_section = {self.sections} must be {inverse.size} frequencies in total")
        return jnp.moveaxis(axes, 0, -1)[..., axis].astype(jnp.float32) * jnp.asarray(inverse)

    def up_to(self, length: int) -> RopeConfig:
        """Return the config for sequences of at most ``length`` tokens, with the same frequencies for all of them:
        longrope fixes one set of factors, and dynamic becomes default within the model's context."""
        if self.kind == "longrope":
            return dataclasses.replace(self, long=length > self.original_max_position)
        plain = self.kind == "dynamic" and length <= self.original_max_position
        return dataclasses.replace(self, kind="default") if plain else self

    def inverse_frequencies(self, head_dim: int) -> np.ndarray:
        """Return [rotated dims / 2] float32 radians per position; the short ones of longrope while ``long`` is None."""
        dim = head_dim if self.kind == "proportional" else int(head_dim * self.partial)
        exponents = np.arange(0, dim, 2, dtype=np.float64) / dim
        inverse = 1.0 / (self.theta**exponents)
        match self.kind:
            case "linear":
                inverse = inverse / self.factor
            case "proportional":
                inverse[int(self.partial * head_dim // 2) :] = 0.0
                inverse = inverse / self.factor
            case "llama3":
                inverse = self._llama3(inverse)
            case "yarn":
                inverse = self._yarn(inverse, dim)
            case "longrope":
                inverse = inverse / np.asarray(self.long_factor if self.long else self.short_factor, np.float64)
        return inverse.astype(np.float32)

    def _shrink(self, tokens: Array, dim: int) -> Array:
        """Return the frequency factors of dynamic (NTK-aware) scaling: the base grows with the tokens beyond the
        context, so that the longest wavelength grows by 1 + factor * excess / context. Exactly 1 in the context."""
        beyond = jnp.maximum(tokens - self.original_max_position, 0).astype(jnp.float32)
        growth = jnp.log1p(beyond * (self.factor / self.original_max_position))
        exponents = (np.arange(0, dim, 2, dtype=np.float64) / max(dim - 2, 1)).astype(np.float32)
        return jnp.exp(-growth * exponents)

    def _llama3(self, inverse: np.ndarray) -> np.ndarray:
        """Scale frequencies as Llama 3.1: stretch long wavelengths, keep short ones, interpolate between."""
        wavelength = 2 * math.pi / inverse
        turns = self.original_max_position / wavelength
        # Llama 4 has two equal factors: no wavelength is between them.
        smooth = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor or 1e-9)
        smooth = np.clip(smooth, 0.0, 1.0)
        return (1 - smooth) * inverse / self.factor + smooth * inverse

    def _yarn(self, inverse: np.ndarray, dim: int) -> np.ndarray:
        """Interpolate frequencies by parts (NTK): as llama3, but with a ramp linear in the index of the frequency."""

        def index(turns: float) -> float:
            return dim * math.log(self.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = index(self.beta_fast), index(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        # fallback of transformers for a ramp of zero length
        ramp = np.clip((np.arange(inverse.size) - low) / (high - low if high != low else 0.001), 0.0, 1.0)
        return inverse / self.factor * ramp + inverse * (1 - ramp)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Return the square root of YaRN's score scale (equation 22), which is applied to both query and key."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def rope_angles(
    positions: Int[Array, "*batch"], inverse: Float[np.ndarray | Array, " half"], factor: float = 1.0
) -> tuple[Float[Array, "*batch half"], Float[Array, "*batch half"]]:
    """Return cosines and sines of every position's angles, times ``factor``, float32."""
    return _turned(positions.astype(jnp.float32)[..., None] * jnp.asarray(inverse), factor)


def _turned(
    angles: Float[Array, "*batch half"], factor: float
) -> tuple[Float[Array, "*batch half"], Float[Array, "*batch half"]]:
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if factor != 1.0:
        cos, sin = cos * factor, sin * factor
    # The barrier keeps XLA from recomputing them in every layer.
    return lax.optimization_barrier((cos, sin))


def rotate(
    x: Float[Array, "*batch heads head_dim"],
    cos: Float[Array, "*batch half"],
    sin: Float[Array, "*batch half"],
    interleaved: bool = False,
) -> Float[Array, "*batch heads head_dim"]:
    """Rotate pairs of the first ``2 * half`` elements of every head; the rest is unchanged (partial rotation).

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
