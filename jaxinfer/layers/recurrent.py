"""Recurrences of layers with a fixed-size state, independent of where the state is stored (docs/states.md)."""

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
"""Function ``(inputs, state, lengths, size)`` that returns the outputs of chunks ``[batch, time, ...]`` of sequences,
with ``lengths`` valid tokens, and the states ``[batch, chunks, ...]`` after each ``size`` valid tokens. The output of a
token may depend only on earlier tokens and on its position in its chunk."""

_SIZE = 64  # tokens per chunk of the reference implementation


@runtime_checkable
class Recur(Protocol):
    """Interface of an `Attend` that also stores recurrent states between steps."""

    def recur(self, function: Recurrence, inputs: Any, state: Any) -> tuple[Any, Any]:
        """Run a recurrence over rows ``[*batch, ...]`` from the stored states, and store the resulting states."""


def recur(
    attend: Any, function: Recurrence, inputs: Any, state: Any, spec: StateSpec, rows: tuple[int, ...], dtype: Any
) -> tuple[Any, Any]:
    """Run a recurrence through `Recur`, or, without a ``state``, over whole sequences (differentiable).

    Args:
        inputs: arrays ``[*rows, ...]``; without a state the last of ``rows`` is time.
        spec: spec of the state; ``dtype``: the model dtype.
    """
    if state is not None:
        assert isinstance(attend, Recur)
        return attend.recur(function, inputs, state)
    *batch, time = rows
    count = math.prod(batch)
    cut = jax.tree.map(lambda x: x.reshape(count, time, *x.shape[len(rows) :]), inputs)
    zeros = jnp.zeros((count, *spec.shape), jnp.float32 if spec.exact else dtype)
    outputs, _ = run_whole(function, cut, zeros, jnp.full(count, time))
    return jax.tree.map(lambda x: x.reshape(*rows, *x.shape[2:]), outputs), None


def run_whole(function: Recurrence, inputs: Any, state: Any, lengths: Int[Array, " batch"]) -> tuple[Any, jax.Array]:
    """Run a recurrence over chunks ``[batch, time, ...]`` of any length; return the outputs and the final states."""
    time = jax.tree.leaves(inputs)[0].shape[1]
    size = 1 if time == 1 else _SIZE
    padded = jax.tree.map(lambda x: jnp.pad(x, [(0, 0), (0, -time % size), *[(0, 0)] * (x.ndim - 2)]), inputs)
    outputs, states = function(padded, state, lengths, size)
    return jax.tree.map(lambda x: x[:, :time], outputs), states[:, -1]


def short_conv(weight: Float[Array, "*channels taps"], bias: Float[Array, "*channels"] | None = None) -> Recurrence:
    """Make a causal convolution of each channel over ``taps`` tokens; its state is the last ``taps - 1`` inputs."""
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


class LinearAttention:
    """`Recurrence` of linear attention; inputs are those of `linear_attention.chunks`, beta optional. The number of
    query and key heads divides that of value heads."""

    def __call__(
        self,
        inputs: tuple[jax.Array, ...],
        state: Float[Array, "batch heads key value"],
        lengths: Int[Array, " batch"],
        size: int,
    ) -> tuple[Float[Array, "batch time heads value"], Float[Array, "batch chunks heads key value"]]:
        q, k, v, decay, *beta = _real(inputs, lengths)
        q, k = (jnp.repeat(x, v.shape[2] // x.shape[2], axis=2) for x in (q, k))
        if q.shape[1] > 1:
            return linear_attention.chunks(q, k, v, decay, *beta, state=state, size=size)
        now = (x[:, 0] for x in (q, k, v, decay, *beta))
        out, after = linear_attention.step(*now, state=state)
        return out[:, None], after[:, None]

    def in_pool(
        self,
        inputs: tuple[jax.Array, ...],
        pool: Float[Array, "states heads key value"],
        read: Int[Array, " batch"],
        write: Int[Array, "batch chunks"],
        lengths: Int[Array, " batch"],
        size: int,
    ) -> tuple[jax.Array, jax.Array] | None:
        """Run the recurrence in one kernel, from and to states in a pool; None: no kernel supports these operands.

        Args:
            read, write: indices in the pool; out of bounds, a state is read as zeros, or its write is dropped.
        """
        q, k, v, decay, *beta = _real(inputs, lengths)
        operands, one = (q, k, v, decay, beta[0] if beta else None), q.shape[1] == 1
        if one:
            operands, write = jax.tree.map(lambda x: x[:, 0], operands), write[:, 0]
        if linear_attention.explain(*operands, pool, read, write).path != "mosaic":
            return None
        if one:
            out, pool = linear_attention.decode(*operands, pool, read, write)
            return out[:, None], pool
        return linear_attention.prefill(*operands, pool, read, write, size)


linear_recurrence = LinearAttention()


def _real(inputs: tuple[jax.Array, ...], lengths: Int[Array, " batch"]) -> list[jax.Array]:
    """Zero the padding of the inputs, so that it changes no state."""
    live = jnp.arange(inputs[0].shape[1]) < lengths[:, None]
    return [jnp.where(live.reshape(*live.shape, *[1] * (x.ndim - 2)), x, 0) for x in inputs]
