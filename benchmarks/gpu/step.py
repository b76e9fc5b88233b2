"""Section step: the engine's own decode and prefill programs at the shape of Llama-3.1-8B with random weights.

Keys and values are random and every row is at the end of its context, so that no prompt needs to be computed; the
programs are those of `engine/execution/step.py`, sampling included, state donated.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu import swap
from benchmarks.gpu.bounds import bytes_per_token, prefill_operations, weight_bytes
from jaxinfer.engine.execution.commands import DecodeBatch, PrefillBatch
from jaxinfer.engine.execution.stages import Stage
from jaxinfer.engine.execution.step import StepState, make_decode, make_prefill
from jaxinfer.gpu_check.llama import LLAMA_8B, TINY, random_model
from jaxinfer.gpu_check.measure import fill, time_calls
from jaxinfer.gpu_check.report import Report
from jaxinfer.kv.pool import LayerPool, new_pools, pages_of
from jaxinfer.models.model import Model
from jaxinfer.parallel.mesh import make_mesh, replicated
from jaxinfer.quant import refused_products
from jaxinfer.sampling import HostSlots, SamplingLimits, new_state

PAGE = 64
LIMITS = SamplingLimits(max_logprobs=20)
# As the engine compiles on a GPU (engine/execution/compiled.py): no GEMM is computed twice to save memory.
GPU_OPTIONS = {"xla_disable_hlo_passes": "rematerialization"}
_RESERVE_S = 15.0
# Memory reserved for programs, in addition to weights and the KV cache.
_SPARE_BYTES = 3 << 30


class Decode(NamedTuple):
    rows: int
    contexts: tuple[int, ...]
    backend: Literal["auto", "xla"] = "auto"
    gemm: Literal["mosaic", "xla"] = "mosaic"

    def __str__(self) -> str:
        return f"decode, {self.rows} rows, {self.backend}{_of_gemm(self.gemm)}"


class Prefill(NamedTuple):
    """Prefill of ``tokens`` on each of ``sequences``, computed in chunks."""

    tokens: int
    chunk: int
    sequences: int = 1
    backend: Literal["auto", "xla"] = "auto"
    gemm: Literal["mosaic", "xla"] = "mosaic"

    def __str__(self) -> str:
        of = f"{self.sequences} x {self.tokens} tokens in chunks of {self.chunk}"
        return f"prefill, {of}, {self.backend}{_of_gemm(self.gemm)}"


def _of_gemm(gemm: str) -> str:
    """Return the suffix of a record's name if products are not those of exact mode."""
    return ", products by xla" if gemm == "xla" else ""


# The most informative first: those that the time does not suffice for are skipped from the end.
WORK: tuple[Decode | Prefill, ...] = (
    Decode(64, (4096, 512), gemm="xla"),  # known to complete
    Decode(64, (4096, 512)),
    Decode(2, (4096, 512)),  # the fewest rows of a decode program
    Prefill(8192, 2048),
    Prefill(2048, 2048),
    Prefill(2048, 2048, gemm="xla"),
    Decode(256, (4096, 512)),
    Decode(8, (4096, 512)),
    Decode(2, (512,), gemm="xla"),
    Decode(64, (4096, 512), "xla"),
    Prefill(2048, 2048, backend="xla"),
    Prefill(256, 256, sequences=8),
)
QUICK_WORK: tuple[Decode | Prefill, ...] = (Decode(2, (64, 128)), Prefill(128, 64))


def run(report: Report) -> None:
    config = TINY if report.quick else LLAMA_8B
    start = time.perf_counter()
    model = random_model(config)
    total, read = weight_bytes(model)
    report.put("weights", bytes=total, read_per_step=read, seconds_to_fill=round(time.perf_counter() - start, 2))
    for work in QUICK_WORK if report.quick else WORK:
        if not report.time_for(str(work), _RESERVE_S):
            continue
        with report.attempt(str(work)):
            if work.gemm == "mosaic" and jax.default_backend() == "gpu":
                _require_kernel(model)
            served = model.for_kernels(work.gemm)
            if isinstance(work, Decode):
                _measure_decode(report, served, work)
            else:
                _measure_prefill(report, served, work, config)
    if report.time_for("swap", _RESERVE_S):
        with report.attempt("swap"):
            swap.measure(report, model, PAGE)


def _require_kernel(model: Model) -> None:
    """Require that the kernel does all products, so that no XLA time is reported under the kernel's name.

    Raises:
        ValueError: the kernel does not multiply by some weight.
    """
    if refused := refused_products(model.specs, make_mesh(), model.dtype):
        raise ValueError(f"the kernel was asked for and does not do {next(iter(refused.items()))}")


