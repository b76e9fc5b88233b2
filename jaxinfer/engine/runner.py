"""The device's side of the loop: launches plans, reads results, owns parameters and state."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int32

from jaxinfer.config import ResolvedEngine
from jaxinfer.engine.buckets import group_chunks
from jaxinfer.engine.compiled import CompileProgress, compile_programs
from jaxinfer.engine.exactness import Proofs
from jaxinfer.engine.measure import measure_costs
from jaxinfer.engine.placement import new_step_state, place_params
from jaxinfer.engine.plan import DecodePlan, Parked, PrefillPlan, StepPlan, StepResult
from jaxinfer.engine.results import prompt_logprobs, row_logprobs, row_tokens, wants_logprobs
from jaxinfer.engine.sequence import Sequence as Sample
from jaxinfer.engine.step import DecodeBatch, PrefillBatch, make_programs
from jaxinfer.kv.moves import Copy, Export, Import, Pages
from jaxinfer.kv.transfer import COPIES, TRANSFER_PAGES, HostPages
from jaxinfer.models.model import Model
from jaxinfer.parallel.mesh import make_mesh, replicated
from jaxinfer.sampling import HostSlots, Logprobs, Sampled, SamplingLimits, SlotParams, SlotState

# Operations that a CPU may spend on proving which prefill sizes agree: a second or two.
_CPU_OPERATIONS = 300_000_000_000


@dataclasses.dataclass(frozen=True)
class Launched:
    """A step on its way: the plan and arrays that will hold its results.

    ``ran`` is how many steps were taken, None if the decode program ran once.
    """

    plan: StepPlan
    sampled: Sampled | None
    ran: jax.Array | None
    prompt: list[Logprobs | None]


class Runner:
    """Owns all device memory of an engine, and the pages in host memory.

    Args:
        model: in the form of `spread_model`.
        tables: the KV manager's, read at each launch.
        progress: of the compilations.
        mesh: of the devices that it runs on; None: one is made.

    Attributes:
        classes: a number for each prefill size; equal numbers: programs with equal bits.
        resumes: whether a chunk that begins within a piece, after a cache hit, gets the bits of the whole. Taken for
            granted where there is no cache, where bits may differ, and where it would take a CPU long to try.
        multi_step: most decode steps of one plan.
        costs: of swapping and of computing again, measured.
    """

    def __init__(
        self,
        model: Model,
        engine: ResolvedEngine,
        limits: SamplingLimits,
        tables: Int32[np.ndarray, "groups slots width"],
        progress: CompileProgress | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        self._engine, self._tables, self._vocab = engine, tables, model.config.vocab_size
        mesh = mesh or make_mesh(engine.tensor_parallel_size, expert=engine.expert_parallel_size)
        self._everywhere = replicated(mesh)
        self._params = place_params(model, mesh)
        self._host_slots = HostSlots(engine.rows, limits)
        self._shown = self._host_slots.snapshot()  # what is on the device as `_slots`
        self._slots = jax.device_put(self._shown, self._everywhere)
        self._state = new_step_state(model, engine, limits, mesh)
        self._host_pages = HostPages(model.cache_spec, engine.host_pages, engine.page_size, model.dtype)
        programs, self._groups = (
            make_programs(model, engine.max_logprobs, engine.multi_step, engine.attention_backend),
            tables.shape[0],
        )
        self._run = compile_programs(programs, engine, self._params, self._slots, self._state, self._groups, progress)
        self._prove(limits)
        self._state, self.costs = measure_costs(
            self._run, engine, self._params, self._slots, self._state, self._groups, self._decode_batch([])
        )

    def _prove(self, limits: SamplingLimits) -> None:
        """Find out which programs may stand in for which."""
        engine = self._engine
        proofs = Proofs(self._run, engine, self._params, self._state, self._groups)
        self._lanes = proofs.lanes()
        exact, classes, resumes = engine.exactness == "exact", _each_alone(engine.prefill_sizes), True
        if exact and engine.enable_prefix_caching and self._affordable(proofs.class_tokens()):
            classes = proofs.classes()
            resumes = proofs.resumes(classes)
        self.classes: dict[int, int] = classes
        self.resumes: bool = resumes
        several = self._run.decode_many is not None and (not exact or proofs.multi_step(limits))
        self.multi_step: int = engine.multi_step if several else 1
        self._state = proofs.state

    def temporaries(self) -> int:
        """Bytes of device memory that the hungriest program uses while it runs."""
        return self._run.temporaries()

    def _affordable(self, tokens: int) -> bool:
        on_cpu = self._everywhere.mesh.devices.flat[0].platform == "cpu"
        operations = 2 * tokens * sum(leaf.size for leaf in jax.tree.leaves(self._params))
        return not on_cpu or operations <= _CPU_OPERATIONS

    # ---- a step

    def launch(self, plan: StepPlan) -> Launched | None:
        """Start a step without waiting for it. Programs run in the order of their launch."""
        if not plan:
            return None
        self._export(plan.exports)
        self._copy(plan.copies)
        self._import(plan.imports)
        self._park(plan.parked)
        self._admit(plan.admitted)
        prompt = self._prefills(plan.prefills)
        sampled, ran = self._decode(plan) if plan.decodes else (None, None)
        return Launched(plan, sampled, ran, prompt)

    def read(self, launched: Launched | None) -> StepResult | None:
        """Wait for a step and bring its results to the host."""
        if launched is None:
            return None
        plan, sampled = launched.plan, launched.sampled
        self._host_pages.settle([export.host for export in plan.exports])
        prompt = [
            [] if result is None else prompt_logprobs(prefill, result)
            for prefill, result in zip(plan.prefills, launched.prompt, strict=True)
        ]
        if sampled is None:
            return StepResult(plan, [], [], prompt)
        steps = None if launched.ran is None else int(np.asarray(launched.ran))
        tokens = row_tokens(plan.decodes, sampled, steps)
        return StepResult(plan, tokens, row_logprobs(plan.decodes, sampled, tokens, steps), prompt)

    # ---- pages

    def _export(self, exports: list[Export]) -> None:
        for some in itertools.batched(exports, TRANSFER_PAGES):
            source = self._ids((export.source for export in some), TRANSFER_PAGES)
            self._host_pages.put([export.host for export in some], self._run.export(self._state, source))

    def _copy(self, copies: list[Copy]) -> None:
        for some in itertools.batched(copies, COPIES):
            source, target = (self._ids((copy[side] for copy in some), COPIES) for side in (0, 1))
            self._state = self._run.copy(self._state, source, target)

    def _import(self, imports: list[Import]) -> None:
        for some in itertools.batched(imports, TRANSFER_PAGES):
            pages = self._host_pages.take([one.host for one in some], TRANSFER_PAGES)
            target = self._ids((one.target for one in some), TRANSFER_PAGES)
            self._state = self._run.restore(self._state, pages, target)

    def _ids(self, pages: Iterable[Pages], room: int) -> Int32[np.ndarray, "groups room"]:
        """Page ids by group. Where there is no page the id is beyond the pool: nothing is written there."""
        ids = np.full((self._groups, room), self._engine.num_pages, np.int32)
        for index, each in enumerate(pages):
            ids[:, index] = each
        return np.where(ids < 0, self._engine.num_pages, ids)

    # ---- slots

    def _park(self, parked: list[Parked]) -> None:
        """What comes back from the host goes on where it was; what is computed again begins anew."""
        for sequence, slot in parked:
            if sequence.stateful and sequence.swapped is not None:
                sequence.sampler_state = self._run.keep(self._state, np.int32(slot))

    def _admit(self, admitted: list[Sample]) -> None:
        for sequence in admitted:
            slot = np.int32(sequence.slot)
            self._host_slots.set(sequence.slot, sequence.request, sequence.index)
            kept, sequence.sampler_state = sequence.sampler_state, None
            if isinstance(kept, SlotState):
                self._state = self._run.resume(self._state, slot, kept)
            elif sequence.stateful:
                prompt, bias = self._host_slots.state_rows(sequence.request, self._vocab)
                self._state = self._run.admit(self._state, slot, prompt, bias)
        if admitted:
            self._put_slots()

    def _put_slots(self) -> None:
        """Most fields are the same in most requests: what did not change is on the device already."""
        before, self._shown = self._shown, self._host_slots.snapshot()
        news = [index for index, (old, new) in enumerate(zip(before, self._shown, strict=True)) if new is not old]
        put = jax.device_put([self._shown[index] for index in news], self._everywhere)
        self._slots = self._slots._replace(**{SlotParams._fields[i]: array for i, array in zip(news, put, strict=True)})

    # ---- prompts

    def _prefills(self, plans: list[PrefillPlan]) -> list[Logprobs | None]:
        """Launch all chunks, several in one program where there is a wide one for their size."""
        results: list[Logprobs | None] = [self._prefill_logprobs(plan) if plan.logprobs else None for plan in plans]
        plain = [plan for plan in plans if not plan.logprobs]
        for group in group_chunks([plan.chunk.size for plan in plain], self._lanes):
            size = plain[group[0]].chunk.size
            lanes = 1 if len(group) == 1 else self._lanes[size]
            batch = self._prefill_batch([plain[index] for index in group], size, lanes)
            self._state = self._run.prefill[size, lanes](self._params, self._state, batch)
        return results

    def _prefill_logprobs(self, plan: PrefillPlan) -> Logprobs:
        start, length, size = plan.chunk
        following = np.zeros(size, np.int32)
        following[:length] = plan.sequence.prompt[start + 1 : start + length + 1]
        batch = self._prefill_batch([plan], size, 1)
        self._state, logprobs = self._run.prefill_logprobs(self._params, self._state, batch, following)
        return logprobs

    def _prefill_batch(self, plans: list[PrefillPlan], size: int, lanes: int) -> PrefillBatch:
        tokens, (starts, lengths) = np.zeros((lanes, size), np.int32), np.zeros((2, lanes), np.int32)
        tables = np.zeros((self._groups, lanes, self._engine.table_width), np.int32)
        for lane, plan in enumerate(plans):
            starts[lane], lengths[lane], _ = start, length, _ = plan.chunk
            tokens[lane, :length] = plan.sequence.prompt[start : start + length]
            tables[:, lane] = self._tables[:, plan.sequence.slot]
        return PrefillBatch(tokens, starts, lengths, tables)

    # ---- decode rows

    def _decode(self, plan: StepPlan) -> tuple[Sampled, jax.Array | None]:
        batch, ran = self._decode_batch(plan.decodes), None
        if plan.steps > 1:
            assert self._run.decode_many is not None
            steps = np.int32(plan.steps)
            self._state, sampled, ran = self._run.decode_many(self._params, self._slots, self._state, batch, steps)
        else:
            self._state, sampled = self._run.decode(self._params, self._slots, self._state, batch)
        for array in jax.tree.leaves((ran, sampled if wants_logprobs(plan.decodes) else sampled.tokens)):
            array.copy_to_host_async()
        return sampled, ran

    def _decode_batch(self, plans: Sequence[DecodePlan]) -> DecodeBatch:
        """The rows of a step; those without a plan are idle."""
        engine = self._engine
        tokens, positions, generated = np.full((3, engine.rows), -1, np.int32)
        sequences, *columns = zip(*plans, strict=True) if plans else ((), (), (), ())
        rows, fed, given = np.array(columns, np.int32)
        positions[rows], tokens[rows] = fed, given
        generated[rows] = fed - np.array([sequence.prefill_end for sequence in sequences], np.int32)
        if engine.speculative is None:
            return DecodeBatch(tokens, positions, generated, self._tables.copy())
        owners = np.arange(engine.rows, dtype=np.int32)
        owners[rows] = [sequence.slot for sequence in sequences]
        return DecodeBatch(tokens, positions, generated, self._tables[:, owners], owners)


def _each_alone(sizes: Sequence[int]) -> dict[int, int]:
    """Every prefill size a class of its own."""
    return {size: number for number, size in enumerate(sizes)}
