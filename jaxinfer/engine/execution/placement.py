"""Placement of an engine's arrays on its mesh: parameters, KV pools, and the sampler state of each slot.

Pools and parameters are created in place: no device ever holds more than its own shards.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.dtypes import itemsize_bits
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.config import EngineConfigError, ResolvedEngine
from jaxinfer.engine.execution.stages import Stage
from jaxinfer.kv.pool import LayerPool, Pool, new_pools, with_states
from jaxinfer.models.model import Model
from jaxinfer.parallel.heads import as_copied, copied, kv_copies, require_even, require_experts, with_copies
from jaxinfer.parallel.mesh import devices_along, param_sharding, pool_sharding, replicated, state_sharding
from jaxinfer.parallel.processes import put_whole
from jaxinfer.quant.banks import Path, bank_specs, lora_targets
from jaxinfer.sampling import HostSlots, SamplingLimits, new_state
from jaxinfer.types import EMBEDDING, HEAD, CacheSpec, LoRATarget, ParamSpec, StateSpec


def shardable_model(model: Model, mesh: Mesh) -> Model:
    """Return the same function in a form to shard over the mesh: with replicated KV heads where they are too few.

    Parameters may be abstract; they stay where they are.

    Raises:
        EngineConfigError: heads, or another dimension that must be sharded, cannot be divided evenly.
    """
    cache, copies = model.cache_spec, kv_copies(model.cache_spec, mesh.shape)
    specs = with_copies(model.specs, copies)
    require_even(specs, mesh.shape)
    require_experts(specs, mesh.shape)
    _require_even_states(cache, devices_along(mesh.shape, "heads"))
    return model.replace(
        specs=specs,
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


def place_params(model: Model, mesh: Mesh) -> Any:
    """Place the parameters of a spread model on their devices; those already there are not moved."""
    return jax.tree.map(lambda spec, value: put(value, param_sharding(mesh, spec)), model.specs, model.params)


def put(value: Any, sharding: NamedSharding) -> jax.Array:
    """Place ``value`` with a sharding. Data already in place, perhaps also on other devices, is not copied."""
    shards = there(value, sharding) if isinstance(value, jax.Array) else None
    if shards is not None:
        return jax.make_array_from_single_device_arrays(value.shape, sharding, [shard.data for shard in shards])
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return _moved(value, sharding)
    return jax.device_put(value, sharding)


def _moved(value: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Move an array shard by shard, for which this process has the shards of ``sharding`` on other devices."""
    found = {shard.index: shard.data for shard in value.addressable_shards}
    wanted = sharding.addressable_devices_indices_map(value.shape)
    parts = [jax.device_put(found[index or ()], device) for device, index in wanted.items()]
    return jax.make_array_from_single_device_arrays(value.shape, sharding, parts)


def there(value: jax.Array, sharding: NamedSharding) -> list[jax.Shard] | None:
    """Return the shards of an array that are where ``sharding`` needs them; None unless all are."""
    wanted = sharding.addressable_devices_indices_map(value.shape)
    found = {shard.device: shard for shard in value.addressable_shards}
    if any(device not in found or found[device].index != index for device, index in wanted.items()):
        return None
    return [found[device] for device in wanted]


def abstract_params(model: Model, mesh: Mesh) -> Any:
    """Return parameters like those of `place_params`, as `jax.ShapeDtypeStruct`."""

    def placed(spec: ParamSpec, leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=param_sharding(mesh, spec))

    return jax.tree.map(placed, model.specs, model.params)


class StageArrays(NamedTuple):
    """Arrays that a pipeline stage keeps on its devices. Sampler arrays are on the last stage only, else None;
    ``features`` where a draft head reads them, ``banks`` where the engine has adapters."""

    params: Any
    pools: list[Pool]
    slots: Any = None  # SlotParams
    last_tokens: Any = None  # [rows]
    sampler: Any = None  # SlotState
    features: Any = None  # [rows, window, width]
    banks: Any = None  # Banks


def targets_of(stage: Stage, engine: ResolvedEngine) -> dict[Path, LoRATarget]:
    """Return the weights of a stage that adapters may change (`jaxinfer.lora.parts`); empty without adapters. Of a tied
    embedding the first stage has the lookup, and the last one the product."""
    if not engine.lora_slots:
        return {}
    model = stage.model
    here: dict[Path, bool] = {EMBEDDING: stage.first, HEAD: stage.last}
    declared = model.family.param_specs(model.config)
    found = lora_targets(model.specs, declared, engine.max_lora_rank, engine.lora_target_modules)
    return {path: target for path, target in found.items() if here.get(path, True)}


def new_banks(stage: Stage, engine: ResolvedEngine, mesh: Mesh) -> dict[str, dict[str, jax.Array]] | None:
    """Make the banks of a stage without adapters; None: it has none."""
    made = abstract_banks(stage, engine, mesh)
    return None if made is None else jax.tree.map(_zeros, made)


