"""Reference recurrence, token by token: every path of the op must agree with it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def step(
    q: Float[Array, "*batch heads key"],
    k: Float[Array, "*batch heads key"],
    v: Float[Array, "*batch heads value"],
    decay: Float[Array, "*batch heads"],
    beta: Float[Array, "*batch heads"] | None,
    state: Float[Array, "*batch heads key value"],
) -> tuple[Float[Array, "*batch heads value"], Float[Array, "*batch heads key value"]]:
    """Process one token: return the output, and the state after it.

    Without ``beta`` this is gated linear attention, and with q = C, k = B, v = dt x the recurrence of Mamba-2 (Dao & Gu
    2024): ``S = exp(decay) S + k v^T``, ``out = S^T q``. With it the gated delta rule (Yang et al. 2024): the state's
    value under ``k`` is removed first, ``S += beta k (v - S^T k)^T``.
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
    """Return all outputs, and the state after each token."""
    operands = [jnp.moveaxis(x, 1, 0) for x in (q, k, v, decay, *([] if beta is None else [beta]))]

    def once(state: jax.Array, now: list[jax.Array]) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        q, k, v, decay, *betas = now
        out, state = step(q, k, v, decay, betas[0] if betas else None, state)
        return state, (out, state)

    outs, states = jax.lax.scan(once, state, operands)[1]
    return jnp.moveaxis(outs, 0, 1), jnp.moveaxis(states, 0, 1)


def decode(
    q: Float[Array, "rows k_heads key"],
    k: Float[Array, "rows k_heads key"],
    v: Float[Array, "rows heads value"],
    decay: Float[Array, "rows heads"],
    beta: Float[Array, "rows heads"] | None,
    pool: Float[Array, "states heads key value"],
    read: Int[Array, " rows"],
    write: Int[Array, " rows"],
) -> tuple[Float[Array, "rows heads value"], Float[Array, "states heads key value"]]:
    """Run `step` on states in a pool: row r continues from state ``read[r]`` and writes its state to ``write[r]``.

    An id out of range reads zeros, and a write to it is dropped. All reads precede all writes. Head h has the query and
    the key of head ``h * k_heads // heads``.
    """
    q, k = (per_head(x, v) for x in (q, k))
    out, state = step(q, k, v.astype(pool.dtype), decay, beta, begin(pool, read))
    return out, put(pool, write, state)


def prefill(
    q: Float[Array, "batch time k_heads key"],
    k: Float[Array, "batch time k_heads key"],
    v: Float[Array, "batch time heads value"],
    decay: Float[Array, "batch time heads"],
    beta: Float[Array, "batch time heads"] | None,
    pool: Float[Array, "states heads key value"],
    read: Int[Array, " batch"],
    write: Int[Array, "batch chunks"],
) -> tuple[Float[Array, "batch time heads value"], Float[Array, "states heads key value"]]:
    """Run `scan` on states in a pool, as `decode`: ``write[b, c]`` is the state of sequence b after its chunk c."""
    q, k = (per_head(x, v) for x in (q, k))
    outs, states = scan(q, k, v.astype(pool.dtype), decay, beta, begin(pool, read))
    size = q.shape[1] // write.shape[1]
    return outs, put(pool, write, states[:, size - 1 :: size])


def per_head(x: Float[Array, "*batch k_heads key"], v: Float[Array, "*batch heads value"]) -> jax.Array:
    """Repeat the queries or keys for each head of ``v``, in float32 at least."""
    return jnp.repeat(x, v.shape[-2] // x.shape[-2], axis=-2).astype(jnp.promote_types(x.dtype, jnp.float32))


def begin(pool: jax.Array, read: jax.Array) -> jax.Array:
    """Return the states of some ids; zeros if out of range."""
    return pool.at[read].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def put(pool: jax.Array, write: jax.Array, state: jax.Array) -> jax.Array:
    """Write states to some ids; drop those out of range."""
    return pool.at[write].set(state, mode="drop", wrap_negative_indices=False)
