"""Compilation jobs of engines that are not started: what `jaxinfer.engine.execution.compiled` would compile."""

from __future__ import annotations

from typing import Any

import jax

from jaxinfer.compilations import Fingerprints
from jaxinfer.config import EngineConfig
from jaxinfer.engine.execution.compiled import _Job, _work
from jaxinfer.engine.execution.placement import abstract_arrays
from jaxinfer.engine.execution.prepare import prepare
from jaxinfer.engine.execution.stages import cut, draft_stages
from jaxinfer.models.model import Model
from jaxinfer.parallel.mesh import make_mesh, traced_for

MESH = make_mesh()


def jobs_of(model: Model, **settings: Any) -> dict[str, _Job]:
    """Return the programs of a small engine by name, those of its draft model last."""
    small: dict[str, Any] = {"max_num_seqs": 2, "max_model_len": 64, "prefill_sizes": (16,), "page_size": 16}
    prepared, engine, limits = prepare(model, EngineConfig(**small | {"num_pages": 9} | settings), "cpu", MESH)
    stages = [*cut(prepared, 1), *(draft_stages(prepared) if prepared.draft is not None else [])]
    found = dict[str, _Job]()
    for stage in stages:
        work = _work(stage, abstract_arrays(stage, engine, limits, MESH), engine)
        found |= {f"{name} {'draft' * stage.drafts}".strip(): job for name, job in work.jobs().items()}
    return found


def digest(job: _Job, fingerprints: Fingerprints) -> str | None:
    device = MESH.devices.flat[0]
    with traced_for(MESH):
        return fingerprints.of(device, job.function, job.arguments, job.donate, job.results)


def program(job: _Job) -> str:
    """Return the jaxpr of a job as text."""
    with traced_for(MESH):
        return str(jax.make_jaxpr(job.function)(*job.arguments))
