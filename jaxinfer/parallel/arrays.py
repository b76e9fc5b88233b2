"""Arrays on a mesh: placing them, their abstract forms, and their bytes on a device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.dtypes import itemsize_bits
from jax.sharding import NamedSharding, Sharding

from jaxinfer.parallel.processes import PAGE_LOCKED, at, put_whole


def put(value: Any, sharding: NamedSharding) -> jax.Array:
    """Place ``value`` with a sharding. Data already in place, perhaps also on other devices, is not copied. Where the
    sharding has devices of several processes, ``value`` has their shards of it, or all of it."""
    shards = there(value, sharding) if isinstance(value, jax.Array) else None
    if shards is not None:
        return jax.make_array_from_single_device_arrays(value.shape, sharding, [shard.data for shard in shards])
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return _moved(value, sharding)
    return cast(jax.Array, put_whole(value, sharding))


def in_memory(value: jax.Array, kind: str | None = None) -> jax.Array:
    """Copy the shards that this process has of an array to another memory of their devices. ``kind``: JAX's name of it;
    None: the devices' own."""
    shards = value.addressable_shards
    kind = kind or shards[0].device.default_memory().kind
    parts = [jax.device_put(shard.data, shard.data.sharding.with_memory_kind(kind)) for shard in shards]
    return jax.make_array_from_single_device_arrays(value.shape, value.sharding.with_memory_kind(kind), parts)


def _moved(value: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Move an array shard by shard, for which this process has the shards of ``sharding`` on other devices."""
    found = {shard.index: shard.data for shard in value.addressable_shards}
    wanted = sharding.addressable_devices_indices_map(value.shape)
    parts = [jax.device_put(found[index or ()], at(device, sharding)) for device, index in wanted.items()]
    return jax.make_array_from_single_device_arrays(value.shape, sharding, parts)


def is_page_locked(sharding: Sharding) -> bool:
    """Whether arrays of this sharding are in page-locked host memory."""
    return sharding.memory_kind == PAGE_LOCKED


def there(value: jax.Array, sharding: NamedSharding) -> list[jax.Shard] | None:
    """Return the shards of an array that are where ``sharding`` needs them; None unless all are."""
    if is_page_locked(value.sharding) != is_page_locked(sharding):
        return None
    wanted = sharding.addressable_devices_indices_map(value.shape)
    found = {shard.device: shard for shard in value.addressable_shards}
    if any(device not in found or found[device].index != index for device, index in wanted.items()):
        return None
    return [found[device] for device in wanted]


def zeros(tree: Any) -> Any:
    """Make zeros for a tree of abstract arrays, each shard on its device only."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), tree)


def placed_like(tree: Any) -> Any:
    """Return shapes, dtypes and shardings of a tree of arrays, which may be abstract."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def overlaid(tree: Any, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a nested dict with some nodes replaced."""
    return {**tree, **{key: overlaid(tree[key], x) if isinstance(x, dict) else x for key, x in changes.items()}}


def abstract(tree: Any, sharding: NamedSharding | None = None) -> Any:
    """Return shapes and dtypes of a tree, all with one sharding, or with none."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def device_memory(device: Any) -> int:
    """Return the bytes that JAX may allocate on a device; 0 where it is not reported."""
    return memory_stats(device).get("bytes_limit", 0)


def memory_stats(device: Any) -> Mapping[str, int]:
    """Return the figures of JAX's allocator for a device by JAX's names, in bytes; empty where they are not reported,
    as on a CPU, and for a topology description (`jax.experimental.topologies`)."""
    try:
        return device.memory_stats() or {}
    except jax.errors.JaxRuntimeError:
        return {}


def device_bytes(tree: Any, *, page_locked: bool = False) -> int:
    """Return the bytes per device of a tree of arrays, which may be abstract, in the devices' own memory or, if
    ``page_locked``, in the host's. All must have a sharding."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if is_page_locked(leaf.sharding) is page_locked]
    return sum(array_bytes(leaf.sharding.shard_shape(leaf.shape), leaf.dtype) for leaf in leaves)


def array_bytes(shape: tuple[int, ...], dtype: Any) -> int:
    """Return the bytes of an array on a device, where two 4-bit numbers share a byte."""
    return math.ceil(math.prod(shape) * itemsize_bits(dtype) / 8)
