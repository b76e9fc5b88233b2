"""Gated DeltaNet: linear attention with a gated delta rule after a short convolution (Yang et al. 2024)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxinfer.layers.base import Layer
from jaxinfer.layers.mlp import ACTIVATIONS
from jaxinfer.layers.recurrent import linear_recurrence, recur, short_conv
from jaxinfer.parallel.tokens import all_tokens, own_tokens
from jaxinfer.quant import matmul
from jaxinfer.types import LayerSpec, StateSpec

_UNIT_EPS = 1e-6  # epsilon of the L2 norm of queries and keys


class GatedDeltaNet(Layer):
    """Gated DeltaNet mixer with ``heads`` key heads, each with ``values`` value heads that share its query and key.

    Parameters: ``qkvz`` [d, heads, 2 key + 2 values value_dim], concatenated query, key, values and gates of a key
    head, so that sharding over heads keeps a group together; ``ba`` [d, heads, 2 values]; ``conv`` [heads, channels,
    taps]; ``log_decay`` and ``dt_bias`` [heads, values]; ``norm`` [value_dim]; ``out`` [heads values value_dim, d].

    Attributes:
        layer: has the states of `states`.
        key, value: key and value head dims.
        activation: activation of the convolution output; that of gates is always SiLU.
    """

    heads: int
    values: int
    key: int
    value: int
    layer: LayerSpec
    eps: float
    activation: str = "silu"

    def __call__(self, x: Float[Array, "*batch d"], attend: Any, cache: Any) -> tuple[Float[Array, "*batch d"], Any]:
        """Mix previous tokens into each token; ``cache`` holds the states of `states`."""
        rows, of_conv, of_delta = x.shape[:-1], *self.layer.states
        x = all_tokens(x)
        channels = 2 * self.key + self.values * self.value
        qkv, z = jnp.split(matmul(x, self.weight("qkvz")), [channels], axis=-1)
        kept = (None, None) if cache is None else cache.states
        taken, conv = recur(attend, short_conv(self.weight("conv")), qkv, kept[0], of_conv, rows, x.dtype)
        operands = *self._heads(ACTIVATIONS[self.activation](taken)), *self._gates(matmul(x, self.weight("ba")))
        mixed, delta = recur(attend, linear_recurrence, operands, kept[1], of_delta, rows, x.dtype)
        gated = self._normed(mixed.astype(x.dtype), z.reshape(mixed.shape))
        out = own_tokens(matmul(gated.reshape(*rows, -1), self.weight("out")))
        return out, None if cache is None else cache._replace(states=(conv, delta))

    def _heads(self, qkv: Float[Array, "*batch heads channels"]) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return float32 queries and keys of all key heads, and values of all value heads."""
        q, k, v = jnp.split(qkv.astype(jnp.float32), [self.key, 2 * self.key], axis=-1)
        return _unit(q) * self.key**-0.5, _unit(k), v.reshape(*v.shape[:-2], self.heads * self.values, self.value)

    def _gates(self, ba: Float[Array, "*batch heads gates"]) -> tuple[jax.Array, jax.Array]:
        """Return the log decay and the write strength (beta) of the state of each value head, float32."""
        b, a = jnp.split(ba, 2, axis=-1)
        wide = (self.weight(name).astype(jnp.float32) for name in ("log_decay", "dt_bias"))
        rate, bias = wide
        decay = -jnp.exp(rate) * jax.nn.softplus(a.astype(jnp.float32) + bias)
        flat = *ba.shape[:-2], self.heads * self.values
        return decay.reshape(flat), jax.nn.sigmoid(b).astype(jnp.float32).reshape(flat)

    def _normed(self, x: Float[Array, "*batch heads value"], z: Float[Array, "*batch heads value"]) -> jax.Array:
        x32 = x.astype(jnp.float32)
        normal = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        scaled = (self.weight("norm") * normal.astype(x.dtype)).astype(jnp.float32)
        return (scaled * jax.nn.silu(z.astype(jnp.float32))).astype(x.dtype)


def states(heads: int, values: int, key: int, value: int, taps: int) -> tuple[StateSpec, StateSpec]:
    """Return the state specs of a `GatedDeltaNet`: the last inputs of its convolution, and its recurrent state."""
    return StateSpec((heads, 2 * key + values * value, taps - 1)), StateSpec((heads * values, key, value), exact=True)


def _unit(x: Float[Array, "*batch d"]) -> Float[Array, "*batch d"]:
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _UNIT_EPS)
