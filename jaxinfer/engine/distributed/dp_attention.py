"""Data-parallel attention: devices that serve sequences of their own and share the experts of a mixture.

Each lane is an engine with a scheduler, slots, pages and a prefix cache of its own, on one device that has all
parameters but routed experts whole. These are dealt out among the lanes, so that all lanes must run each program
together: every step is planned by each lane, and launched once (`jaxinfer.engine.distributed.lockstep`).
"""

from __future__ import annotations

from typing import override

from jax.sharding import Mesh

from jaxinfer.config import EngineConfig
from jaxinfer.engine.distributed.lockstep import Lane, Lockstep
from jaxinfer.engine.distributed.replicas import Replicas, config_of_each
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.execution.compiled import CompileProgress
from jaxinfer.engine.execution.prepare import prepare
from jaxinfer.engine.execution.runner import Proved
from jaxinfer.models.model import Model
from jaxinfer.parallel.mesh import mesh_for


class Lanes(Replicas):
    """Has the methods of `Engine`. A request is served by one lane from its first to its last token.

    Settings hold for each of the lanes, as for each of `Replicas`. A request's bits do not depend on its lane.

    Args, Raises: as `Engine`.
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        platform: str,
        progress: CompileProgress | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        mesh = mesh or mesh_for(config)
        one = config_of_each(config, mesh.shape["lane"])
        self._lockstep = Lockstep(*prepare(model, one, platform, mesh), mesh, progress)
        engines, proved = list[Engine](), None
        for lane in self._lockstep.lanes:
            engine = _engine_of(lane, model, one, platform, mesh, proved)
            proved = engine.proved  # of programs that all lanes run
            self._lockstep.classes = proved.classes
            engines.append(engine)
        self._begin(engines, config, 1)

    @override
    def _launched(self) -> None:
        self._lockstep.run()


def _engine_of(
    lane: Lane, model: Model, config: EngineConfig, platform: str, mesh: Mesh, proved: Proved | None
) -> Engine:
    return Engine(model, config, platform, None, mesh, lambda *_: lane, proved)
