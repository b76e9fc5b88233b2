"""The device side of the KV cache: one array per layer, donated to every step, and how a step reads and writes it."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxinfer.types import CacheSpec, LayerSpec
from pallas_kernels import kv_write, paged_attention


class LayerPool(NamedTuple):
    """Keys and values of one layer; ``scales`` has size zero while the pool is not quantised."""

    data: Float[Array, "pages 2 kv_heads page head_dim"]
    scales: Float[Array, " none"]


def new_pools(spec: CacheSpec, pages: int, page_size: int, dtype: jnp.dtype) -> list[LayerPool]:
    """Zeroed pools, one per layer: what nobody wrote must be finite, since masked keys are multiplied by zero."""
    shape = spec.pool_shape(pages, page_size)
    return [LayerPool(jnp.zeros(shape, dtype), jnp.zeros((0,), jnp.float32)) for _ in spec.layers]


class DecodeAttend(NamedTuple):
    """`Attend` for rows of one token each: row r stands at ``positions[r]`` of the sequence with ``tables[r]``.

    A row at position -1 is padding: it writes nothing and attends to nothing.
    """

    tables: Int[Array, "rows width"]
    positions: Int[Array, " rows"]

    def __call__(
        self, q: jax.Array, k: jax.Array, v: jax.Array, cache: LayerPool, layer: LayerSpec, scale: float
    ) -> tuple[jax.Array, LayerPool]:
        pages, page = cache.data.shape[0], cache.data.shape[3]
        at = jnp.maximum(self.positions, 0)
        own = jnp.take_along_axis(self.tables, (at // page)[:, None], axis=1)[:, 0]
        data = kv_write.write_rows(cache.data, k, v, jnp.where(self.positions >= 0, own, pages), at % page)
        mixed = paged_attention.decode(q, data, self.tables, self.positions + 1, scale=scale, window=layer.window)
        return mixed, cache._replace(data=data)


class PrefillAttend(NamedTuple):
    """`Attend` for chunks, one a lane: ``lengths`` tokens from ``starts``, multiples of the page size.

    The rows are the lanes' tokens one lane after another, all padded to one size. A lane of length 0 writes nothing.
    Lanes may be consecutive chunks of one sequence: all write before any attends.
    """

    tables: Int[Array, "lanes width"]
    starts: Int[Array, " lanes"]
    lengths: Int[Array, " lanes"]

    def __call__(
        self, q: jax.Array, k: jax.Array, v: jax.Array, cache: LayerPool, layer: LayerSpec, scale: float
    ) -> tuple[jax.Array, LayerPool]:
        (pages, _, _, page, _), (lanes, width) = cache.data.shape, self.tables.shape
        q, k, v = (x.reshape(lanes, x.shape[0] // lanes, *x.shape[1:]) for x in (q, k, v))
        index = jnp.arange(-(-q.shape[1] // page))
        at = jnp.minimum(self.starts[:, None] // page + index, width - 1)
        own = jnp.take_along_axis(self.tables, at, axis=1)
        data = kv_write.write_pages(cache.data, k, v, jnp.where(index * page < self.lengths[:, None], own, pages))
        ends = jnp.where(self.lengths > 0, self.starts + self.lengths, 0)
        mixed = paged_attention.prefill(q, data, self.tables, self.starts, ends, scale=scale, window=layer.window)
        return mixed.reshape(-1, *mixed.shape[2:]), cache._replace(data=data)
