"""Section rows: batch invariance of GEMMs, by the number of rows.

The engine promises that a request's results do not depend on its batch. It runs every token in a program of a fixed row
count to keep that promise; this section shows which row counts are bitwise identical and could be cheaper: with XLA,
and with the kernels of `pallas_kernels.matmul` and of `pallas_kernels.quant_matmul`, which must have a single class.
"""

from __future__ import annotations

import concurrent.futures
import functools
import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.gpu_check.measure import fill, time_calls
from jaxinfer.gpu_check.report import Report
from jaxinfer.quant import matmul, matmul_transposed
from pallas_kernels import matmul as dense
from pallas_kernels import quant_matmul
from pallas_kernels.choice import HOPPER, lowering_target

# Llama-3.1-8B: name, inputs, outputs, and whether the weight is stored as [out, in], as in the model
PROJECTIONS = (
    ("qkv", 4096, 6144, False),
    ("out", 4096, 4096, False),
    ("gate_up", 4096, 28672, True),
    ("down", 14336, 4096, False),
    ("head", 4096, 128256, True),
)
QUICK_PROJECTIONS = (("qkv", 64, 96, False), ("gate_up", 96, 64, True))
# The first wave covers the range, later waves the values between; each wave covers all projections before the next.
WAVES = (
    (1, 2, 4, 8, 16, 32, 64, 128, 256, 512),
    (2048, 8192),
    (3, 6, 12, 24, 48, 96, 192, 384),
    (5, 7, 9, 17, 33, 65, 129, 257),
)
KERNEL, INT4 = ", by the kernel", ", int4 by its kernel"
QUICK_WAVES = ((1, 2, 4), (3, 8))
_COMPILE_THREADS = 8
_RESERVE_S = 12.0  # upper bound on the time of one wave of one projection


class Result(NamedTuple):
    """Findings at one row count: a digest of row 0's bits, whether an equal last row has an equal result, the time."""

    bits: str
    slot_free: bool
    best_ms: float


def run(report: Report) -> None:
    waves, projections = (QUICK_WAVES, QUICK_PROJECTIONS) if report.quick else (WAVES, PROJECTIONS)
    products = [(name + by, k, n, transposed) for by in _paths() for name, k, n, transposed in projections]
    for wave in waves:
        for name, k, n, transposed in products:
            step = f"{name}, rows {', '.join(map(str, wave))}"
            if not report.time_for(step, 0.0 if report.quick else _RESERVE_S):
                continue
            with report.attempt(step):
                weight = _weight(name, k, n, transposed)
                found = _found(report.found(name)) | _measure(_product(name, transposed), weight, k, wave)
                report.put(name, inputs=k, outputs=n, transposed=transposed, **_summary(found))


def _paths() -> tuple[str, ...]:
    """Return the suffixes of the products' names; elsewhere kernels are interpreted, which takes too long."""
    return ("", KERNEL, INT4) if lowering_target().capability == HOPPER else ("",)


def _product(name: str, transposed: bool) -> Callable[..., jax.Array]:
    if name.endswith(INT4):
        return lambda x, weight: quant_matmul.matmul(x, *weight, path="mosaic")
    if name.endswith(KERNEL):
        return functools.partial(dense.matmul, layout="in last" if transposed else "in first", path="mosaic")
    return matmul_transposed if transposed else matmul


def _weight(name: str, k: int, n: int, transposed: bool) -> Any:
    """Return a 16-bit matrix; or a 4-bit one [outputs, inputs] with scales per 128 inputs."""
    if name.endswith(INT4):
        return fill(2, (n, k), jnp.int4, 8.0), fill(3, (k // 128, n), jnp.bfloat16)
    return fill(2, (n, k) if transposed else (k, n), jnp.bfloat16, k**-0.5)


def _measure(product: Callable[..., jax.Array], weight: Any, k: int, wave: tuple[int, ...]) -> dict[int, Result]:
    inputs = {rows: _inputs(k, rows) for rows in wave}

    def compile_one(x: jax.Array) -> Any:
        return jax.jit(product).lower(x, weight).compile()

    with concurrent.futures.ThreadPoolExecutor(_COMPILE_THREADS) as threads:
        programs = dict(zip(wave, threads.map(compile_one, inputs.values()), strict=True))
    return {rows: _result(programs[rows], inputs[rows], weight) for rows in wave}


def _inputs(k: int, rows: int) -> jax.Array:
    """Return ``rows`` inputs: row 0 is the same for every row count, and the last row repeats it."""
    x = fill(1, (rows, k), jnp.bfloat16)
    return x.at[-1].set(x[0])


def _result(program: Any, x: jax.Array, weight: Any) -> Result:
    out = program(x, weight)
    first, last = (np.asarray(out[row]).tobytes() for row in (0, -1))
    timing = time_calls(lambda: program(x, weight), rounds=3, round_ms=4)
    return Result(hashlib.sha256(first).hexdigest()[:16], first == last, timing["best_ms"])


def _found(record: dict[str, Any]) -> dict[int, Result]:
    """Read the results that `_summary` has written."""
    depends = record.get("row_depends_on_slot_at", ())
    return {
        int(rows): Result(bits, int(rows) not in depends, record["best_ms"][rows])
        for rows, bits in record.get("bits", {}).items()
    }


def _summary(found: dict[int, Result]) -> dict[str, Any]:
    classes: dict[str, list[int]] = {}
    for rows in sorted(found):
        classes.setdefault(found[rows].bits, []).append(rows)
    return {
        "classes": list(classes.values()),
        "row_depends_on_slot_at": [rows for rows in sorted(found) if not found[rows].slot_free],
        "bits": {str(rows): found[rows].bits for rows in sorted(found)},
        "best_ms": {str(rows): found[rows].best_ms for rows in sorted(found)},
    }
