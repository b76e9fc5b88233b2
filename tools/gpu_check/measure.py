"""Timing and cheap random operands."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def time_calls(call: Callable[[], Any], *, rounds: int = 7, round_ms: float = 20.0, most: int = 200) -> dict[str, Any]:
    """Milliseconds of one call: median and best over ``rounds``.

    A round launches ``calls`` calls one after the other and waits for all of them; its time, divided by their number,
    is what counts. Nothing is subtracted: where a call is shorter than its launch, the launch is what is measured.
    """
    jax.block_until_ready(call())  # compiles
    calls = max(1, min(most, math.ceil(round_ms / max(_round(call, 1), 1e-3))))
    times = [_round(call, calls) for _ in range(rounds)]
    return {"median_ms": _round_to(statistics.median(times)), "best_ms": _round_to(min(times)), "calls": calls}


def _round(call: Callable[[], Any], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        result = call()
    jax.block_until_ready(result)
    return (time.perf_counter() - start) * 1e3 / calls


def _round_to(ms: float) -> float:
    return float(f"{ms:.5g}")


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def fill(seed: int | jax.Array, shape: tuple[int, ...], dtype: Any, scale: float | jax.Array = 1.0) -> jax.Array:
    """Pseudo-random numbers, uniform in [-scale, scale): a hash of the element's index, fused into the write.

    Good enough not to flatter a timing (zeros do); real random bits would need several times the memory.
    """
    bits = lax.iota(jnp.uint32, math.prod(shape)) * jnp.uint32(2654435761) + jnp.uint32(seed) * jnp.uint32(40503)
    bits = (bits ^ (bits >> 15)) * jnp.uint32(2246822519)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(3266489917)
    unit = (bits >> 8).astype(jnp.float32) * jnp.float32(2.0**-23) - 1.0
    return (unit * scale).astype(dtype).reshape(shape)


def relative_error(out: Any, exact: Any) -> float:
    """Norm of the difference over norm of the exact result (numpy, float64)."""
    norm = float(((exact) ** 2).sum()) ** 0.5
    return float(f"{float(((out - exact) ** 2).sum()) ** 0.5 / max(norm, 1e-300):.3g}")
