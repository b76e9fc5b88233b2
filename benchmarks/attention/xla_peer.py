"""The jaxinfer peer: XLA attention over pages of 64 tokens in a shuffled order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.attention.shapes import LAYERS, Shape, serve
from pallas_kernels import paged_attention

PAGE = 64


def prepare(shape: Shape, dtype: str) -> Callable[[], Any]:
    rng, rows = np.random.default_rng(0), len(shape.lengths)
    width = -(-max(shape.lengths) // PAGE)
    pool = jnp.asarray(rng.standard_normal((rows * width, 2, shape.kv_heads, PAGE, shape.head_dim), np.float32), dtype)
    tables = jnp.asarray(rng.permutation(rows * width).reshape(rows, width), jnp.int32)
    lengths = jnp.asarray(shape.lengths, jnp.int32)
    q = jnp.asarray(rng.standard_normal((rows, shape.queries, shape.heads, shape.head_dim), np.float32), dtype)
    starts = lengths - shape.queries
    one, options = q[:, 0], paged_attention.AttentionOptions(shape.head_dim**-0.5)

    @jax.jit
    def decode(q: jax.Array, pool: jax.Array, tables: jax.Array, lengths: jax.Array) -> jax.Array:
        for _ in range(LAYERS):
            q = paged_attention.decode(q, pool, tables, lengths, options)
        return q

    @jax.jit
    def prefill(q: jax.Array, pool: jax.Array, tables: jax.Array, starts: jax.Array, lengths: jax.Array) -> jax.Array:
        for _ in range(LAYERS):
            q = paged_attention.prefill(q, pool, tables, starts, lengths, options)
        return q

    if shape.queries == 1:
        return lambda: decode(one, pool, tables, lengths).block_until_ready()
    return lambda: prefill(q, pool, tables, starts, lengths).block_until_ready()


if __name__ == "__main__":
    serve({"jax": jax.__version__}, prepare)
