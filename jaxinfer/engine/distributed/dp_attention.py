"""Data-parallel attention: each rank serves its own sequences, and all ranks share the experts of an MoE.

Each rank is an engine with its own scheduler, slots, pages and prefix cache, on one device that holds all parameters
except routed experts in full. Experts are sharded over the ranks, so that all ranks must run each program together:
every step is planned by each rank, and launched once (`jaxinfer.engine.distributed.lockstep`).
"""

from __future__ import annotations

from typing import override

from jax.sharding import Mesh

from jaxinfer.config import EngineConfig
from jaxinfer.engine.distributed.lockstep import Lockstep
from jaxinfer.engine.distributed.replicas import Replicas, config_of_each
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.execution.compiled import CompileProgress
from jaxinfer.engine.execution.prepare import prepare
from jaxinfer.lora.store import LoRAStore
from jaxinfer.models.model import Model
from jaxinfer.parallel.mesh import mesh_for


class DpAttentionEngine(Replicas):
    """An `EngineCore` of ranks. A request is served by one rank from its first to its last token.

    Settings apply to each rank, as in `Replicas`. A request's results are bitwise independent of its rank.

    Args, Raises: see `Replicas`.
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        platform: str,
        progress: CompileProgress | None = None,
        mesh: Mesh | None = None,
        loras: LoRAStore | None = None,
    ) -> None:
        mesh = mesh or mesh_for(config)
        one = config_of_each(config, mesh.shape["dp_attn"])
        prepared = prepare(model, one, platform, mesh)
        self._lockstep = Lockstep(*prepared, mesh, progress)
        engines, found = list[Engine](), None
        for rank in self._lockstep.ranks:
            engine = Engine(prepared, mesh, None, lambda *_, rank=rank: rank, found, loras)
            found = engine.calibration  # of programs that all ranks run
            self._lockstep.size_classes = found.size_classes
            engines.append(engine)
        self._begin(engines, config, 1)

    @override
    def _launched(self) -> None:
        self._lockstep.run()
