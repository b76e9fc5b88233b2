"""Section copy: achieved memory bandwidth of the device, in bytes per second."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxinfer.gpu_check.measure import fill, time_calls
from jaxinfer.gpu_check.report import Report

SIZES_MIB = (16, 64, 256, 1024, 4096)
QUICK_MIB = (1, 2)
_LARGE_MIB = 1024
# name, function of two arrays, number of arrays that the call reads and writes
OPERATIONS: tuple[tuple[str, Callable[[jax.Array, jax.Array], jax.Array], int], ...] = (
    ("copy", lambda x, y: jnp.copy(x), 2),
    ("scale", lambda x, y: x * 1.0001, 2),
    ("add", lambda x, y: x + y, 3),
)


def run(report: Report) -> None:
    """Measure all sizes: those up to the L2 cache (50 MB on an H100) measure the cache, the largest the memory."""
    for mib in QUICK_MIB if report.quick else SIZES_MIB:
        key = f"{mib} MiB"
        if report.wanted(key):
            with report.attempt(key):
                best = _measure(report, mib, key)
                if report.quick or mib >= _LARGE_MIB:
                    best = max(best, report.found("best").get("gb_s", 0.0))
                    report.put("best", gb_s=best, of="tiny arrays" if report.quick else "arrays of 1 GiB and more")


def _measure(report: Report, mib: int, key: str) -> float:
    """Return the GB/s of the fastest operation."""
    x, y = (fill(seed, (mib << 18,), jnp.float32) for seed in (1, 2))
    rates = []
    for name, operation, arrays in OPERATIONS:
        timing = time_calls(functools.partial(jax.jit(operation), x, y))
        moved = report.bandwidth(arrays * x.nbytes, timing["best_ms"])
        report.put(f"{name} {key}", **timing, **moved)
        rates.append(moved["gb_s"])
    return max(rates)
