"""Recurrences: what layers with a state of fixed size compute, independent of where states are kept (docs/states.md)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxinfer.types import StateSpec
from pallas_kernels import linear_attention

Recurrence = Callable[[Any, jax.Array, Int[Array, " batch"], int], tuple[Any, jax.Array]]
"""``function(inputs, state, lengths, size)``: the outputs of pieces ``[batch, time, ...]`` of sequences, of which
``lengths`` tokens are real, and the states ``[batch, chunks, ...]`` behind each ``size`` of them, as far as they are
real. A token's output may depend on what is before it and on its place in its chunk, on nothing else."""

_SIZE = 64  # tokens of a chunk of the plain form


@runtime_checkable
class Recur(Protocol):
    """What an `Attend` that keeps states between steps has besides."""

    def recur(self, function: Recurrence, inputs: Any, state: Any) -> tuple[Any, Any]:
        """Run a recurrence over rows ``[*batch, ...]`` from the states that are kept, and keep those behind them."""
        ...


def recur(
    attend: Any, function: Recurrence, inputs: Any, state: Any, spec: StateSpec, rows: tuple[int, ...], dtype: Any
) -> tuple[Any, Any]:
    """Run a recurrence as `Recur` does, or without any ``state`` over whole sequences: differentiable.

    Args:
        inputs: arrays ``[*rows, ...]``; without a state the last of ``rows`` is time.
        spec: of the state; ``dtype`` where it names none.
    """
    if state is not None:
        assert isinstance(attend, Recur)
        return attend.recur(function, inputs, state)
    *batch, time = rows
    count = math.prod(batch)
    cut = jax.tree.map(lambda x: x.reshape(count, time, *x.shape[len(rows) :]), inputs)
    padded = jax.tree.map(lambda x: jnp.pad(x, [(0, 0), (0, -time % _SIZE), *[(0, 0)] * (x.ndim - 2)]), cut)
    zeros = jnp.zeros((count, *spec.shape), spec.dtype or dtype)
    outputs, _ = function(padded, zeros, jnp.full(count, time), _SIZE)
    return jax.tree.map(lambda x: x[:, :time].reshape(*rows, *x.shape[2:]), outputs), None


def short_conv(weight: Float[Array, "*channels taps"], bias: Float[Array, "*channels"] | None = None) -> Recurrence:
    """A causal convolution of each channel over the last ``taps`` tokens, whose state are the last ``taps - 1``."""
    return functools.partial(_short_conv, weight, bias)


def _short_conv(
    weight: Float[Array, "*channels taps"],
    bias: Float[Array, "*channels"] | None,
    x: Float[Array, "batch time *channels"],
    state: Float[Array, "batch *channels before"],
    lengths: Int[Array, " batch"],
    size: int,
) -> tuple[Float[Array, "batch time *channels"], Float[Array, "batch chunks *channels before"]]:
    time, taps = x.shape[1], weight.shape[-1]
    whole = jnp.concatenate([jnp.moveaxis(state, -1, 1).astype(x.dtype), x], axis=1)
    wide = weight.astype(jnp.float32)
    out = sum(whole[:, tap : tap + time].astype(jnp.float32) * wide[..., tap] for tap in range(taps))
    out = out if bias is None else out + bias.astype(jnp.float32)
    ends = jnp.minimum((jnp.arange(time // size) + 1) * size, lengths[:, None])
    last = ends[..., None] + jnp.arange(taps - 1)  # [batch, chunks, before]
    states = jax.vmap(lambda own, at: own[at])(whole, last)
    return jnp.asarray(out).astype(x.dtype), jnp.moveaxis(states, 2, -1).astype(state.dtype)


def linear_recurrence(
    inputs: tuple[jax.Array, ...], state: Float[Array, "batch heads key value"], lengths: Int[Array, " batch"], size: int
) -> tuple[Float[Array, "batch time heads value"], Float[Array, "batch chunks heads key value"]]:
    """`Recurrence` of linear attention: ``inputs`` are those of `linear_attention.chunks`, with or without beta."""
    q, k, v, decay, *beta = inputs
    if q.shape[1] == 1:
        out, after = linear_attention.step(*(x[:, 0] for x in (q, k, v, decay)), *(x[:, 0] for x in beta), state=state)
        return out[:, None], after[:, None]
    live = jnp.arange(q.shape[1]) < lengths[:, None]

    def real(x: jax.Array) -> jax.Array:
        return jnp.where(live.reshape(*live.shape, *[1] * (x.ndim - 2)), x, 0)

    return linear_attention.chunks(q, *map(real, (k, v, decay)), *map(real, beta), state=state, size=size)
