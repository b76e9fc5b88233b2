"""Reference of the grouped matrix product, row by row."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

__all__ = ["check", "matmul"]


def check(x: Any, weights: Any) -> None:
    """Raise ValueError if ``x`` [..., k] and ``weights`` [experts, ..., k] do not fit each other."""
    if weights.ndim < 3 or x.shape[-1] != weights.shape[-1]:
        raise ValueError(f"x {x.shape} and weights {weights.shape} of [experts, outputs, inputs] do not fit each other")


def matmul(
    x: Float[Array, "rows k"], weights: Float[Array, "experts *n k"], experts: Int[Array, " rows"]
) -> Float[Array, "rows *n"]:
    """Compute ``weights[experts[i]] @ x[i]`` for every row in float32; 0 where ``experts`` is out of range.

    Raises:
        ValueError: shapes that do not fit each other.
    """
    check(x, weights)
    known = (experts >= 0) & (experts < weights.shape[0])
    chosen = weights[jnp.where(known, experts, 0)].astype(jnp.float32)
    rows = jnp.where(known[:, None], x, 0).astype(jnp.float32)
    return jnp.einsum("rk,r...k->r...", rows, chosen, precision="highest")
