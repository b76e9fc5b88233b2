"""Section kernels: the time of each kernel, compared with device limits, the XLA path and jax's own attention (cuDNN).

Calls follow one another within one program, on operands that together exceed the L2 cache (`measure.Inside`).
"""

from __future__ import annotations

import collections
import concurrent.futures
import functools
import importlib
import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.gpu_check import dense, workloads
from jaxinfer.gpu_check.measure import Inside, fill
from jaxinfer.gpu_check.report import Report
from jaxinfer.gpu_check.workloads import Copy, Decode, Dense, Latent, Mixture, Prefill, Product, States, Workload, Write
from pallas_kernels.mla_attention import LatentOptions
from pallas_kernels.paged_attention import AttentionOptions

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
        case Latent():
            yield from _latent_paths(shape)
        case Product():
            for path, module in ((MOSAIC, "mosaic.launch"), (XLA, "xla")):
                function = f"pallas_kernels.quant_matmul.{module}:matmul"
                yield Path(path, function, {}, functools.partial(_product, shape))
        case Dense():
            for path in (MOSAIC, XLA):
                options = {"layout": shape.layout, "gated": shape.gated}
                operands = functools.partial(dense.operands, shape)
                yield Path(path, f"jaxinfer.gpu_check.dense:{path}", options, operands)
        case Mixture():
            for path in (MOSAIC, XLA):
                yield Path(
                    path,
                    f"jaxinfer.gpu_check.experts:{path}",
                    {"most": shape.tokens},
                    functools.partial(_mixture, shape),
                )
        case Write():
            yield from _write_paths(shape)
        case Copy():
            yield from _both("kv_copy", "copy_pages", functools.partial(_copy, shape), changes=True)
        case States():
            for path in (MOSAIC, XLA):
                function = f"jaxinfer.gpu_check.states:{path}"
                yield Path(path, function, {}, functools.partial(_states, shape), changes=True)


def _both(
    op: str, function: str, operands: Callable[[int], tuple[Any, ...]], *, changes: bool = False
) -> Iterator[Path]:
    for path in (MOSAIC, XLA):
        yield Path(path, f"pallas_kernels.{op}.{path}:{function}", {}, operands, changes)


def _write_paths(shape: Write) -> Iterator[Path]:
    for path in (MOSAIC, XLA):
        operands = functools.partial(_write, shape)
        yield Path(path, "jaxinfer.gpu_check.kernels:written_by", {"path": path}, operands, changes=True)


def written_by(pool: Any, k: Any, v: Any, pages: Any, offsets: Any, *, path: str) -> Any:
    """Run a path of kv_write and return only the pool."""
    return importlib.import_module(f"pallas_kernels.kv_write.{path}").write(pool, k, v, pages, offsets).pool


def _decode_paths(shape: Decode) -> Iterator[Path]:
    module, scale = "pallas_kernels.paged_attention", shape.head_dim**-0.5
    options = {"options": AttentionOptions(scale)}
    paged = functools.partial(_paged, shape, (shape.rows, shape.heads, shape.head_dim), ())
    yield Path(MOSAIC, f"{module}.hopper.decode.launch:decode", options, paged)
    yield Path(XLA, f"{module}.xla:decode", {**options, "together": shape.rows}, paged)
    contiguous = functools.partial(_contiguous, shape, shape.rows, 1)
    yield from _jax_paths({"scale": scale}, contiguous)


def _prefill_paths(shape: Prefill) -> Iterator[Path]:
    module, scale = "pallas_kernels.paged_attention", shape.head_dim**-0.5
    options = {"options": AttentionOptions(scale)}
    starts = jnp.full((shape.sequences,), shape.context - shape.chunk, jnp.int32)
    paged = functools.partial(_paged, shape, (shape.sequences, shape.chunk, shape.heads, shape.head_dim), (starts,))
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


def _latent_paths(shape: Latent) -> Iterator[Path]:
    module, options = "pallas_kernels.mla_attention", {"options": LatentOptions(192**-0.5, shape.rank)}
    operands = functools.partial(_latent, shape)
    yield Path(MOSAIC, f"{module}.mosaic.attention:decode", options, operands)
    yield Path(XLA, f"{module}.xla:decode", options, operands)


