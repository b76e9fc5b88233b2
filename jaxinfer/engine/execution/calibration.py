"""Calibration of an executor's programs before READY, on the actual devices: equivalences and costs."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jaxinfer.compilations import found_out, timed
from jaxinfer.config import ResolvedEngine
from jaxinfer.engine.execution import commands
from jaxinfer.engine.execution.commands import Executor, PrefillBatch, as_text, idle_batch
from jaxinfer.engine.execution.encoder import text_part
from jaxinfer.engine.execution.prepare import Prepared
from jaxinfer.engine.execution.probe import AdaptedExecutor, Probe, joint
from jaxinfer.engine.scheduling.pages import Costs
from jaxinfer.kv.transfer import transfers
from jaxinfer.quant.banks import lora_targets

# Operations that a CPU may spend on comparing prefill sizes: a second or two.
_CPU_OPERATIONS = 300_000_000_000


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Bitwise equivalences of programs, which may be substituted for each other, and their costs.

    Attributes:
        prefill_batches: chunks of the wide program of each prefill size that is bitwise equivalent to the narrow one.
        size_classes: a number for each prefill size; equal numbers: bitwise equivalent programs.
        exact_resume: whether a chunk that begins within a chunk, after a cache hit, is bitwise identical to a full run.
        Assumed untested without a cache, in relaxed mode, and where the test would take a CPU long.
        decode_agrees: whether decode rows and chunks of all sizes write bitwise identical keys and values: prompts may
        reuse generated tokens, and generated tokens may be recomputed in chunks.
        decode_sizes: rows of the bitwise equivalent decode programs, ascending.
        multi_step: maximum decode steps of one plan.
        costs: measured costs of swapping and of recomputing.
    """

    prefill_batches: Mapping[int, int]
    size_classes: Mapping[int, int]
    exact_resume: bool
    decode_agrees: bool
    decode_sizes: list[int]
    multi_step: int
    costs: Costs


_PER_SIZE = ("prefill_batches", "size_classes")


def calibrate(executor: Executor, prepared: Prepared, platform: str) -> Calibration:
    """Probe an executor's programs, unless an earlier start did. Its pools must be empty, and are invalid
    afterwards."""
    settings = f"{prepared.config!r} {platform} {jax.devices()[0].device_kind}"
    find_out = functools.partial(_try_out, executor, prepared, platform)
    with timed("programs tried out, or what is known of them read"):
        found = found_out(executor.digest(), settings, find_out, _is_proof)
    by_size = {name: {int(size): number for size, number in found[name].items()} for name in _PER_SIZE}
    # Measured at each start: also the first call of the programs, whose cost no request then pays.
    with timed("costs measured"):
        costs = measure_costs(executor, prepared.config, len(prepared.model.cache_spec.windows))
    return Calibration(**found | by_size, costs=costs)


def _is_proof(found: Any) -> bool:
    fields = {field.name for field in dataclasses.fields(Calibration)} - {"costs"}
    return isinstance(found, dict) and found.keys() == fields


def _try_out(executor: Executor, prepared: Prepared, platform: str) -> dict[str, Any]:
    """Return the fields of a `Calibration` except its costs, which are kept as JSON."""
    model, engine, limits = prepared
    exact, probes = engine.exactness == "exact", _probes(executor, prepared)
    found = [probe.prefill_batches() for probe in probes]
    batches = {size: count for size, count in found[0].items() if all(size in each for each in found)}
    classes, resume, agrees = {size: number for number, size in enumerate(engine.prefill_sizes)}, True, False
    weights = sum(leaf.size for leaf in jax.tree.leaves(text_part(model.params)))
    operations = 2 * len(probes) * weights  # of one token
    most = _CPU_OPERATIONS // operations if platform == "cpu" else math.inf
    if exact and engine.enable_prefix_caching and (tokens := probes[0].size_class_tokens()) <= most:
        classes = joint([probe.size_classes() for probe in probes])
        resume = all(probe.exact_resume(classes) for probe in probes)
        if resume and tokens + probes[0].decode_tokens() <= most:
            agrees = all(probe.decode_agrees(classes) for probe in probes)
    sizes = [*engine.decode_sizes]
    if exact:
        proven = [probe.decode_sizes(limits) for probe in probes]
        sizes = [size for size in sizes if all(size in each for each in proven)]
    several = engine.multi_step > 1 and (not exact or all(probe.multi_step(limits, sizes) for probe in probes))
    return {
        "prefill_batches": batches,
        "size_classes": classes,
        "exact_resume": resume,
        "decode_agrees": agrees,
        "decode_sizes": sizes,
        "multi_step": engine.multi_step if several else 1,
    }


def _probes(executor: Executor, prepared: Prepared) -> list[Probe]:
    """Return a probe of the programs, and one of those with adapters, if any: a property must hold for both."""
    model, engine, _ = prepared
    executors, spec = [executor], model.cache_spec
    if engine.lora_slots:
        declared = model.family.param_specs(model.config)
        targets = lora_targets(declared, declared, engine.max_lora_rank, engine.lora_target_modules)
        executors.append(AdaptedExecutor(executor, targets, engine.lora_slots))
    of_model = spec.windows, model.dtype.itemsize, spec.exact_per_token
    return [Probe(each, engine, model.config.vocab_size, *of_model) for each in executors]


def measure_costs(executor: Executor, engine: ResolvedEngine, groups: int) -> Costs:
    """Time one call of each program, after one that is not timed: roughly, enough to choose between swapping and
    recomputing. No page may hold a sequence's tokens yet. ``groups``: number of cache groups."""
    size, hosts = engine.prefill_sizes[-1], next(transfers(range(engine.host_pages)), range(0))
    chunk = PrefillBatch(
        np.zeros((1, size), np.int32),
        np.zeros(1, np.int32),
        np.array([min(size, engine.table_width * engine.page_size)], np.int32),
        np.broadcast_to(np.arange(engine.table_width, dtype=np.int32), (groups, 1, engine.table_width)).copy(),
    )
    chunk, pages = as_text(chunk, engine), np.zeros((groups, len(hosts)), np.int32)
    nowhere = np.full_like(pages, engine.num_pages)

    def swap() -> None:
        executor.run(commands.ExportPages(pages, hosts))
        executor.run(commands.ImportPages(hosts, nowhere))

    idle = idle_batch(engine, groups)  # a step costs nearly as much without a row that decodes as with them
    prefill = _timed(executor, lambda: executor.run(commands.Prefill(chunk)))
    decode = _timed(executor, lambda: executor.run(commands.Decode(0, idle)))
    swap_page = _timed(executor, swap) / len(hosts) if hosts else math.inf
    return Costs(swap_page, prefill_token=prefill / size, decode_step=decode)


def _timed(executor: Executor, call: Callable[[], object]) -> float:
    """Return the seconds of a second call."""
    call()
    executor.wait()
    start = time.perf_counter()
    call()
    executor.wait()
    return time.perf_counter() - start
