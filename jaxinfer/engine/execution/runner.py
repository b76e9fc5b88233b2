"""Runner: launches plans on the device and reads their results."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import jax
import numpy as np
from jaxtyping import Int32, Integer

from jaxinfer.config import ResolvedEngine
from jaxinfer.engine.execution import commands
from jaxinfer.engine.execution.commands import (
    DecodeBatch,
    DraftBatch,
    Executor,
    HeadBatch,
    PrefillBatch,
    PromptNumbers,
    SamplerSnapshot,
    SnapshotNumbers,
    as_text,
)
from jaxinfer.engine.execution.encoder import encode_command
from jaxinfer.engine.execution.extras import asks_of_rows, wanted_arrays, with_experts, with_extras
from jaxinfer.engine.scheduling.buckets import group_chunks
from jaxinfer.engine.scheduling.plan import Branch, DecodePlan, Draft, Preempted, PrefillPlan, StepPlan, StepResult
from jaxinfer.engine.scheduling.sequence import Sequence as Sample
from jaxinfer.kv.store import Copy, Export, Import, Pages
from jaxinfer.kv.transfer import COPIES, transfers
from jaxinfer.models.vision.tower import Vision
from jaxinfer.sampling import HostSlots, Sampled, SamplingLimits
from jaxinfer.spec.drafter import path_of
from jaxinfer.types import PositionLogprobs, TokenLogprob

_Column = Integer[np.ndarray, " planned"]


@dataclasses.dataclass(frozen=True)
class Launched:
    """A launched step: its plan, arrays that will hold its results, the number of steps that ``ran`` (None: one decode
    step), and the tokens ``drafted`` by a draft model."""

    plan: StepPlan
    sampled: Sampled | None
    ran: jax.Array | None
    prompt: list[PromptNumbers | None]
    drafted: jax.Array | None = None


class WrongTokenError(RuntimeError):
    """Planning fault, never served: a row would be fed its slot's token of another sequence or position."""