def _measure_decode(report: Report, model: Model, work: Decode) -> None:
    rows, per_token = work.rows, bytes_per_token(model, PAGE)
    contexts = dict.fromkeys(_fitting(report, model, rows, context) for context in work.contexts)
    state, tables = _state(model, rows, max(contexts) // PAGE)
    slots = jax.device_put(HostSlots(rows, LIMITS).snapshot(), replicated(make_mesh()))
    function = make_decode(Stage(model), LIMITS.max_logprobs, backend=work.backend)
    program, seconds = _compiled(function, 2, model.params, slots, state, _decode_batch(tables, 1))
    name = str(work)
    report.put(f"program: {name}", compile_s=seconds, **_look_at_program(program, pages_of(state.pools)))
    for context in contexts:
        timing, state = _time(program, (model.params, slots), state, [_decode_batch(tables, context)])
        moved = weight_bytes(model)[1] + rows * context * per_token
        speed = {"tokens_s": round(rows / timing["best_ms"] * 1e3, 1)}
        report.put(f"{name}, context {context}", **timing, **speed, **report.bandwidth(moved, timing["best_ms"]))


def _fitting(report: Report, model: Model, rows: int, context: int) -> int:
    """Return ``context``, or the longest multiple of 512 that fits into memory; then also write a record."""
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    if limit is None:
        return context
    each = rows * bytes_per_token(model, PAGE)
    room = limit - weight_bytes(model)[0] - _SPARE_BYTES
    if each * context <= room:
        return context
    fits = max(512, room // each // 512 * 512)
    report.put(
        f"not run: decode, {rows} rows, context {context}",
        reason=f"keys and values are {each * context / 1e9:.0f} GB, there is room for {room / 1e9:.0f} GB",
    )
    return fits


def _measure_prefill(report: Report, model: Model, work: Prefill, config: dict[str, Any]) -> None:
    state, tables = _state(model, work.sequences, work.tokens // PAGE)
    starts = range(0, work.tokens, work.chunk)
    batches = [_prefill_batch(tables, start, work.chunk) for start in starts]
    function = make_prefill(Stage(model), work.backend)
    program, seconds = _compiled(function, 1, model.params, state.pools, batches[0])
    name = str(work)
    timing, pools = _time(program, (model.params,), state.pools, batches)
    operations = work.sequences * sum(prefill_operations(config, start, work.chunk) for start in starts)
    speed = {"tokens_s": round(work.sequences * work.tokens / timing["best_ms"] * 1e3, 1)}
    found = report.rate(operations, timing["best_ms"])
    report.put(name, compile_s=seconds, **timing, **speed, **found, **_look_at_program(program, pools))


def _state(model: Model, rows: int, width: int) -> tuple[StepState, np.ndarray]:
    """Return pools of random keys and values, and the page tables of all rows."""
    pools = new_pools(model.cache_spec, 1, PAGE, jnp.dtype(jnp.bfloat16))
    shape = model.cache_spec.pool_shape(rows * width, PAGE)
    filled = [pool._replace(data=fill(seed, shape, jnp.bfloat16)) for seed, pool in enumerate(pools)]
    slots = new_state(rows, model.config.vocab_size, LIMITS)
    state = jax.device_put(StepState(list(filled), jnp.ones((rows,), jnp.int32), slots), replicated(make_mesh()))
    return state, np.arange(rows * width, dtype=np.int32).reshape(rows, width)


def _compiled(function: Callable[..., Any], donated: int, *arguments: Any) -> tuple[Any, float]:
    """Compile the program; return it and the compilation time in seconds."""
    options = GPU_OPTIONS if jax.default_backend() == "gpu" else None
    start = time.perf_counter()
    jitted = jax.jit(function, donate_argnums=donated, out_shardings=replicated(make_mesh()))
    program = jitted.lower(*arguments).compile(compiler_options=options)
    return program, round(time.perf_counter() - start, 2)


def _decode_batch(tables: np.ndarray, context: int) -> DecodeBatch:
    """Return a batch in which every row is at the last position of its context and feeds its last sampled token."""
    tokens, positions, generated = (np.full((tables.shape[0],), value, np.int32) for value in (-1, context - 1, 1))
    return DecodeBatch(tokens, positions, generated, tables[None])


def _prefill_batch(tables: np.ndarray, start: int, chunk: int) -> PrefillBatch:
    sequences = tables.shape[0]
    starts, lengths = (np.full((sequences,), value, np.int32) for value in (start, chunk))
    return PrefillBatch(np.ones((sequences, chunk), np.int32), starts, lengths, tables[None])


def _time(program: Any, before: tuple[Any, ...], carried: Any, batches: list[Any]) -> tuple[dict[str, Any], Any]:
    """Time one call per batch. The donated argument is passed from call to call: the state of a decode step (whose
    second result is the sampled tokens), the pools of a prefill."""
    current = [carried]

    def once() -> Any:
        for batch in batches:
            out = program(*before, current[0], batch)
            current[0] = out[0] if isinstance(out, tuple) else out
        return out

    def wait(_: Any) -> None:
        """Wait for the result of the last call: earlier results are donated by then."""
        jax.block_until_ready(current[0])

    timing = time_calls(once, rounds=5, round_ms=100, most=50, wait=wait)
    return timing, current[0]


def _look_at_program(program: Any, pools: list[LayerPool]) -> dict[str, Any]:
    """Read the figures that `docs/gpu.md` names: the number of GEMMs, copies of pools, bytes of temporaries."""
    text, memory = program.as_text(), program.memory_analysis()
    pool = re.escape(f"bf16[{','.join(map(str, pools[0].data.shape))}]")
    return {
        "gemms_of_cublas": len(re.findall(r"custom_call_target=\"__cublas", text)),
        "gemms_of_triton": len(re.findall(r"\"kind\":\"__triton(?:_nested)?_gemm_?\w*\"", text)),
        "kernels_of_mosaic": len(re.findall(r"custom_call_target=\"mosaic_gpu", text)),
        "pool_copies": len(re.findall(rf"= {pool}\S* copy\(", text)),
        "temporary_bytes": getattr(memory, "temp_size_in_bytes", None),
        "aliased_bytes": getattr(memory, "alias_size_in_bytes", None),
    }
