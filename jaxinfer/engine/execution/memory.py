"""Device memory planning: whether an engine fits, and the size of its KV pool. Needs config.json, not the weights."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import logging
import math
import os
import pathlib
from collections.abc import Callable, Iterator
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
from jaxinfer.engine.execution.stages import Stage, cut, draft_stages, unshared
from jaxinfer.models.model import Model
from jaxinfer.parallel.mesh import mesh_for, replicas, stages
from jaxinfer.parallel.processes import own_devices

_log = logging.getLogger("jaxinfer.start")
_MORE_DEVICES = (2, 4, 8)
_MOST_PERCENT = 95  # of a device's memory: the rest is for uncounted allocations

# A layer's pool stays below this many elements, so that no offset into it needs more than 32 bits.
_INDEXABLE = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Budget:
    """The share of a device's memory that an engine may take, in bytes; ``used``: memory in use by other programs."""

    total: int
    utilization: float
    used: int = 0

    @property
    def bytes(self) -> int:
        return int(self.total * self.utilization) - self.used

    def __str__(self) -> str:
        others = f" - {_size(self.used)} in use" if self.used else ""
        return f"{self.utilization:g} x {_size(self.total)}{others} (memory_utilization)"


@dataclasses.dataclass(frozen=True)
class Needs:
    """Bytes that an engine needs: weights, sampler state, one page of the KV pool over all layers, temporaries of
    running programs (None: not known yet), banks of adapters, and states."""

    weights: int
    sampler: int
    page: int
    temporaries: int | None = None
    adapters: int = 0
    states: int = 0

    @property
    def fixed(self) -> int:
        return self.weights + self.sampler + (self.temporaries or 0) + self.adapters + self.states


