"""Ahead-of-time compilation: every program that can run after READY is compiled here, before READY."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.compilations import Fingerprints, compiler_options, lower, timed
from jaxinfer.config import ResolvedEngine
from jaxinfer.engine.execution.commands import DecodeBatch, DraftBatch, HeadBatch, PrefillBatch
from jaxinfer.engine.execution.draft import HeadPrograms, make_draft_program
from jaxinfer.engine.execution.encoder import abstract_layout, make_encode
from jaxinfer.engine.execution.kernel_trial import try_kernels
from jaxinfer.engine.execution.placement import StageArrays, mask_words, mesh_of, of_slot, targets_of
from jaxinfer.engine.execution.stages import Stage, drafted_width, returns_experts
from jaxinfer.engine.execution.step import (
    StepState,
    make_decode,
    make_decode_many,
    make_move_programs,
    make_pass_programs,
    make_prefill,
    make_prefill_logprobs,
    unpack,
    with_adapters,
)
from jaxinfer.kv.transfer import COPIES, TRANSFERS, moved_pages
from jaxinfer.parallel.arrays import device_bytes, placed_like
from jaxinfer.parallel.dp_attention import of_ranks, over_ranks, over_ranks_sharding
from jaxinfer.parallel.mesh import page_sharding, replicated, traced_for
from jaxinfer.parallel.processes import on_host
from jaxinfer.quant.banks import Banked, without_banks, write, writing_over_ranks
from jaxinfer.sampling import Typical, admit, keep_slot, resume_slot
from jaxinfer.sampling.training import WIDTH as ASKS

# Called with the number of compiled programs, and with the total.
CompileProgress = Callable[[int, int], None]
ADAPTED = "_adapted"  # suffix of the names of programs with adapters


@dataclasses.dataclass(frozen=True)
class CompiledStage:
    """Executables of a pipeline stage, named as in `engine.step`; ``decode`` and ``decode_many`` by rows (none where
    the stage has none), ``prefill`` by chunk size and number of chunks, ``export`` and ``restore`` by number of pages,
    ``encode`` by patch rows of an image. They take a batch as `pack` makes it.

    On all stages but the last, ``decode`` and ``prefill`` are those of `make_pass_programs`, and the programs that need
    the head or the sampler are None. ``decode_many`` is empty where one step is the most. A draft model or head has
    ``draft`` instead of ``decode``; a head without a cache has no other program.

    If the engine has adapters, ``adapted`` has the computing programs again, which take a `Banked` instead of
    parameters, and ``load`` by module name writes adapter weights into a slot of the banks.
    """

    prefill: Mapping[tuple[int, int], Callable[..., Any]]
    copy: Any = None
    export: Mapping[int, Any] = dataclasses.field(default_factory=dict)
    restore: Mapping[int, Any] = dataclasses.field(default_factory=dict)
    decode: Mapping[int, Any] = dataclasses.field(default_factory=dict)
    draft: Any = None
    decode_many: Mapping[int, Any] = dataclasses.field(default_factory=dict)
    prefill_logprobs: Any = None
    admit: Any = None
    save_slot: Any = None
    restore_slot: Any = None
    encode: Mapping[int, Any] = dataclasses.field(default_factory=dict)
    adapted: CompiledStage | None = None
    load: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def widest_decode(self) -> Any:
        """The decode program of most rows."""
        return self.decode[max(self.decode)]

    def temporaries(self) -> int:
        """Return the bytes that the program with the largest working set uses while it runs, see `temporary_bytes`."""
        widest = self.prefill[max(self.prefill, key=math.prod)] if self.prefill else None
        programs = (*self.decode.values(), *self.encode.values(), self.draft, widest, self.prefill_logprobs)
        own = max(temporary_bytes(program) for program in programs if program is not None)
        return own if self.adapted is None else max(own, self.adapted.temporaries())


class _Job(NamedTuple):
    """A function, its arguments, the donated one, the shardings of its results; ``loops``: it may contain loops;
    ``batch``: the argument that the host makes for each call, packed into one array; ``collectives``: on several
    devices it has some."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donate: int | None
    results: Any
    loops: bool = False
    batch: int | None = None
    collectives: bool = True

    def options(self, mesh: Mesh) -> dict[str, str] | None:
        """Return the XLA options for these devices."""
        copies = device_bytes(self.arguments[0], page_locked=True) > 0
        return compiler_options(mesh, self.loops and not (self.collectives and mesh.size > 1), copies)


