"""Section gemm: achieved throughput of large matrix products, in operations per second by dtype."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.gpu_check.measure import fill, relative_error, time_calls
from jaxinfer.gpu_check.report import Report

SIZES = (4096, 8192)
QUICK_SIZES = (64,)
# name, dtype of the operands, dtype of the result, precision, whether the right operand is stored as [n, k]
KINDS = (
    ("bfloat16", jnp.bfloat16, jnp.bfloat16, lax.Precision.DEFAULT, False),
    ("float16", jnp.float16, jnp.float16, lax.Precision.DEFAULT, False),
    ("float32, no TF32", jnp.float32, jnp.float32, lax.Precision.HIGHEST, False),
    ("float32, TF32 allowed", jnp.float32, jnp.float32, lax.Precision.DEFAULT, False),
    ("float8_e4m3fn", jnp.float8_e4m3fn, jnp.bfloat16, lax.Precision.DEFAULT, True),
    ("int8", jnp.int8, jnp.int32, lax.Precision.DEFAULT, True),
)


def run(report: Report) -> None:
    """Measure the rates. `share_of_gemm` in other sections is the share of the best bfloat16 rate."""
    for size in QUICK_SIZES if report.quick else SIZES:
        for name, dtype, result, precision, transposed in KINDS:
            key = f"{name} {size}"
            if not report.wanted(key):
                continue
            with report.attempt(key):
                found = _measure(size, dtype, result, precision, transposed)
                report.put(key, **found)
                if dtype == jnp.bfloat16:
                    best = max(found["tflop_s"], report.found("best").get("tflop_s", 0.0))
                    report.put("best", tflop_s=best, of="bfloat16")


def _measure(size: int, dtype: Any, result: Any, precision: lax.Precision, transposed: bool) -> dict[str, Any]:
    contract = (((1,), (1 if transposed else 0,)), ((), ()))

    @jax.jit
    def multiply(a: jax.Array, b: jax.Array) -> jax.Array:
        return lax.dot_general(a, b, contract, precision=precision, preferred_element_type=result)

    a, b = _operands(size, dtype)
    timing = time_calls(lambda: multiply(a, b), round_ms=40)
    rows = np.asarray(a[:4], np.float64) @ (lambda m: m.T if transposed else m)(np.asarray(b, np.float64))
    error = relative_error(np.asarray(multiply(a, b)[:4], np.float64), rows)
    return {**timing, "tflop_s": round(2 * size**3 / timing["best_ms"] / 1e9, 3), "relative_error": error}


def _operands(size: int, dtype: Any) -> Iterator[jax.Array]:
    scale = 100.0 if dtype == jnp.int8 else 1.0
    return (fill(seed, (size, size), dtype, scale) for seed in (1, 2))
