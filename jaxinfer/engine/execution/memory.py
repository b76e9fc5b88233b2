"""Plan device memory: does it fit, and how large is the pool. Needs config.json, not the weights."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from jaxinfer.config import EngineConfig, EngineConfigError, ResolvedEngine
from jaxinfer.engine.execution.compiled import compile_largest, temporary_bytes
from jaxinfer.engine.execution.placement import (
    StageArrays,
    abstract,
    abstract_arrays,
    abstract_params,
    array_bytes,
    device_bytes,
    there,
)
from jaxinfer.engine.execution.prepare import Prepared, prepare, resolve_for
from jaxinfer.engine.execution.stages import Stage, cut
from jaxinfer.models.model import Model
from jaxinfer.parallel.mesh import mesh_for, replicas, stages
from jaxinfer.parallel.processes import own_devices

# A layer's pool stays below this many elements, so that no offset into it needs more than 32 bits.
_INDEXABLE = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Budget:
    """The share of a device's memory that an engine may take, in bytes.

    ``total`` is what the device has, ``used`` what others hold of it already.
    """

    total: int
    utilization: float
    used: int = 0

    @property
    def bytes(self) -> int:
        return int(self.total * self.utilization) - self.used

    def __str__(self) -> str:
        others = f" - {_size(self.used)} in use" if self.used else ""
        return f"{self.utilization:.2f} x {_size(self.total)}{others} (memory_utilization)"


@dataclasses.dataclass(frozen=True)
class Needs:
    """Bytes that an engine needs: those of its weights, of the sampler's state, of one page of the KV pool over all
    layers, and of what programs use while they run (None: not known yet)."""

    weights: int
    sampler: int
    page: int
    temporaries: int | None = None

    @property
    def fixed(self) -> int:
        return self.weights + self.sampler + (self.temporaries or 0)


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Decision of `plan_memory`: ``pages`` in the pool."""

    needs: Needs
    budget: Budget
    pages: int

    def require(self, temporaries: Callable[[], int]) -> None:
        """Check what the compiled programs use, unless the plan knew it; ``temporaries`` finds out.

        Raises:
            EngineConfigError: the pool of the plan does not fit beside that; the message holds the sum.
        """
        if self.needs.temporaries is None:
            needs = dataclasses.replace(self.needs, temporaries=temporaries())
            _require_fit(needs, self.budget, self.pages, f"a pool of {self.pages} pages")


def plan_memory(needs: Needs, budget: Budget, *, length: int, width: int, asked: int | None, most: int) -> MemoryPlan:
    """The size of the pool. Arithmetic only.

    Args:
        length, width: tokens of the longest sequence and its pages: the least that a pool must hold.
        asked: pages that the user wants; None: as many as fit, but not more than ``most``.

    Raises:
        EngineConfigError: it does not fit; the message holds the sum.
    """
    purpose = f"1 sequence of {length} tokens ({width} pages)" if asked is None else f"num_pages = {asked}"
    _require_fit(needs, budget, width if asked is None else asked, purpose)
    room = (budget.bytes - needs.fixed) // needs.page
    return MemoryPlan(needs, budget, asked or max(width, min(room, most)))


def _require_fit(needs: Needs, budget: Budget, pages: int, purpose: str) -> None:
    total = needs.fixed + pages * needs.page
    if total <= budget.bytes:
        return
    parts = {"weights": needs.weights, "temporaries": needs.temporaries, "sampler state": needs.sampler}
    terms = [f"{name} {_size(size)}" for name, size in parts.items() if size]
    raise EngineConfigError(
        f"{' + '.join([*terms, f'{purpose} {_size(pages * needs.page)}'])} = {_size(total)} > {budget}"
    )


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 / 20 else f"{count / 2**20:.1f} MiB"


# ---- what jax knows


