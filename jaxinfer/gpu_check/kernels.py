"""Section kernels: the time of each kernel, compared with device limits, the XLA path and jax's own attention (cuDNN).

Calls follow one another within one program, on operands that together exceed the L2 cache (`measure.Inside`).
"""

from __future__ import annotations

import collections
import concurrent.futures
import functools
import importlib
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.gpu_check import workloads
from jaxinfer.gpu_check.measure import Inside, fill
from jaxinfer.gpu_check.report import Report
from jaxinfer.gpu_check.workloads import Workload
from pallas_kernels import kv_write
from pallas_kernels.grouped_matmul.arg_specs import Mixture
from pallas_kernels.kv_copy.arg_specs import Copy
from pallas_kernels.kv_write.arg_specs import Write
from pallas_kernels.linear_attention.arg_specs import States
from pallas_kernels.matmul.arg_specs import Product as Dense
from pallas_kernels.mla_attention import LatentOptions
from pallas_kernels.mla_attention.arg_specs import Latents
from pallas_kernels.operands import Draw
from pallas_kernels.paged_attention import AttentionOptions
from pallas_kernels.paged_attention.arg_specs import Decode, Prefill
from pallas_kernels.quant_matmul.arg_specs import Product

MOSAIC, XLA, CUDNN, JAX_XLA = "mosaic", "xla", "jax, cuDNN", "jax, XLA"
REPEATS, QUICK_REPEATS = 8, 1
_RESERVE_S = 8.0
_AT_A_TIME = 6
_TRACING = threading.Lock()  # JAX does not document that kernels may be lowered by several threads at a time
_FEW_ROWS = 256  # rows of a product: up to this many, the bytes of the weight are the limit
# The XLA path of a long prefill takes seconds: only short ones are timed.
_XLA_OPERATIONS = 2e11


class Path(NamedTuple):
    """A function as "module:function", its arguments besides the operands, and a factory of the operands.

    ``operands`` takes the index of the set of operands. ``changes``: see `measure.Inside`.
    """

    name: str
    function: str
    options: dict[str, Any]
    operands: Callable[[int], tuple[Any, ...]]
    changes: bool = False


class Job(NamedTuple):
    shape: Workload
    path: Path

    def __str__(self) -> str:
        return f"{self.shape}: {self.path.name}"


class Program(NamedTuple):
    calls: Inside
    compiled: Callable[..., Any]


def run(report: Report) -> None:
    """Time our kernels at all shapes, then the functions that they are compared with.

    A batch of jobs is lowered and compiled in parallel, then timed one after the other.
    """
    at_once = 1 if report.alone else _AT_A_TIME
    with concurrent.futures.ThreadPoolExecutor(at_once) as threads:
        for jobs in itertools.batched(_jobs(report), at_once):
            if not report.time_for(f"{jobs[0]} and what follows", _RESERVE_S):
                return
            programs: dict[str, Program] = {}
            collections.deque(threads.map(functools.partial(_compile, report, programs), jobs), maxlen=0)
            for job in jobs:
                if str(job) in programs:
                    with report.attempt(str(job)):
                        _measure(report, job, programs[str(job)])


def _jobs(report: Report) -> Iterator[Job]:
    # The speed of interpreted kernels means nothing: without a GPU, the section only checks that the other paths run.
    passes = [MOSAIC, CUDNN, XLA] if jax.default_backend() == "gpu" else [XLA, JAX_XLA]
    shapes = (*workloads.attention(quick=report.quick), *workloads.others(quick=report.quick))
    for name in passes:
        jobs = (Job(shape, path) for shape in shapes for path in paths(shape) if path.name == name)
        yield from (job for job in jobs if report.wanted(str(job)) and report.wanted(_compiling(job), anew=True))


def _compiling(job: Job) -> str:
    return f"compiling {job}"


def _compile(report: Report, programs: dict[str, Program], job: Job) -> None:
    """Compile the program of a job into ``programs``. A missing path or a failed compilation becomes a record."""
    with report.attempt(_compiling(job)):
        calls = _calls(*job, report.quick)
        operands = jax.eval_shape(functools.partial(job.path.operands, 0))
        with _TRACING:
            lowered = calls.lower(operands)
        programs[str(job)] = Program(calls, lowered.compile())


def _calls(shape: Workload, path: Path, quick: bool) -> Inside:
    module, _, name = path.function.partition(":")
    function = functools.partial(getattr(importlib.import_module(module), name), **path.options)
    sets = 1 if quick or isinstance(shape, Prefill) else workloads.variants(shape.bytes)
    return Inside(function, sets, QUICK_REPEATS if quick else REPEATS, path.changes)


def _measure(report: Report, job: Job, program: Program) -> None:
    calls = program.calls
    timing = calls.time(program.compiled, [job.path.operands(index) for index in range(calls.sets)])
    names = {"shape": str(job.shape), "path": job.path.name, "sets": calls.sets}
    report.put(str(job), **names, **timing, **limits(report, job.shape, timing["best_ms"]))


def limits(report: Report, shape: Workload, ms: float) -> dict[str, float]:
    """Return rates of the shape's bound: operations for prefill and products of many rows, bytes for all others."""
    if isinstance(shape, Prefill) or (isinstance(shape, Product | Dense | Mixture) and shape.rows > _FEW_ROWS):
        return report.rate(shape.operations, ms)
    return report.bandwidth(shape.bytes, ms)


