"""The plain recurrence, token by token: what every path of the op must agree with."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def step(
    q: Float[Array, "*batch heads key"],
    k: Float[Array, "*batch heads key"],
    v: Float[Array, "*batch heads value"],
    decay: Float[Array, "*batch heads"],
    beta: Float[Array, "*batch heads"] | None,
    state: Float[Array, "*batch heads key value"],
) -> tuple[Float[Array, "*batch heads value"], Float[Array, "*batch heads key value"]]:
    """One token: the output, and the state after it.

    Without ``beta`` this is gated linear attention, and with q = C, k = B, v = dt x the recurrence of Mamba-2 (Dao & Gu
    2024): ``S = exp(decay) S + k v^T``, ``out = S^T q``. With it the gated delta rule (Yang et al. 2024): what the
    state has under ``k`` is taken out first, ``S += beta k (v - S^T k)^T``.
    """
    state = state * jnp.exp(decay)[..., None, None]
    if beta is not None:
        v = (v - jnp.sum(state * k[..., :, None], axis=-2)) * beta[..., None]
    state = state + k[..., :, None] * v[..., None, :]
    return jnp.sum(state * q[..., :, None], axis=-2), state


def scan(
    q: Float[Array, "batch time heads key"],
    k: Float[Array, "batch time heads key"],
    v: Float[Array, "batch time heads value"],
    decay: Float[Array, "batch time heads"],
    beta: Float[Array, "batch time heads"] | None,
    state: Float[Array, "batch heads key value"],
) -> tuple[Float[Array, "batch time heads value"], Float[Array, "batch time heads key value"]]:
    """All outputs, and the state after each token."""
    operands = [jnp.moveaxis(x, 1, 0) for x in (q, k, v, decay, *([] if beta is None else [beta]))]

    def once(state: jax.Array, now: list[jax.Array]) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        out, state = step(*now[:4], now[4] if len(now) > 4 else None, state)
        return state, (out, state)

    outs, states = jax.lax.scan(once, state, operands)[1]
    return jnp.moveaxis(outs, 0, 1), jnp.moveaxis(states, 0, 1)
