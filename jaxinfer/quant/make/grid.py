"""Integer grids: the values of a quantised weight, equally spaced integers times a scale per group of inputs."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxinfer.quant.layouts import Grouped, Parts


@dataclasses.dataclass(frozen=True)
class Made:
    """A quantised weight: arrays and their layout."""

    layout: Grouped
    parts: Parts

    def dequantize(self) -> Float[Array, "out k"]:
        """Dequantize to float32, columns in the order of the inputs."""
        weight = self.layout.dequantize(self.parts)
        if "order" not in self.parts:
            return weight
        return jnp.zeros_like(weight).at[:, self.parts["order"]].set(weight)


@dataclasses.dataclass(frozen=True)
class IntegerGrid:
    """Grid of weight = (code - zero) * scale, codes from -2^(bits-1) to 2^(bits-1) - 1, a scale per ``group`` inputs.

    Scales are rounded to their storage dtype before codes are chosen.

    Attributes:
        bits: 2 to 8; up to 4 are stored as int4.
        group: inputs that share a scale; 0: all of them.
        symmetric: no zero points; the largest absolute value is half a step above the largest code, so that all codes
            are used (as in compressed-tensors and GPTQ's reference code).
        scale_dtype: "float32", "float16" or "bfloat16".
    """

    bits: int = 4
    group: int = 128
    symmetric: bool = True
    scale_dtype: str = "float32"

    @property
    def low(self) -> int:
        return -(1 << (self.bits - 1))

    @property
    def high(self) -> int:
        return (1 << (self.bits - 1)) - 1

    def width(self, inputs: int) -> int:
        """Return the number of inputs that share a scale.

        Raises:
            ValueError: groups do not divide the inputs.
        """
        group = self.group or inputs
        if inputs % group:
            raise ValueError(f"groups of {group} do not divide {inputs} inputs")
        return group

    def cropped(self, made: Made, inputs: int) -> Made:
        """Crop a weight whose inputs were padded to whole groups: the last group becomes shorter.

        Scales are repeated for groups of the greatest common divisor of group and inputs. With an ``order``, padding
        comes last in it, as for inputs whose Gram matrix is zero.
        """
        have = made.parts["codes"].shape[1]
        if have == inputs:
            return made
        group = math.gcd(self.width(have), inputs)
        at = np.arange(0, inputs, group) // self.width(have)
        parts = {
            name: part[:, :inputs] if name == "codes" else part[:, at]
            for name, part in made.parts.items()
            if name != "order"
        }
        if "order" in made.parts:
            parts["order"] = made.parts["order"][:inputs]
        return Made(dataclasses.replace(made.layout, group=group), parts)

    def layout(self, inputs: int, *, ordered: bool = False, activations: str = "") -> Grouped:
        return Grouped(
            "int4" if self.bits <= 4 else "int8",
            self.width(inputs),
            self.scale_dtype,
            zeros=not self.symmetric,
            ordered=ordered,
            activations=activations,
        )

    def fit(self, weight: Float[Array, "*out group"]) -> tuple[Float[Array, "*out"], Float[Array, "*out"]]:
        """Return scales and zero points of groups, such that nothing is clipped by more than half a step."""
        steps = float((1 << self.bits) - 1)
        if self.symmetric:
            scale = self.storable(2.0 * jnp.abs(weight).max(axis=-1) / steps)
            return scale, jnp.zeros_like(scale)
        high, low = jnp.maximum(weight.max(axis=-1), 0.0), jnp.minimum(weight.min(axis=-1), 0.0)
        scale = self.storable((high - low) / steps)
        return scale, jnp.clip(jnp.round(-low / scale), 0, steps) + self.low

    def storable(self, scale: Float[Array, "*any"]) -> Float[Array, "*any"]:
        """Round scales to their storage dtype, positive; 1 for a group of zeros."""
        limits = jnp.finfo(self.scale_dtype)
        least = limits.smallest_subnormal if self.scale_dtype == "float16" else limits.tiny
        bounded = jnp.clip(jnp.where(scale > 0, scale, 1.0), float(least), float(limits.max))
        return bounded.astype(self.scale_dtype).astype(jnp.float32)

    def code(self, weight: Array, scale: Array, zero: Array) -> Array:
        """Return the nearest codes, as integer-valued float32."""
        return jnp.clip(jnp.round(weight / scale) + zero, self.low, self.high)

    def rounded(self, weight: Float[Array, "*out group"]) -> Float[Array, "*out group"]:
        """Return the values of groups after rounding to nearest."""
        scale, zero = (part[..., None] for part in self.fit(weight))
        return (self.code(weight, scale, zero) - zero) * scale

    def made(
        self,
        codes: Float[Array, "out k"],
        scales: Float[Array, "out groups"],
        zeros: Float[Array, "out groups"],
        order: jax.Array | None = None,
        activations: str = "",
    ) -> Made:
        layout = self.layout(codes.shape[1], ordered=order is not None, activations=activations)
        parts = {"codes": codes.astype(layout.codes), "scales": scales.astype(self.scale_dtype)}
        if not self.symmetric:
            parts["zeros"] = zeros.astype(jnp.int8)
        return Made(layout, parts if order is None else {**parts, "order": order.astype(jnp.int32)})
