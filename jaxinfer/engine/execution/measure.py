"""What moving and computing cost on this device, measured before READY."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from jaxinfer.config import ResolvedEngine
from jaxinfer.engine.execution.executor import Executor
from jaxinfer.engine.execution.step import DecodeBatch, PrefillBatch
from jaxinfer.engine.scheduling.preemption import Costs
from jaxinfer.kv.transfer import TRANSFER_PAGES


def measure_costs(executor: Executor, engine: ResolvedEngine, groups: int, idle: DecodeBatch) -> Costs:
    """One timed call of each program, after one that is not: rough, which is enough to choose between swapping and
    computing again. No page that holds a sequence's tokens may exist yet.

    Args:
        groups: of the cache.
        idle: rows of which none decodes; a step costs nearly as much with them as without.
    """
    size, hosts = engine.prefill_sizes[-1], range(min(TRANSFER_PAGES, engine.host_pages))
    chunk = PrefillBatch(
        np.zeros((1, size), np.int32),
        np.zeros(1, np.int32),
        np.array([min(size, engine.table_width * engine.page_size)], np.int32),
        np.broadcast_to(np.arange(engine.table_width, dtype=np.int32), (groups, 1, engine.table_width)).copy(),
    )
    pages = np.zeros((groups, TRANSFER_PAGES), np.int32)
    nowhere = np.full_like(pages, engine.num_pages)

    def swap() -> None:
        executor.export(pages, hosts)
        executor.restore(hosts, nowhere)

    prefill = _timed(executor, lambda: executor.prefill(chunk))
    decode = _timed(executor, lambda: executor.decode(0, idle))
    moved = _timed(executor, swap)
    return Costs(swap_page=moved / TRANSFER_PAGES, prefill_token=prefill / size, decode_step=decode)


def _timed(executor: Executor, call: Callable[[], object]) -> float:
    """The seconds of a second call."""
    call()
    executor.wait()
    start = time.perf_counter()
    call()
    executor.wait()
    return time.perf_counter() - start