@dataclasses.dataclass(frozen=True)
class Ways:
    """Other settings under which an engine that does not fit may fit.

    Attributes:
        page_size: tokens of a page.
        small_page: bytes of a page with 8-bit elements; None where they have 8 bits already.
        devices: numbers of devices over which the model could be sharded.
    """

    page_size: int
    small_page: int | None = None
    devices: tuple[int, ...] = ()

    def out(self, needs: Needs, budget: Budget, width: int, asked: int | None) -> str:
        """Describe the settings that do fit, as far as is known."""
        found = list(self._fitting(needs, budget, width, asked))
        if not found:
            return "no setting makes it fit: take a smaller model, or quantise it (jaxinfer convert --quantize int8)"
        return "it fits with " + " or ".join([", ".join(found[:-1]), found[-1]] if found[1:] else found)

    def _fitting(self, needs: Needs, budget: Budget, width: int, asked: int | None) -> Iterator[str]:
        pages, room = width if asked is None else asked, (budget.bytes - needs.fixed) // needs.page
        if asked is None and room > 0:
            yield f"max_model_len = {room * self.page_size}"
        if asked is not None and room >= width:
            yield "num_pages left open"
        if self.small_page is not None and needs.fixed + pages * self.small_page <= budget.bytes:
            yield "kv_cache_dtype = int8"
        total, spread = needs.fixed + pages * needs.page, needs.weights + pages * needs.page
        enough = (count for count in self.devices if total - spread + spread // count <= budget.bytes)
        yield from (f"tensor_parallel_size = {count}" for count in itertools.islice(enough, 1))
        share = math.ceil(100 * (total + budget.used) / budget.total)
        if share <= _MOST_PERCENT:
            yield f"memory_utilization = {share / 100:g}"


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Decision of `plan_memory`: ``pages`` in the pool, of which a sequence may need ``width``."""

    needs: Needs
    budget: Budget
    pages: int
    width: int
    ways: Ways

    @property
    def unused(self) -> int:
        """Bytes of the budget that the plan leaves."""
        return self.budget.bytes - self.needs.fixed - self.pages * self.needs.page

    def require(self, temporaries: Callable[[], int]) -> None:
        """Raise EngineConfigError, with the sum, if the plan's pool does not fit with the temporaries of the compiled
        programs: unless the plan includes them, ``temporaries`` returns them."""
        if self.needs.temporaries is None:
            needs = dataclasses.replace(self.needs, temporaries=temporaries())
            out = functools.partial(self.ways.out, needs, self.budget, self.width, self.pages)
            _require_fit(needs, self.budget, self.pages, f"a pool of {self.pages} pages", out)


def plan_memory(
    needs: Needs, budget: Budget, *, length: int, width: int, asked: int | None, most: int, ways: Ways
) -> MemoryPlan:
    """Compute the size of the pool. Arithmetic only.

    Args:
        length, width: tokens of the longest sequence and its pages: the minimum that a pool must hold.
        asked: pages that the user wants; None: as many as fit, but not more than ``most``.
        ways: alternatives for the error message.

    Raises:
        EngineConfigError: it does not fit; the message has the sum, and what to change.
    """
    purpose = f"1 sequence of {length} tokens ({width} pages)" if asked is None else f"num_pages = {asked}"
    out = functools.partial(ways.out, needs, budget, width, asked)
    _require_fit(needs, budget, width if asked is None else asked, purpose, out)
    room = (budget.bytes - needs.fixed) // needs.page
    return MemoryPlan(needs, budget, asked or max(width, min(room, most)), width, ways)


def _require_fit(needs: Needs, budget: Budget, pages: int, purpose: str, out: Callable[[], str]) -> None:
    total = needs.fixed + pages * needs.page
    if total <= budget.bytes:
        return
    parts = {"weights": needs.weights, "adapters": needs.adapters, "temporaries": needs.temporaries}
    parts["states"] = needs.states
    parts["sampler state"] = needs.sampler
    terms = [f"{name} {_size(size)}" for name, size in parts.items() if size]
    raise EngineConfigError(
        f"{' + '.join([*terms, f'{purpose} {_size(pages * needs.page)}'])} = {_size(total)} > {budget}: {out()}"
    )


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 / 20 else f"{count / 2**20:.1f} MiB"


# ---- planning with jax


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
    plans = []
    for number, part in enumerate(parts):
        here = [places[number] for places in copies if own_devices(places[number])]
        if not here:  # other processes have this stage
            continue
        devices = [device for place in here for device in own_devices(place)]
        budgets = [device_budget(each, config.memory_utilization, held[each], mesh.size) for each in devices]
        budget = min(budgets, key=lambda budget: budget.bytes)
        plans.append(_plan_stage(prepared, part, config, platform, here[0], budget))
    plan = min(plans, key=lambda plan: plan.pages)
    filled = platform != "cpu" and config.num_pages is None and config.kv_cache_bytes is None
    if filled and plan.unused >= plan.needs.page:
        unused = "the pool has %d pages, as many as 32-bit offsets into a layer's pool reach: %s stay unused"
        _log.warning(unused, plan.pages, _size(plan.unused))
    return plan


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
        ways=_ways(part, engine, platform),
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


def _ways(part: Stage, engine: ResolvedEngine, platform: str) -> Ways:
    """Return settings that could help. More devices only help on accelerators: those of a CPU share its memory."""
    cache, itemsize = part.model.cache_spec, part.model.dtype.itemsize
    small = None
    if cache.dtype is None:
        small = cache.stored_as("int8").bytes_per_page(engine.page_size, itemsize, engine.devices)
    plain = platform != "cpu" and engine.devices == engine.dp_ranks == 1 and not cache.latent
    heads = math.gcd(*(cache.sizes(layer)[0] for layer in cache.layers))
    devices = tuple(n for n in _MORE_DEVICES if heads % n == 0) if plain else ()
    return Ways(engine.page_size, small, devices)


def stage_needs(part: Stage, engine: ResolvedEngine, arrays: StageArrays) -> Needs:
    """Return the bytes of a stage of a `Prepared` model on each of its devices, without its programs; ``arrays``: its
    `abstract_arrays`. A draft model is on the devices of its model's last stage, and has as many pages."""
    weights, page = device_bytes(arrays.params), _page_bytes(part.model, engine)
    for draft in draft_stages(part.model):
        mesh = jax.tree.leaves(arrays.params)[0].sharding.mesh
        weights += device_bytes(abstract_params(unshared(draft.model, part.model), mesh))
        page += _page_bytes(draft.model, engine)
    sampler, adapters = device_bytes((arrays.sampler, arrays.features)), device_bytes(arrays.banks)
    state = part.model.cache_spec.bytes_per_state(part.model.dtype.itemsize, engine.devices)
    return Needs(weights, sampler * engine.microbatches, page, adapters=adapters, states=state * engine.state_places)


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
        if isinstance(leaf, jax.Array) and leaf.shape == place.shape:
            found.update(
                {shard.device: array_bytes(shard.data.shape, leaf.dtype) for shard in there(leaf, place.sharding) or ()}
            )
    return found


def device_budget(device: Any, utilization: float, held: int, devices: int = 1) -> Budget:
    """Return the budget of a device. ``held``: bytes in use that are the engine's weights, which `Needs` counts.

    A GPU's limit is what JAX may allocate on it; a CPU's is the memory that the machine has available now, shared
    equally by its ``devices``.
    """
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return Budget(stats["bytes_limit"], utilization, max(0, stats["bytes_in_use"] - held))
    return Budget(available_memory() // devices + held, utilization)


def available_memory(proc: pathlib.Path = pathlib.Path("/proc"), groups: pathlib.Path = pathlib.Path("/sys")) -> int:
    """Return the bytes of main memory available without swapping; in a container not more than its limit."""
    limit = groups / "fs/cgroup/memory.max"
    bounds = [int(text) for text in [_read(limit).strip()] if text.isdigit()]
    fields = dict(line.split(":", 1) for line in _read(proc / "meminfo").splitlines() if ":" in line)
    if "MemAvailable" in fields:
        return min([int(fields["MemAvailable"].split()[0]) * 1024, *bounds])
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *bounds])


def _read(path: pathlib.Path) -> str:
    """Return the text of a system file; empty if it does not exist."""
    return path.read_text() if path.is_file() else ""


def _most_pages(model: Model, config: EngineConfig, page: int) -> int:
    spec, split = model.cache_spec, (config.page_size, config.devices)
    bound = _INDEXABLE // max(math.prod(spec.pool_shape(1, *split, layer)) for layer in spec.layers)
    return bound if config.kv_cache_bytes is None else min(bound, config.kv_cache_bytes // page)
