"""The meaning of a copy of pages, one page after the other."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def copy_pages(
    pool: Float[Array, "pages 2 kv_heads page head_dim"], source: Int[Array, " copies"], target: Int[Array, " copies"]
) -> Float[Array, "pages 2 kv_heads page head_dim"]:
    """Page ``source[i]`` to page ``target[i]``. A target beyond the pool is dropped, whatever its source.

    No page may be the target of two copies; one that is both a source and a target gives what it held before.
    """
    result = pool
    for i in range(source.shape[0]):
        meant = jnp.arange(pool.shape[0]) == target[i]
        result = jnp.where(meant[:, None, None, None, None], pool[jnp.minimum(source[i], pool.shape[0] - 1)], result)
    return result
