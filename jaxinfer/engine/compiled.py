"""Ahead-of-time compilation: every program that can run after READY is compiled here, before READY."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.config import ResolvedEngine
from jaxinfer.engine.step import DecodeBatch, PrefillBatch, Programs, StepState
from jaxinfer.kv.transfer import COPIES, TRANSFER_PAGES
from jaxinfer.parallel.mesh import traced_for
from jaxinfer.sampling import SlotParams

# Called with the programs that are compiled, and with how many there will be.
CompileProgress = Callable[[int, int], None]

# Recomputing a GEMM to save memory costs a tenth of a decode step, and the memory is there: the pool is sized last.
_GPU_OPTIONS = {"xla_disable_hlo_passes": "rematerialization"}


@dataclasses.dataclass(frozen=True)
class CompiledPrograms:
    """Executables, named as in `step.Programs`; ``prefill`` by chunk size and lanes.

    ``decode_many`` is None unless several steps may run without the host.
    """

    decode: Callable[..., Any]
    decode_many: Callable[..., Any] | None
    prefill: Mapping[tuple[int, int], Callable[..., Any]]
    prefill_logprobs: Callable[..., Any]
    admit: Callable[..., Any]
    keep: Callable[..., Any]
    resume: Callable[..., Any]
    copy: Callable[..., Any]
    export: Callable[..., Any]
    restore: Callable[..., Any]

    def temporaries(self) -> int:
        """Bytes that the hungriest program uses while it runs, see `temporary_bytes`."""
        widest = self.prefill[max(self.prefill, key=math.prod)]
        return max(map(temporary_bytes, (self.decode, self.prefill_logprobs, widest)))


class _Job(NamedTuple):
    """A function, the arguments that it will be called with, which of them is donated, and where its results lie."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donate: int | None
    results: Any


def compile_programs(
    programs: Programs,
    engine: ResolvedEngine,
    params: Any,
    slots: SlotParams,
    state: StepState,
    groups: int = 1,
    progress: CompileProgress | None = None,
) -> CompiledPrograms:
    """Every program that the engine can run.

    Args:
        groups: of the cache (`CacheSpec.windows`).
        progress: called at the beginning and after each program, by the thread that calls this function.
    """
    params, slots, state = (_abstract(tree) for tree in (params, slots, state))
    shapes, kept = _Shapes(engine, groups, _sharding(state.last_tokens)), _shardings(state)
    jobs = {
        **_computing(programs, shapes, params, slots, state),
        **_keeping(programs, shapes, state),
        **{
            f"prefill_{size}x{lanes}": _Job(programs.prefill, (params, state, shapes.prefill(size, lanes)), 1, kept)
            for size, lanes in shapes.prefills
        },
    }
    done = _compile(jobs, shapes.mesh, progress)
    prefill = {(size, lanes): done.pop(f"prefill_{size}x{lanes}") for size, lanes in shapes.prefills}
    return CompiledPrograms(prefill=prefill, **{"decode_many": None, **done})


def compile_largest(
    programs: Programs, engine: ResolvedEngine, params: Any, slots: SlotParams, state: StepState, groups: int = 1
) -> list[Any]:
    """The executables that use most memory while they run: the widest decode and prefill programs.

    All arguments may be abstract: arrays are only asked for shape, dtype and sharding.
    """
    shapes = _Shapes(engine, groups, _sharding(state.last_tokens))
    jobs = _computing(programs, shapes, params, slots, state)
    jobs.pop("decode_many", None)  # one step needs as much as several, the results aside
    size, lanes = max(shapes.prefills, key=math.prod)
    jobs["prefill"] = _Job(programs.prefill, (params, state, shapes.prefill(size, lanes)), 1, _shardings(state))
    return list(_compile(jobs, shapes.mesh).values())


def temporary_bytes(executable: Any) -> int:
    """Device memory that a compiled program uses beside its arguments, as XLA has planned it."""
    plan = executable.memory_analysis()
    return plan.temp_size_in_bytes + plan.output_size_in_bytes - plan.alias_size_in_bytes


