"""Does it fit, and how large is the pool: answered from config.json, before weights are loaded."""

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
from jaxinfer.engine.compiled import compile_largest, temporary_bytes
from jaxinfer.engine.engine import resolve_for
from jaxinfer.engine.placement import (
    abstract_params,
    abstract_slots,
    abstract_step_state,
    device_bytes,
    spread_model,
)
from jaxinfer.engine.step import StepState, make_programs
from jaxinfer.models.model import Model
from jaxinfer.parallel.mesh import make_mesh
from jaxinfer.sampling import SamplingLimits

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
    """What was decided: ``pages`` in the pool."""

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

    All bytes are those of one device of the mesh (None: one is made): each holds the same.

    On an accelerator all memory that is left goes to the pool (within ``kv_cache_bytes``, if that is given), and XLA
    says what the largest programs need: they are compiled for that, nothing is allocated. On a CPU the default pool is
    bounded (`jaxinfer.config.resolve`); where all that leaves half of the memory, the programs are asked when they are
    compiled anyway, through `MemoryPlan.require`.

    Raises:
        EngineConfigError: a setting cannot be served, or it does not fit.
    """
    mesh = mesh or make_mesh(config.tensor_parallel_size, expert=config.expert_parallel_size)
    given, model = model.params, spread_model(model.replace(params=_shapes(model.params)), mesh)
    engine = resolve_for(model, config, platform)
    weights = device_bytes(abstract_params(model, mesh))
    page = model.cache_spec.bytes_per_page(engine.page_size, model.dtype.itemsize, config.devices)
    state = abstract_step_state(model, engine, SamplingLimits(max_logprobs=engine.max_logprobs), mesh)
    sampler = device_bytes(state.slots)
    held = _held(model, given, mesh)
    budgets = [device_budget(each, config.memory_utilization, held[each], mesh.size) for each in mesh.devices.flat]
    budget = min(budgets, key=lambda budget: budget.bytes)
    most = engine.num_pages if platform == "cpu" else _most_pages(model, config, page)
    decide = functools.partial(
        plan_memory,
        budget=budget,
        length=engine.max_model_len,
        width=engine.table_width,
        asked=config.num_pages,
        most=most,
    )
    plan = decide(Needs(weights, sampler, page))
    if platform == "cpu" and 2 * (plan.needs.fixed + plan.pages * page) <= budget.bytes:
        return plan
    # More pages allow wider programs.
    roomy = dataclasses.replace(config, num_pages=config.num_pages or max(most, engine.table_width))
    temporaries = _temporaries(model, resolve_for(model, roomy, platform), state, mesh)
    return decide(Needs(weights, sampler, page, temporaries))


def _shapes(params: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)


def _held(model: Model, params: Any, mesh: Mesh) -> collections.Counter[jax.Device]:
    """Bytes that parameters take already, by device, of those that lie where the model's will stay."""
    found: collections.Counter[jax.Device] = collections.Counter()
    for leaf, wanted in zip(jax.tree.leaves(params), jax.tree.leaves(abstract_params(model, mesh)), strict=True):
        if not isinstance(leaf, jax.Array) or leaf.shape != wanted.shape:
            continue
        if mesh.size == 1 or leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim):
            found.update({shard.device: shard.data.nbytes for shard in leaf.addressable_shards})
    return found


def device_budget(device: Any, utilization: float, held: int, devices: int = 1) -> Budget:
    """What a device offers. ``held`` bytes of what is in use are the engine's own weights, and counted there.

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


def _temporaries(model: Model, engine: ResolvedEngine, state: StepState, mesh: Mesh) -> int:
    slots = abstract_slots(engine, SamplingLimits(max_logprobs=engine.max_logprobs), mesh)
    programs = make_programs(model, engine.max_logprobs, engine.multi_step, engine.attention_backend)
    params, groups = abstract_params(model, mesh), len(model.cache_spec.windows)
    return max(map(temporary_bytes, compile_largest(programs, engine, params, slots, state, groups)))