def compile_stages(
    stages: Sequence[Stage],
    arrays: Sequence[StageArrays],
    engine: ResolvedEngine,
    progress: CompileProgress | None = None,
) -> list[CompiledStage]:
    """Compile every program that the engine can run, of each pipeline stage.

    Args:
        arrays: arrays of each stage; for a draft model with the slots of its model. They may be abstract: only shape,
        dtype and sharding are read. Where the mesh has data-parallel attention ranks, those of one rank; the programs
        take and give those of all (`jaxinfer.parallel.dp_attention`).
        progress: called at the beginning and after each program, by the thread that calls this function.
    """
    works = [_work(stage, stage_arrays, engine) for stage, stage_arrays in zip(stages, arrays, strict=True)]
    done = _compile(_tried([(work.mesh, work.jobs()) for work in works], engine), progress)
    return [work.named(programs) for work, programs in zip(works, done, strict=True)]


def compile_largest(
    stage: Stage, arrays: StageArrays, engine: ResolvedEngine, *, several: bool = False, every_size: bool = False
) -> list[Any]:
    """Compile the programs that use most memory while they run: the widest decode and prefill programs of a stage, and
    the drafting program.

    All arguments may be abstract. ``several``: also that of several decode steps, which needs as much as one;
    ``every_size``: also the decode programs of fewer rows, and the encoder programs of fewer patches.
    """
    work = _work(stage, arrays, engine)
    size, count = max(work.prefills, key=math.prod, default=(0, 0))
    wanted = ["decode", "draft", "prefill_logprobs", f"prefill_{size}x{count}", *(["decode_many"] if several else [])]
    wanted += [work.sized("decode", rows) for rows in work.engine.decode_sizes] if every_size else []
    wanted += [name + ADAPTED for name in wanted]
    wanted += [f"encode_{rows}" for rows in (engine.encoder_sizes if every_size else engine.encoder_sizes[-1:])]
    jobs = {name: job for name, job in {**work.computing(), **work.encoding()}.items() if name in wanted}
    return list(_compile(_tried([(work.mesh, jobs)], engine))[0].values())


def compile_moving(stage: Stage, arrays: StageArrays, engine: ResolvedEngine) -> dict[str, Any]:
    """Compile the programs that only move pages, by name. All arguments may be abstract."""
    work = _work(stage, arrays, engine)
    return _compile(_tried([(work.mesh, work.moving())], engine))[0]


def _work(stage: Stage, arrays: StageArrays, engine: ResolvedEngine) -> _Work:
    kind = _HeadWork if stage.is_head else _DraftWork if stage.drafts else _Work
    abstract = placed_like(arrays)
    return kind(stage.described_by(abstract.params), abstract, engine)


def temporary_bytes(executable: Any) -> int:
    """Return the device memory that a compiled program uses besides its arguments, as XLA has planned it."""
    plan = executable.memory_analysis()
    return plan.temp_size_in_bytes + plan.output_size_in_bytes - plan.alias_size_in_bytes