class Runner:
    """Runs plans on the device, and reads their results.

    Args:
        executor: owns all device memory.
        tables: page tables of the KV manager, read at each launch.
        vocab: size of the vocabulary.
        prefill_batches: chunks that run together, by prefill size (`Calibration`).
        decode_sizes: rows of the decode programs, ascending (`Calibration`).
        vision: the vision tower, where plans have images.
    """

    def __init__(
        self,
        executor: Executor,
        engine: ResolvedEngine,
        limits: SamplingLimits,
        tables: Int32[np.ndarray, "groups slots width"],
        vocab: int,
        prefill_batches: Mapping[int, int],
        decode_sizes: Sequence[int],
        vision: Vision | None = None,
    ) -> None:
        self._vision = vision
        self._executor, self._engine, self._tables, self._vocab = executor, engine, tables, vocab
        self._groups, self._rows = tables.shape[0], engine.rows // engine.microbatches
        self._prefill_batches, self._decode_sizes = prefill_batches, decode_sizes
        self._slots = [HostSlots(self._rows, limits) for _ in range(engine.microbatches)]
        self._device_slots = [slots.snapshot() for slots in self._slots]  # current values on the device
        self._snapshots = SnapshotNumbers()
        self._catch_up = False  # whether a preempted sequence has had a sampler state
        # Content of `StepState.last_tokens`, by microbatch and row: the sequence of the token (`arrival`), and the
        # position.
        self._sampled = np.full((engine.microbatches, 2, self._rows), -1, np.int64)
        # Owners and branches of a step's rows where each is its slot's own.
        own = [np.arange(self._rows, dtype=np.int32)] if engine.speculative is not None else []
        self._own_rows = [*own, np.zeros(self._rows, np.int32)] if engine.drafts_trees else own

    # ---- a step

    def launch(self, plan: StepPlan) -> Launched | None:
        """Start a step without waiting for it. Programs run in the order of their launch."""
        if not plan:
            return None
        if dropped := self._snapshots.take_dropped():
            self._executor.run(commands.DropSnapshots(dropped))
        self._export(plan.exports)
        self._copy(plan.copies)
        self._import(plan.imports)
        self._save_preempted(plan.preempted)
        self._admit(plan.admitted)
        for load in plan.loads:
            self._executor.run(commands.LoadLora(*load))
        for encode in plan.encodes:
            assert self._vision is not None
            self._executor.run(encode_command(self._vision, self._engine, encode))
        prompt = self._prefills(plan.prefills)
        drafted = self._draft(plan) if plan.drafts and self._engine.drafts_on_device else None
        sampled, ran = self._decode(plan) if plan.decodes else (None, None)
        return Launched(plan, sampled, ran, prompt, drafted)

    def read(self, launched: Launched | None) -> StepResult | None:
        """Wait for a step and copy its results to the host."""
        if launched is None:
            return None
        plan, sampled = launched.plan, launched.sampled
        if launched.drafted is not None:
            plan = with_drafted(plan, np.asarray(launched.drafted))
        pairs = zip(plan.prefills, launched.prompt, strict=True)
        prompt = [[] if result is None else prompt_logprobs(prefill, result) for prefill, result in pairs]
        if sampled is None:
            return StepResult(plan, [], [], prompt)
        steps = None if launched.ran is None else int(np.asarray(launched.ran))
        tokens = row_tokens(plan.decodes, sampled, steps)
        logprobs = with_extras(plan.decodes, sampled, row_logprobs(plan.decodes, sampled, tokens, steps))
        return StepResult(plan, tokens, logprobs, prompt)

    # ---- pages

    def _export(self, exports: list[Export]) -> None:
        for some in transfers(exports):
            source = self._ids((export.source for export in some), len(some))
            self._executor.run(commands.ExportPages(source, [export.host for export in some]))

    def _copy(self, copies: list[Copy]) -> None:
        for some in itertools.batched(copies, COPIES):
            source, target = (self._ids((copy[side] for copy in some), COPIES) for side in (0, 1))
            self._executor.run(commands.CopyPages(source, target))

    def _import(self, imports: list[Import]) -> None:
        for some in transfers(imports):
            target = self._ids((one.target for one in some), len(some))
            self._executor.run(commands.ImportPages([one.host for one in some], target))

    def _ids(self, pages: Iterable[Pages], room: int) -> Int32[np.ndarray, "groups room"]:
        """Return page ids by group. A missing page gets an id beyond the pool: nothing is written there."""
        ids = np.full((self._groups, room), self._engine.num_pages, np.int32)
        for index, each in enumerate(pages):
            ids[:, index] = each
        return np.where(ids < 0, self._engine.num_pages, ids)

    # ---- slots

    def _save_preempted(self, preempted: list[Preempted]) -> None:
        """Save the sampler states of preempted sequences: rows of recomputed tokens may sample, and count, others."""
        for sequence, slot in preempted:
            if sequence.stateful and sequence.sampler_state is None:
                self._catch_up = True
                sequence.sampler_state = snapshot = self._snapshots.new()
                self._executor.run(commands.SaveSlot(slot, snapshot.number))

    def _admit(self, admitted: list[Sample]) -> None:
        for sequence in admitted:
            slots, row = self._place(sequence.slot)
            slots.set(row, sequence.request, sequence.index)
            if sequence.stateful:
                self._executor.run(commands.AdmitSlot(sequence.slot, *slots.state_rows(sequence.request, self._vocab)))
        for microbatch in {sequence.slot % self._engine.microbatches for sequence in admitted}:
            self._set_slots(microbatch)

    def _restore_caught_up(self, rows: list[DecodePlan]) -> None:
        """Restore the sampler states of preempted sequences whose known tokens are all computed again."""
        for sequence, _, position, *_ in rows:
            state = sequence.sampler_state
            if isinstance(state, SamplerSnapshot) and position + 1 == len(sequence.tokens):
                self._executor.run(commands.RestoreSlot(sequence.slot, state.number))
                sequence.sampler_state = None

    def _place(self, slot: int) -> tuple[HostSlots, int]:
        row, microbatch = divmod(slot, self._engine.microbatches)
        return self._slots[microbatch], row

    def _set_slots(self, microbatch: int) -> None:
        """Send the fields that have changed: most are the same in most requests, and on the device already."""
        before, current = self._device_slots[microbatch]._asdict(), self._slots[microbatch].snapshot()
        self._device_slots[microbatch] = current
        fields = {name: new for name, new in current._asdict().items() if new is not before[name]}
        if fields:
            self._executor.run(commands.SetSlots(microbatch, fields))

    # ---- prompts

    def _prefills(self, plans: list[PrefillPlan]) -> list[PromptNumbers | None]:
        """Launch all chunks, several in one program where there is a wide one for their size."""
        results: list[PromptNumbers | None] = [
            self._prefill_logprobs(plan) if plan.logprobs else None for plan in plans
        ]
        wide = self._prefill_batches
        for plain in self._together([plan for plan in plans if not plan.logprobs]):
            for group in group_chunks([plan.chunk.size for plan in plain], wide):
                size = plain[group[0]].chunk.size
                count = 1 if len(group) == 1 else wide[size]
                batch = self._prefill_batch([plain[index] for index in group], size, count)
                self._executor.run(commands.Prefill(batch))
        return results

    def _together(self, plans: list[PrefillPlan]) -> list[list[PrefillPlan]]:
        """Group chunks for one program: one chunk per sequence with states, from which the next one continues, and
        where chunks end at images: the next one may share a page with it."""
        images = self._engine.images
        if not self._engine.num_states and not (images is not None and images.both_ways):
            return [plans]
        turns: dict[int, list[PrefillPlan]] = {}
        chunks = collections.Counter[Sample]()
        for plan in plans:
            turns.setdefault(chunks[plan.sequence], []).append(plan)
            chunks[plan.sequence] += 1
        return list(turns.values())

    def _prefill_logprobs(self, plan: PrefillPlan) -> PromptNumbers:
        start, length, size = plan.chunk
        following = np.zeros(size, np.int32)
        following[:length] = plan.sequence.prompt[start + 1 : start + length + 1]
        batch = self._prefill_batch([plan], size, 1)
        return self._executor.run(commands.PrefillLogprobs(batch, following))

    def _prefill_batch(self, plans: list[PrefillPlan], size: int, count: int) -> PrefillBatch:
        tokens, (starts, lengths) = np.zeros((count, size), np.int32), np.zeros((2, count), np.int32)
        tables = np.zeros((self._groups, count, self._engine.table_width), np.int32)
        following = np.zeros(count, np.int32) if self._engine.drafts_by_head else None
        loras = np.full(count, -1, np.int32) if self._engine.lora_slots else None
        for index, plan in enumerate(plans):
            starts[index], lengths[index], _ = start, length, _ = plan.chunk
            tokens[index, :length] = plan.sequence.tokens[start : start + length]
            tables[:, index] = self._tables[:, plan.sequence.slot]
            if following is not None:
                following[index] = plan.sequence.tokens[start + length]
            if loras is not None:
                loras[index] = plan.sequence.lora_slot
        batch = as_text(PrefillBatch(tokens, starts, lengths, tables, following, loras), self._engine)
        for index, plan in enumerate(plans):
            _place_images(batch, index, plan)
        return batch

    # ---- decode rows

    def _draft(self, plan: StepPlan) -> jax.Array:
        """Launch the draft model after the rows of sequences with drafts; first on the tokens that it has not seen."""
        if self._engine.drafts_by_head:
            return self._draft_by_head(plan)
        for prefill in plan.draft_prefills:
            self._executor.run(commands.DraftPrefill(self._prefill_batch([prefill], prefill.chunk.size, 1)))
        microbatches, rows = self._engine.microbatches, self._rows
        tokens, generated, limits = np.zeros((3, rows), np.int32)
        positions = np.full(rows, -1, np.int32)
        for sequence, start, drafts, *_ in plan.drafts or ():
            row = sequence.slot // microbatches
            tokens[row], positions[row], limits[row] = sequence.tokens[start - 1], start - 1, len(drafts)
            generated[row] = start - 1 - sequence.prompt_end
        tables = self._tables[:, plan.microbatch :: microbatches].copy()
        batch = DraftBatch(tokens, positions, generated, limits, tables)
        drafted = self._executor.run(commands.Draft(plan.microbatch, batch))
        drafted.copy_to_host_async()
        return drafted

    def _draft_by_head(self, plan: StepPlan) -> jax.Array:
        """Launch the draft head on all pairs that it has not seen, the newest of each sequence last."""
        newest = [(pairs.sequence, pairs.end - 1) for pairs in plan.pairs]
        others = [(sequence, at) for sequence, start, end in plan.pairs for at in range(start, end - 1)]
        ahead = max(0, len(others) + len(newest) - self._rows)
        for some in itertools.batched(others[:ahead], self._rows):
            self._executor.run(commands.HeadDraft(plan.microbatch, self._head_batch(plan, [], some)))
        batch = self._head_batch(plan, plan.drafts or (), [*newest, *others[ahead:]])
        drafted = self._executor.run(commands.HeadDraft(plan.microbatch, batch))
        drafted.copy_to_host_async()
        return drafted

    def _head_batch(self, plan: StepPlan, drafts: Iterable[Draft], pairs: Sequence[tuple[Sample, int]]) -> HeadBatch:
        """Make a batch of the pairs at these positions, one per row; first the newest of the drafts' sequences."""
        engine, rows = self._engine, self._rows
        owners, tokens, last, generated, bases = np.zeros((5, rows), np.int32)
        positions, limits = np.full(rows, -1, np.int32), np.zeros((rows, engine.speculative_tree), np.int32)
        tables = np.zeros((self._groups, engine.speculative_tree, rows, engine.table_width), np.int32)
        for row, (sequence, at) in enumerate(pairs):
            owners[row], tokens[row], positions[row] = self._place(sequence.slot)[1], sequence.tokens[at + 1], at
        for sequence in {pairs.sequence for pairs in plan.pairs}:
            slot = self._place(sequence.slot)[1]
            bases[slot], first = sequence.base, sequence.base // engine.page_size
            tables[:, 0, slot, : engine.table_width - first] = self._tables[:, sequence.slot, first:]
        for row, (sequence, start, names, branches) in enumerate(drafts):
            slot, first = self._place(sequence.slot)[1], sequence.base // engine.page_size
            last[slot], generated[slot], limits[slot, 0] = row, start - 1 - sequence.prompt_end, len(names)
            for kv_slot, path in branches:
                place = path_of(path, engine.num_speculative_tokens)
                tables[:, place, slot, : engine.table_width - first] = self._tables[:, kv_slot, first:]
                limits[slot, place] = len(path)
        tables = tables[:0] if engine.drafts_from_one_state else tables
        return HeadBatch(owners, tokens, positions, last, generated, bases, limits, tables)

    def _decode(self, plan: StepPlan) -> tuple[Sampled, jax.Array | None]:
        if self._catch_up:
            self._restore_caught_up(plan.decodes)
        count = self._fewest_rows(plan)
        batch, ran = self._decode_batch(plan.microbatch, plan.decodes, count), None
        if plan.steps > 1:
            sampled, ran = self._executor.run(commands.DecodeMany(batch, plan.steps))
        else:
            asks = asks_of_rows(plan.decodes, count) if self._engine.enable_training_outputs else None
            sampled = self._executor.run(commands.Decode(plan.microbatch, batch, self._masks(plan, count), asks))
        logprobs = sampled.logprobs if wants_logprobs(plan.decodes) else None
        for array in jax.tree.leaves((ran, sampled.tokens, logprobs, wanted_arrays(plan.decodes, sampled))):
            array.copy_to_host_async()
        return sampled, ran

    def _fewest_rows(self, plan: StepPlan) -> int:
        """Return the smallest decode program size that covers all rows of the plan and their sequences' slots."""
        last = max(max(row.row, row.sequence.slot // self._engine.microbatches) for row in plan.decodes)
        return next(size for size in self._decode_sizes if size > last)

    def _masks(self, plan: StepPlan, count: int) -> Int32[np.ndarray, "rows words"] | None:
        """Return masks of all rows; all tokens where a row has none. None if no row has one: no transfer is needed."""
        if not plan.masks:
            return None
        masks = np.full((count, -(-self._vocab // 32)), -1, np.int32)
        for row, mask in plan.masks.items():
            masks[row] = 0
            masks[row, : mask.size] = mask
        return masks

    def _decode_batch(self, microbatch: int, plans: Sequence[DecodePlan], count: int) -> DecodeBatch:
        """Make the first ``count`` rows of a microbatch; rows without a plan are idle."""
        batch, rows = self._rows_batch(microbatch, plans, count), [plan.row for plan in plans]
        if self._engine.lora_slots:
            loras = np.full(count, -1, np.int32)
            loras[rows] = [plan.sequence.lora_slot for plan in plans]
            batch = batch._replace(loras=loras)
        if self._engine.images is not None and self._engine.images.axes:
            shifts = np.zeros(count, np.int32)
            shifts[rows] = [0 if (images := plan.sequence.images) is None else images.shift for plan in plans]
            batch = batch._replace(shifts=shifts)
        return batch

    def _rows_batch(self, microbatch: int, plans: Sequence[DecodePlan], count: int) -> DecodeBatch:
        microbatches = self._engine.microbatches
        tokens, positions, generated = np.full((3, count), -1, np.int32)
        sequences, *columns = zip(*plans, strict=True) if plans else ((), (), (), (), ())
        rows, fed, inputs, of_branch = np.array(columns, np.int32)
        positions[rows], tokens[rows] = fed, inputs
        generated[rows] = fed - np.array([sequence.prompt_end for sequence in sequences], np.int32)
        arrivals = np.array([sequence.arrival for sequence in sequences], np.int64)
        tables = self._tables[:, microbatch::microbatches]
        slots = [sequence.slot // microbatches for sequence in sequences]
        if slots == list(columns[0]):  # no row has a draft
            self._note(microbatch, rows, arrivals, fed, inputs)
            own = (each[:count] for each in self._own_rows)
            return DecodeBatch(tokens, positions, generated, tables[:, :count].copy(), *own)
        owners = np.arange(count, dtype=np.int32)
        owners[rows] = slots
        slot_rows = owners[rows] == rows
        self._note(microbatch, rows[slot_rows], arrivals[slot_rows], fed[slot_rows], inputs[slot_rows])
        if not self._engine.drafts_trees:
            return DecodeBatch(tokens, positions, generated, tables[:, owners], owners)
        kv_slots, branches = owners * microbatches + microbatch, np.zeros(count, np.int32)
        branches[rows] = of_branch
        tables = self._tables[:, np.where(branches > 0, branches, kv_slots)]
        return DecodeBatch(tokens, positions, generated, tables, owners, branches)

    def _note(self, microbatch: int, rows: _Column, arrivals: _Column, positions: _Column, inputs: _Column) -> None:
        """Record the sequences and positions of the tokens that these rows, each its slot's own, will sample.

        Raises:
            WrongTokenError: a row without a token needs one that its slot did not sample (`Sequence.sampled`).
        """
        whose, where = self._sampled[microbatch]
        wrong = (inputs < 0) & ((whose[rows] != arrivals) | (where[rows] != positions - 1))
        if wrong.any():
            row = rows[wrong][0]
            raise WrongTokenError(
                f"row {row} of microbatch {microbatch} asks for the token of sequence {arrivals[wrong][0]} at position "
                f"{positions[wrong][0]}; its slot sampled that of sequence {whose[row]} at {where[row] + 1}"
            )
        whose[rows], where[rows] = arrivals, positions


def _place_images(batch: PrefillBatch, index: int, plan: PrefillPlan) -> None:
    """Fill in chunk ``index`` of a batch what depends on the images of its prompt."""
    images, (start, length, _) = plan.sequence.images, plan.chunk
    if images is None:
        return
    if batch.images is not None and plan.rows is not None:
        batch.images[index, :length] = plan.rows
    if batch.axes is not None:
        batch.axes[index, :, :length] = images.axes(start, start + length)
    if batch.ends is not None:
        batch.ends[index, :length] = images.ends(start, start + length)


def with_drafted(plan: StepPlan, drafted: Int32[np.ndarray, "rows drafts"]) -> StepPlan:
    """Replace the placeholders in a plan by the tokens that a draft model drafted, given by the row of each slot."""
    own = {draft.sequence for draft in plan.drafts or ()}
    rows = {row.sequence: row.row for row in reversed(plan.decodes) if row.sequence in own}
    found = {sequence: drafted[row].tolist() for sequence, row in rows.items()}

    def known(sequence: Sample, token: int) -> int:
        return found[sequence][-2 - token] if token < -1 else token

    def told(draft: Draft) -> Draft:
        sequence = draft.sequence
        tokens = [known(sequence, token) for token in draft.tokens]
        branches = (Branch(slot, [known(sequence, token) for token in path]) for slot, path in draft.branches)
        return draft._replace(tokens=tokens, branches=tuple(branches))

    decodes = [row._replace(token=known(row.sequence, row.token)) for row in plan.decodes]
    return dataclasses.replace(plan, decodes=decodes, drafts=[told(draft) for draft in plan.drafts or ()])


def wants_logprobs(rows: Sequence[DecodePlan]) -> bool:
    return any(row.sequence.request.params.logprobs is not None for row in rows)


def row_tokens(rows: Sequence[DecodePlan], sampled: Sampled, steps: int | None) -> list[list[int]]:
    """Return the tokens of each planned row, one for each of ``steps``; None: a single step without a step axis."""
    tokens = np.asarray(sampled.tokens)
    places = [row.row for row in rows]
    chosen = tokens[None, places] if steps is None else tokens[:steps, places]
    return chosen.T.tolist()


def row_logprobs(
    rows: Sequence[DecodePlan], sampled: Sampled, tokens: list[list[int]], steps: int | None
) -> list[Sequence[PositionLogprobs]]:
    """Return log probabilities of `row_tokens`: none for a row whose request wants none."""
    each: list[Sequence[PositionLogprobs]] = [()] * len(rows)
    asking = [index for index, row in enumerate(rows) if row.sequence.request.params.logprobs is not None]
    if asking:
        places = [rows[index].row for index in asking]
        host = [np.asarray(x)[None] if steps is None else np.asarray(x)[:steps] for x in sampled.logprobs]
        most = max(0, *(rows[index].sequence.request.params.logprobs or 0 for index in asking))
        positions = _positions([np.moveaxis(x[:, places], 1, 0) for x in host], most)
        for index, of_row in zip(asking, positions, strict=True):
            top = max(0, rows[index].sequence.request.params.logprobs or 0)  # -1: the whole vocabulary, in the extras
            each[index] = [_record(token, top, *at) for token, at in zip(tokens[index], of_row, strict=True)]
    return each


def prompt_logprobs(plan: PrefillPlan, result: PromptNumbers) -> list[PositionLogprobs]:
    """Return log probabilities of each prompt token that follows a token of the chunk, with the experts of the token
    before it if they were requested."""
    start, length, _ = plan.chunk
    following, top = plan.sequence.prompt[start + 1 : start + length + 1], plan.sequence.params.prompt_logprobs
    assert top is not None
    (positions,) = _positions([np.asarray(x)[None, :length] for x in result.logprobs], top)
    found = [_record(token, top, *at) for token, at in zip(following, positions, strict=True)]
    if result.routed is None or not plan.sequence.params.return_routed_experts:
        return found
    return with_experts(found, np.asarray(result.routed)[:length])


def _positions(fields: list[np.ndarray], top: int) -> Iterator[list[tuple[float, int, list[int], list[float]]]]:
    """Convert the fields of `Logprobs` [rows, steps, ...] to rows of steps of values, with the ``top`` best tokens."""
    logprob, rank, ids, logprobs = fields
    lists = (x.tolist() for x in (logprob, rank, ids[..., :top], logprobs[..., :top]))
    return (list(zip(*row, strict=True)) for row in zip(*lists, strict=True))


def _record(token: int, top: int, logprob: float, rank: int, ids: list[int], logprobs: list[float]) -> PositionLogprobs:
    best = map(TokenLogprob, ids[:top], logprobs[:top], range(1, top + 1))
    return PositionLogprobs(TokenLogprob(token, logprob, rank), tuple(best))
