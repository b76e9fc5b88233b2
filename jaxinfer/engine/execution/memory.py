"""Device memory of an engine's stages: planned, as `jaxinfer.planner` needs it, from config.json without the weights;
and in use, by shapes, and by what JAX and the driver report."""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from jaxinfer.config import EngineConfig, EngineConfigError, ResolvedEngine
from jaxinfer.engine.execution.compiled import compile_largest, temporary_bytes
from jaxinfer.engine.execution.placement import (
    StageArrays,
    abstract_arrays,
    abstract_params,
    host_weights,
    layers_of,
    mesh_of,
)
from jaxinfer.engine.execution.prepare import Prepared, prepare, resolve_for
from jaxinfer.engine.execution.stages import Stage, cut, draft_stages, unshared
from jaxinfer.engine.scheduling.usage import DeviceUsage, HostUsage, Usage
from jaxinfer.kv.pool import Pool, StatePool
from jaxinfer.models.model import Model
from jaxinfer.parallel.arrays import abstract, array_bytes, device_bytes, is_page_locked, memory_stats, there
from jaxinfer.parallel.driver import driver_figures
from jaxinfer.parallel.mesh import mesh_for, replicas, stages
from jaxinfer.parallel.processes import own_devices, require_host_memory
from jaxinfer.planner.memory import (
    Budget,
    HostWeights,
    MemoryPlan,
    Needs,
    Ways,
    available_memory,
    device_budget,
    plan_memory,
    size_text,
)

_log = logging.getLogger("jaxinfer.start")
_MORE_DEVICES = (2, 4, 8)

# A layer's pool stays below this many elements, so that no offset into it needs more than 32 bits.
_INDEXABLE = 2**31 - 1


def plan_engine(model: Model, config: EngineConfig, platform: str, mesh: Mesh | None = None) -> MemoryPlan:
    """Size the pool of an engine, for a model with possibly abstract parameters (`jax.ShapeDtypeStruct`).

    All bytes are those of one device of the mesh (None: one is made): of the pipeline stage with the least capacity.

    On an accelerator all remaining memory goes to the pool (within ``kv_cache_bytes``, if given), and XLA reports the
    needs of the largest programs: they are compiled for that, without allocating. On a CPU the default pool is bounded
    (`jaxinfer.config.resolve`); if that leaves half of the memory, the temporaries are checked once the programs are
    compiled anyway, through `MemoryPlan.require`.

    Raises:
        EngineConfigError: a setting cannot be served, or it does not fit.
    """
    mesh = mesh or mesh_for(config)
    prepared = prepare(_abstract(model), config, platform, mesh)
    parts, copies = cut(prepared.model, config.pipeline_parallel_size), [stages(replica) for replica in replicas(mesh)]
    held: collections.Counter[jax.Device] = collections.Counter()
    for places in copies:
        for part, own in zip(parts, places, strict=True):
            held.update(_held(part.model, model.params, own))
            for draft in draft_stages(part.model):
                held.update(_held(unshared(draft.model, part.model), getattr(model.draft, "params", None), own))
    plans, hosted = [], 0
    for number, part in enumerate(parts):
        here = [places[number] for places in copies if own_devices(places[number])]
        if not here:  # other processes have this stage
            continue
        devices = [device for place in here for device in own_devices(place)]
        budgets = [device_budget(each, config.memory_utilization, held[each], mesh.size) for each in devices]
        budget = min(budgets, key=lambda budget: budget.bytes)
        plans.append(_plan_stage(prepared, part, config, platform, here[0], budget))
        hosted += plans[-1].needs.host.bytes * len(devices)
    _require_host_memory(config, hosted, platform)
    plan = min(plans, key=lambda plan: plan.pages)
    filled = platform != "cpu" and config.num_pages is None and config.kv_cache_bytes is None
    if filled and plan.unused >= plan.needs.page:
        unused = "the pool has %d pages, as many as 32-bit offsets into a layer's pool reach: %s stay unused"
        _log.warning(unused, plan.pages, size_text(plan.unused))
    return plan


def _require_host_memory(config: EngineConfig, weights: int, platform: str) -> None:
    """Raise EngineConfigError if the host has no room for the weights that this process keeps there."""
    if not weights:
        return
    if platform == "gpu":
        require_host_memory(config.swap_space_gib, weights)
    if weights > (free := available_memory()):
        raise EngineConfigError(
            f"weight_offload_gib = {config.weight_offload_gib:g} cannot be: {size_text(weights)} of weights would be "
            f"in host memory, of which {size_text(free)} are available"
        )


