"""Placement of an engine's arrays on its mesh: parameters, KV pools, and the sampler state of each slot.

Pools and parameters are created in place: no device ever holds more than its own shards. Some weights may be placed in
host memory.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxinfer.config import EngineConfig, EngineConfigError, ResolvedEngine
from jaxinfer.engine.execution.encoder import abstract_cache, text_part
from jaxinfer.engine.execution.stages import Stage, cut
from jaxinfer.kv.pool import Pool, new_pools, with_states
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.model import Model
from jaxinfer.parallel.arrays import abstract, array_bytes, device_bytes, in_memory, is_page_locked, put
from jaxinfer.parallel.heads import as_copied, copied, kv_copies, require_even, require_experts, with_copies
from jaxinfer.parallel.mesh import devices_along, mesh_for, param_sharding, pool_sharding, replicated, state_sharding
from jaxinfer.parallel.processes import PAGE_LOCKED, on_host, own_devices, put_whole
from jaxinfer.planner.memory import HostWeights
from jaxinfer.quant.banks import Path, bank_specs, lora_targets
from jaxinfer.sampling import HostSlots, SamplingLimits, new_state
from jaxinfer.types import EMBEDDING, HEAD, VISION, CacheSpec, LoRATarget, ParamSpec, StateSpec
from jaxinfer.weights.load import Deferred, on_devices

_LAYER = "layers_"
_GIB = 2**30
_MEASURED = 1 << 28  # bytes of a copy that is measured


def shardable_model(model: Model, mesh: Mesh) -> Model:
    """Return the same function in a form to shard over the mesh: with replicated KV heads where they are too few.

    Parameters may be abstract; they stay where they are.

    Raises:
        EngineConfigError: heads, or another dimension that must be sharded, cannot be divided evenly.
    """
    made = with_copied_heads(model, mesh)
    require_even(made.specs, mesh.shape)
    require_experts(made.specs, mesh.shape)
    _require_even_states(model.cache_spec, devices_along(mesh.shape, "heads"))
    return made


def with_tensor_size(config: EngineConfig, model: Model, devices: Sequence[Any]) -> EngineConfig:
    """Return the settings with the largest tensor-parallel size that divides the devices and over which the model, and
    its draft model, can be sharded, if the size is to be chosen. Parameters may be abstract."""
    if config.tensor_parallel_size:
        return config
    others = config.expert_parallel_size * config.pipeline_parallel_size * config.data_parallel_size
    most = max(1, len(devices) // others)
    sizes = (dataclasses.replace(config, tensor_parallel_size=n) for n in range(most, 0, -1) if most % n == 0)
    alone = dataclasses.replace(config, tensor_parallel_size=1)  # and it is rejected later, with the reason
    return next((each for each in sizes if _is_shardable(model, each, devices)), alone)


def _is_shardable(model: Model, config: EngineConfig, devices: Sequence[Any]) -> bool:
    try:
        for each in filter(None, (model, model.draft)):
            shardable_model(each.replace(draft=None), mesh_for(config, devices))
    except EngineConfigError:
        return False
    return True


def with_copied_heads(model: Model, mesh: Mesh) -> Model:
    """Return the model, of which specs and parameters may be only some, with as many KV heads as the mesh needs."""
    cache, copies = model.cache_spec, kv_copies(model.cache_spec, mesh.shape)
    return model.replace(
        specs=with_copies(model.specs, copies),
        cache_spec=dataclasses.replace(cache, kv_heads=cache.kv_heads * copies),
        params=jax.tree.map(lambda spec, value: copied(value, spec, copies), model.specs, model.params),
    )


def _require_even_states(cache: CacheSpec, devices: int) -> None:
    """Raise EngineConfigError unless the heads of all states can be divided evenly."""
    for state in {state for layer in cache.layers for state in layer.states if not state.whole}:
        if state.shape[0] % devices:
            raise EngineConfigError(
                f"states of {state.shape[0]} heads cannot be spread over {devices} devices (tensor_parallel_size x "
                f"expert_parallel_size)"
            )


def place_of(mesh: Mesh, spec: ParamSpec) -> NamedSharding:
    """Return the sharding of a parameter, in the memory where it is kept."""
    sharding = param_sharding(mesh, spec)
    return on_host(sharding) if spec.on_host else sharding


def mesh_of(params: Any) -> Mesh:
    """Return the mesh of placed parameters; those in the host memory of abstract devices have none."""
    meshes = (leaf.sharding.mesh for leaf in jax.tree.leaves(params))
    return next(mesh for mesh in meshes if isinstance(mesh, Mesh))


def place_params(model: Model, mesh: Mesh) -> Any:
    """Place the parameters of a spread model on their devices; those already there are not moved."""
    return placed_params(model.specs, model.params, mesh)


def placed_params(specs: Any, params: Any, mesh: Mesh) -> Any:
    """Place a tree of parameters on a mesh. What is still to be read is read by shards, each once."""

    def placed(spec: ParamSpec, value: Any) -> jax.Array:
        sharding = place_of(mesh, spec)
        return on_devices(sharding, spec, value.fill) if isinstance(value, Deferred) else put(value, sharding)

    return jax.tree.map(placed, specs, params)


def abstract_params(model: Model, mesh: Mesh) -> Any:
    """Return parameters like those of `place_params`, as `jax.ShapeDtypeStruct`."""

    def placed(spec: ParamSpec, leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place_of(mesh, spec))

    return jax.tree.map(placed, model.specs, model.params)


class StageArrays(NamedTuple):
    """Arrays that a pipeline stage keeps on its devices. Sampler arrays are on the last stage only, else None;
    ``features`` where a draft head reads them, ``banks`` where the engine has adapters; ``tower`` and ``images`` are on
    the first stage, where the engine serves images."""

    params: Any
    pools: list[Pool]
    slots: Any = None  # SlotParams
    last_tokens: Any = None  # [rows]
    sampler: Any = None  # SlotState
    features: Any = None  # [rows, window, width]
    banks: Any = None  # Banks
    tower: Any = None  # parameters of the vision tower
    images: Any = None  # encoder cache [rows, width]


def targets_of(stage: Stage, engine: ResolvedEngine) -> dict[Path, LoRATarget]:
    """Return the weights of a stage that adapters may change (`jaxinfer.lora.parts`); empty without adapters. Of a tied
    embedding the first stage has the lookup, and the last one the product."""
    if not engine.lora_slots:
        return {}
    model = stage.model
    here: dict[Path, bool] = {EMBEDDING: stage.first, HEAD: stage.last}
    declared = model.family.param_specs(model.config)
    found = lora_targets(text_part(model.specs), declared, engine.max_lora_rank, engine.lora_target_modules)
    return {path: target for path, target in found.items() if here.get(path, True)}


def abstract_banks(stage: Stage, engine: ResolvedEngine, mesh: Mesh) -> Any:
    """Return the adapter banks of a stage as `jax.ShapeDtypeStruct`; None: it has none."""
    if stage.drafts or not engine.lora_slots:
        return None

    def placed(spec: ParamSpec) -> jax.ShapeDtypeStruct:
        dtype = jnp.dtype(spec.dtype or stage.model.dtype)
        return jax.ShapeDtypeStruct(spec.shape, dtype, sharding=param_sharding(mesh, spec))

    return jax.tree.map(placed, bank_specs(targets_of(stage, engine), engine.lora_slots, mesh.shape["dp_attn"]))


def of_slot(bank: Any) -> jax.ShapeDtypeStruct:
    """Return the host input for one slot of a bank: float32, sharded as the bank is."""
    sharding = NamedSharding(bank.sharding.mesh, PartitionSpec(*tuple(bank.sharding.spec)[1:]))
    return jax.ShapeDtypeStruct(bank.shape[1:], np.dtype(np.float32), sharding=sharding)


def of_bank(part: str, arrays: Mapping[str, Any], specs: Mapping[str, ParamSpec]) -> dict[str, Any]:
    """Return adapter weights of a module (`jaxinfer.lora.parts`) by their names in a bank, with heads replicated as in
    ``specs`` (`slot_specs`)."""
    return {name: as_copied(arrays[f"{part}/{name}"], spec) for name, spec in specs.items()}


def put_part(part: str, arrays: Mapping[str, Any], specs: Mapping[str, ParamSpec], mesh: Mesh) -> dict[str, jax.Array]:
    """Send adapter weights of a module towards a bank: each device gets its shards only."""
    whole = of_bank(part, arrays, specs)
    return {name: put_whole(whole[name], param_sharding(mesh, spec)) for name, spec in specs.items()}


def _states(state: StateSpec, model: Model, engine: ResolvedEngine, mesh: Mesh) -> jax.ShapeDtypeStruct:
    shape, dtype = (engine.state_places, *state.shape), jnp.dtype(jnp.float32 if state.exact else model.dtype)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=state_sharding(mesh, state))


def abstract_pools(model: Model, engine: ResolvedEngine, mesh: Mesh) -> list[Pool]:
    """Return the pools of a model as `jax.ShapeDtypeStruct`: pages and their scales are sharded by `pool_sharding`,
    states by `state_sharding`."""
    spec, platform = model.cache_spec, mesh.devices.flat[0].platform
    made = jax.eval_shape(lambda: new_pools(spec, engine.num_pages, engine.page_size, model.dtype, platform=platform))
    pages = abstract(made, pool_sharding(mesh, spec))
    return with_states(spec, pages, lambda state: _states(state, model, engine, mesh))


def new_slots(model: Model, rows: int, limits: SamplingLimits, mesh: Mesh) -> tuple[Any, Any]:
    """Make last tokens and sampler state of slots without samples. Replicated on every device of the mesh."""
    return put_whole(_slots(model, rows, limits), replicated(mesh))


def abstract_arrays(stage: Stage, engine: ResolvedEngine, limits: SamplingLimits, mesh: Mesh) -> StageArrays:
    """Return the arrays of a stage as `jax.ShapeDtypeStruct`; slot arrays are those of one microbatch."""
    model, rows = stage.model, engine.rows // engine.microbatches
    placed = abstract_pools(model, engine, mesh)
    whole, banks = abstract_params(model, mesh), abstract_banks(stage, engine, mesh)
    vision = {"tower": whole.get(VISION), "images": abstract_cache(model, engine, replicated(mesh))}
    params = text_part(whole)
    if not stage.last:
        return StageArrays(params, placed, banks=banks, **vision)
    slots = abstract(HostSlots(rows, limits).snapshot(), replicated(mesh))
    made = jax.eval_shape(lambda: (*_slots(model, rows, limits), _features(stage, engine)))
    last_tokens, sampler, features = abstract(made, replicated(mesh))
    return StageArrays(params, placed, slots, last_tokens, sampler, features, banks, **vision)


def mask_words(sampler: Any) -> int:
    """Return the 32-bit words of a row's mask, one bit for each token of the vocabulary of a sampler state."""
    return -(-int(sampler.counts.shape[-1]) // 32)


def new_features(stage: Stage, engine: ResolvedEngine, mesh: Mesh) -> jax.Array | None:
    """Make empty features of a microbatch's slots. None: no draft head reads any."""
    made = _features(stage, engine)
    return None if made is None else put_whole(made, replicated(mesh))


def _features(stage: Stage, engine: ResolvedEngine) -> Any:
    rows, width = engine.rows // engine.microbatches, stage.model.config.features if stage.is_head else stage.features
    return jnp.zeros((rows, engine.feature_window, width), stage.model.dtype) if width else None


def _slots(model: Model, rows: int, limits: SamplingLimits) -> tuple[Any, Any]:
    return jnp.zeros((rows,), jnp.int32), new_state(rows, model.config.vocab_size, limits)


# --------------------------------------------------------------------------------------------------------------
# Weights in host memory (``weight_offload_gib``).


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

    specs = _in_order_of(model.specs, jax.tree_util.tree_map_with_path(marked, model.specs))
    return model.replace(specs=specs, params=jax.tree.map(_kept, specs, model.params))


def _in_order_of(like: Any, tree: Any) -> Any:
    """Return ``tree`` with names as in ``like``: parts of adapters are numbered in their order, and jax sorts names."""
    return {name: _in_order_of(like[name], tree[name]) for name in like} if isinstance(like, Mapping) else tree


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
