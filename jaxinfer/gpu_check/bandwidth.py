"""Section copy: how many bytes a second the device's memory moves."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxinfer.gpu_check.measure import fill, time_calls
from jaxinfer.gpu_check.report import Report

SIZES_MIB = (16, 64, 256, 1024, 4096)
QUICK_MIB = (1, 2)
# name, function of two arrays, how many arrays the call reads and writes
OPERATIONS: tuple[tuple[str, Callable[[jax.Array, jax.Array], jax.Array], int], ...] = (
    ("copy", lambda x, y: jnp.copy(x), 2),
    ("scale", lambda x, y: x * 1.0001, 2),
    ("add", lambda x, y: x + y, 3),
)


def run(report: Report) -> None:
    """Sizes at or below the L2 cache (50 MB on an H100) measure the cache; the largest sizes measure the memory."""
    best = 0.0
    for mib in QUICK_MIB if report.quick else SIZES_MIB:
        key = f"{mib} MiB"
        with report.attempt(key):
            x, y = (fill(seed, (mib << 18,), jnp.float32) for seed in (1, 2))
            for name, operation, arrays in OPERATIONS:
                jitted = jax.jit(operation)
                timing = time_calls(functools.partial(jitted, x, y))
                moved = report.bandwidth(arrays * x.nbytes, timing["best_ms"])
                report.put(f"{name} {key}", **timing, **moved)
                if report.quick or mib >= 1024:
                    best = max(best, moved["gb_s"])
    report.put("best", gb_s=best, of="arrays of 1 GiB and more" if not report.quick else "tiny arrays")
