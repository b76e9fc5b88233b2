"""linear_attention in XLA: a step for rows of one token, and chunks of some tens of tokens for prompts.

Within a chunk everything is matrix products; the state is carried from chunk to chunk (Yang et al. 2024, "Gated Delta
Networks"; Dao & Gu 2024 without the delta rule). Every product has the shape of one chunk of one head, so a token is
bitwise independent of the number of chunks in a program.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.linear_attention.reference import begin, decode, per_head, put, step

__all__ = ["chunks", "decode", "prefill", "step"]


def chunks(
    q: Float[Array, "batch time heads key"],
    k: Float[Array, "batch time heads key"],
    v: Float[Array, "batch time heads value"],
    decay: Float[Array, "batch time heads"],
    beta: Float[Array, "batch time heads"] | None,
    state: Float[Array, "batch heads key value"],
    size: int,
) -> tuple[Float[Array, "batch time heads value"], Float[Array, "batch chunks heads key value"]]:
    """Return all outputs, and the state after each chunk of ``size`` tokens; ``time`` is a multiple of it."""

    def once(state: jax.Array, now: list[jax.Array]) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        out, state = _chunk(now, state)
        return state, (out, state)

    outs, states = lax.scan(once, state, _given(q, k, v, decay, beta, size))[1]
    return _joined(outs), jnp.moveaxis(states, 0, 1)


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
    """See `reference.prefill`. Each chunk's states are written to the pool at once: only one per sequence is live."""
    q, k, v = per_head(q, v), per_head(k, v), v.astype(jnp.float32)

    def once(held: tuple[jax.Array, jax.Array], now: tuple[Any, Any]) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        state, pool = held
        out, state = _chunk(now[0], state)
        return (state, put(pool, now[1], state)), out

    given = _given(q, k, v, decay, beta, v.shape[1] // write.shape[1]), write.T
    (_, pool), outs = lax.scan(once, (begin(pool, read), pool), given)
    return _joined(outs), pool


def _given(q: Any, k: Any, v: Any, decay: Any, beta: Any, size: int) -> list[jax.Array]:
    """Return the inputs of a scan over chunks."""
    return [_cut(x, size) for x in (q, k, v, decay[..., None], *([] if beta is None else [beta[..., None]]))]


def _joined(outs: Float[Array, "chunks batch heads size value"]) -> Float[Array, "batch time heads value"]:
    whole = jnp.moveaxis(outs, (0, 2), (1, 3))  # [batch, chunks, size, heads, value]
    return whole.reshape(whole.shape[0], -1, *whole.shape[3:])


def _cut(x: Float[Array, "batch time heads d"], size: int) -> Float[Array, "chunks batch heads size d"]:
    cut = x.reshape(x.shape[0], x.shape[1] // size, size, *x.shape[2:])
    return jnp.moveaxis(cut, (1, 3), (0, 2))


def _chunk(
    now: list[jax.Array], state: Float[Array, "batch heads key value"]
) -> tuple[Float[Array, "batch heads size value"], Float[Array, "batch heads key value"]]:
    """Return the outputs of one chunk, and the state after it."""
    q, k, v, (decay, *betas) = *now[:3], (gate[..., 0] for gate in now[3:])
    beta = betas[0] if betas else None
    size = q.shape[-2]
    since = jnp.cumsum(decay, axis=-1)  # the decay since the chunk began, the token's own included
    index = jnp.arange(size)
    causal = index[:, None] >= index[None, :]
    # Sums of the decays between two tokens, not differences of the large sums since the beginning.
    steps = jnp.where(index[:, None] > index[None, :], decay[..., :, None], 0.0)
    between = jnp.where(causal, jnp.exp(jnp.cumsum(steps, axis=-2)), 0.0)
    before = jnp.exp(since)[..., None]
    if beta is not None:
        seen = jnp.where(index[:, None] > index[None, :], _product("bhik,bhjk->bhij", k * beta[..., None], k), 0.0)
        solved = _inverse(seen * between)
        written = _product("bhij,bhjv->bhiv", solved, v * beta[..., None])
        taken = _product("bhij,bhjk->bhik", solved, k * beta[..., None] * before)
        v = written - _product("bhik,bhkv->bhiv", taken, state)
    scores = _product("bhik,bhjk->bhij", q, k) * between
    out = _product("bhik,bhkv->bhiv", q * before, state) + _product("bhij,bhjv->bhiv", scores, v)
    left = between[..., -1, :, None]
    kept = state * jnp.exp(since[..., -1])[..., None, None]
    return out, kept + _product("bhik,bhiv->bhkv", k * left, v)


def _product(form: str, one: jax.Array, other: jax.Array) -> jax.Array:
    return jnp.einsum(form, one, other, precision=lax.Precision.HIGHEST)


def _inverse(lower: Float[Array, "*batch size size"]) -> Float[Array, "*batch size size"]:
    """Return the inverse of ``1 + lower``, ``lower`` strictly lower triangular of a power-of-two size, by doubling
    block sizes. As stable as substitution; powers of ``lower`` would be products of huge numbers."""
    size, width = lower.shape[-1], 1
    inverse = jnp.ones((*lower.shape[:-2], size, 1, 1), lower.dtype)  # of the blocks along the diagonal
    while width < size:
        count = size // (2 * width)
        blocks = lower.reshape(*lower.shape[:-2], count, 2 * width, count, 2 * width)
        own = jnp.moveaxis(jnp.diagonal(blocks, axis1=-4, axis2=-2), -1, -3)[..., width:, :width]
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        below = -_product("...ij,...jk->...ik", _product("...ij,...jk->...ik", second, own), first)
        upper = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        inverse = jnp.concatenate([upper, jnp.concatenate([below, second], axis=-1)], axis=-2)
        width *= 2
    return inverse[..., 0, :, :]
