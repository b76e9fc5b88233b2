"""Arrays of several processes: each process has the shards of its own devices. With one process this costs nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jaxtyping import Array, Shaped

from jaxinfer.config import EngineConfigError
from jaxinfer.parallel.mesh import asked

PAGE_LOCKED = "pinned_host"
_HOST_KINDS = (PAGE_LOCKED, "unpinned_host")  # JAX's memory kinds of the host, the best first
_LOCKED_MEMORY = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
_FOR_PAGES = 0.9  # share of the lockable memory; the runtime uses the rest for its own transfers


def join_processes(coordinator: str, num_processes: int, process_id: int, seconds: int = 60) -> None:
    """Join the processes, so that JAX sees the devices of all. Call it before any other use of JAX devices.

    Args:
        coordinator: HOST:PORT on which process 0 listens for the other processes.
        seconds: timeout for all processes to arrive.

    Raises:
        RuntimeError: a process did not arrive. JAX may also end the process.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")  # else CPUs have no multi-process collectives
    jax.distributed.initialize(
        coordinator,
        num_processes,
        process_id,
        cluster_detection_method="deactivate",  # the user's settings override those of a cluster scheduler
        initialization_timeout=seconds,
        coordinator_bind_address=coordinator,  # instead of all interfaces
    )


def require_processes(mesh: Mesh, grouped: bool = True) -> None:
    """Raise EngineConfigError if the processes of JAX cannot share this mesh. ``grouped``: they are a group."""
    count = jax.process_count()
    if count == 1:
        return
    if not grouped:  # each would plan its own steps, and wait in collectives for the others
        raise EngineConfigError(
            f"JAX has {count} processes here, and only `jaxinfer serve` runs an engine over several"
        )
    if mesh.shape["dp_attn"] > 1:
        both = f"and num_processes = {count} exclude each other:"
        raise EngineConfigError(f"enable_dp_attention = True {both} one process plans the steps of all its devices")
    local = jax.local_device_count()
    if mesh.size != jax.device_count():
        total = f"{count} processes x {local} = {jax.device_count()}"
        raise EngineConfigError(f"{asked(mesh.shape)} must be all devices of the group: {total}")
    require_whole(mesh.shape, count, local)


def require_host_memory(gib: float, weights: int = 0) -> None:
    """Raise EngineConfigError if page memory, and ``weights`` (bytes) of this process, exceed what a GPU's runtime
    locks on the host: a page that could not be allocated would end the engine."""
    limit = int(os.environ.get(_LOCKED_MEMORY, "64"))  # 64 is XLA's own default
    if (own := gib / jax.process_count()) + weights / 2**30 > _FOR_PAGES * limit:
        beside, both = "", "pages"
        if weights:
            beside, both = f" beside {weights / 2**30:.1f} GiB of weights (weight_offload_gib)", "pages and weights"
        raise EngineConfigError(
            f"swap_space_gib = {gib:g} is {own:g} in each process{beside}, and of the {limit} GiB that XLA locks on a "
            f"host at most {_FOR_PAGES:.0%} are for {both}: set {_LOCKED_MEMORY} to more"
        )


def require_whole(sizes: Mapping[str, int], processes: int, devices: int) -> None:
    """Raise EngineConfigError if a replica or pipeline stage of a mesh of these sizes begins within a process's
    ``devices``."""
    stage = sizes["dp_attn"] * sizes["expert"] * sizes["tensor"]
    for what, size in (("copy", stage * sizes["stage"]), ("stage", stage)):
        if size % devices and devices % size:
            why = f"the {size} devices of a {what} and the {devices} of a process: neither is a multiple of the other"
            raise EngineConfigError(f"{asked(sizes)} cannot be spread over {processes} processes: {why}")


def processes_of(mesh: Mesh) -> list[int]:
    """Return the processes that have devices of a mesh, in ascending order."""
    return sorted({device.process_index for device in mesh.devices.flat})


def own_devices(mesh: Mesh) -> list[jax.Device]:
    """Return the devices of a mesh that belong to this process."""
    return [device for device in mesh.devices.flat if device.process_index == jax.process_index()]


def put_whole(tree: Any, sharding: Sharding) -> Any:
    """Put arrays that every process holds in full on their devices. Unlike `jax.device_put`, processes do not compare
    their values."""
    if sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)
    return jax.tree.map(lambda x: _put_shards(np.asarray(x), sharding), tree)


def at(device: jax.Device, sharding: Sharding) -> SingleDeviceSharding:
    """Return the place of a shard of an array on one device: in the memory of the whole array's ``sharding``."""
    return SingleDeviceSharding(device, memory_kind=sharding.memory_kind)


def _put_shards(value: np.ndarray, sharding: Sharding) -> jax.Array:
    places = sharding.addressable_devices_indices_map(value.shape)
    parts = [jax.device_put(value[index], at(device, sharding)) for device, index in places.items()]
    return jax.make_array_from_single_device_arrays(value.shape, sharding, parts)


def own_part(array: Array) -> Shaped[np.ndarray, "..."]:
    """Copy this process's shard of an array to the host, or all of it if this process has all. Waits.

    The array is sharded along one of its axes at most, and the devices of a process are consecutive along it.
    """
    parts = own_shards(array)
    if len(parts) == 1:
        return parts[0]
    (axis,) = _spread(array.sharding, array.shape)
    return np.concatenate(parts, axis)


def own_shards(array: Array) -> list[Shaped[np.ndarray, "..."]]:
    """Copy this process's different shards of an array to the host, in the order of their places, or all of it if this
    process has all. Waits."""
    if has_all(array):
        return [np.asarray(array)]
    parts = {_start(shard.index): shard.data for shard in array.addressable_shards}
    return [np.asarray(parts[start]) for start in sorted(parts)]


def has_all(array: Array) -> bool:
    """Whether the shards of this process are all different shards of an array."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return True
    sizes = {_start(shard.index): shard.data.size for shard in array.addressable_shards}
    return sum(sizes.values()) == array.size


def on_host(sharding: NamedSharding) -> NamedSharding:
    """Return the sharding of an array in host memory, page-locked if possible, so that copies to and from it overlap
    with host work. A backend without host memory kinds keeps the array in its default memory."""
    mesh = sharding.mesh
    assert isinstance(mesh, Mesh)
    kinds = [memory.kind for device in own_devices(mesh)[:1] for memory in device.addressable_memories()]
    if not kinds:  # abstract devices (pallas_kernels.check): with them, JAX drops the memory kind
        return NamedSharding(mesh.abstract_mesh, sharding.spec, memory_kind=_HOST_KINDS[0])
    found = next((kind for kind in _HOST_KINDS if kind in kinds), None)
    return sharding if found is None else sharding.with_memory_kind(found)


def _spread(sharding: Sharding, shape: tuple[int, ...]) -> list[int]:
    part = sharding.shard_shape(shape)
    return [axis for axis, size in enumerate(shape) if part[axis] != size]


def _start(index: tuple[slice, ...] | None) -> tuple[int, ...]:
    return tuple(each.start or 0 for each in index or ())
