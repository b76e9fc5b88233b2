"""Section step: the engine's own decode step, XLA path, at the shape of Llama-3.1-8B with random weights.

Keys and values are random and every row stands at the end of its context, so that no prompt need be computed; the
step itself is what `engine/step.py` jits, sampling included, state donated.
"""

from __future__ import annotations

import re
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.engine.step import DecodeBatch, StepState, make_programs
from jaxinfer.kv.pool import new_pools
from jaxinfer.models.model import Model
from jaxinfer.models.registry import family_for
from jaxinfer.parallel.mesh import make_mesh, param_sharding, replicated
from jaxinfer.sampling import HostSlots, SamplingLimits, SlotParams, new_state
from jaxinfer.types import ParamSpec
from tools.gpu_check.measure import fill, time_calls
from tools.gpu_check.report import Report

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
TINY = {
    **LLAMA_8B,
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
ROWS, QUICK_ROWS = (1, 64, 8), (2,)
CONTEXTS, QUICK_CONTEXTS = (512, 4096), (64, 128)
PAGE = 64
MAX_LOGPROBS = 20
# As the engine compiles on a GPU (engine/compiled.py): no GEMM is computed twice to save memory.
GPU_OPTIONS = {"xla_disable_hlo_passes": "rematerialization"}
_RESERVE_S = 20.0


def run(report: Report) -> None:
    start = time.perf_counter()
    model = _random_model(TINY if report.quick else LLAMA_8B)
    jax.block_until_ready(model.params)
    total, read = _weight_bytes(model)
    seconds = round(time.perf_counter() - start, 2)
    report.put("weights", bytes=total, read_per_step=read, seconds_to_fill=seconds)
    for rows in QUICK_ROWS if report.quick else ROWS:
        if report.left() < _RESERVE_S and not report.quick:
            report.put("stopped", reason=f"time: {rows} rows and what follows was not run")
            return
        with report.attempt(f"{rows} rows"):
            _measure_rows(report, model, rows)


def _random_model(config_json: dict[str, Any]) -> Model:
    family = family_for(config_json)
    config = family.config(config_json)
    mesh = make_mesh()
    leaves, tree = jax.tree.flatten(family.param_specs(config), is_leaf=lambda x: isinstance(x, ParamSpec))
    params = [
        jax.device_put(_random_weight(spec, seed), param_sharding(mesh, spec)) for seed, spec in enumerate(leaves)
    ]
    return Model(family.module(config), jax.tree.unflatten(tree, params), config, family)


def _random_weight(spec: ParamSpec, seed: int) -> jax.Array:
    if spec.init != "normal":
        return jnp.full(spec.shape, float(spec.init == "ones"), jnp.bfloat16)
    return fill(seed, spec.shape, jnp.bfloat16, spec.scale)


def _weight_bytes(model: Model) -> tuple[int, int]:
    """Bytes of all weights, and of those that a step reads whole: all but an embedding that is no output head."""
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    return total, total - (0 if model.config.tied else model.params["embed"]["table"].nbytes)


class _Step(NamedTuple):
    """A compiled decode step and what it is called with, the batch aside."""

    program: Any
    params: Any
    slots: SlotParams
    tables: np.ndarray
    pool_type: str  # of one layer, as HLO writes it
    compile_s: float


def _measure_rows(report: Report, model: Model, rows: int) -> None:
    contexts = QUICK_CONTEXTS if report.quick else CONTEXTS
    state = _state(model, rows, max(contexts) // PAGE)
    step = _compile(model, rows, max(contexts) // PAGE, state)
    report.put(f"program of {rows} rows", compile_s=step.compile_s, **_look_at_program(step))
    _, read = _weight_bytes(model)
    per_key = model.cache_spec.bytes_per_page(PAGE, 2) // PAGE
    for context in contexts:
        timing, state = _time(step, state, rows, context)
        moved = read + rows * context * per_key
        speed = {"tokens_s": round(rows / timing["best_ms"] * 1e3, 1)}
        key = f"{rows} rows, context {context}"
        report.put(key, **timing, **speed, **report.bandwidth(moved, timing["best_ms"]))


def _state(model: Model, rows: int, width: int) -> StepState:
    pools = new_pools(model.cache_spec, 1, PAGE, jnp.dtype(jnp.bfloat16))
    shape = model.cache_spec.pool_shape(rows * width, PAGE)
    filled = [pool._replace(data=fill(seed, shape, jnp.bfloat16)) for seed, pool in enumerate(pools)]
    slots = new_state(rows, model.config.vocab_size, SamplingLimits(max_logprobs=MAX_LOGPROBS))
    return jax.device_put(StepState(filled, jnp.ones((rows,), jnp.int32), slots), replicated(make_mesh()))


def _compile(model: Model, rows: int, width: int, state: StepState) -> _Step:
    everywhere = replicated(make_mesh())
    host_slots = HostSlots(rows, SamplingLimits(max_logprobs=MAX_LOGPROBS))
    slots = jax.device_put(host_slots.snapshot(), everywhere)
    tables = np.arange(rows * width, dtype=np.int32).reshape(rows, width)
    options = GPU_OPTIONS if jax.default_backend() == "gpu" else None
    start = time.perf_counter()
    jitted = jax.jit(make_programs(model, MAX_LOGPROBS).decode, donate_argnums=2, out_shardings=everywhere)
    lowered = jitted.lower(model.params, slots, state, _batch(tables, 1))
    program = lowered.compile(compiler_options=options)
    seconds = round(time.perf_counter() - start, 2)
    pool_type = ",".join(map(str, model.cache_spec.pool_shape(rows * width, PAGE)))
    return _Step(program, model.params, slots, tables, f"bf16[{pool_type}]", seconds)


def _batch(tables: np.ndarray, context: int) -> DecodeBatch:
    """Every row stands at the last position of its context and feeds what it sampled last."""
    rows = tables.shape[0]
    ints = (np.full((rows,), value, np.int32) for value in (-1, context - 1, 1))
    return DecodeBatch(*ints, tables[None])


def _time(step: _Step, state: StepState, rows: int, context: int) -> tuple[dict[str, Any], StepState]:
    batch, current = _batch(step.tables, context), [state]

    def once() -> Any:
        current[0], sampled = step.program(step.params, step.slots, current[0], batch)
        return sampled

    timing = time_calls(once, rounds=5, round_ms=100, most=50)
    tokens = np.asarray(once().tokens)
    return {**timing, "distinct_tokens": len(set(tokens.tolist()))}, current[0]


def _look_at_program(step: _Step) -> dict[str, Any]:
    """What `docs/gpu.md` says to look for: how many GEMMs, whether pools are copied, how large temporaries are."""
    text, memory = step.program.as_text(), step.program.memory_analysis()
    pool = re.escape(step.pool_type)
    return {
        "gemms_of_cublas": len(re.findall(r"custom_call_target=\"__cublas", text)),
        "gemms_of_triton": len(re.findall(r"\"kind\":\"__triton(?:_nested)?_gemm_?\w*\"", text)),
        "pool_copies": len(re.findall(rf"= {pool}\S* copy\(", text)),
        "temporary_bytes": getattr(memory, "temp_size_in_bytes", None),
        "aliased_bytes": getattr(memory, "alias_size_in_bytes", None),
    }
