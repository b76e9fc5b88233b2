"""The engine that settings ask for."""

from __future__ import annotations

from jax.sharding import Mesh

from jaxinfer.config import EngineConfig
from jaxinfer.engine.compiled import CompileProgress
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.lanes import Lanes
from jaxinfer.engine.replicas import Replicas
from jaxinfer.models.model import Model
from jaxinfer.parallel.mesh import mesh_for


def make_engine(
    model: Model,
    config: EngineConfig,
    platform: str,
    progress: CompileProgress | None = None,
    mesh: Mesh | None = None,
) -> Engine | Replicas:
    """Arguments and errors are those of `Engine`."""
    mesh = mesh or mesh_for(config)
    if mesh.shape["data"] > 1:
        return Replicas(model, config, platform, progress, mesh)
    if mesh.shape["lane"] > 1:
        return Lanes(model, config, platform, progress, mesh)
    return Engine(model, config, platform, progress, mesh)
