"""Memory of devices: what an engine keeps there, by shapes, and what JAX and the driver report."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax

from jaxinfer.engine.execution.driver import driver_figures
from jaxinfer.engine.scheduling.usage import DeviceUsage, HostUsage, Usage
from jaxinfer.kv.pool import Pool, StatePool
from jaxinfer.parallel.arrays import array_bytes, memory_stats

_Sizes = collections.Counter[tuple[jax.Device | None, str]]  # bytes by device (None: the host) and part


class Kept(NamedTuple):
    """Arrays that some devices of this process keep: trees, perhaps empty.

    Attributes:
        temporaries: bytes of the largest working set of the programs that run there.
        host_pages: bytes of pages in the host's memory.
    """

    devices: Sequence[jax.Device]
    weights: Any = None
    pools: Sequence[Pool] = ()
    adapters: Any = None
    encoder_cache: Any = None
    slots: Any = None
    temporaries: int = 0
    host_pages: int = 0


def measure(listed: Iterable[Kept]) -> Usage:
    """Return the usage of this process's devices."""
    sizes: _Sizes = collections.Counter()
    devices, temporaries = set[jax.Device](), collections.Counter[jax.Device]()
    for kept in listed:
        devices.update(kept.devices)
        for device in kept.devices:  # one program runs at a time
            temporaries[device] = max(temporaries[device], kept.temporaries)
        sizes[None, "kv_pages"] += kept.host_pages
        for part in ("weights", "adapters", "encoder_cache", "slots"):
            _add(sizes, part, getattr(kept, part))
        for pool in kept.pools:
            _add(sizes, "kv_cache", pool.pages if isinstance(pool, StatePool) else pool)
            _add(sizes, "states", pool.states if isinstance(pool, StatePool) else None)
    sizes.update({(device, "temporaries"): size for device, size in temporaries.items()})
    places = sorted(devices, key=lambda device: device.id)
    host = HostUsage(process=jax.process_index(), parts=_parts(sizes, None))
    return Usage(devices=[_device(device, _parts(sizes, device)) for device in places], hosts=[host])


def _add(sizes: _Sizes, part: str, tree: Any) -> None:
    """Add the bytes of a tree's arrays, as far as this process has them.

    Only shapes and shardings are read: another thread may donate an array to a program meanwhile. Abstract arrays have
    no memory: they stand for what is asleep.
    """
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array):
            devices = leaf.sharding.addressable_devices
            size = array_bytes(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)
            for device in devices:
                own = leaf.sharding.memory_kind in (None, device.default_memory().kind)
                sizes[device if own else None, part] += size


def _parts(sizes: _Sizes, place: jax.Device | None) -> dict[str, int]:
    return {part: size for (device, part), size in sizes.items() if device == place and size}


def _device(device: Any, parts: dict[str, int]) -> DeviceUsage:
    stats = memory_stats(device)
    return DeviceUsage(
        process=device.process_index,
        device=device.id,
        kind=device.device_kind,
        parts=parts,
        in_use=stats.get("bytes_in_use"),
        peak=stats.get("peak_bytes_in_use"),
        limit=stats.get("bytes_limit"),
        driver=driver_figures(device),
    )
