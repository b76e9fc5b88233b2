"""Timing, cheap random operands, and the error of a result against the exact one."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def time_calls(
    call: Callable[[], Any],
    *,
    rounds: int = 7,
    round_ms: float = 20.0,
    most: int = 200,
    inside: int = 1,
    wait: Callable[[Any], Any] = jax.block_until_ready,
) -> dict[str, Any]:
    """Measure the milliseconds of one call: median and best over ``rounds``.

    A round launches ``calls`` calls one after the other and waits for all of them; its time divided by their number is
    the sample. Nothing is subtracted: where a call is shorter than its launch, the result is the launch time.

    Args:
        inside: repetitions of the measured function within one call; the time is divided by this.
        wait: waits until the result of a call is ready.
    """
    wait(call())  # compiles
    calls = max(1, min(most, math.ceil(round_ms / max(_round(call, 1, wait), 1e-3))))
    times = [_round(call, calls, wait) / inside for _ in range(rounds)]
    return {"median_ms": _round_to(statistics.median(times)), "best_ms": _round_to(min(times)), "calls": calls}


def _round(call: Callable[[], Any], calls: int, wait: Callable[[Any], Any]) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        result = call()
    wait(result)
    return (time.perf_counter() - start) * 1e3 / calls


class Inside(NamedTuple):
    """Calls that follow one another within one program, so that no launch by the host is measured.

    Attributes:
        sets: number of operand sets. Sets that together exceed the L2 cache make every call read from memory.
        repeats: calls with each of them.
        changes: the result is the first operand of the next call with these operands, updated in place.
    """

    function: Callable[..., Any]
    sets: int
    repeats: int
    changes: bool = False

    def lower(self, operands: Sequence[Any]) -> jax.stages.Lowered:
        """Lower the program for operands of these shapes (`jax.ShapeDtypeStruct`), identical for all sets."""
        heads, rest = [operands[0]] * self.sets, [tuple(operands[1:])] * self.sets
        results = [operands[0] if self.changes else jax.eval_shape(self.function, *operands)] * self.sets
        loop = jax.jit(looped(self.function, self.repeats, changes=self.changes), donate_argnums=0)
        return loop.lower(results, [] if self.changes else heads, rest)

    def time(self, program: Callable[..., Any], variants: Sequence[tuple[Any, ...]]) -> dict[str, Any]:
        """Run `time_calls` for one of the calls. ``variants``: the sets of operands."""
        heads, rest = [each[0] for each in variants], [tuple(each[1:]) for each in variants]
        if self.changes:
            state = [jax.tree.map(jnp.copy, heads)]
        else:
            shapes = [jax.eval_shape(self.function, *operands) for operands in variants]
            state = [jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)]

        def call() -> Any:
            state[0] = program(state[0], [] if self.changes else heads, rest)
            return state[0]

        return time_calls(call, inside=self.repeats * self.sets, rounds=5)


def looped(function: Callable[..., Any], repeats: int, *, changes: bool) -> Callable[..., Any]:
    """Return the loop that `Inside` times: ``loop(results, first operands, other operands)``, one of each per set."""
    once = jax.jit(function)  # traced and lowered once, not once per operand set

    def loop(carried: list[Any], heads: list[Any], rest: list[tuple[Any, ...]]) -> list[Any]:
        def body(_: Any, carried: list[Any]) -> list[Any]:
            results, last = [], carried[-1]
            for index, others in enumerate(rest):
                if changes:
                    first = carried[index]
                else:
                    # Each call depends on the result of the previous call, or XLA would hoist it out of the loop.
                    first, _ = lax.optimization_barrier((heads[index], last))
                last = once(first, *others)
                results.append(last)
            return results

        return lax.fori_loop(0, repeats, body, carried)

    return loop


def _round_to(ms: float) -> float:
    return float(f"{ms:.5g}")


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def fill(seed: int | jax.Array, shape: tuple[int, ...], dtype: Any, scale: float | jax.Array = 1.0) -> jax.Array:
    """Return pseudo-random numbers, uniform in [-scale, scale): a hash of the element's index, fused into the write.

    They are random enough not to flatter a timing (zeros do); real random bits would need several times the memory.
    """
    bits = lax.iota(jnp.uint32, math.prod(shape)) * jnp.uint32(2654435761) + jnp.uint32(seed) * jnp.uint32(40503)
    bits = (bits ^ (bits >> 15)) * jnp.uint32(2246822519)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(3266489917)
    unit = (bits >> 8).astype(jnp.float32) * jnp.float32(2.0**-23) - 1.0
    return (unit * scale).astype(dtype).reshape(shape)


def relative_error(out: Any, exact: Any) -> float:
    """Return the norm of the difference over the norm of the exact result (numpy, float64)."""
    norm = float(((exact) ** 2).sum()) ** 0.5
    return float(f"{float(((out - exact) ** 2).sum()) ** 0.5 / max(norm, 1e-300):.3g}")


def deviation(got: Any, exact: Any, bound: float) -> dict[str, Any]:
    """Measure the error of ``got`` against the float64 result, minus the rounding of the result to its own dtype.

    The worst vector (along the last axis) counts, so that rows of large results do not mask a row of small ones.
    Infinities and NaN must be at the positions where ``exact`` has them; a vector of zeros must be all zeros.

    Args:
        bound: bound on the norm of the difference over the norm of the exact result, in addition to rounding.
    """
    rounded = np.asarray(np.asarray(exact).astype(got.dtype), np.float64)
    got, exact = np.asarray(got, np.float64), np.asarray(exact, np.float64)
    defined = np.isfinite(exact)
    alike = bool(np.array_equal(defined, np.isfinite(got)))
    got, exact, rounded = (np.atleast_1d(np.where(defined, x, 0.0)) for x in (got, exact, rounded))
    size = np.maximum(np.linalg.norm(exact, axis=-1), 1e-300)
    beyond = (np.linalg.norm(got - exact, axis=-1) - np.linalg.norm(rounded - exact, axis=-1)) / size
    worst = float(beyond.max(initial=0.0))
    return {
        "relative_error": relative_error(got, exact),
        "of_rounding": relative_error(rounded, exact),
        "worst_vector": float(f"{worst:.3g}"),
        "bound": bound,
        "max_abs_error": float(f"{np.abs(got - exact).max(initial=0):.3g}"),
        "same_finite": alike,
        "ok": bool(alike and worst <= bound),
    }
