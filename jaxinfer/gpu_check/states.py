"""Linear attention on states in a pool: poisoned operands and their exact result, and calls that return the pool."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from pallas_kernels.linear_attention import reference
from pallas_kernels.linear_attention import xla as plain
from pallas_kernels.linear_attention.mosaic import decode, prefill

__all__ = ["exact", "mosaic", "operands", "xla"]

_GATES, _STATES = ("decay", "beta"), 9


def operands(quick: bool, *, size: int | None, dtype: Any, delta: bool) -> dict[str, np.ndarray]:
    """Build rows that continue in place and elsewhere, and one that begins and stores nothing; other states are NaN.

    Args:
        size: tokens of a chunk; None: one token of each row.
        delta: the delta rule, of heads that share a key; else Mamba-2, each head with its own key.
    """
    rng, (key, value) = np.random.default_rng(0), (64, 32) if quick else (128, 128 if delta else 64)
    k_heads, heads = (1, 2) if quick else (16, 32 if delta else 16)
    read = np.array([1, _STATES, 3], np.int32)
    write = np.array([[-1, 1], [0, _STATES], [2, 4]], np.int32)[:, :: 1 if size else -1]
    lead = (3, 2 * size) if size else (3,)
    q, k = rng.normal(size=(2, *lead, k_heads, key)) / key**0.5
    arrays = {"q": q.astype(dtype), "k": k.astype(dtype), "v": rng.normal(size=(*lead, heads, value)).astype(dtype)}
    arrays["decay"] = -rng.exponential(0.3, (*lead, heads)).astype(np.float32)
    if delta:
        arrays["beta"] = rng.uniform(size=(*lead, heads)).astype(np.float32)
    pool = np.full((_STATES, heads, key, value), np.nan, np.float32)
    pool[[1, 3]] = rng.normal(size=(2, *pool.shape[1:]))
    return {**arrays, "pool": pool, "read": read, "write": write if size else write[:, 0]}


def exact(arrays: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return outputs and pool in float64."""
    with jax.enable_x64(True):
        wide = {name: x if x.dtype == np.int32 else x.astype(np.float64) for name, x in arrays.items()}
        path = reference.decode if wide["v"].ndim == 3 else reference.prefill
        out, pool = jax.jit(path)(**{"beta": None, **wide})
        return np.asarray(out), np.asarray(pool)


def mosaic(pool: Any, q: Any, k: Any, v: Any, decay: Any, beta: Any, read: Any, write: Any) -> jax.Array:
    """Run the Mosaic kernel on the tokens of all rows; return the pool."""
    door = decode.decode if v.ndim == 3 else prefill.prefill
    return door(q, k, v, decay, beta, pool, read, write)[1]


def xla(pool: Any, q: Any, k: Any, v: Any, decay: Any, beta: Any, read: Any, write: Any) -> jax.Array:
    """Run XLA on the tokens of all rows; return the pool."""
    door = plain.decode if v.ndim == 3 else plain.prefill
    return door(q, k, v, decay, beta, pool, read, write)[1]
