"""Operands that cost a kernel as much as a model's: random numbers (zeros draw less power), pages in random order."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Num

CACHE_BYTES = 128 << 20  # more than any GPU's cache so far: operands of this size come from memory
MOST_SETS = 16


def sets_beyond_cache(set_bytes: int) -> int:
    """Return how many operand sets of ``set_bytes`` bytes exceed the GPU's cache, 2 to `MOST_SETS`."""
    return max(2, min(MOST_SETS, math.ceil(CACHE_BYTES / set_bytes)))


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def numbers(seed: int | Int[Array, ""], shape: tuple[int, ...], dtype: Any) -> Num[Array, "..."]:
    """Draw integers of the whole range, or normally distributed floats."""
    key = jax.random.key(seed)
    if jnp.issubdtype(dtype, jnp.integer):
        least, most = int(jnp.iinfo(dtype).min), int(jnp.iinfo(dtype).max)
        return jax.random.randint(key, shape, least, most + 1, jnp.int32).astype(dtype)
    return jax.random.normal(key, shape, jnp.bfloat16).astype(dtype)


def tables(rows: int, width: int) -> Int[Array, "rows width"]:
    """Return page tables of rows that share no page, scattered over the pool."""
    pages = np.random.default_rng(0).permutation(rows * width).astype(np.int32)
    return jnp.asarray(pages.reshape(rows, width))


def filled(size: int, value: int) -> Int[Array, " size"]:
    return jnp.full((size,), value, jnp.int32)