@dataclasses.dataclass(frozen=True)
class _Work:
    stage: Stage
    arrays: StageArrays
    engine: ResolvedEngine

    @property
    def replicated(self) -> NamedSharding:
        return replicated(self.mesh)

    @property
    def mesh(self) -> Mesh:
        return mesh_of(self.arrays.params)

    @property
    def prefills(self) -> list[tuple[int, int]]:
        return sorted({*((size, 1) for size in self.engine.prefill_sizes), *self.engine.wide_prefills})

    def sized(self, name: str, rows: int) -> str:
        """Return the name of a decode program of ``rows`` rows; the largest has no suffix."""
        return name if rows == self.engine.decode_sizes[-1] else f"{name}_{rows}"

    def named(self, done: dict[str, Any]) -> CompiledStage:
        if self.arrays.banks is None:
            return self._named(done)
        adapted = {name.removesuffix(ADAPTED): done.pop(name) for name in list(done) if name.endswith(ADAPTED)}
        load = {part: done[f"load_{like}"] for part, like in self._like_parts().items()}
        plain = {name: program for name, program in done.items() if not name.startswith("load_")}
        return dataclasses.replace(self._named(plain), adapted=self._named(adapted), load=load)

    def _named(self, done: dict[str, Any]) -> CompiledStage:
        prefill = {(size, count): done.pop(f"prefill_{size}x{count}") for size, count in self.prefills}
        decode = {
            rows: done.pop(self.sized("decode", rows))
            for rows in self.engine.decode_sizes
            if self.sized("decode", rows) in done
        }
        many = {
            rows: done.pop(self.sized("decode_many", rows))
            for rows in self.engine.decode_sizes
            if self.sized("decode_many", rows) in done
        }
        moving: dict[str, Any] = {
            kind: {size: done.pop(f"{kind}_{size}") for size in TRANSFERS if f"{kind}_{size}" in done}
            for kind in ("export", "restore")
        }
        encode = {rows: done.pop(name) for rows in self.engine.encoder_sizes if (name := f"encode_{rows}") in done}
        return CompiledStage(prefill, decode=decode, decode_many=many, encode=encode, **moving, **done)

    # ---- programs

    def jobs(self) -> dict[str, _Job]:
        rest = {**self.moving(), **(self.keeping() if self.stage.last else {})}
        ranked = {name: _of_ranks(job, self.mesh) for name, job in rest.items()}
        return {**self.computing(), **self.encoding(), **ranked, **self._loading()}

    def computing(self) -> dict[str, _Job]:
        jobs = self._whole() if self.stage.last else self._passing()
        if self.arrays.banks is not None:
            adapted = {name + ADAPTED: self._with_adapters(job) for name, job in jobs.items()}
            targets = targets_of(self.stage, self.engine)
            plain = {name: job._replace(function=without_banks(job.function, targets)) for name, job in jobs.items()}
            jobs = plain | adapted
        return {name: _of_ranks(_packed(job, self.replicated), self.mesh, shared=1) for name, job in jobs.items()}

    def _passing(self) -> dict[str, _Job]:
        backend, spread = self.engine.attention_backend, self.engine.sequence_parallel_norms
        decode, prefill = make_pass_programs(self.stage, backend, spread_tokens=spread)
        (params, pools), results = self.arrays[:2], (_shardings(self.arrays.pools), self.replicated)
        drafted = [self._drafted()] if self.engine.drafts_on_device and self.stage.first else []
        jobs = {}
        for rows in self.engine.decode_sizes:
            # The tokens that slots sampled last are those of all slots; hidden states those of the step's rows.
            arriving = self._arriving(self.engine.decode_sizes[-1] if self.stage.first else rows)
            given = (params, pools, self._decode_batch(rows), arriving, *drafted)
            name = self.sized("decode", rows)
            jobs[name] = _Job(_renamed(decode, name), given, 1, results, self.stage.loops, batch=2)
        return jobs | self._prefill_jobs(prefill, results)

    def _whole(self) -> dict[str, _Job]:
        engine, (params, pools, slots, last_tokens, sampler, features, *_) = self.engine, self.arrays
        state = StepState(pools, last_tokens, sampler, features)
        backend, spread, loops = engine.attention_backend, engine.sequence_parallel_norms, self.stage.loops
        decode = make_decode(
            self.stage,
            engine.top_logprobs,
            engine.num_speculative_tokens,
            backend,
            whole=engine.whole_vocabulary,
            routed=self._routed,
            typical=Typical(engine.typical_threshold, engine.typical_alpha),
        )
        decode_many = make_decode_many(decode, engine.multi_step)
        carried, out, pages = _shardings(state), self.replicated, self._filled(pools)
        drafted, jobs = self._drafted() if engine.drafts_on_device else None, {}
        for rows in self.engine.decode_sizes:
            batch, masks = self._decode_batch(rows), self._ints(rows, mask_words(sampler)) if engine.grammars else None
            asks = self._ints(rows, ASKS) if engine.enable_training_outputs else None
            given = (params, slots, state, batch, self._arriving(rows), drafted, masks, asks)
            one = _renamed(decode, name := self.sized("decode", rows))
            jobs[name] = _Job(one, given, 2, (carried, out), loops | engine.drafts_leave_states, batch=3)
            if engine.multi_step > 1 and batch.owners is None:
                several = (params, slots, state, batch, self._ints())
                many = _renamed(decode_many, name := self.sized("decode_many", rows))
                jobs[name] = _Job(many, several, 2, (carried, out, out), loops=True, batch=3)
        largest = engine.prefill_sizes[-1]
        prompt = (params, pools, self._prefill_batch(largest, 1), self._entering(largest), self._ints(largest))
        with_logprobs = make_prefill_logprobs(
            self.stage, engine.top_logprobs, backend, spread_tokens=spread, routed=self._routed
        )
        jobs["prefill_logprobs"] = _Job(with_logprobs, prompt, 1, (pages, out), loops, batch=2)
        return jobs | self._prefill_jobs(make_prefill(self.stage, backend, spread_tokens=spread), pages)

    @property
    def _routed(self) -> bool:
        """Whether programs return experts."""
        return returns_experts(self.stage.model.params, self.engine)

    def _with_adapters(self, job: _Job) -> _Job:
        """Return the job with `Banked` as first argument, and with the adapter slot of each row in its batch."""
        place, targets = job.batch, targets_of(self.stage, self.engine)
        assert place is not None
        function = with_adapters(job.function, place, self.engine.lora_slots, targets)
        function.__name__ += ADAPTED
        batch = job.arguments[place]
        rows = batch.lengths if isinstance(batch, PrefillBatch) else batch.positions
        loras = self._ints(rows.shape[0])
        arguments = list(job.arguments)
        arguments[0], arguments[place] = Banked(arguments[0], self.arrays.banks), batch._replace(loras=loras)
        return job._replace(function=function, arguments=tuple(arguments))

    def _filled(self, pools: Any) -> Any:
        """Return the shardings of the pools that a prefill program gives, and of the features returned with them."""
        return (_shardings(pools), self.replicated) if self.stage.prompts else _shardings(pools)

    def _prefill_jobs(self, function: Callable[..., Any], results: Any) -> dict[str, _Job]:
        jobs = {}
        for size, count in self.prefills:
            arguments = (*self.arrays[:2], self._prefill_batch(size, count), self._entering(size * count))
            jobs[f"prefill_{size}x{count}"] = _Job(function, arguments, 1, results, self.stage.loops, batch=2)
        return jobs

    def encoding(self) -> dict[str, _Job]:
        """Return programs that encode images, in the stage that has the vision tower."""
        vision, images, jobs = self.stage.model.vision, self.arrays.images, dict[str, _Job]()
        if vision is None or images is None:
            return jobs
        for rows in self.engine.encoder_sizes:
            shapes = abstract_layout(vision, rows)
            layout = {key: self._array(value.shape, value.dtype) for key, value in shapes.items()}
            patches = self._array((rows, vision.config.values), np.uint8)
            given = (self.arrays.tower, images, patches, layout, self._ints(rows // vision.config.merged))
            encode = _renamed(make_encode(vision), name := f"encode_{rows}")
            job = _Job(encode, given, 1, _sharding(images), loops=True, collectives=False)
            jobs[name] = _of_ranks(_of_each(job, self.mesh), self.mesh, shared=1)
        return jobs

    def _like_parts(self) -> dict[str, str]:
        """Map each module of the banks to the first one with the same shapes: most layers are identical."""
        firsts, all_banks = dict[Any, str](), self.arrays.banks or {}
        forms = {part: tuple((name, x.shape, x.sharding) for name, x in own.items()) for part, own in all_banks.items()}
        return {part: firsts.setdefault(form, part) for part, form in forms.items()}

    def _loading(self) -> dict[str, _Job]:
        """Return programs that write the weights of one adapted module into a slot."""
        jobs = {}
        for part in set(self._like_parts().values()):
            banks = self.arrays.banks[part]
            arguments = banks, self._ints(), jax.tree.map(of_slot, banks)
            function = write if self.mesh.shape["dp_attn"] == 1 else writing_over_ranks(arguments)
            jobs[f"load_{part}"] = _Job(function, arguments, 0, _shardings(banks))
        return jobs

    def moving(self) -> dict[str, _Job]:
        """Return programs that only move pages."""
        spec, pools, engine = self.stage.model.cache_spec, self.arrays.pools, self.engine
        copy, export, restore = make_move_programs(spec, engine.attention_backend)
        copies = self._ints(self.groups, COPIES)
        page = moved_pages(spec, 1, engine.page_size, self.stage.model.dtype)
        page, carried = page.update(sharding=on_host(page_sharding(self.mesh, spec))), _shardings(pools)
        jobs = {"copy": _Job(copy, (pools, copies, copies), 0, carried)}
        for size in TRANSFERS if engine.host_pages else TRANSFERS[:1]:
            ids = self._ints(self.groups, size)
            jobs[f"export_{size}"] = _Job(export, (pools, ids), None, page.sharding)
            if engine.host_pages:  # else pages are only exported to be read
                jobs[f"restore_{size}"] = _Job(restore, (pools, (page,) * size, ids), 0, carried)
        return jobs

    def keeping(self) -> dict[str, _Job]:
        """Return programs on the sampler state of a slot."""
        sampler, slot = self.arrays.sampler, self._ints()
        vocab, carried = sampler.counts.shape[1], _shardings(sampler)
        rows = self._array((vocab,), jnp.bool_), self._array((vocab,), jnp.float32)
        one = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype, sharding=x.sharding), sampler)
        return {
            "admit": _Job(admit, (sampler, slot, *rows), 0, carried),
            "save_slot": _Job(keep_slot, (sampler, slot), None, self.replicated),
            "restore_slot": _Job(resume_slot, (sampler, slot, one), 0, carried),
        }

    # ---- arguments from the host and from the stage before

    @property
    def groups(self) -> int:
        return len(self.stage.model.cache_spec.windows)

    def _array(self, shape: tuple[int, ...], dtype: Any, sharding: NamedSharding | None = None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, np.dtype(dtype), sharding=sharding or self.replicated)

    def _ints(self, *shape: int) -> jax.ShapeDtypeStruct:
        return self._array(shape, np.int32)

    def _arriving(self, rows: int) -> jax.ShapeDtypeStruct | None:
        if self.stage.first:
            return None if self.stage.last else self._ints(rows)
        return self._array((rows, self.stage.taken), self.stage.model.dtype)

    def _entering(self, rows: int) -> jax.ShapeDtypeStruct | None:
        """Return what prefill programs take besides tokens: the encoder cache, or hidden states."""
        return self.arrays.images if self.stage.first else self._arriving(rows)

    def _decode_batch(self, count: int) -> DecodeBatch:
        rows, tables = self._ints(count), self._ints(self.groups, count, self.engine.table_width)
        owners, branches = self.engine.speculative is not None, self.engine.drafts_trees
        own, images = (rows if owners else None, rows if branches else None), self.engine.images
        shifts = rows if images is not None and images.axes else None
        return DecodeBatch(rows, rows, rows, tables, *own, shifts=shifts)

    def _drafted(self) -> jax.ShapeDtypeStruct:
        return self._ints(self.engine.rows // self.engine.microbatches, drafted_width(self.engine))

    def _prefill_batch(self, size: int, count: int) -> PrefillBatch:
        tables = self._ints(self.groups, count, self.engine.table_width)
        batch = PrefillBatch(self._ints(count, size), self._ints(count), self._ints(count), tables)
        if self.stage.drafts or self.engine.images is None:
            return batch
        images = self._ints(count, size)
        axes = self._ints(count, 3, size) if self.engine.images.axes else None
        return batch._replace(images=images, axes=axes, ends=images if self.engine.images.both_ways else None)


class _DraftWork(_Work):
    """Programs of a draft model."""

    def jobs(self) -> dict[str, _Job]:
        return {**self.computing(), **self.moving()}

    def computing(self) -> dict[str, _Job]:
        engine, (params, pools, slots, _, sampler, *_) = self.engine, self.arrays
        draft = make_draft_program(self.stage, engine.num_speculative_tokens, engine.attention_backend)
        pages = _shardings(pools)
        arguments = (params, slots, sampler, pools, self._draft_batch())
        one = _Job(draft, arguments, 3, (pages, self.replicated), loops=True, batch=4)
        prefill = make_prefill(self.stage, engine.attention_backend)
        return {
            name: _packed(job, self.replicated)
            for name, job in {"draft": one, **self._prefill_jobs(prefill, pages)}.items()
        }

    def _draft_batch(self) -> DraftBatch:
        count = self.engine.rows // self.engine.microbatches
        rows = self._ints(count)
        return DraftBatch(rows, rows, rows, rows, self._ints(self.groups, count, self.engine.table_width))


class _HeadWork(_Work):
    """Programs of a draft head."""

    @property
    def prefills(self) -> list[tuple[int, int]]:
        return super().prefills if self.arrays.pools else []

    def jobs(self) -> dict[str, _Job]:
        return {**self.computing(), **(self.moving() if self.arrays.pools else {})}

    def computing(self) -> dict[str, _Job]:
        engine, (params, pools, slots, _, sampler, features, *_) = self.engine, self.arrays
        most, paths = engine.num_speculative_tokens, engine.speculative_tree
        programs = HeadPrograms(self.stage, most, paths, engine.attention_backend, engine.draft_tree)
        pages = _shardings(pools)
        arguments = (params, slots, sampler, pools, self._head_batch(), features)
        jobs = {"draft": _Job(programs.draft, arguments, 3, (pages, self.replicated), loops=True, batch=4)}
        for size, count in self.prefills:
            batch = self._prefill_batch(size, count)._replace(following=self._ints(count))
            width = self.stage.model.config.features
            given = self._array((size * count, width), self.stage.model.dtype)
            jobs[f"prefill_{size}x{count}"] = _Job(programs.prefill, (params, pools, batch, given), 1, pages, batch=2)
        return {name: _packed(job, self.replicated) for name, job in jobs.items()}

    def _head_batch(self) -> HeadBatch:
        count = self.engine.rows // self.engine.microbatches
        groups, paths = self.groups if self.arrays.pools else 0, self.engine.speculative_tree
        tables = self._ints(groups, paths, count, self.engine.table_width)
        return HeadBatch(*(self._ints(count),) * 6, self._ints(count, paths), tables)


def _renamed(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Rename a function; profiles and dumps show its program under this name."""

    @functools.wraps(function)
    def renamed(*operands: Any) -> Any:
        return function(*operands)

    renamed.__name__ = name
    return renamed


def _of_each(job: _Job, mesh: Mesh) -> _Job:
    """Turn a job of replicated arrays into one that each device computes alone, in the program of a single device."""
    if mesh.size == 1 or mesh.shape["dp_attn"] > 1:  # a rank computes alone
        return job
    alone = jax.shard_map(job.function, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    return job._replace(function=alone)


def _of_ranks(job: _Job, mesh: Mesh, shared: int = 0) -> _Job:
    """Turn one rank's job into that of all ranks, with the first ``shared`` arguments shared by all."""
    if mesh.shape["dp_attn"] == 1:
        return job
    function, results = over_ranks(job.function, job.arguments, shared), jax.tree.map(over_ranks_sharding, job.results)
    return job._replace(function=function, arguments=of_ranks(job.arguments, mesh, shared), results=results)


def _packed(job: _Job, replicated: NamedSharding) -> _Job:
    """Return the job with its batch packed into one array. Each host array costs a transfer, and changes its address
    per call: every node of a command buffer that reads it must be updated."""
    place = job.batch
    assert place is not None
    batch = job.arguments[place]

    @functools.wraps(job.function)
    def function(*operands: Any) -> Any:
        # Sliced once: without a barrier each layer's kernel would get its own slice.
        unpacked = lax.optimization_barrier(unpack(operands[place], batch))
        return job.function(*operands[:place], unpacked, *operands[place + 1 :])

    size = sum(leaf.size for leaf in jax.tree.leaves(batch))
    one = jax.ShapeDtypeStruct((size,), np.dtype(np.int32), sharding=replicated)
    return job._replace(function=function, arguments=(*job.arguments[:place], one, *job.arguments[place + 1 :]))


def _compile(
    work: Sequence[tuple[Mesh, Mapping[str, _Job]]], progress: CompileProgress | None = None
) -> list[dict[str, Any]]:
    """Lower one program after another (tracing holds the interpreter lock); threads compile or load them."""
    on_progress = progress or (lambda done, total: None)
    fingerprints = Fingerprints()
    jobs = {(place, name): (mesh, job) for place, (mesh, named) in enumerate(work) for name, job in named.items()}
    on_progress(0, total := len(jobs))
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        try:
            with timed(f"{total} programs traced and lowered"):
                lowered = (
                    (key, _lowered(mesh, job, fingerprints).compile, job.options(mesh))
                    for key, (mesh, job) in jobs.items()
                )
                running = {key: threads.submit(run, compiler_options=options) for key, run, options in lowered}
        except BaseException:
            threads.shutdown(cancel_futures=True)  # on a failed program: do not wait for the rest
            raise
        with timed(f"{total} programs compiled, or read, behind that"):
            for done, _ in enumerate(concurrent.futures.as_completed(running.values()), start=1):
                on_progress(done, total)
        return [{name: running[place, name].result() for name in named} for place, (_, named) in enumerate(work)]


def _tried(
    work: Sequence[tuple[Mesh, Mapping[str, _Job]]], engine: ResolvedEngine
) -> Sequence[tuple[Mesh, Mapping[str, _Job]]]:
    """Return the same work after trying its kernels on the local GPU."""
    try_kernels([(mesh, job.function, job.arguments) for mesh, named in work for job in named.values()], engine)
    return work


def _lowered(mesh: Mesh, job: _Job, fingerprints: Fingerprints) -> Any:
    with traced_for(mesh):
        return lower(mesh, job.function, job.arguments, job.donate, job.results, fingerprints)


def _sharding(x: jax.Array | jax.ShapeDtypeStruct) -> NamedSharding:
    assert isinstance(x.sharding, NamedSharding)
    return x.sharding


def _shardings(tree: Any) -> Any:
    return jax.tree.map(_sharding, tree)
