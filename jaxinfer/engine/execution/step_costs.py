"""Measurement of swap, prefill and decode costs on this device, before READY."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np

from jaxinfer.config import ResolvedEngine
from jaxinfer.engine.execution import commands
from jaxinfer.engine.execution.commands import Executor, PrefillBatch, idle_batch
from jaxinfer.engine.scheduling.preemption import Costs
from jaxinfer.kv.transfer import transfers


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
    pages = np.zeros((groups, len(hosts)), np.int32)
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
