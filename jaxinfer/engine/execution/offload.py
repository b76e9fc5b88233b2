"""Weights in host memory: which are kept there, and the model with them (``weight_offload_gib``)."""

from __future__ import annotations

import collections
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, SingleDeviceSharding

from jaxinfer.config import EngineConfigError
from jaxinfer.engine.execution.stages import cut
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.model import Model
from jaxinfer.parallel.arrays import array_bytes, device_bytes, in_memory, is_page_locked
from jaxinfer.parallel.mesh import devices_along
from jaxinfer.parallel.processes import PAGE_LOCKED, own_devices
from jaxinfer.planner.memory import HostWeights
from jaxinfer.types import ParamSpec

_LAYER = "layers_"
_GIB = 2**30
_MEASURED = 1 << 28  # bytes of a copy that is measured


class _Unit(NamedTuple):
    """Matrices of a layer that are kept together: those of its experts, or the others."""

    layer: int
    experts: bool


def offloaded(model: Model, gib: float, mesh: Mesh) -> Model:
    """Return the model with the weights in host memory that ``gib`` (``weight_offload_gib``) asks for, of each pipeline
    stage: their specs say so, and arrays that are elsewhere are copied there.

    Raises:
        EngineConfigError: its layers cannot be kept there.
    """
    chosen = _chosen(model, gib, mesh) if gib else set()

    def marked(path: Any, spec: ParamSpec) -> ParamSpec:
        kept = _unit(path, spec) in chosen
        return spec if spec.on_host is kept else dataclasses.replace(spec, on_host=kept)

    specs = jax.tree_util.tree_map_with_path(marked, model.specs)
    return model.replace(specs=specs, params=jax.tree.map(_kept, specs, model.params))


def by_layers(model: Model, function: Callable[[Model], Model]) -> Model:
    """Apply a function that computes on arrays to a model. Arrays in host memory are copied to the device for it, one
    layer at a time; those that it leaves alone stay the same arrays."""
    if not any(spec.on_host for spec in jax.tree.leaves(model.specs)):
        return function(model)
    parts = [_transformed(model, name, function) for name in model.params]
    specs, params = ({name: tree for part in parts for name, tree in getattr(part, of).items()} for of in _TREES)
    return model.replace(specs=specs, params=params)


_TREES = ("specs", "params")


def _transformed(model: Model, name: str, function: Callable[[Model], Model]) -> Model:
    kept = dict[int, Any]()

    def fetched(value: Any) -> Any:
        if not isinstance(value, jax.Array) or not is_page_locked(value.sharding):
            return value
        copy = in_memory(value)
        kept[id(copy)] = copy, value
        return copy

    params = jax.tree.map(fetched, model.params[name])
    part = function(model.replace(specs={name: model.specs[name]}, params={name: params}, draft=None))

    def back(spec: ParamSpec, value: Any) -> Any:
        return kept[id(value)][1] if id(value) in kept else _kept(spec, value)

    return part.replace(params=jax.tree.map(back, part.specs, part.params))


def host_weights(params: Any) -> HostWeights:
    """Return the bytes of placed parameters, perhaps abstract, that are in host memory, for a device."""
    layers = sorted((name for name in params if name.startswith(_LAYER)), key=_number)
    sizes = (device_bytes(params[name], page_locked=True) for name in layers)
    return HostWeights(tuple(filter(None, sizes)))


def layers_of(model: Model, mesh: Mesh) -> HostWeights:
    """Return the bytes of a stage's layers that could be in host memory, for a device."""
    sizes = collections.Counter[int]()
    for unit, size in (_sizes(model, mesh) if isinstance(model.module, Decoder) else {}).items():
        sizes[unit.layer] += size
    return HostWeights(tuple(sizes.values()))


def link_bandwidth(device: jax.Device) -> float:
    """Measure the bytes per second of copies from page-locked host memory to a device."""
    host = jax.device_put(jnp.zeros(_MEASURED, jnp.uint8), SingleDeviceSharding(device, memory_kind=PAGE_LOCKED))
    return _MEASURED / min(_copy_seconds(jax.block_until_ready(host), device) for _ in range(3))


def _copy_seconds(host: jax.Array, device: jax.Device) -> float:
    begin = time.perf_counter()
    jax.device_put(host, SingleDeviceSharding(device)).block_until_ready()
    return time.perf_counter() - begin


def _chosen(model: Model, gib: float, mesh: Mesh) -> set[_Unit]:
    if not isinstance(model.module, Decoder):
        what = f"{type(model.module).__name__} is no jaxinfer.models.decoder.Decoder, which runs layer by layer"
        raise EngineConfigError(f"weight_offload_gib = {gib:g} cannot be: {what}")
    kinds = [memory.kind for device in own_devices(mesh)[:1] for memory in device.addressable_memories()]
    if kinds and PAGE_LOCKED not in kinds:  # abstract devices have none
        raise EngineConfigError(f"weight_offload_gib = {gib:g} cannot be: JAX locks no host memory for this device")
    found = set[_Unit]()
    for stage in cut(model.replace(draft=None), mesh.shape["stage"]):
        found |= _of_stage(_sizes(stage.model, mesh), int(gib * _GIB))
    return found


def _sizes(model: Model, mesh: Mesh) -> dict[_Unit, int]:
    """Return the bytes on a device of what may be kept in host memory."""
    sizes = collections.Counter[_Unit]()

    def count(path: Any, spec: ParamSpec, leaf: Any) -> None:
        if (unit := _unit(path, spec)) is not None:
            devices = math.prod(devices_along(mesh.shape, axis) for axis in spec.axes)  # heads may not be copied yet
            sizes[unit] += array_bytes(leaf.shape, leaf.dtype) // devices

    jax.tree_util.tree_map_with_path(count, model.specs, model.params)
    return dict(sizes)


def _of_stage(sizes: dict[_Unit, int], wanted: int) -> set[_Unit]:
    """Choose at least ``wanted`` bytes: experts first, then the rest of layers."""
    found = set[_Unit]()
    for experts in (True, False):
        missing = wanted - sum(sizes[unit] for unit in found)
        units = sorted(unit for unit in sizes if unit.experts is experts)
        found |= _spaced(units, sizes, missing) if missing > 0 else set()
    return found


def _spaced(units: Sequence[_Unit], sizes: dict[_Unit, int], wanted: int) -> set[_Unit]:
    """Choose as few evenly spaced units as have ``wanted`` bytes, or all: others compute while one is copied."""
    total = len(units)
    for count in range(1, total):
        some = {units[(2 * place + 1) * total // (2 * count)] for place in range(count)}
        if sum(sizes[unit] for unit in some) >= wanted:
            return some
    return set(units)


def _unit(path: Any, spec: ParamSpec) -> _Unit | None:
    """Return the unit of a parameter; None: it stays on the device, as vectors do, whose copies would save nothing."""
    name = path[0].key
    if not name.startswith(_LAYER) or len(spec.shape) < 2:
        return None
    return _Unit(_number(name), "expert" in spec.axes)


def _number(name: str) -> int:
    return int(name.removeprefix(_LAYER))


def _kept(spec: ParamSpec, value: Any) -> Any:
    """Return an array in the memory where it is kept."""
    if not isinstance(value, jax.Array) or spec.on_host is is_page_locked(value.sharding):
        return value
    return in_memory(value, PAGE_LOCKED if spec.on_host else None)
