"""Arrays of several processes: each one sees its own devices' parts. In one process this costs nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding
from jaxtyping import Array, Shaped

from jaxinfer.config import EngineConfigError
from jaxinfer.parallel.mesh import asked

_HOST_KINDS = ("pinned_host", "unpinned_host")  # what JAX calls memory of the host, the best first
_LOCKED_MEMORY = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
_FOR_PAGES = 0.9  # of what may be locked; by the rest the runtime moves all else


def join_processes(coordinator: str, num_processes: int, process_id: int, seconds: int = 60) -> None:
    """Make the devices of all processes JAX's. To be called before anything else asks JAX for devices.

    Args:
        coordinator: HOST:PORT on which process 0 listens for the others.
        seconds: for all to arrive.

    Raises:
        RuntimeError: they did not. JAX may also end the process.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")  # else CPUs of several processes have none
    jax.distributed.initialize(
        coordinator,
        num_processes,
        process_id,
        cluster_detection_method="deactivate",  # what the user said holds, whatever the scheduler of a cluster says
        initialization_timeout=seconds,
        coordinator_bind_address=coordinator,  # not every interface that there is
    )


def require_processes(mesh: Mesh) -> None:
    """Raises:
    EngineConfigError: the processes of a group cannot share this mesh.
    """
    count = jax.process_count()
    if count == 1:
        return
    if mesh.shape["dp_attn"] > 1:
        both = f"and num_processes = {count} exclude each other:"
        raise EngineConfigError(f"enable_dp_attention = True {both} one process plans the steps of all its devices")
    local = jax.local_device_count()
    if mesh.size != jax.device_count():
        total = f"{count} processes x {local} = {jax.device_count()}"
        raise EngineConfigError(f"{asked(mesh.shape)} must be all devices of the group: {total}")
    require_whole(mesh.shape, count, local)


def require_host_memory(gib: float) -> None:
    """Raises:
    EngineConfigError: so much for pages is more than a GPU's runtime locks: a page that it has no room for would end
        the engine.
    """
    limit = int(os.environ.get(_LOCKED_MEMORY, "64"))  # which is XLA's own default
    if (own := gib / jax.process_count()) > _FOR_PAGES * limit:
        raise EngineConfigError(
            f"swap_space_gib = {gib:g} is {own:g} in each process, and of the {limit} GiB that XLA locks on a host "
            f"at most {_FOR_PAGES:.0%} are for pages: set {_LOCKED_MEMORY} to more"
        )


def require_whole(sizes: Mapping[str, int], processes: int, devices: int) -> None:
    """Raises:
    EngineConfigError: a copy or a pipeline stage of a mesh of these sizes begins amid a process's ``devices``.
    """
    stage = sizes["dp_attn"] * sizes["expert"] * sizes["tensor"]
    for what, size in (("copy", stage * sizes["stage"]), ("stage", stage)):
        if size % devices and devices % size:
            why = f"the {size} devices of a {what} and the {devices} of a process: neither is a multiple of the other"
            raise EngineConfigError(f"{asked(sizes)} cannot be spread over {processes} processes: {why}")


def processes_of(mesh: Mesh) -> list[int]:
    """The processes that have devices of a mesh, the first one first."""
    return sorted({device.process_index for device in mesh.devices.flat})


def own_devices(mesh: Mesh) -> list[jax.Device]:
    """The devices of a mesh that belong to this process."""
    return [device for device in mesh.devices.flat if device.process_index == jax.process_index()]


def put_whole(tree: Any, sharding: Sharding) -> Any:
    """Put arrays that every process has whole on their devices. Unlike `jax.device_put`, no process asks another one
    whether it was given the same."""
    if sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)
    return jax.tree.map(lambda x: _put_shards(np.asarray(x), sharding), tree)


def _put_shards(value: np.ndarray, sharding: Sharding) -> jax.Array:
    places = sharding.addressable_devices_indices_map(value.shape)
    parts = [jax.device_put(value[index], device) for device, index in places.items()]
    return jax.make_array_from_single_device_arrays(value.shape, sharding, parts)


def own_part(array: Array) -> Shaped[np.ndarray, "..."]:
    """Copy this process's part of an array to the host; all of it where it has all. Waits.

    The array is spread along one of its axes at most, and the devices of a process follow one another along it.
    """
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    parts = {_start(shard.index): shard.data for shard in array.addressable_shards}
    ordered = [np.asarray(parts[start]) for start in sorted(parts)]
    (axis,) = _spread(array.sharding, array.shape)
    return np.concatenate(ordered, axis)


def on_host(sharding: NamedSharding) -> NamedSharding:
    """The sharding of an array that lies in memory of the devices' hosts, page-locked where there is such: then copies
    to and from it run beside the host's own work. A backend that tells of none keeps it where all else is."""
    mesh = sharding.mesh
    assert isinstance(mesh, Mesh)
    kinds = [memory.kind for device in own_devices(mesh)[:1] for memory in device.addressable_memories()]
    if not kinds:  # devices that are only described (pallas_kernels.check): with them, JAX drops the kind
        return NamedSharding(mesh.abstract_mesh, sharding.spec, memory_kind=_HOST_KINDS[0])
    found = next((kind for kind in _HOST_KINDS if kind in kinds), None)
    return sharding if found is None else sharding.with_memory_kind(found)


def _spread(sharding: Sharding, shape: tuple[int, ...]) -> list[int]:
    part = sharding.shard_shape(shape)
    return [axis for axis, size in enumerate(shape) if part[axis] != size]


def _start(index: tuple[slice, ...] | None) -> tuple[int, ...]:
    return tuple(each.start or 0 for each in index or ())
