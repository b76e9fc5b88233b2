"""What moving and computing cost on this device, measured before READY."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxinfer.config import ResolvedEngine
from jaxinfer.engine.compiled import CompiledPrograms
from jaxinfer.engine.preemption import Costs
from jaxinfer.engine.step import DecodeBatch, PrefillBatch, StepState
from jaxinfer.kv.transfer import TRANSFER_PAGES
from jaxinfer.sampling import SlotParams


def measure_costs(
    run: CompiledPrograms,
    engine: ResolvedEngine,
    params: Any,
    slots: SlotParams,
    state: StepState,
    groups: int,
    idle: DecodeBatch,
) -> tuple[StepState, Costs]:
    """One timed call of each program, after one that is not: rough, which is enough to choose between swapping and
    computing again. No page that holds a sequence's tokens may exist yet.

    Args:
        idle: rows of which none decodes; a step costs nearly as much with them as without.
    """
    size = engine.prefill_sizes[-1]
    chunk = PrefillBatch(
        np.zeros((1, size), np.int32),
        np.zeros(1, np.int32),
        np.array([min(size, engine.table_width * engine.page_size)], np.int32),
        np.broadcast_to(np.arange(engine.table_width, dtype=np.int32), (groups, 1, engine.table_width)).copy(),
    )
    pages = np.zeros((groups, TRANSFER_PAGES), np.int32)
    nowhere = np.full_like(pages, engine.num_pages)

    def swap(state: StepState) -> StepState:
        return run.restore(state, np.array(run.export(state, pages)), nowhere)

    state, prefill = _timed(lambda state: run.prefill[size, 1](params, state, chunk), state)
    state, decode = _timed(lambda state: run.decode(params, slots, state, idle)[0], state)
    state, moved = _timed(swap, state)
    return state, Costs(swap_page=moved / TRANSFER_PAGES, prefill_token=prefill / size, decode_step=decode)


def _timed(call: Callable[[StepState], StepState], state: StepState) -> tuple[StepState, float]:
    """The seconds of a second call."""
    state = jax.block_until_ready(call(state))
    start = time.perf_counter()
    state = jax.block_until_ready(call(state))
    return state, time.perf_counter() - start
