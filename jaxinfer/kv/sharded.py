"""Attention and page copies with heads sharded over devices: each device works on its own heads, in its own pool.

Kernels are not aware of a mesh, and XLA's partitioner cannot partition kernels. So both run inside `jax.shard_map`,
over the mesh that the program is traced for; without a mesh, or with one device along the axis, nothing is wrapped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int

from jaxinfer.kv.pool import DecodeAttend, LayerPool, PrefillAttend, Rope, copy_pages, fuses
from jaxinfer.kv.states import Recurrence
from jaxinfer.parallel.mesh import RULES, pool_spec, traced_size
from jaxinfer.types import CacheSpec, LayerSpec
from pallas_kernels.choice import Wish
from pallas_kernels.token_index import Index

_AXES = RULES["kv_heads"]
_REPLICATED, _HEADS = PartitionSpec(), PartitionSpec(None, _AXES)


def _pool(latent: bool) -> LayerPool:
    """Return the partition specs of a layer's pool."""
    heads: Any = pool_spec(latent)  # elements and scales have the same leading dimensions
    return LayerPool(heads, heads)


def spread(attend: DecodeAttend | PrefillAttend) -> DecodeAttend | PrefillAttend | ShardedAttend:
    """Wrap ``attend`` for the mesh that the program is traced for."""
    return attend if traced_size("kv_heads") == 1 else ShardedAttend(attend)


class ShardedAttend(NamedTuple):
    """`Attend` with the heads sharded over devices; latents serve all heads and are replicated."""

    attend: DecodeAttend | PrefillAttend

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array | None,
        v: jax.Array | None,
        cache: LayerPool,
        layer: LayerSpec,
        scale: float,
        sinks: jax.Array | None = None,
        chosen: jax.Array | None = None,
    ) -> tuple[jax.Array, LayerPool]:
        latent = layer.latent_rank is not None

        def attend_shard(attend: DecodeAttend | PrefillAttend, *operands: Any) -> tuple[jax.Array, LayerPool]:
            q, k, v, chosen, cache, sinks = operands
            return attend(q, k, v, cache, layer, scale, sinks, chosen)

        keys, pool = _REPLICATED if latent else _HEADS, _pool(latent)
        run = _by_heads(attend_shard, (_HEADS, keys, keys, _REPLICATED, pool))
        return run(self.attend, q, k, v, chosen, cache, sinks)

    def choosing(
        self, q: jax.Array, k: jax.Array, index: Index, cache: LayerPool, layer: LayerSpec, scale: float
    ) -> tuple[jax.Array, jax.Array | None, LayerPool]:
        """See `ChoosingAttend`: each device chooses the keys redundantly, from identical numbers."""

        def choosing_shard(attend: DecodeAttend | PrefillAttend, *operands: Any) -> Any:
            q, k, index, cache = operands
            return attend.choosing(q, k, index, cache, layer, scale)

        operands, results = (_REPLICATED, _HEADS, *[_REPLICATED] * 3), (_HEADS, _REPLICATED, _REPLICATED)
        run = jax.shard_map(choosing_shard, in_specs=operands, out_specs=results, check_vma=False)
        return run(self.attend, q, k, index, cache)

    def recur(self, function: Recurrence, inputs: Any, state: jax.Array) -> tuple[Any, jax.Array]:
        """See `jaxinfer.layers.recurrent.Recur`: states are sharded with their heads. Only XLA's implementation runs,
        because its partitioner cannot partition kernels."""
        return dataclasses.replace(self.attend, backend="xla").recur(function, inputs, state)

    def fused(
        self,
        qkv: jax.Array,
        rope: Rope,
        interleaved: bool,
        cache: LayerPool,
        layer: LayerSpec,
        scale: float,
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, LayerPool] | None:
        """See `FusedAttend`."""
        if not fuses(cache, qkv, rope, interleaved, self.attend.backend):
            return None

        def fused_shard(attend: DecodeAttend | PrefillAttend, *operands: Any) -> tuple[jax.Array, LayerPool] | None:
            qkv, rope, cache, sinks = operands
            return attend.fused(qkv, rope, interleaved, cache, layer, scale, sinks)

        return _by_heads(fused_shard, (_HEADS, _REPLICATED, _pool(latent=False)))(self.attend, qkv, rope, cache, sinks)


def _by_heads(function: Callable[..., Any], operands: tuple[Any, ...]) -> Callable[..., Any]:
    """Map ``function(attend, *operands, sinks)`` over devices by heads; the pool is the last of ``operands``."""
    return jax.shard_map(
        function,
        in_specs=(_REPLICATED, *operands, PartitionSpec(_AXES)),
        out_specs=(_HEADS, operands[-1]),
        check_vma=False,
    )


def copy_own_pages(
    spec: CacheSpec,
    pools: list[LayerPool],
    source: Int[Array, "groups copies"],
    target: Int[Array, "groups copies"],
    backend: Wish = "auto",
) -> list[LayerPool]:
    """Copy pages (`copy_pages`) on each device, in its shard of the pools."""
    if traced_size("kv_heads") == 1:
        return copy_pages(spec, pools, source, target, backend)
    all_pools = [_pool(spec.latent)] * len(pools)

    def copy_shard(pools: list[LayerPool], source: jax.Array, target: jax.Array) -> list[LayerPool]:
        return copy_pages(spec, pools, source, target, backend)

    run = jax.shard_map(
        copy_shard, in_specs=(all_pools, _REPLICATED, _REPLICATED), out_specs=all_pools, check_vma=False
    )
    return run(pools, source, target)