def _plan_stage(
    prepared: Prepared, part: Stage, config: EngineConfig, platform: str, mesh: Mesh, budget: Budget
) -> MemoryPlan:
    """Size the pool of one pipeline stage; `plan_engine` takes the smallest."""
    model, engine, limits = prepared
    arrays = abstract_arrays(part, engine, limits, mesh)
    needs = stage_needs(part, engine, arrays)
    most = engine.num_pages if platform == "cpu" else _most_pages(model, config, needs.page)
    decide = functools.partial(
        plan_memory,
        budget=budget,
        length=engine.max_model_len,
        width=engine.table_width,
        asked=config.num_pages,
        most=most,
        ways=_ways(part, engine, platform, mesh),
    )
    least = engine.table_width if config.num_pages is None else config.num_pages
    fits = needs.fixed + least * needs.page <= budget.bytes
    if not fits and (config.num_pages is not None or needs.fixed + needs.page > budget.bytes):
        return decide(needs)  # raises: the programs' own memory would change nothing
    if fits and platform == "cpu":
        plan = decide(needs)
        if 2 * (needs.fixed + plan.pages * needs.page) <= budget.bytes:
            return plan
    # More pages allow wider programs.
    roomy = dataclasses.replace(config, num_pages=config.num_pages or max(most, engine.table_width))
    temporaries = _temporaries(part, arrays, resolve_for(model, roomy, platform, mesh))
    return decide(dataclasses.replace(needs, temporaries=temporaries))


def _ways(part: Stage, engine: ResolvedEngine, platform: str, mesh: Mesh) -> Ways:
    """Return settings that could help. More devices only help on accelerators: those of a CPU share its memory."""
    cache, itemsize = part.model.cache_spec, part.model.dtype.itemsize
    small = None
    if cache.dtype is None:
        small = cache.stored_as("int8").bytes_per_page(engine.page_size, itemsize, engine.devices)
    plain = platform != "cpu" and engine.devices == engine.dp_ranks == 1 and not cache.latent
    heads = math.gcd(*(cache.sizes(layer)[0] for layer in cache.layers))
    devices = tuple(n for n in _MORE_DEVICES if heads % n == 0) if plain else ()
    movable = platform != "cpu" and not engine.weight_offload_gib and not engine.enable_dp_attention
    layers = layers_of(part.model, mesh) if movable else HostWeights()
    return Ways(engine.page_size, small, devices, layers)


def stage_needs(part: Stage, engine: ResolvedEngine, arrays: StageArrays) -> Needs:
    """Return the bytes of a stage of a `Prepared` model on each of its devices, without its programs; ``arrays``: its
    `abstract_arrays`. A draft model is on the devices of its model's last stage, and has as many pages."""
    weights, page = device_bytes((arrays.params, arrays.tower)), _page_bytes(part.model, engine)
    for draft in draft_stages(part.model):
        mesh = mesh_of(arrays.params)
        weights += device_bytes(abstract_params(unshared(draft.model, part.model), mesh))
        page += _page_bytes(draft.model, engine)
    sampler, adapters = device_bytes((arrays.sampler, arrays.features)), device_bytes(arrays.banks)
    state = part.model.cache_spec.bytes_per_state(part.model.dtype.itemsize, engine.devices)
    others = {"adapters": adapters, "states": state * engine.state_places, "images": device_bytes(arrays.images)}
    return Needs(weights, sampler * engine.microbatches, page, **others, host=host_weights(arrays.params))


def _page_bytes(model: Model, engine: ResolvedEngine) -> int:
    return model.cache_spec.bytes_per_page(engine.page_size, model.dtype.itemsize, engine.devices)


def _abstract(model: Model) -> Model:
    draft = None if model.draft is None else _abstract(model.draft)
    return model.replace(params=abstract(model.params), draft=draft)


def _temporaries(part: Stage, arrays: StageArrays, engine: ResolvedEngine) -> int:
    return max(map(temporary_bytes, compile_largest(part, arrays, engine)))


def _held(model: Model, params: Any, mesh: Mesh) -> collections.Counter[jax.Device]:
    """Return the bytes of parameters that are already on the model's devices, by device."""
    found: collections.Counter[jax.Device] = collections.Counter()
    wanted = {name: node for name, node in abstract_params(model, mesh).items() if name in params}
    own = {name: params[name] for name in wanted}  # a head may share its model's, which are elsewhere
    for leaf, place in zip(jax.tree.leaves(own), jax.tree.leaves(wanted), strict=True):
        if isinstance(leaf, jax.Array) and leaf.shape == place.shape and not is_page_locked(place.sharding):
            found.update(
                {shard.device: array_bytes(shard.data.shape, leaf.dtype) for shard in there(leaf, place.sharding) or ()}
            )
    return found


def _most_pages(model: Model, config: EngineConfig, page: int) -> int:
    spec, split = model.cache_spec, (config.page_size, config.devices)
    bound = _INDEXABLE // max(math.prod(spec.pool_shape(1, *split, layer)) for layer in spec.layers)
    return bound if config.kv_cache_bytes is None else min(bound, config.kv_cache_bytes // page)


# ---- memory in use


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
            devices: Any = leaf.sharding.addressable_devices
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