def plan_engine(model: Model, config: EngineConfig, platform: str, mesh: Mesh | None = None) -> MemoryPlan:
    """Size the pool of an engine, for a model whose parameters may be abstract (`jax.ShapeDtypeStruct`).

    All bytes are those of one device of the mesh (None: one is made): of the pipeline stage that has least room.

    On an accelerator all memory that is left goes to the pool (within ``kv_cache_bytes``, if that is given), and XLA
    says what the largest programs need: they are compiled for that, nothing is allocated. On a CPU the default pool is
    bounded (`jaxinfer.config.resolve`); where all that leaves half of the memory, the programs are asked when they are
    compiled anyway, through `MemoryPlan.require`.

    Raises:
        EngineConfigError: a setting cannot be served, or it does not fit.
    """
    mesh = mesh or mesh_for(config)
    prepared = prepare(model.replace(params=abstract(model.params)), config, platform, mesh)
    parts, copies = cut(prepared.model, config.pipeline_parallel_size), [stages(replica) for replica in replicas(mesh)]
    held: collections.Counter[jax.Device] = collections.Counter()
    for places in copies:
        for part, own in zip(parts, places, strict=True):
            held.update(_held(part.model, model.params, own))
    plans = []
    for number, part in enumerate(parts):
        here = [places[number] for places in copies if own_devices(places[number])]
        if not here:  # other processes have this stage
            continue
        devices = [device for place in here for device in own_devices(place)]
        budgets = [device_budget(each, config.memory_utilization, held[each], mesh.size) for each in devices]
        budget = min(budgets, key=lambda budget: budget.bytes)
        plans.append(_plan_stage(prepared, part, config, platform, here[0], budget))
    return min(plans, key=lambda plan: plan.pages)


def _plan_stage(
    prepared: Prepared, part: Stage, config: EngineConfig, platform: str, mesh: Mesh, budget: Budget
) -> MemoryPlan:
    """The pool of one pipeline stage; `plan_engine` takes the smallest."""
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
    )
    plan = decide(needs)
    if platform == "cpu" and 2 * (needs.fixed + plan.pages * needs.page) <= budget.bytes:
        return plan
    # More pages allow wider programs.
    roomy = dataclasses.replace(config, num_pages=config.num_pages or max(most, engine.table_width))
    temporaries = _temporaries(part, arrays, resolve_for(model, roomy, platform))
    return decide(dataclasses.replace(needs, temporaries=temporaries))


def stage_needs(part: Stage, engine: ResolvedEngine, arrays: StageArrays) -> Needs:
    """Bytes of a pipeline stage on each of its devices, its programs aside. Arithmetic: nothing is compiled.

    Args:
        part: of a `Prepared` model.
        arrays: the stage's `abstract_arrays`.
    """
    page = part.model.cache_spec.bytes_per_page(engine.page_size, part.model.dtype.itemsize, engine.devices)
    return Needs(device_bytes(arrays.params), device_bytes(arrays.sampler) * engine.microbatches, page)


def _temporaries(part: Stage, arrays: StageArrays, engine: ResolvedEngine) -> int:
    return max(map(temporary_bytes, compile_largest(part, arrays, engine)))


def _held(model: Model, params: Any, mesh: Mesh) -> collections.Counter[jax.Device]:
    """Bytes that parameters take already, by device, of those that lie where the model's will stay."""
    found: collections.Counter[jax.Device] = collections.Counter()
    own, wanted = {name: params[name] for name in model.params}, abstract_params(model, mesh)
    for leaf, place in zip(jax.tree.leaves(own), jax.tree.leaves(wanted), strict=True):
        if isinstance(leaf, jax.Array) and leaf.shape == place.shape:
            found.update(
                {shard.device: array_bytes(shard.data.shape, leaf.dtype) for shard in there(leaf, place.sharding) or ()}
            )
    return found


def device_budget(device: Any, utilization: float, held: int, devices: int = 1) -> Budget:
    """Budget that a device offers. ``held`` bytes of what is in use are the engine's weights, and counted there.

    A GPU's limit is what JAX may allocate on it; a CPU's is the memory that the machine has available now, of which
    each of as many ``devices`` has the same share.
    """
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return Budget(stats["bytes_limit"], utilization, max(0, stats["bytes_in_use"] - held))
    return Budget(available_memory() // devices + held, utilization)


def available_memory(proc: pathlib.Path = pathlib.Path("/proc"), groups: pathlib.Path = pathlib.Path("/sys")) -> int:
    """Bytes of main memory that can be had without swapping; in a container not more than its limit."""
    limit = groups / "fs/cgroup/memory.max"
    bounds = [int(text) for text in [_read(limit).strip()] if text.isdigit()]
    fields = dict(line.split(":", 1) for line in _read(proc / "meminfo").splitlines() if ":" in line)
    if "MemAvailable" in fields:
        return min([int(fields["MemAvailable"].split()[0]) * 1024, *bounds])
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *bounds])


def _read(path: pathlib.Path) -> str:
    """The text of a system's file; empty where the system has none."""
    return path.read_text() if path.is_file() else ""


def _most_pages(model: Model, config: EngineConfig, page: int) -> int:
    bound = _INDEXABLE // math.prod(model.cache_spec.pool_shape(1, config.page_size, config.devices))
    return bound if config.kv_cache_bytes is None else min(bound, config.kv_cache_bytes // page)