def _computing(
    programs: Programs, shapes: _Shapes, params: Any, slots: SlotParams, state: StepState
) -> dict[str, _Job]:
    largest, batch = shapes.engine.prefill_sizes[-1], shapes.decode()
    kept, shown = _shardings(state), shapes.everywhere
    prompt = (params, state, shapes.prefill(largest, 1), shapes.ints(largest))
    jobs = {
        "decode": _Job(programs.decode, (params, slots, state, batch), 2, (kept, shown)),
        "prefill_logprobs": _Job(programs.prefill_logprobs, prompt, 1, (kept, shown)),
    }
    if shapes.engine.multi_step > 1 and batch.owners is None:
        several = (params, slots, state, batch, shapes.ints())
        jobs["decode_many"] = _Job(programs.decode_many, several, 2, (kept, shown, shown))
    return jobs


def _keeping(programs: Programs, shapes: _Shapes, state: StepState) -> dict[str, _Job]:
    """Programs that move state and compute nothing."""
    vocab, kept, slot = state.slots.counts.shape[1], _shardings(state), shapes.ints()
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype, sharding=x.sharding), state.slots)
    copies, moved = shapes.ints(shapes.groups, COPIES), shapes.ints(shapes.groups, TRANSFER_PAGES)
    rows = shapes.array((vocab,), jnp.bool_), shapes.array((vocab,), jnp.float32)
    pages = _exported(state)
    return {
        "admit": _Job(programs.admit, (state, slot, *rows), 0, kept),
        "keep": _Job(programs.keep, (state, slot), None, shapes.everywhere),
        "resume": _Job(programs.resume, (state, slot, one), 0, kept),
        "copy": _Job(programs.copy, (state, copies, copies), 0, kept),
        "export": _Job(programs.export, (state, moved), None, pages.sharding),
        "restore": _Job(programs.restore, (state, pages, moved), 0, kept),
    }


def _exported(state: StepState) -> jax.ShapeDtypeStruct:
    """Pages of all layers, as the export program gives them: each device its own heads, the host reads them all."""
    pool = state.pools[0].data
    lies = _sharding(pool)
    sharding = NamedSharding(lies.mesh, PartitionSpec(None, None, *tuple(lies.spec)[1:]))
    return jax.ShapeDtypeStruct((TRANSFER_PAGES, len(state.pools), *pool.shape[1:]), pool.dtype, sharding=sharding)


def _compile(jobs: Mapping[str, _Job], mesh: Mesh, progress: CompileProgress | None = None) -> dict[str, Any]:
    """Lower one after the other (tracing holds the interpreter lock), compile in threads."""
    tell = progress or (lambda done, total: None)
    tell(0, len(jobs))
    with traced_for(mesh):
        lowered = {
            name: jax.jit(job.function, donate_argnums=job.donate, out_shardings=job.results).lower(*job.arguments)
            for name, job in jobs.items()
        }
    options = _GPU_OPTIONS if mesh.devices.flat[0].platform == "gpu" else None
    with concurrent.futures.ThreadPoolExecutor(max_workers=4) as threads:
        running = {name: threads.submit(low.compile, compiler_options=options) for name, low in lowered.items()}
        for done, _ in enumerate(concurrent.futures.as_completed(running.values()), start=1):
            tell(done, len(jobs))
        return {name: compiled.result() for name, compiled in running.items()}


def _abstract(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def _sharding(x: jax.Array | jax.ShapeDtypeStruct) -> NamedSharding:
    assert isinstance(x.sharding, NamedSharding)
    return x.sharding


def _shardings(tree: Any) -> Any:
    return jax.tree.map(_sharding, tree)


@dataclasses.dataclass(frozen=True)
class _Shapes:
    """Of what the host hands to the programs."""

    engine: ResolvedEngine
    groups: int
    everywhere: NamedSharding

    @property
    def mesh(self) -> Mesh:
        assert isinstance(self.everywhere.mesh, Mesh)
        return self.everywhere.mesh

    def array(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, np.dtype(dtype), sharding=self.everywhere)

    def ints(self, *shape: int) -> jax.ShapeDtypeStruct:
        return self.array(shape, np.int32)

    @property
    def prefills(self) -> list[tuple[int, int]]:
        return sorted({*((size, 1) for size in self.engine.prefill_sizes), *self.engine.wide_prefills})

    def decode(self) -> DecodeBatch:
        rows = self.ints(self.engine.rows)
        tables = self.ints(self.groups, self.engine.rows, self.engine.table_width)
        return DecodeBatch(rows, rows, rows, tables, None if self.engine.speculative is None else rows)

    def prefill(self, size: int, lanes: int) -> PrefillBatch:
        tables = self.ints(self.groups, lanes, self.engine.table_width)
        return PrefillBatch(self.ints(lanes, size), self.ints(lanes), self.ints(lanes), tables)
