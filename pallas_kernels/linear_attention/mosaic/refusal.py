"""Rejections of the linear attention kernels: operands that they do not support, in words."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
UNIT = 16  # keys, and values of a head, are multiples of this
MOST_KEYS = 256
TOKENS = 16  # tokens of a prefill step


def decode_refusal(q: Any, k: Any, v: Any, decay: Any, beta: Any, pool: Any, read: Any, write: Any) -> str | None:
    """Return why the kernel does not support operands of these shapes and dtypes; None if it does."""
    rows, gates = v.shape[:-2], [x.shape for x in (decay, beta) if x is not None]
    if q.shape != k.shape or q.shape[:-2] != rows or any(shape != v.shape[:-1] for shape in gates):
        return f"queries {q.shape}, keys {k.shape}, values {v.shape} and gates {gates} do not fit each other"
    if read.shape != rows or write.shape != rows:
        return f"{rows} rows, but states {read.shape} to read and {write.shape} to write"
    return _of_states(q, k, v, pool)


def _of_states(q: Any, k: Any, v: Any, pool: Any) -> str | None:
    (k_heads, key), (heads, value) = q.shape[-2:], v.shape[-2:]
    if pool.ndim != 4 or pool.shape[1:] != (heads, key, value) or heads % k_heads:
        return f"queries {q.shape}, values {v.shape} and the pool {pool.shape} do not fit each other"
    if pool.dtype != jnp.float32:
        return f"states of {pool.dtype}: float32 is needed"
    if wrong := [str(x.dtype) for x in (q, k, v) if x.dtype not in DTYPES]:
        return f"queries, keys or values of {wrong[0]}: float32, bfloat16 or float16 is needed"
    if key % UNIT or key > MOST_KEYS or value % UNIT or not min(key, value, pool.shape[0]):
        return f"{pool.shape[0]} states of {key} keys and {value} values: multiples of {UNIT}, at most {MOST_KEYS} keys"
    return None


def prefill_refusal(q: Any, k: Any, v: Any, decay: Any, beta: Any, pool: Any, read: Any, write: Any) -> str | None:
    """Return why the kernel does not support operands of these shapes and dtypes; None if it does."""
    lead, gates = v.shape[:-2], [x.shape for x in (decay, beta) if x is not None]
    if q.shape != k.shape or q.shape[:-2] != lead or any(shape != v.shape[:-1] for shape in gates):
        return f"queries {q.shape}, keys {k.shape}, values {v.shape} and gates {gates} do not fit each other"
    if read.shape != lead[:1] or write.ndim != 2 or write.shape[:1] != lead[:1]:
        return f"{lead[0]} sequences, but states {read.shape} to read and {write.shape} to write"
    if not write.shape[1] or lead[1] % (write.shape[1] * TOKENS) or not lead[1]:
        return f"{lead[1]} tokens in {write.shape[1]} chunks: multiples of {TOKENS} are needed"
    (key, value), exact = (
        (q.shape[-1], v.shape[-1]),
        {jnp.dtype(q.dtype), jnp.dtype(k.dtype)} == {jnp.dtype(jnp.bfloat16)},
    )
    if key % 64 or value % 32 or (key > 128 and not exact):
        return f"{key} keys of {q.dtype} and {value} values: multiples of 64 and 32, above 128 keys bfloat16 are needed"
    return _of_states(q, k, v, pool)
