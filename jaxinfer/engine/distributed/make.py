"""Factory of the engine for given settings: one engine, replicas, or ranks of data-parallel attention."""

from __future__ import annotations

import dataclasses
import functools

from jax.sharding import Mesh

from jaxinfer.config import EngineConfig, ResolvedEngine
from jaxinfer.engine.core import EngineCore
from jaxinfer.engine.distributed.leader import LeaderExecutor
from jaxinfer.engine.distributed.lockstep import Lockstep
from jaxinfer.engine.distributed.replicas import Replicas
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.execution.compiled import CompileProgress
from jaxinfer.engine.execution.executor import LocalExecutor, MakeExecutor
from jaxinfer.engine.execution.memory import plan_engine
from jaxinfer.engine.execution.prepare import Prepared, compile_quantisers, prepare
from jaxinfer.lora.open import open_store
from jaxinfer.lora.store import LoRAStore
from jaxinfer.models.model import Model
from jaxinfer.parallel.group import Group
from jaxinfer.parallel.mesh import mesh_for, replicas
from jaxinfer.parallel.processes import own_devices, processes_of, require_host_memory


def make_engine(
    model: Model,
    config: EngineConfig,
    platform: str,
    progress: CompileProgress | None = None,
    mesh: Mesh | None = None,
    group: Group | None = None,
    loras: LoRAStore | None = None,
) -> EngineCore:
    """Make the engine for a model. On an accelerator the KV pool is sized to the free memory if the settings do not.

    Every setting applies to each replica or rank, with two exceptions: the queue limits and ``swap_space_gib`` are
    totals.

    Args:
        progress: see `Engine`.
        mesh: devices of the engine; None: the first ones.
        group: process group whose processes have these devices.
        loras: adapters that requests may name, shared by all replicas; None: opened if LoRA is enabled.

    Raises:
        EngineConfigError: a setting cannot be served.
    """
    mesh = mesh or mesh_for(config)
    if platform == "gpu":
        require_host_memory(config.swap_space_gib)
    if config.num_pages is None and platform != "cpu":
        config = dataclasses.replace(config, num_pages=plan_engine(model, config, platform, mesh).pages)
    loras = open_store(model, config) if loras is None and config.enable_lora else loras
    if mesh.shape["data"] > 1:
        return _make_replicas(model, config, platform, progress, mesh, group, loras)
    if mesh.shape["dp_attn"] > 1:
        return _make_ranks(model, config, platform, progress, mesh, loras)
    return Engine(_prepared(model, config, platform, mesh), mesh, progress, _make_for(group, 0, mesh), loras=loras)


def _make_replicas(
    model: Model,
    config: EngineConfig,
    platform: str,
    progress: CompileProgress | None,
    mesh: Mesh,
    group: Group | None,
    loras: LoRAStore | None,
) -> Replicas:
    places, engines = replicas(mesh), list[Engine]()
    one = dataclasses.replace(_config_of_each(config, len(places)), data_parallel_size=1)
    prepared = _prepared(model, one, platform, places[0])  # shared: replicas differ only in their devices
    local = sum(bool(own_devices(place)) for place in places)  # the first ones
    for number, place in enumerate(places):
        on_progress, make = _share(progress, number, local), _make_for(group, number, place)
        found = None if own_devices(place) else engines[0].calibration  # of the same programs on identical devices
        engines.append(Engine(prepared, place, on_progress, make, found, loras))
    return Replicas(engines, config, len(places))


def _make_ranks(
    model: Model,
    config: EngineConfig,
    platform: str,
    progress: CompileProgress | None,
    mesh: Mesh,
    loras: LoRAStore | None,
) -> Replicas:
    """Make the engines of data-parallel attention: each rank serves its own sequences on one device, with its own
    scheduler, slots, pages and prefix cache, and all ranks share the routed experts, so they run each program together.
    The results of a request are bitwise independent of its rank."""
    prepared = _prepared(model, _config_of_each(config, mesh.shape["dp_attn"]), platform, mesh)
    lockstep = Lockstep(prepared, mesh, progress)
    engines, found = list[Engine](), None
    for rank in lockstep.ranks:
        engine = Engine(prepared, mesh, None, lambda *_, rank=rank: rank, found, loras)
        found = engine.calibration  # of programs that all ranks run
        lockstep.size_classes = found.size_classes
        engines.append(engine)
    return Replicas(engines, config, 1, lockstep)


def make_followers(
    model: Model, config: EngineConfig, platform: str, mesh: Mesh, progress: CompileProgress | None = None
) -> tuple[ResolvedEngine, dict[int, LocalExecutor]]:
    """Make the executors of a follower process: one for each replica of which it has devices, by replica number.

    See `make_engine` for arguments and errors.
    """
    places = replicas(mesh)
    numbers = [number for number, place in enumerate(places) if own_devices(place)]
    one = _config_of_each(config, len(places)) if len(places) > 1 else config
    one, executors = dataclasses.replace(one, data_parallel_size=1), dict[int, LocalExecutor]()
    prepared = _prepared(model, one, platform, places[numbers[0]])
    for count, number in enumerate(numbers):
        executors[number] = LocalExecutor(prepared, places[number], _share(progress, count, len(numbers)))
    return dataclasses.replace(prepared.config, data_parallel_size=len(places)), executors


def _prepared(model: Model, config: EngineConfig, platform: str, mesh: Mesh) -> Prepared:
    prepared = prepare(model, config, platform, mesh)
    if config.enable_weight_updates:
        compile_quantisers(model, prepared.config, platform, mesh)
    return prepared


def _make_for(group: Group | None, number: int, mesh: Mesh) -> MakeExecutor:
    """Return the executor factory of a replica, where ``number`` counts the replicas of a group."""
    return LocalExecutor if group is None else functools.partial(LeaderExecutor, group, number, processes_of(mesh))


def _config_of_each(config: EngineConfig, count: int) -> EngineConfig:
    """Return the settings of one of several engines: swap space is divided, the group enforces queue limits."""
    share = config.swap_space_gib / count
    unbounded = dataclasses.replace(
        config, max_waiting_requests=None, max_waiting_sequences=None, max_waiting_tokens=None
    )
    return dataclasses.replace(unbounded, swap_space_gib=share)


def _share(progress: CompileProgress | None, number: int, replicas: int) -> CompileProgress | None:
    """Scale one replica's progress to that of all replicas, which have as many programs each."""
    if progress is None:
        return None
    return lambda done, total: progress(number * total + done, replicas * total)
