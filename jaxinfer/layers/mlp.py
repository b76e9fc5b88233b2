"""Feed-forward layers."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxinfer.layers.base import Layer
from jaxinfer.parallel.tokens import all_tokens, own_tokens
from jaxinfer.quant import matmul, matmul_transposed, plus_bias, swiglu

_TWICE_U = 2.0 * math.sqrt(2.0 / math.pi)


def gelu_tanh(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Approximate `gelu_erf` by tanh (Hendrycks & Gimpel 2016), ``x (1 + tanh(u)) / 2``.

    That sum cancels for negative x, with errors of half an ulp of 1; the code uses the identical ``x sigmoid(2u)``.
    """
    return x * jax.nn.sigmoid(_TWICE_U * x * (1.0 + 0.044715 * x * x))


def gelu_erf(x: Float[Array, "..."]) -> Float[Array, "..."]:
    return jax.nn.gelu(x, approximate=False)


def quick_gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Approximate `gelu_erf` by a sigmoid (Hendrycks & Gimpel 2016)."""
    return x * jax.nn.sigmoid(1.702 * x)


def squared_relu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    return jnp.square(jax.nn.relu(x))


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "gelu": gelu_erf,
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
    "relu": jax.nn.relu,
    "relu2": squared_relu,
}


class GatedMLP(Layer):
    """Gated feed-forward network down(act(gate(x)) * up(x)) (Shazeer 2020).

    ``gate_up`` is [2, hidden, d], ``down`` [hidden, d]. ``gate_scale`` multiplies the gate.
    """

    activation: str
    bias: bool = False
    gate_scale: float = 1.0

    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        out = own_tokens(matmul(self._hidden(all_tokens(x)), self.weight("down")))
        return plus_bias(out, self.weight("down_bias")) if self.bias else out

    def _hidden(self, x: Float[Array, "... d"]) -> Float[Array, "... hidden"]:
        if self.activation == "silu" and not self.bias and self.gate_scale == 1.0:
            return swiglu(x, self.weight("gate_up"))
        gate_up = matmul_transposed(x, self.weight("gate_up"))
        if self.bias:
            gate_up = plus_bias(gate_up, self.weight("gate_up_bias"))
        gate, up = gate_up[..., 0, :], gate_up[..., 1, :]
        gate = gate if self.gate_scale == 1.0 else gate * self.gate_scale
        return ACTIVATIONS[self.activation](gate.astype(jnp.float32)).astype(x.dtype) * up


class MLP(Layer):
    """Ungated feed-forward network down(act(up(x))): ``up`` [hidden, d], ``down`` [hidden, d]; biases with ``bias``."""

    activation: str
    bias: bool = True

    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        hidden = matmul_transposed(all_tokens(x), self.weight("up"))
        if self.bias:
            hidden = plus_bias(hidden, self.weight("up_bias"))
        hidden = ACTIVATIONS[self.activation](hidden.astype(jnp.float32)).astype(x.dtype)
        out = own_tokens(matmul(hidden, self.weight("down")))
        return plus_bias(out, self.weight("down_bias")) if self.bias else out