def _zeros(array: jax.ShapeDtypeStruct) -> jax.Array:
    """Make zeros, each shard created on its device only."""
    part = np.zeros(array.sharding.shard_shape(array.shape), array.dtype)
    return jax.make_array_from_callback(array.shape, array.sharding, lambda _: part)


def abstract_banks(stage: Stage, engine: ResolvedEngine, mesh: Mesh) -> Any:
    """Return banks like those of `new_banks`, as `jax.ShapeDtypeStruct`."""
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


def put_part(part: str, arrays: Mapping[str, Any], specs: Mapping[str, ParamSpec], mesh: Mesh) -> dict[str, jax.Array]:
    """Send adapter weights of a module (`jaxinfer.lora.parts`) towards a bank: each device gets its shards only, with
    heads replicated as on the mesh."""
    whole = {name: as_copied(arrays[f"{part}/{name}"], spec) for name, spec in specs.items()}
    return {name: put_whole(whole[name], param_sharding(mesh, spec)) for name, spec in specs.items()}


def new_pools_on(model: Model, engine: ResolvedEngine, mesh: Mesh) -> list[Pool]:
    """Make empty pools: pages and their scales sharded by `pool_sharding`, states by `state_sharding`."""
    spec = model.cache_spec
    pages = _pages(model, engine, mesh, pool_sharding(mesh, spec))

    def room(state: StateSpec) -> jax.Array:
        states = _states(state, model, engine, mesh)
        return jnp.zeros(states.shape, states.dtype, device=states.sharding)

    return with_states(spec, pages, room)


def _states(state: StateSpec, model: Model, engine: ResolvedEngine, mesh: Mesh) -> jax.ShapeDtypeStruct:
    shape, dtype = (engine.state_places, *state.shape), jnp.dtype(jnp.float32 if state.exact else model.dtype)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=state_sharding(mesh, state))


def _pages(model: Model, engine: ResolvedEngine, mesh: Mesh, sharding: NamedSharding | None = None) -> list[LayerPool]:
    platform = mesh.devices.flat[0].platform
    return new_pools(model.cache_spec, engine.num_pages, engine.page_size, model.dtype, sharding, platform)


def _abstract_pools(model: Model, engine: ResolvedEngine, mesh: Mesh) -> list[Pool]:
    """Return abstract pools like those of `new_pools_on`."""
    spec = model.cache_spec
    pages = abstract(jax.eval_shape(lambda: _pages(model, engine, mesh)), pool_sharding(mesh, spec))
    return with_states(spec, pages, lambda state: _states(state, model, engine, mesh))


def new_slots(model: Model, rows: int, limits: SamplingLimits, mesh: Mesh) -> tuple[Any, Any]:
    """Make last tokens and sampler state of slots without samples. Replicated on every device of the mesh."""
    return put_whole(_slots(model, rows, limits), replicated(mesh))


def abstract_arrays(stage: Stage, engine: ResolvedEngine, limits: SamplingLimits, mesh: Mesh) -> StageArrays:
    """Return the arrays of a stage as `jax.ShapeDtypeStruct`; slot arrays are those of one microbatch."""
    model, rows = stage.model, engine.rows // engine.microbatches
    placed = _abstract_pools(model, engine, mesh)
    params, banks = abstract_params(model, mesh), abstract_banks(stage, engine, mesh)
    if not stage.last:
        return StageArrays(params, placed, banks=banks)
    slots = abstract(HostSlots(rows, limits).snapshot(), replicated(mesh))
    made = jax.eval_shape(lambda: (*_slots(model, rows, limits), _features(stage, engine)))
    last_tokens, sampler, features = abstract(made, replicated(mesh))
    return StageArrays(params, placed, slots, last_tokens, sampler, features, banks)


def abstract(tree: Any, sharding: NamedSharding | None = None) -> Any:
    """Return shapes and dtypes of a tree, all with one sharding, or with none."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def device_memory(device: Any) -> int:
    """Return the bytes that JAX may allocate on a device; 0 where it is not reported, or for a topology description
    (`jax.experimental.topologies`)."""
    try:
        stats = device.memory_stats() or {}
    except jax.errors.JaxRuntimeError:
        return 0
    return int(stats.get("bytes_limit", 0))


def device_bytes(tree: Any) -> int:
    """Return the bytes per device of a tree of arrays, which may be abstract. All must have a sharding."""
    leaves = jax.tree.leaves(tree)
    return sum(array_bytes(leaf.sharding.shard_shape(leaf.shape), leaf.dtype) for leaf in leaves)


def array_bytes(shape: tuple[int, ...], dtype: Any) -> int:
    """Return the bytes of an array on a device, where two 4-bit numbers share a byte."""
    return math.ceil(math.prod(shape) * itemsize_bits(dtype) / 8)


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