def paths(shape: Workload) -> Iterator[Path]:
    """Yield every path of a shape. A new op adds one case."""
    match shape:
        case Decode():
            yield from _decode_paths(shape)
        case Prefill():
            yield from _prefill_paths(shape)
        case Latents():
            function, options = "pallas_kernels.mla_attention.{}:decode", {"options": LatentOptions(192**-0.5)}
            yield from _both(function, _without_starts(shape), options, "mosaic.attention")
        case Product():
            yield from _both("pallas_kernels.quant_matmul.{}:matmul", shape.operands, mosaic="mosaic.launch")
        case Dense():
            yield from _both("jaxinfer.gpu_check.dense:{}", shape.operands, shape.options)
        case Mixture():
            yield from _both("jaxinfer.gpu_check.experts:{}", shape.operands, {"most": shape.tokens})
        case Write():
            yield from _both("jaxinfer.gpu_check.kernels:written_by_{}", shape.operands, changes=True)
        case Copy():
            yield from _both("pallas_kernels.kv_copy.{}:copy_pages", shape.operands, changes=True)
        case States():
            yield from _both("jaxinfer.gpu_check.states:{}", _pool_first(shape), changes=True)


def _both(
    function: str,
    make: Callable[[Draw], tuple[Any, ...]],
    options: Mapping[str, Any] | None = None,
    mosaic: str = MOSAIC,
    *,
    changes: bool = False,
) -> Iterator[Path]:
    """Yield the kernel and the XLA path of a function, in whose name the path's stands for {}."""
    for path, name in ((MOSAIC, mosaic), (XLA, XLA)):
        yield Path(path, function.format(name), dict(options or {}), functools.partial(_drawn, make), changes)


def _drawn(make: Callable[[Draw], tuple[Any, ...]], index: int) -> tuple[Any, ...]:
    operands: tuple[Any, ...] = jax.jit(lambda seed: make(Draw(seed)))(1000 * index)
    return operands


def _without_starts(shape: Decode | Latents) -> Callable[[Draw], tuple[Any, ...]]:
    """Return a maker of a decode step's operands: one query of each row, without the position that it begins at."""

    def make(draw: Draw) -> tuple[Any, ...]:
        q, pool, tables, _, lengths, *_ = shape.operands(draw)
        return q[:, 0], pool, tables, lengths

    return make


def _pool_first(shape: States) -> Callable[[Draw], tuple[Any, ...]]:
    def make(draw: Draw) -> tuple[Any, ...]:
        *given, pool, read, write = shape.operands(draw)
        return pool, *given, read, write

    return make


def written_by_mosaic(*operands: Any) -> Any:
    """Write by the kernel and return only the pool."""
    return kv_write.write(*operands, path="mosaic").pool


def written_by_xla(*operands: Any) -> Any:
    """Write by XLA and return only the pool."""
    return kv_write.write(*operands, path="xla").pool


def _decode_paths(shape: Decode) -> Iterator[Path]:
    module, scale = "pallas_kernels.paged_attention", shape.head_dim**-0.5
    options = {"options": AttentionOptions(scale)}
    paged = functools.partial(_drawn, _without_starts(shape))
    yield Path(MOSAIC, f"{module}.hopper.decode.launch:decode", options, paged)
    yield Path(XLA, f"{module}.xla:decode", {**options, "together": shape.rows}, paged)
    contiguous = functools.partial(_contiguous, shape, shape.rows, 1)
    yield from _jax_paths({"scale": scale}, contiguous)


def _prefill_paths(shape: Prefill) -> Iterator[Path]:
    module, scale = "pallas_kernels.paged_attention", shape.head_dim**-0.5
    options = {"options": AttentionOptions(scale)}
    paged = functools.partial(_drawn, lambda draw: shape.operands(draw)[:5])
    yield Path(MOSAIC, f"{module}.hopper.prefill.launch:prefill", options, paged)
    if shape.operations <= _XLA_OPERATIONS:
        yield Path(XLA, f"{module}.xla:prefill", options, paged)
    if shape.chunk == shape.context:  # the causal mask of jax begins at the first key
        yield from _jax_paths(
            {"scale": scale, "is_causal": True}, functools.partial(_contiguous, shape, shape.sequences, shape.chunk)
        )


def _jax_paths(options: dict[str, Any], operands: Callable[[int], tuple[Any, ...]]) -> Iterator[Path]:
    for name, implementation in ((CUDNN, "cudnn"), (JAX_XLA, "xla")):
        yield Path(name, "jax.nn:dot_product_attention", {**options, "implementation": implementation}, operands)


def page_table(rows: int, context: int, page: int) -> np.ndarray:
    """Return a table with the pages of all rows in random order."""
    width = -(-context // page)
    return np.random.default_rng(0).permutation(rows * width).astype(np.int32).reshape(rows, width)


def _contiguous(shape: Decode | Prefill, rows: int, queries: int, index: int) -> tuple[Any, ...]:
    keys = (rows, shape.context, shape.kv_heads, shape.head_dim)
    return (
        fill(3 * index, (rows, queries, shape.heads, shape.head_dim), jnp.bfloat16),
        fill(3 * index + 1, keys, jnp.bfloat16),
        fill(3 * index + 2, keys, jnp.bfloat16),
    )