def page_table(rows: int, context: int, page: int) -> np.ndarray:
    """Return a table with the pages of all rows in random order."""
    width = -(-context // page)
    return np.random.default_rng(0).permutation(rows * width).astype(np.int32).reshape(rows, width)


def _paged(shape: Decode | Prefill, queries: tuple[int, ...], middle: Sequence[Any], index: int) -> tuple[Any, ...]:
    table = page_table(queries[0], shape.context, shape.page)
    pool = (table.size, 2, shape.kv_heads, shape.page, shape.head_dim)
    return (
        fill(3 * index, queries, jnp.bfloat16),
        fill(3 * index + 1, pool, jnp.bfloat16),
        jnp.asarray(table),
        *middle,
        jnp.full((queries[0],), shape.context, jnp.int32),
    )


def _contiguous(shape: Decode | Prefill, rows: int, queries: int, index: int) -> tuple[Any, ...]:
    keys = (rows, shape.context, shape.kv_heads, shape.head_dim)
    return (
        fill(3 * index, (rows, queries, shape.heads, shape.head_dim), jnp.bfloat16),
        fill(3 * index + 1, keys, jnp.bfloat16),
        fill(3 * index + 2, keys, jnp.bfloat16),
    )


def _latent(shape: Latent, index: int) -> tuple[Any, ...]:
    latent, table = shape.rank + shape.rope, page_table(shape.rows, shape.context, shape.page)
    return (
        fill(2 * index, (shape.rows, shape.heads, latent), jnp.bfloat16),
        fill(2 * index + 1, (table.size, shape.page, latent), jnp.bfloat16),
        jnp.asarray(table),
        jnp.full((shape.rows,), shape.context, jnp.int32),
    )


def _product(shape: Product, index: int) -> tuple[Any, ...]:
    dtype, limit = (jnp.int4, 8.0) if shape.bits == 4 else (jnp.int8, 127.0)
    return (
        fill(3 * index, (shape.rows, shape.inputs), jnp.bfloat16),
        fill(3 * index + 1, (shape.channels, shape.inputs), dtype, limit),
        fill(3 * index + 2, (shape.inputs // 128, shape.channels), jnp.bfloat16),
    )


def _mixture(shape: Mixture, index: int) -> tuple[Any, ...]:
    entries, weights = shape.tokens * shape.top_k, (shape.experts, shape.channels, shape.inputs)
    x = fill(2 * index, (entries, shape.inputs), jnp.bfloat16)
    experts = jnp.arange(entries, dtype=jnp.int32) % shape.experts
    if not shape.mxfp4:
        return x, fill(2 * index + 1, weights, jnp.bfloat16), experts
    scales = jnp.full((shape.inputs // 32, *weights[:2]), 120, jnp.uint8)
    return x, fill(2 * index + 1, weights, jnp.int4, 7.0), experts, scales


def _pool(pages: int, shape: Write | Copy, index: int) -> jax.Array:
    return fill(index, (pages, 2, shape.kv_heads, shape.page, shape.head_dim), jnp.bfloat16)


def _write(shape: Write, index: int) -> tuple[Any, ...]:
    width = math.ceil(shape.tokens / shape.page) + (shape.tokens > 1)
    table = page_table(shape.sequences, width * shape.page, shape.page)
    new = (shape.sequences, shape.tokens, shape.kv_heads, shape.head_dim)
    keys, values = (fill(2 * index + one, new, jnp.bfloat16) for one in (1, 2))
    return _pool(table.size, shape, index), keys, values, jnp.asarray(table), jnp.full((shape.sequences,), 5, jnp.int32)


def _copy(shape: Copy, index: int) -> tuple[Any, ...]:
    pages = np.random.default_rng(0).permutation(2 * shape.pages).astype(np.int32)
    source, target = jnp.asarray(pages[: shape.pages]), jnp.asarray(pages[shape.pages :])
    return _pool(2 * shape.pages, shape, index), source, target


def _states(shape: States, index: int) -> tuple[Any, ...]:
    lead = (shape.rows,) if shape.tokens == 1 else (shape.rows, shape.tokens)
    q, k = (fill(6 * index + one, (*lead, shape.k_heads, shape.key), jnp.bfloat16, 0.1) for one in range(2))
    v, decay, beta = (
        fill(6 * index + one, (*lead, shape.heads, *rest), dtype)
        for one, rest, dtype in ((2, (shape.value,), jnp.bfloat16), (3, (), jnp.float32), (4, (), jnp.float32))
    )
    pool = fill(6 * index + 5, (shape.rows, shape.heads, shape.key, shape.value), jnp.float32)
    own = jnp.arange(shape.rows, dtype=jnp.int32)
    if shape.tokens > 1:  # only the state after the last chunk is kept
        beyond = jnp.full((shape.rows, shape.tokens // 64 - 1), shape.rows, jnp.int32)
        return pool, q, k, v, -jnp.abs(decay), jnp.abs(beta), own, jnp.concatenate([beyond, own[:, None]], axis=1)
    return pool, q, k, v, -jnp.abs(decay), jnp.abs(beta), own, own
