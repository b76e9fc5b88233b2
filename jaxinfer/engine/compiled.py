"""Ahead-of-time compilation: every program that can run after READY is compiled here, before READY."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.config import ResolvedEngine
from jaxinfer.engine.step import DecodeBatch, PrefillBatch, Programs, StepState
from jaxinfer.sampling import SlotParams

# Recomputing a GEMM to save memory costs a tenth of a decode step, and the memory is there: the pool is sized last.
_GPU_OPTIONS = {"xla_disable_hlo_passes": "rematerialization"}


@dataclasses.dataclass(frozen=True)
class CompiledPrograms:
    """Executables by name; ``prefill`` by chunk size and lanes."""

    decode: Callable[..., Any]
    prefill: Mapping[tuple[int, int], Callable[..., Any]]
    prefill_logprobs: Callable[..., Any]
    admit: Callable[..., Any]


def compile_programs(
    programs: Programs, engine: ResolvedEngine, params: Any, slots: SlotParams, state: StepState
) -> CompiledPrograms:
    """Lower one after the other (tracing holds the interpreter lock), compile in threads."""
    sharding = jax.tree.leaves(state)[0].sharding
    params, slots, state = (_abstract(tree) for tree in (params, slots, state))

    def lower(function: Callable, *arguments: Any, donate: int) -> Any:
        outputs = jax.tree.map(lambda _: sharding, jax.eval_shape(function, *arguments))
        jitted = jax.jit(function, donate_argnums=donate, out_shardings=outputs)
        return jitted.lower(*arguments)

    largest, vocab = engine.prefill_sizes[-1], state.slots.counts.shape[1]
    lowered = {
        "decode": lower(programs.decode, params, slots, state, _decode_batch(engine), donate=2),
        "prefill_logprobs": lower(
            programs.prefill_logprobs, params, state, _prefill_batch(engine, largest, 1), _ints(largest), donate=1
        ),
        "admit": lower(
            programs.admit, state, _ints(), _array((vocab,), jnp.bool_), _array((vocab,), jnp.float32), donate=0
        ),
    }
    prefills = sorted({*((size, 1) for size in engine.prefill_sizes), *engine.wide_prefills})
    for size, lanes in prefills:
        batch = _prefill_batch(engine, size, lanes)
        lowered[f"prefill_{size}x{lanes}"] = lower(programs.prefill, params, state, batch, donate=1)
    options = _GPU_OPTIONS if sharding.mesh.devices.flat[0].platform == "gpu" else None
    with concurrent.futures.ThreadPoolExecutor(max_workers=4) as threads:
        jobs = {name: threads.submit(low.compile, compiler_options=options) for name, low in lowered.items()}
        done = {name: job.result() for name, job in jobs.items()}
    return CompiledPrograms(
        decode=done["decode"],
        prefill={(size, lanes): done[f"prefill_{size}x{lanes}"] for size, lanes in prefills},
        prefill_logprobs=done["prefill_logprobs"],
        admit=done["admit"],
    )


def _abstract(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def _array(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, np.dtype(dtype))


def _ints(*shape: int) -> jax.ShapeDtypeStruct:
    return _array(shape, np.int32)


def _decode_batch(engine: ResolvedEngine) -> DecodeBatch:
    rows = _ints(engine.rows)
    return DecodeBatch(rows, rows, rows, _ints(engine.rows, engine.table_width))


def _prefill_batch(engine: ResolvedEngine, size: int, lanes: int) -> PrefillBatch:
    return PrefillBatch(_ints(lanes, size), _ints(lanes), _ints(lanes), _ints(lanes, engine.table_width))
