"""Candidates on the machine's GPU: compiled, compared with the heuristic's result, and timed."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.specs import Problem

# Two 16-bit results, each with its own rounding (2**-9 / sqrt(3) of a number) and that of the probabilities.
TOLERANCE = 5e-3
SAMPLE_SECONDS = 4e-3
MOST_CALLS = 100
# The launches of a program are independent: a CUDA graph would run them concurrently.
ONE_AFTER_THE_OTHER: dict[str, Any] = {"xla_gpu_command_buffer_scheduling_mode": "SERIALIZE"}
# Exceptions for a kernel that Mosaic GPU, ptxas or the driver rejects.
REFUSALS = (ValueError, NotImplementedError, jax.errors.JaxRuntimeError)


class DeviceBench:
    """`search.Bench` of one problem. A program launches every operand set once; a sample is some calls of it."""

    def __init__(
        self,
        problem: Problem,
        bits: frozenset[str],
        *,
        clock: Callable[[], float] = time.perf_counter,
        sample_seconds: float = SAMPLE_SECONDS,
    ) -> None:
        self._problem, self._bits, self._clock, self._seconds = problem, bits, clock, sample_seconds
        self._sets = problem.operands()
        self._programs: dict[Any, Callable[..., Any]] = {}
        self._calls: dict[Any, int] = {}
        self._first: tuple[Any, Any] | None = None  # tiles, results

    def prepare(self, tiles: Any) -> str | None:
        """Run tiles; return why they may not win, or None. With the bits of the first ones, results must be equal."""
        try:
            jitted = jax.jit(functools.partial(_launch_all, self._problem.launch, tiles))
            program = jitted.lower(self._sets).compile(compiler_options=ONE_AFTER_THE_OTHER)
            results = jax.block_until_ready(program(self._sets))
        except REFUSALS as error:
            return f"it does not run: {str(error).strip().splitlines()[0] if str(error) else type(error).__name__}"
        if self._first is None:
            self._first = tiles, results
        if reason := self._disagreement(tiles, results):
            return reason
        self._programs[tiles] = program
        begun = self._clock()
        jax.block_until_ready(program(self._sets))
        self._calls[tiles] = max(1, min(MOST_CALLS, math.ceil(self._seconds / max(self._clock() - begun, 1e-6))))
        return None

    def sample(self, tiles: Any) -> float:
        program, calls = self._programs[tiles], self._calls[tiles]
        begun = self._clock()
        for _ in range(calls):
            results = program(self._sets)
        jax.block_until_ready(results)
        return (self._clock() - begun) * 1e6 / (calls * len(self._sets))

    def _disagreement(self, tiles: Any, results: Any) -> str | None:
        assert self._first is not None
        first, expected = self._first
        finite, equal, error = map(float, _compare(results, expected))
        if not finite:
            return "its result is not finite"
        if self._numerics(tiles) == self._numerics(first):
            return None if equal else "it changes bits, and only fields that should not differ"
        return f"its result is {error:.1e} off" if error > TOLERANCE else None

    def _numerics(self, tiles: Any) -> Mapping[str, int]:
        return {name: value for name, value in dataclasses.asdict(tiles).items() if name in self._bits}


def _launch_all(launch: Callable[..., Any], tiles: Any, sets: Sequence[tuple[Any, ...]]) -> list[Any]:
    return [launch(*operands, tiles=tiles) for operands in sets]


@jax.jit
def _compare(results: list[Any], expected: list[Any]) -> tuple[Any, Any, Any]:
    """Compare results: all finite, all equal, and a set's largest error (norm of the difference over the norm)."""
    pairs = list(zip(results, expected, strict=True))
    finite = jnp.stack([jnp.isfinite(one).all() for one, _ in pairs]).all()
    equal = jnp.stack([(one == other).all() for one, other in pairs]).all()
    return finite, equal, jnp.stack([_relative(one, other) for one, other in pairs]).max()


def _relative(one: Any, other: Any) -> Any:
    one, other = one.astype(jnp.float32), other.astype(jnp.float32)
    return jnp.linalg.norm(one - other) / jnp.maximum(jnp.linalg.norm(other), 1e-30)
