"""Mamba-2: a state-space layer with one decay per head and token, after a short convolution (Dao & Gu 2024)."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxinfer.layers.base import Layer
from jaxinfer.layers.mlp import ACTIVATIONS
from jaxinfer.layers.recurrent import Recurrence, linear_recurrence, recur, short_conv
from jaxinfer.parallel.tokens import all_tokens, own_tokens
from jaxinfer.quant import matmul, plus_bias
from jaxinfer.types import LayerSpec, StateSpec

UNLIMITED = (0.0, float("inf"))


@dataclasses.dataclass(frozen=True)
class MambaSizes:
    """Sizes and switches of `Mamba2`.

    Attributes:
        groups: groups of neighbouring heads, which share B (input to the state) and C (output of the state).
        state: state size per head dim.
        taps: kernel size of the convolution, in tokens.
        activation: activation after the convolution.
        bias, conv_bias, out_bias: whether the input projection, convolution and output projection have biases.
        norm: "gated": norm after the gate; "before gate": norm before the gate; None: gate without norm.
        limits: clipping range of the time steps.
        multipliers: factors of the projected gate, values, B, C and time steps.
    """

    heads: int
    head_dim: int
    groups: int
    state: int
    taps: int
    activation: str = "silu"
    bias: bool = False
    conv_bias: bool = True
    out_bias: bool = False
    norm: Literal["gated", "before gate"] | None = "gated"
    limits: tuple[float, float] = UNLIMITED
    multipliers: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def states(self) -> tuple[StateSpec, StateSpec, StateSpec]:
        """Specs of the states: convolution inputs of heads and of groups, and the recurrent state. Group states are
        replicated, since there may be fewer groups than devices."""
        heads = StateSpec((self.heads, self.head_dim, self.taps - 1))
        groups = StateSpec((2 * self.groups, self.state, self.taps - 1), whole=True)
        return heads, groups, StateSpec((self.heads, self.state, self.head_dim), exact=True)


class Mamba2(Layer):
    """Mamba-2 mixer.

    Parameters: ``zx`` [d, heads, 2 head_dim], the gate and values of each head, so that sharding over heads keeps them
    together; ``dt`` [d, heads]; ``bc`` [d, 2 groups, state], B of all groups, then C; ``conv_x`` [heads, head_dim,
    taps], ``conv_bc`` [2 groups, state, taps]; ``log_decay``, ``dt_bias`` and ``skip`` [heads]; ``norm`` [heads,
    head_dim]; ``out`` [heads head_dim, d]. Depending on the switches also ``zx_bias``, ``dt_in_bias``, ``bc_bias``,
    ``conv_x_bias``, ``conv_bc_bias`` and ``out_bias``.

    Attributes:
        layer: has the states of `MambaSizes.states`.
    """

    sizes: MambaSizes
    layer: LayerSpec
    eps: float

    def __call__(self, x: Float[Array, "*batch d"], attend: Any, cache: Any) -> tuple[Float[Array, "*batch d"], Any]:
        """Mix previous tokens into each token; ``cache`` holds the states of `MambaSizes.states`."""
        rows, (of_x, of_bc, of_memory) = x.shape[:-1], self.layer.states[-3:]
        z, values, bc, dt = self._projected(all_tokens(x))
        kept = (None,) * 3 if cache is None else cache.states
        values, conv_x = recur(attend, self._conv("conv_x"), values, kept[0], of_x, rows, x.dtype)
        bc, conv_bc = recur(attend, self._conv("conv_bc"), bc, kept[1], of_bc, rows, x.dtype)
        values, bc = (self._activated(part) for part in (values, bc))
        steps = self._steps(dt)
        decay = -jnp.exp(self._wide("log_decay")) * steps
        keys, queries = self._by_head(bc)
        operands = (queries, keys, values * steps[..., None], decay)
        mixed, memory = recur(attend, linear_recurrence, operands, kept[2], of_memory, rows, x.dtype)
        gated = self._gated(mixed + self._wide("skip")[:, None] * values, z)
        out = own_tokens(matmul(gated.astype(x.dtype).reshape(*rows, -1), self.weight("out")))
        out = plus_bias(out, self.weight("out_bias")) if self.sizes.out_bias else out
        return out, None if cache is None else cache._replace(states=(conv_x, conv_bc, memory))

    def _wide(self, name: str) -> jax.Array:
        return self.weight(name).astype(jnp.float32)

    def _projected(self, x: Float[Array, "*batch d"]) -> tuple[jax.Array, ...]:
        """Return the gate and values of each head, B and C of each group, and the time steps."""
        zx, bc, dt = (self._linear(x, *names) for names in (("zx", "zx_bias"), ("bc", "bc_bias"), ("dt", "dt_in_bias")))
        z, values = jnp.split(zx, 2, axis=-1)
        parts = (z, values, *jnp.split(bc, 2, axis=-2), dt)
        scaled = (part if by == 1.0 else part * by for part, by in zip(parts, self.sizes.multipliers, strict=True))
        z, values, b, c, dt = scaled
        return z, values, jnp.concatenate([b, c], axis=-2), dt

    def _linear(self, x: Float[Array, "*batch d"], weight: str, bias: str) -> jax.Array:
        return matmul(x, self.weight(weight), self.weight(bias) if self.sizes.bias else None)

    def _conv(self, name: str) -> Recurrence:
        return short_conv(self.weight(name), self.weight(f"{name}_bias") if self.sizes.conv_bias else None)

    def _activated(self, x: Float[Array, "*batch"]) -> Float[Array, "*batch"]:
        """Apply the activation in the model dtype and return float32."""
        return ACTIVATIONS[self.sizes.activation](x).astype(jnp.float32)

    def _steps(self, dt: Float[Array, "*batch heads"]) -> Float[Array, "*batch heads"]:
        """Return the float32 time steps, which set how much of a token is written and how far a state decays."""
        steps = jax.nn.softplus(dt.astype(jnp.float32) + self._wide("dt_bias"))
        return steps if self.sizes.limits == UNLIMITED else jnp.clip(steps, *self.sizes.limits)

    def _by_head(self, bc: Float[Array, "*batch groups state"]) -> tuple[jax.Array, jax.Array]:
        """Repeat B and C of each group for its heads."""
        b, c = jnp.split(bc, 2, axis=-2)
        heads = self.sizes.heads // self.sizes.groups
        return jnp.repeat(b, heads, axis=-2), jnp.repeat(c, heads, axis=-2)

    def _gated(
        self, mixed: Float[Array, "*batch heads head_dim"], z: Float[Array, "*batch heads head_dim"]
    ) -> Float[Array, "*batch heads head_dim"]:
        gate = jax.nn.silu(z.astype(jnp.float32))
        if self.sizes.norm is None:
            return mixed * gate
        before = self.sizes.norm == "before gate"
        mixed = mixed if before else mixed * gate
        by_group = mixed.reshape(*mixed.shape[:-2], self.sizes.groups, -1)
        square = jnp.mean(by_group * by_group, axis=-1, keepdims=True)
        normal = (by_group * jax.lax.rsqrt(square + self.eps)).reshape(mixed.shape) * self._wide("norm")
        return normal * gate if before else normal
