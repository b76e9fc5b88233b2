"""Placement of an engine's arrays on its mesh: parameters, KV pools, and the sampler state of each slot.

Pools and parameters are created in place: no device ever holds more than its own shards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.config import EngineConfig, EngineConfigError, ResolvedEngine
from jaxinfer.engine.execution.encoder import abstract_cache, text_part
from jaxinfer.engine.execution.stages import Stage
from jaxinfer.kv.pool import Pool, new_pools, with_states
from jaxinfer.models.model import Model
from jaxinfer.parallel.arrays import abstract, put
from jaxinfer.parallel.heads import as_copied, copied, kv_copies, require_even, require_experts, with_copies
from jaxinfer.parallel.mesh import devices_along, mesh_for, param_sharding, pool_sharding, replicated, state_sharding
from jaxinfer.parallel.processes import on_host, put_whole
from jaxinfer.quant.banks import Path, bank_specs, lora_targets
from jaxinfer.sampling import HostSlots, SamplingLimits, new_state
from jaxinfer.types import EMBEDDING, HEAD, VISION, CacheSpec, LoRATarget, ParamSpec, StateSpec
from jaxinfer.weights.load import Deferred, on_devices


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
