"""Factory of the engine for given settings."""

from __future__ import annotations

import dataclasses

from jax.sharding import Mesh

from jaxinfer.config import EngineConfig, ResolvedEngine
from jaxinfer.engine.core import EngineCore
from jaxinfer.engine.distributed.dp_attention import DpAttentionEngine
from jaxinfer.engine.distributed.replicas import Replicas, config_of_each, make_for, share
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.execution.compiled import CompileProgress
from jaxinfer.engine.execution.executor import LocalExecutor
from jaxinfer.engine.execution.memory import plan_engine
from jaxinfer.engine.execution.prepare import prepare
from jaxinfer.lora.open import open_store
from jaxinfer.lora.store import LoRAStore
from jaxinfer.models.model import Model
from jaxinfer.parallel.group import Group
from jaxinfer.parallel.mesh import mesh_for, replicas
from jaxinfer.parallel.processes import own_devices, require_host_memory


def make_engine(
    model: Model,
    config: EngineConfig,
    platform: str,
    progress: CompileProgress | None = None,
    mesh: Mesh | None = None,
    group: Group | None = None,
    loras: LoRAStore | None = None,
) -> EngineCore:
    """Make the engine for a model; opens an adapter store if LoRA is enabled and none is given, and on an accelerator
    sizes the KV pool to the free memory if the settings do not. See `Replicas` for arguments and errors."""
    mesh = mesh or mesh_for(config)
    if platform == "gpu":
        require_host_memory(config.swap_space_gib)
    if config.num_pages is None and platform != "cpu":
        config = dataclasses.replace(config, num_pages=plan_engine(model, config, platform, mesh).pages)
    loras = open_store(model, config) if loras is None and config.enable_lora else loras
    if mesh.shape["data"] > 1:
        return Replicas(model, config, platform, progress, mesh, group, loras)
    if mesh.shape["dp_attn"] > 1:
        return DpAttentionEngine(model, config, platform, progress, mesh, loras)
    return Engine(prepare(model, config, platform, mesh), mesh, progress, make_for(group, 0, mesh), loras=loras)


def make_followers(
    model: Model, config: EngineConfig, platform: str, mesh: Mesh, progress: CompileProgress | None = None
) -> tuple[ResolvedEngine, dict[int, LocalExecutor]]:
    """Make the executors of a follower process: one for each replica of which it has devices, by replica number.

    See `Replicas` for arguments and errors.
    """
    places = replicas(mesh)
    numbers = [number for number, place in enumerate(places) if own_devices(place)]
    one = config_of_each(config, len(places)) if len(places) > 1 else config
    one, executors = dataclasses.replace(one, data_parallel_size=1), dict[int, LocalExecutor]()
    prepared = prepare(model, one, platform, places[numbers[0]])
    for count, number in enumerate(numbers):
        executors[number] = LocalExecutor(*prepared, places[number], share(progress, count, len(numbers)))
    return dataclasses.replace(prepared.config, data_parallel_size=len(places)), executors
