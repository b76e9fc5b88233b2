"""Products of which the inputs are rounded to 8 bits, too (W8A8): `Grouped.activations` asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Num

from jaxinfer.quant.layouts import Grouped

# What a token's largest input becomes. Integers: the middle of the last step, as compressed-tensors has it.
_LARGEST = {"int8": 127.5, "float8_e4m3fn": 448.0}
_LEAST = 1e-30  # of what is divided by: a token of zeros has a scale, too


class Rounded(NamedTuple):
    """Inputs of 8 bits: ``codes * scales``, a scale for neighbours of a token or for all alike."""

    codes: Num[Array, "rows k"]
    scales: Float[Array, "#rows groups"]

    def plain(self) -> Float[Array, "rows k"]:
        times = self.codes.shape[-1] // self.scales.shape[-1]
        return self.codes.astype(jnp.float32) * jnp.repeat(self.scales, times, axis=-1)


def rounded(x: Float[Array, "rows k"], layout: Grouped, static: Float[Array, ""] | None = None) -> Rounded:
    """The inputs as a layout wants them.

    Args:
        static: the scale of all; None: each token's own, for every ``layout.activation_group`` inputs.
    """
    dtype, x = jnp.dtype(layout.activations), x.astype(jnp.float32)
    grouped = x.reshape(x.shape[0], -1, layout.activation_group or x.shape[-1])
    if static is None:
        largest = jnp.maximum(jnp.abs(grouped).max(-1), _LEAST)
        scales = _quotient(largest, jnp.full((), _LARGEST[layout.activations], jnp.float32))
    else:
        scales = jnp.full((1, 1), static, jnp.float32)
    numbers = _quotient(grouped, scales[:, :, None]).reshape(x.shape)
    if dtype == jnp.int8:
        return Rounded(jnp.clip(jnp.round(numbers), -128, 127).astype(jnp.int8), scales)
    return Rounded(jnp.clip(numbers, -448.0, 448.0).astype(dtype), scales)


def _quotient(x: Float[Array, "*shape"], by: Float[Array, "..."]) -> Float[Array, "*shape"]:
    """``x / by``, correctly rounded. XLA would multiply with the reciprocal of what is broadcast; a token's largest
    number lies on the border of two integers, and a last bit decides which one it becomes."""
    return x / lax.optimization_barrier(jnp.broadcast_to(by, x.shape))


def product(x: Float[Array, "rows k"], layout: Grouped, arrays: Mapping[str, Any]) -> Float[Array, "rows n"]:
    """``rounded(x) @ weight.T`` in the dtype of ``x``, of the parts of a `Grouped` weight with one scale a channel.

    8-bit numbers are multiplied as they are: integers into int32, floats into float32.
    """
    codes = arrays["codes"].reshape(-1, arrays["codes"].shape[-1])
    own = rounded(x, layout, arrays.get("input_scale"))
    sums = _sums(own, codes, arrays["scales"].reshape(codes.shape[0], -1).astype(jnp.float32) * layout.factor)
    return sums.astype(x.dtype)


def _sums(x: Rounded, codes: Array, scales: Float[Array, "n groups"]) -> Float[Array, "rows n"]:
    numbers = (((1,), (1,)), ((), ()))
    if x.scales.shape[-1] == scales.shape[-1] == 1:
        kind = jnp.int32 if codes.dtype == jnp.int8 else jnp.float32
        whole = lax.dot_general(x.codes, codes, numbers, preferred_element_type=kind)
        return whole.astype(jnp.float32) * x.scales * scales.T
    weight = codes.astype(jnp.float32) * jnp.repeat(scales, codes.shape[-1] // scales.shape[-1], axis=-1)
    return lax.dot_general(x.plain(), weight, numbers, precision=lax.Precision.HIGHEST)
