"""Section parity: every kernel and every XLA path against float64, on poisoned operands; and batch invariance.

A row must be bitwise identical whatever the other rows and its position: the batch is computed twice, in reversed
order, and each row alone. Interpreted kernels, which are slow, are only run in reversed order.
"""

from __future__ import annotations

import collections
import concurrent.futures
import functools
import threading
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.gpu_check.measure import deviation
from jaxinfer.gpu_check.problem import MOSAIC, XLA, Operands, Problem, host
from jaxinfer.gpu_check.problems import FIRST, PROBLEMS
from jaxinfer.gpu_check.report import Report
from pallas_kernels import compat
from pallas_kernels.choice import lowering_target

_RESERVE_S = 4.0
_THREADS = 8
_TRACING = threading.Lock()  # JAX does not document that kernels may be lowered by several threads at a time


def run(report: Report) -> None:
    """Check a shape of each kernel at least; without a GPU (slow), after the XLA paths of the same shapes."""
    check(report, PROBLEMS[:FIRST], (MOSAIC,) if jax.default_backend() == "gpu" else (XLA, MOSAIC))


def run_all(report: Report) -> None:
    """Check all kernels, then the XLA paths on the same operands."""
    check(report, PROBLEMS, (MOSAIC, XLA) if jax.default_backend() == "gpu" else (XLA, MOSAIC))


def check(report: Report, problems: Iterable[Problem], paths: tuple[str, ...]) -> None:
    """Check all problems on one path after the other."""
    operands: dict[str, Operands] = {}
    # Compilation takes most of the time. All threads share one kernel interpreter.
    at_once = _THREADS if jax.default_backend() == "gpu" and not report.alone else 1
    with concurrent.futures.ThreadPoolExecutor(at_once) as threads:
        for path in paths:
            done = threads.map(functools.partial(_check, report, operands, path), problems)
            collections.deque(done, maxlen=0)


def _check(report: Report, operands: dict[str, Operands], path: str, problem: Problem) -> None:
    """Check one path of a problem; the first path checked builds the operands."""
    key = f"{problem} ({path})"
    if (why := problem.refusal(path, lowering_target().capability)) is not None:
        report.put(key, skipped=why)
        return
    if not report.time_for(key, _RESERVE_S):
        return
    with report.attempt(key):
        if str(problem) not in operands:
            with jax.default_device(jax.devices("cpu")[0]):  # float64 references run on the CPU
                operands[str(problem)] = problem.build(report.quick)
            report.goes_on(f"operands of {key}")
        runner = _Run(problem, operands[str(problem)].options, path, lambda: report.goes_on(f"compiled {key}"))
        report.put(key, path=path, **_checked(runner, operands[str(problem)]))


class _Run:
    """One path of a problem on this backend: interpreted, or compiled for each new shape of its operands.

    ``compiled`` is called after each compilation.
    """

    def __init__(self, problem: Problem, options: dict[str, Any], path: str, compiled: Callable[[], None]) -> None:
        self.interpret = path == MOSAIC and jax.default_backend() != "gpu"
        extra = {"interpret": compat.interpret_params(), **problem.interpreted_tiles()} if self.interpret else {}
        self.problem, self.path, self._compiled = problem, path, compiled
        self._function = functools.partial(problem.function(path), **options, **extra)
        self._programs: dict[Any, Callable[..., Any]] = {}

    def __call__(self, arrays: dict[str, Any]) -> tuple[Any, Any]:
        operands = jax.tree.map(jnp.asarray, arrays)
        if self.interpret:
            out = compat.interpreted(lambda: self._function(**operands))
        else:
            out = self._program(operands)(**operands)
        by_row, whole = self.problem.result(out)
        return host(by_row), host(whole)

    def _program(self, operands: dict[str, Any]) -> Callable[..., Any]:
        shapes = tuple(x.shape for x in jax.tree.leaves(operands))
        if shapes not in self._programs:
            with _TRACING:
                lowered = jax.jit(self._function).lower(**operands)
            self._programs[shapes] = lowered.compile()
            self._compiled()
        return self._programs[shapes]


def _checked(runner: _Run, operands: Operands) -> dict[str, Any]:
    got = runner(operands.arrays)
    found = _compared(got, operands, operands.expected(runner.path), runner.problem.bound)
    # XLA may choose another program for another number of rows: only kernels are batch-invariant.
    bits = _bits(runner, operands, got, alone=runner.path == MOSAIC)
    return {**found, **bits, "interpreted": runner.interpret, "ok": found["ok"] and all(bits.values())}


def _compared(got: tuple[Any, Any], operands: Operands, expected: tuple[Any, Any], bound: float) -> dict[str, Any]:
    """Return the worst deviation over the arrays of a result. Padding must be finite, its values are not compared."""
    by_row, exact = got[0], expected[0]
    finite = True
    if operands.counts is not None:
        finite = bool(np.isfinite(by_row.astype(np.float32)).all())
        by_row, exact = by_row[operands.counts], exact[operands.counts]
    pairs = zip(jax.tree.leaves((by_row, got[1])), jax.tree.leaves((exact, expected[1])), strict=True)
    found = [deviation(one, other, bound) for one, other in pairs]
    worst = max(found, key=lambda each: (not each["ok"], each["worst_vector"]))
    return {**worst, "ok": worst["ok"] and finite}


def _bits(runner: _Run, operands: Operands, got: tuple[Any, Any], *, alone: bool) -> dict[str, bool]:
    arrays, by_row = operands.arrays, [name for name in runner.problem.by_row if name in operands.arrays]

    def taken(rows: slice) -> dict[str, Any]:
        return arrays | {name: jax.tree.map(lambda x: np.ascontiguousarray(x[rows]), arrays[name]) for name in by_row}

    backwards = runner(taken(slice(None, None, -1)))
    same = {"same_bits_reversed": _same((_reversed(backwards[0]), backwards[1]), got)}
    if runner.interpret:
        return same
    same["same_bits_twice"] = _same(runner(arrays), got)
    if alone and got[0] is not None:
        rows = range(got[0].shape[0])
        single = (_same(runner(taken(slice(row, row + 1)))[0], got[0][row : row + 1]) for row in rows)
        same["same_bits_alone"] = all(single)
    return same


def _reversed(by_row: np.ndarray | None) -> np.ndarray | None:
    return None if by_row is None else np.ascontiguousarray(by_row[::-1])


def _same(one: Any, other: Any) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(a.tobytes() == np.ascontiguousarray(b).tobytes() for a, b in pairs)
