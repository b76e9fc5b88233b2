"""Compatibility of Mosaic GPU between JAX releases (0.11.2 and 0.12); no other file knows of the differences.

Mosaic GPU declares itself unstable. Kernels import from here what changed or is in a private module, and the rest from
``jax.experimental.pallas.mosaic_gpu``.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.thread_block import block_of

_KERNEL_KEYWORDS = frozenset(inspect.signature(plgpu.kernel).parameters)
# 0.11.2 finds no layout for a tile of shared memory that the copy out clips at the array's end.
CLIPPED_STORES = hasattr(plgpu, "store")


def kernel(
    body: Callable[..., None],
    *,
    out_type: Any,
    scratch_types: Any,
    grid: tuple[int, ...],
    grid_names: tuple[str, ...],
    num_threads: int,
    thread_name: str,
    kernel_name: str,
    compiler_params: plgpu.CompilerParams,
    cost_estimate: pl.CostEstimate,
    cluster: tuple[int, ...] = (),
    cluster_names: tuple[str, ...] = (),
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Callable[..., Any]:
    """Call ``plgpu.kernel``; the cost estimate is passed on where the release takes one (from 0.12).

    Raises:
        ValueError: no GPU could launch such a CTA.
    """
    block = block_of(num_threads, math.prod(cluster), scratch_types)
    for fault in () if interpret is not None else block.faults():
        raise ValueError(f"{kernel_name}: {fault}")
    cost: dict[str, Any] = {"cost_estimate": cost_estimate} if "cost_estimate" in _KERNEL_KEYWORDS else {}
    launch: Callable[..., Any] = plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch_types,
        grid=grid,
        grid_names=grid_names,
        num_threads=num_threads,
        thread_name=thread_name,
        kernel_name=kernel_name,
        compiler_params=compiler_params,
        cluster=cluster,
        cluster_names=cluster_names,
        interpret=interpret,
        **cost,
    )
    return launch


def store(target: Any, value: jax.Array) -> None:
    """Store an array to a reference in device memory; 0.11.2 has no ``plgpu.store``."""
    if hasattr(plgpu, "store"):
        plgpu.store(target, value, optimized=False)
    else:
        target[...] = value


def interpret_params(*, detect_races: bool = True) -> plgpu.InterpretGPUParams:
    """Return parameters to run a kernel on the CPU: SMEM, asynchronous copies and mbarriers are simulated, slowly.

    Uninitialised memory reads as NaN. On a race, 0.12 raises and 0.11.2 prints: `interpreted` handles both.
    """
    return plgpu.InterpretGPUParams(detect_races=detect_races, uninitialized_memory="nan")


def interpreted(call: Callable[[], Any]) -> Any:
    """Return the result of ``call``, which runs a kernel under `interpret_params` with race detection.

    Raises:
        RuntimeError: the kernel has a data race, or (0.11.2 only) it ends before an arrival at a barrier was waited
            for. Not every race is seen: a copy issued before one that was waited for counts as waited for too.
    """
    interpret_pallas_call.reset_gpu_interpret_mode_state()
    result = jax.block_until_ready(call())
    if interpret_pallas_call.get_races().races_found:
        raise RuntimeError("a data race was detected while interpreting the kernel (its report is on stdout)")
    return result
