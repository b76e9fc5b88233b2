"""Attention and copies of pages where heads are spread over devices: each works on its own heads, in its own pool.

Kernels know nothing of a mesh, and XLA's partitioner nothing of kernels. So both run inside `jax.shard_map`, over the
mesh that the program is traced for; without one, or with one device along the axis, nothing is wrapped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int

from jaxinfer.kv.pool import DecodeAttend, LayerPool, PrefillAttend, Rope, copy_pages, fuses
from jaxinfer.parallel.mesh import RULES, pool_spec, traced_size
from jaxinfer.types import CacheSpec, LayerSpec
from pallas_kernels.choice import Wish

_AXES = RULES["kv_heads"]
_EVERYWHERE, _HEADS = PartitionSpec(), PartitionSpec(None, _AXES)


def _pool(latent: bool) -> LayerPool:
    """How a layer's pool lies."""
    heads: Any = pool_spec(latent)  # elements and scales have the same leading dimensions
    return LayerPool(heads, heads)


def spread(attend: DecodeAttend | PrefillAttend) -> DecodeAttend | PrefillAttend | SpreadAttend:
    """``attend`` for the mesh that the program is traced for."""
    return attend if traced_size("kv_heads") == 1 else SpreadAttend(attend)


class SpreadAttend(NamedTuple):
    """`Attend` of which each device does its own heads; latents serve all heads and lie on every device."""

    attend: DecodeAttend | PrefillAttend

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array | None,
        cache: LayerPool,
        layer: LayerSpec,
        scale: float,
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, LayerPool]:
        latent = layer.latent_rank is not None

        def own(attend: DecodeAttend | PrefillAttend, *operands: Any) -> tuple[jax.Array, LayerPool]:
            q, k, v, cache, sinks = operands
            return attend(q, k, v, cache, layer, scale, sinks)

        keys, pool = _EVERYWHERE if latent else _HEADS, _pool(latent)
        return _by_heads(own, (_HEADS, keys, keys, pool))(self.attend, q, k, v, cache, sinks)

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

        def own(attend: DecodeAttend | PrefillAttend, *operands: Any) -> tuple[jax.Array, LayerPool] | None:
            qkv, rope, cache, sinks = operands
            return attend.fused(qkv, rope, interleaved, cache, layer, scale, sinks)

        return _by_heads(own, (_HEADS, _EVERYWHERE, _pool(latent=False)))(self.attend, qkv, rope, cache, sinks)


def _by_heads(own: Callable[..., Any], operands: tuple[Any, ...]) -> Callable[..., Any]:
    """``own(attend, *operands, sinks)`` on each device; the pool is the last of ``operands``."""
    return jax.shard_map(
        own,
        in_specs=(_EVERYWHERE, *operands, PartitionSpec(_AXES)),
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
    """`copy_pages`, each device in its own pools."""
    if traced_size("kv_heads") == 1:
        return copy_pages(spec, pools, source, target, backend)
    all_pools = [_pool(spec.latent)] * len(pools)

    def own(pools: list[LayerPool], source: jax.Array, target: jax.Array) -> list[LayerPool]:
        return copy_pages(spec, pools, source, target, backend)

    run = jax.shard_map(own, in_specs=(all_pools, _EVERYWHERE, _EVERYWHERE), out_specs=all_pools, check_vma=False)
    return run(pools, source, target)
