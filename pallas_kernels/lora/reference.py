"""Reference of the low-rank product, row by row."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

__all__ = ["check", "low_rank"]


def check(x: Any, a: Any, b: Any) -> None:
    """Raise ValueError if ``x`` [..., k], ``a`` [slots, rank, k] and ``b`` [slots, ..., rank] do not fit."""
    if a.ndim != 3 or b.ndim < 3 or (*a.shape[:2], x.shape[-1]) != (b.shape[0], b.shape[-1], a.shape[2]):
        raise ValueError(
            f"x {x.shape}, a {a.shape} of [slots, rank, inputs] and b {b.shape} of [slots, outputs, rank] do not fit "
            "each other"
        )


def low_rank(
    x: Float[Array, "rows k"],
    a: Float[Array, "slots rank k"],
    b: Float[Array, "slots *n rank"],
    slots: Int[Array, " rows"],
    *,
    dtype: Any = jnp.float32,
) -> Float[Array, "rows *n"]:
    """Compute ``b[slots[i]] @ (a[slots[i]] @ x[i])`` for every row in ``dtype``; 0 where ``slots`` is out of range.

    Raises:
        ValueError: shapes that do not fit each other.
    """
    check(x, a, b)
    known = (slots >= 0) & (slots < a.shape[0])
    shrink, expand = (bank[jnp.where(known, slots, 0)].astype(dtype) for bank in (a, b))
    rows = jnp.where(known[:, None], x, 0).astype(dtype)
    hidden = jnp.einsum("ik,irk->ir", rows, shrink, precision="highest")
    return jnp.where(
        known.reshape(-1, *[1] * (b.ndim - 2)), jnp.einsum("ir,i...r->i...", hidden, expand, precision="highest"), 0
    )
