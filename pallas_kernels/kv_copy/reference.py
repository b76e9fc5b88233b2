"""The meaning of a copy of pages, one page after the other."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def copy_pages(
    pool: Float[Array, "pages 2 kv_heads page head_dim"], source: Int[Array, " copies"], target: Int[Array, " copies"]
) -> Float[Array, "pages 2 kv_heads page head_dim"]:
    """Page ``source[i]`` to page ``target[i]``. A target beyond the pool is dropped.

    No page may be the target of two copies; one that is both a source and a target gives what it held before.
    """
    result = pool
    for i in range(source.shape[0]):
        inside = target[i] < pool.shape[0]
        at = jnp.where(inside, target[i], 0)
        result = result.at[at].set(jnp.where(inside, pool[source[i]], result[at]))
    return result
