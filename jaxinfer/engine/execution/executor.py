"""Local executor: all device memory of an engine, and the implementation of each command.

With several processes, each has the stages of which it has devices, and runs only their programs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int32, UInt8

from jaxinfer.compilations import digest_of
from jaxinfer.config import ResolvedEngine
from jaxinfer.engine.execution import commands
from jaxinfer.engine.execution.commands import (
    Command,
    DecodeBatch,
    DraftBatch,
    Executor,
    HeadBatch,
    PrefillBatch,
    PromptNumbers,
)
from jaxinfer.engine.execution.compiled import CompiledStage, CompileProgress, compile_stages
from jaxinfer.engine.execution.encoder import abstract_cache, text_part
from jaxinfer.engine.execution.memory import Kept, measure
from jaxinfer.engine.execution.placement import (
    StageArrays,
    abstract_banks,
    abstract_pools,
    mask_words,
    new_features,
    new_slots,
    place_params,
    placed_params,
    put_part,
    targets_of,
)
from jaxinfer.engine.execution.prepare import Prepared
from jaxinfer.engine.execution.stages import Stage, cut, draft_stages, drafted_width, sharing
from jaxinfer.engine.execution.step import StepState, pack
from jaxinfer.engine.scheduling.usage import Usage
from jaxinfer.kv.pool import Pool, StatePool
from jaxinfer.kv.transfer import HostPages, slot_bytes
from jaxinfer.models.model import Model
from jaxinfer.parallel.arrays import overlaid, placed_like, zeros
from jaxinfer.parallel.links import Link
from jaxinfer.parallel.mesh import replicated, stages
from jaxinfer.parallel.processes import own_devices, own_part, processes_of, put_whole
from jaxinfer.quant.banks import Banked, slot_specs
from jaxinfer.sampling import HostSlots, Logprobs, Sampled, SamplingLimits, SlotParams, SlotState
from jaxinfer.sampling.training import WIDTH as ASKS
from jaxinfer.sampling.training import Extras
from jaxinfer.types import VISION
from jaxinfer.weights.fit import selected

_ELSEWHERE: Any = ...  # an array that another process has


class StageRuntime:
    """A pipeline stage on its devices: parameters, vision tower and encoder cache, banks of adapters, pools (donated to
    each call), host pages, executables."""

    def __init__(self, stage: Stage, engine: ResolvedEngine, mesh: Mesh) -> None:
        model = stage.model
        self.stage, self.mesh, self.replicated = stage, mesh, replicated(mesh)
        whole = place_params(model, mesh)
        self.params, self.tower = text_part(whole), whole.get(VISION)
        self.images: Array | None = zeros(abstract_cache(model, engine, self.replicated))
        self.banks = zeros(abstract_banks(stage, engine, mesh))
        self._of_parts = slot_specs(targets_of(stage, engine)) if self.banks else {}
        self.pools: list[Pool] = zeros(abstract_pools(model, engine, mesh))
        self._host_pages = engine.host_pages
        self.host = HostPages(self._host_pages)
        self.run: CompiledStage

    def staged(self, model: Model, shared: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Place those parameters of a prepared model, perhaps not all, that this stage has.

        Args:
            shared: placed parameters of the model that a draft head shares; None: ``model`` is this stage's own.
        """
        params, specs = model.params, self.stage.model.specs
        if shared is not None:
            pairs = [(own, theirs) for own, theirs in self.stage.model.config.shares if theirs in model.params]
            params = {own: shared.get(theirs, model.params[theirs]) for own, theirs in pairs}
        params = {name: params[name] for name in params if name in specs}
        placed: dict[str, Any] = placed_params(selected(specs, params, partial=True), params, self.mesh)
        return placed

    def take(self, placed: Mapping[str, Any]) -> None:
        """Replace parameters by those that `staged` has placed."""
        tower = placed.get(VISION)
        self.params = overlaid(self.params, text_part(placed))
        self.tower = self.tower if tower is None else overlaid(self.tower, tower)

    def deleted(self) -> str | None:
        """Return the path of a parameter whose array was deleted; None: all are there."""
        leaves = jax.tree_util.tree_leaves_with_path(self.params)
        return next(
            (jax.tree_util.keystr(path, simple=True, separator=".") for path, x in leaves if x.is_deleted()), None
        )

    def kept(self, slots: Any = None, shared: Collection[str] = ()) -> Kept:
        """Return the arrays of this stage. ``slots``: those of its slots; ``shared``: parameters of another stage."""
        params = {name: node for name, node in self.params.items() if name not in shared}
        weights, devices = (params, self.tower), own_devices(self.mesh)
        return Kept(devices, weights, self.pools, self.banks, self.images, slots, self._temporaries, self.host.nbytes)

    @functools.cached_property
    def _temporaries(self) -> int:
        return self.run.temporaries()

    def sleep(self, *, cache: bool, weights: bool) -> None:
        """Drop pools, host pages and encoder cache, or weights: their shapes stay."""
        if cache:
            self.pools, self.images = placed_like(self.pools), placed_like(self.images)
            self.host = HostPages(self._host_pages)
        if weights:
            self.params, self.tower = placed_like(self.params), placed_like(self.tower)

    def wake(self) -> None:
        """Make empty pools, and an empty encoder cache."""
        self.pools, self.images = zeros(self.pools), zeros(self.images)

    def arrive(self, tokens: Array) -> Array:
        """Copy sampled tokens to this stage's devices, from device to device. Does not block."""
        return jax.device_put(tokens, self.replicated)

    def programs(self, batch: DecodeBatch | PrefillBatch) -> tuple[CompiledStage, Any, Int32[np.ndarray, " numbers"]]:
        """Return the programs for a batch, their parameters and the packed batch: programs without adapters where no
        row has one."""
        if batch.loras is None or (batch.loras < 0).all():
            return self.run, self.params, pack(batch._replace(loras=None))
        assert self.run.adapted is not None
        assert self.banks is not None
        return self.run.adapted, Banked(self.params, self.banks), pack(batch)

    def load(self, slot: int, part: str, arrays: Mapping[str, np.ndarray]) -> None:
        """Write adapter weights of a module into the banks, if this stage has it."""
        if self.banks is not None and part in self.banks:
            placed = put_part(part, arrays, self._of_parts[part], self.mesh)
            self.banks[part] = self.run.load[part](self.banks[part], np.int32(slot), placed)

    def encode(self, command: commands.Encode) -> None:
        """Write the encoder's outputs of an image into the encoder cache."""
        program = self.run.encode[command.patches.shape[0]]
        self.images = program(self.tower, self.images, command.patches, dict(command.layout), command.rows)

    def tokens(self, rows: int) -> Array:
        """Make dummy last tokens for the first stage where all tokens come from the host."""
        return put_whole(np.zeros(rows, np.int32), self.replicated)

    def pass_decode(self, batch: DecodeBatch, arriving: Array | None, drafted: Array | None = None) -> Array:
        given = (drafted,) if self.stage.first and drafted is not None else ()
        run, params, packed = self.programs(batch)
        self.pools, hidden = run.decode[batch.positions.shape[0]](params, self.pools, packed, arriving, *given)
        return hidden

    def pass_prefill(self, batch: PrefillBatch, arriving: Array | None) -> Array:
        count, size = batch.tokens.shape
        run, params, packed = self.programs(batch)
        self.pools, hidden = run.prefill[size, count](params, self.pools, packed, arriving)
        return hidden

    def copy(self, source: Int32[np.ndarray, "groups copies"], target: Int32[np.ndarray, "groups copies"]) -> None:
        self.pools = self.run.copy(self.pools, source, target)

    def export(self, source: Int32[np.ndarray, "groups pages"], hosts: Sequence[int]) -> None:
        self.host.release(hosts)
        self.host.put(hosts, self._exported(source))

    def _exported(self, source: Int32[np.ndarray, "groups pages"]) -> tuple[Array, ...]:
        return self.run.export[source.shape[1]](self.pools, source)

    def page_bytes(self, source: Int32[np.ndarray, "groups pages"]) -> UInt8[np.ndarray, "pages slots bytes"]:
        """Return the bytes of each slot of these pages, as far as the process has them."""
        return slot_bytes(np.concatenate([own_part(page) for page in self._exported(source)]))

    def state_bytes(self, states: Sequence[int]) -> UInt8[np.ndarray, " bytes"]:
        """Return the bytes of these states in all layers, as far as the process has them."""
        arrays = [array for pool in self.pools if isinstance(pool, StatePool) for array in pool.states]
        found = [np.ascontiguousarray(own_part(array[np.array(states)])) for array in arrays]
        return np.concatenate([np.zeros(0, np.uint8), *(each.reshape(-1).view(np.uint8) for each in found)])

    def restore(self, hosts: Sequence[int], target: Int32[np.ndarray, "groups pages"]) -> None:
        self.pools = self.run.restore[len(hosts)](self.pools, self.host.take(hosts), target)


@dataclasses.dataclass
class MicrobatchState:
    """Slots that decode together, on the last stage. ``input_tokens`` is the copy of ``last_tokens`` for the first
    stage; None where that is the last one, too, or where the host feeds it. ``drafted``: latest tokens for the slots by
    a draft model or head, ``input_drafted``: their copy for the first stage. ``features``: see `StepState`."""

    slots: SlotParams
    last_tokens: Array
    sampler: SlotState
    input_tokens: Array | None
    drafted: Array | None = None
    features: Array | None = None
    input_drafted: Array | None = None


class LocalExecutor:
    """Runs the programs of an engine on one or more pipeline stages: an `Executor`.

    With several stages each has its own programs, and its output is copied to the devices of the next. A step returns
    when all are launched: so a stage works on one step while the stage before works on the next one.

    Args:
        mesh: mesh of one replica.
        progress: progress of the compilations.

    Attributes:
        runtimes: one for each stage of which this process has devices.
        drafting: runtime of the draft model or head, if the model has one: on the devices of the last stage.
        microbatches: see `ResolvedEngine.microbatches`; empty without the last stage: results are ``...`` there.
        handed: last output for a stage of another process: available when the step has run here.
    """

    def __init__(self, prepared: Prepared, mesh: Mesh, progress: CompileProgress | None = None) -> None:
        model, engine, limits = prepared
        self._engine, self._experts, meshes = engine, limits.experts, stages(mesh)
        self._parts = list(dict.fromkeys(path[0] for path in targets_of(Stage(model), engine)))
        cuts = cut(model, len(meshes))
        places = [
            StageRuntime(stage, engine, stage_mesh) if own_devices(stage_mesh) else None
            for stage, stage_mesh in zip(cuts, meshes, strict=True)
        ]
        self.runtimes, last = [runtime for runtime in places if runtime is not None], places[-1]
        rows = engine.rows // engine.microbatches
        self._passing = list(zip(places[:-1], _links(cuts, meshes, engine), strict=True))
        self._entry, self._first = places[0], places[0] if self._passing else None
        # If one process has all stages, tokens go back to the first one from device to device.
        self._loops = self._first is not None and len(processes_of(mesh)) == 1
        self._no_tokens = None if self._first is None else self._first.tokens(rows)
        self.handed: Array | None = None
        self._snapshots: dict[int, SlotState] = {}
        self.microbatches = [] if last is None else self._microbatches(last, rows, limits)
        self._open_masks = {} if last is None else self._open_masks_by_rows(last)
        self._no_asks = {} if last is None else self._empty_asks_by_rows(last)
        self.drafting = self._drafting(model, meshes[-1])
        computing = [*self.runtimes, *self.drafting]
        arrays = [self._arrays(runtime) for runtime in computing]
        compiled = (
            compile_stages([runtime.stage for runtime in computing], arrays, engine, progress) if computing else []
        )
        for runtime, run in zip(computing, compiled, strict=True):
            runtime.run = run
            runtime.stage = runtime.stage.without_weights()

    def _drafting(self, model: Model, mesh: Mesh) -> list[StageRuntime]:
        if not own_devices(mesh):
            return []
        own = self.runtimes[-1].params  # shared parameters are there, except an embedding of the first stage
        return [StageRuntime(sharing(stage, own), self._engine, mesh) for stage in draft_stages(model)]

    def _microbatches(self, last: StageRuntime, rows: int, limits: SamplingLimits) -> list[MicrobatchState]:
        model, slots = last.stage.model, HostSlots(rows, limits).snapshot()
        nothing = np.zeros((rows, drafted_width(self._engine)), np.int32)
        drafted = put_whole(nothing, last.replicated) if self._engine.drafts_on_device else None
        return [
            MicrobatchState(
                put_whole(slots, last.replicated),
                tokens,
                sampler,
                self._at_first(tokens),
                drafted,
                new_features(last.stage, self._engine, last.mesh),
                self._at_first(drafted),
            )
            for tokens, sampler in (new_slots(model, rows, limits, last.mesh) for _ in range(self._engine.microbatches))
        ]

    def _at_first(self, tokens: Array | None) -> Array | None:
        """Copy tokens to the first stage; None where that is the last stage, or another process's."""
        if tokens is None or self._first is None or not self._loops:
            return None
        return self._first.arrive(tokens)

    def _open_masks_by_rows(self, last: StageRuntime) -> dict[int, Array]:
        """Make device masks that allow all tokens for all rows, by number of rows: for steps without a grammar."""
        if not self._engine.grammars:
            return {}
        words = mask_words(self.microbatches[0].sampler)
        sizes = self._engine.decode_sizes
        return {rows: put_whole(np.full((rows, words), -1, np.int32), last.replicated) for rows in sizes}

    def _empty_asks_by_rows(self, last: StageRuntime) -> dict[int, Array]:
        """Make device arrays for steps in which no row asks for outputs for training, by number of rows."""
        sizes = self._engine.decode_sizes if self._engine.enable_training_outputs else ()
        return {rows: put_whole(np.zeros((rows, ASKS), np.int32), last.replicated) for rows in sizes}

    def _arrays(self, runtime: StageRuntime) -> StageArrays:
        vision = {"tower": runtime.tower, "images": runtime.images}
        if not runtime.stage.last:
            return StageArrays(runtime.params, runtime.pools, banks=runtime.banks, **vision)
        microbatch = self.microbatches[0]
        kept = microbatch.slots, microbatch.last_tokens, microbatch.sampler, microbatch.features
        return StageArrays(runtime.params, runtime.pools, *kept, runtime.banks, **vision)

    def run[Result](self, command: Command[Result]) -> Result:
        """Run a command: the single dispatch over command types."""
        return cast(Result, self._run(command))

    def _run(self, command: Command[Any]) -> Any:
        match command:
            case commands.Decode():
                return self._decode(command)
            case commands.DecodeMany(batch, steps):
                return self._decode_many(batch, steps)
            case commands.Prefill(batch):
                return self._prefill(batch)
            case commands.PrefillLogprobs(batch, following):
                return self._prefill_logprobs(batch, following)
            case commands.Encode():
                return None if self._entry is None else self._entry.encode(command)
            case commands.DraftPrefill(batch):
                return self._draft_prefill(batch)
            case commands.LoadLora(slot, part, arrays):
                return self._load(slot, part, arrays)
            case commands.CopyPages(source, target):
                return self._each(lambda stage: stage.copy(source, target))
            case commands.ExportPages(source, hosts):
                return self._each(lambda stage: stage.export(source, hosts))
            case commands.ImportPages(hosts, target):
                return self._each(lambda stage: stage.restore(hosts, target))
            case commands.ReadPages(source):
                return np.concatenate([stage.page_bytes(source) for stage in self.runtimes], -1)
            case commands.ReadStates(states):
                return np.concatenate([stage.state_bytes(states) for stage in self.runtimes])
            case commands.DropSnapshots(snapshots):
                return self._drop(snapshots)
        if not self.microbatches:
            return _ELSEWHERE if command.by_last_stage else None
        return self._run_with_state(command)

    def _run_with_state(self, command: Command[Any]) -> Any:
        """Run a command on state that only the last stage has."""
        last, snapshots = self.runtimes[-1], self._snapshots
        match command:
            case commands.Draft(number, batch):
                return self._draft(self.microbatches[number], batch)
            case commands.HeadDraft(number, batch):
                chosen = self.microbatches[number]
                return self._draft(chosen, batch, chosen.features)
            case commands.SetSlots(number, fields):
                chosen = self.microbatches[number]
                chosen.slots = chosen.slots._replace(**put_whole(dict(fields), last.replicated))
            case commands.AdmitSlot(slot, prompt, bias):
                chosen, row = self._place(slot)
                chosen.sampler = last.run.admit(chosen.sampler, row, prompt, bias)
            case commands.SaveSlot(slot, snapshot):
                chosen, row = self._place(slot)
                snapshots[snapshot] = last.run.save_slot(chosen.sampler, row)
            case commands.RestoreSlot(slot, snapshot):
                chosen, row = self._place(slot)
                chosen.sampler = last.run.restore_slot(chosen.sampler, row, snapshots[snapshot])
            case commands.ReadLastTokens(number):
                return np.array(self.microbatches[number].last_tokens)
            case _:
                raise TypeError(f"no executor runs {command!r}")
        return None

    def _sampled_elsewhere(self) -> Sampled:
        extras = None
        if self._engine.enable_training_outputs:
            extras = Extras(*(_ELSEWHERE,) * 4, routed=_ELSEWHERE if self._experts else None)
        return Sampled(_ELSEWHERE, Logprobs(*(_ELSEWHERE,) * 4), extras)

    def _load(self, slot: int, part: int, arrays: Mapping[str, np.ndarray]) -> None:
        for runtime in self.runtimes:
            runtime.load(slot, self._parts[part], arrays)

    def _drop(self, snapshots: Sequence[int]) -> None:
        for number in snapshots:
            self._snapshots.pop(number, None)

    def _place(self, slot: int) -> tuple[MicrobatchState, np.int32]:
        row, microbatch = divmod(slot, len(self.microbatches))
        return self.microbatches[microbatch], np.int32(row)

    # ---- steps

    def _decode(self, command: commands.Decode) -> Sampled:
        microbatch, batch = command.microbatch, command.batch
        rows, fed, drafted = batch.positions.shape[0], self._no_tokens, None
        if self._loops:
            fed, drafted = self.microbatches[microbatch].input_tokens, self.microbatches[microbatch].input_drafted
        arriving = self._through(rows, lambda runtime, x: runtime.pass_decode(batch, x, drafted), fed)
        if not self.microbatches:
            return self._sampled_elsewhere()
        chosen, last = self.microbatches[microbatch], self.runtimes[-1]
        run, params, packed = last.programs(batch)
        masks = self._open_masks.get(rows) if command.masks is None else command.masks
        asks = self._no_asks.get(rows) if command.asks is None else command.asks
        operands = packed, arriving, chosen.drafted, masks, asks
        state, sampled = run.decode[rows](params, chosen.slots, self._state(chosen), *operands)
        self._update(chosen, state)
        return sampled

    def _decode_many(self, batch: DecodeBatch, steps: int) -> tuple[Sampled, Array]:
        if not self.microbatches:
            return self._sampled_elsewhere(), _ELSEWHERE
        chosen, last = self.microbatches[0], self.runtimes[-1]
        run, params, packed = last.programs(batch)
        program = run.decode_many[batch.positions.shape[0]]
        state, sampled, ran = program(params, chosen.slots, self._state(chosen), packed, np.int32(steps))
        self._update(chosen, state)
        return sampled, ran

    def _draft(self, chosen: MicrobatchState, batch: DraftBatch | HeadBatch, *features: Array | None) -> Array:
        (runtime,) = self.drafting
        operands = chosen.slots, chosen.sampler, runtime.pools, pack(batch), *features
        runtime.pools, drafted = runtime.run.draft(runtime.params, *operands)
        chosen.drafted, chosen.input_drafted = drafted, self._at_first(drafted)
        return drafted

    def _draft_prefill(self, batch: PrefillBatch) -> None:
        (count, size), plain = batch.tokens.shape, batch.for_drafts()
        for runtime in self.drafting:
            if not runtime.stage.is_head:
                runtime.pools = runtime.run.prefill[size, count](runtime.params, runtime.pools, pack(plain), None)

    def _head_prefill(self, batch: PrefillBatch, filled: Any) -> list[Pool]:
        """Run the draft head, if any, on the features of prompt chunks; return the pools that the chunks filled."""
        if not self.runtimes[-1].stage.prompts:
            return cast(list[Pool], filled)
        (runtime,), (pools, features) = self.drafting, filled
        (count, size), plain = batch.tokens.shape, batch.for_drafts()
        if batch.following is not None:
            runtime.pools = runtime.run.prefill[size, count](runtime.params, runtime.pools, pack(plain), features)
        return pools

    def _prefill(self, batch: PrefillBatch) -> None:
        self._draft_prefill(batch)
        count, size = batch.tokens.shape
        arriving = self._chunks_through(batch)
        if self.microbatches:
            last = self.runtimes[-1]
            run, params, seen = last.programs(batch._replace(following=None))
            filled = run.prefill[size, count](params, last.pools, seen, arriving)
            last.pools = self._head_prefill(batch, filled)

    def _prefill_logprobs(self, batch: PrefillBatch, following: Int32[np.ndarray, " chunk"]) -> PromptNumbers:
        self._draft_prefill(batch)
        arriving = self._chunks_through(batch)
        if not self.microbatches:
            return PromptNumbers(self._sampled_elsewhere().logprobs, _ELSEWHERE if self._experts else None)
        last = self.runtimes[-1]
        run, params, seen = last.programs(batch._replace(following=None))
        filled, numbers = run.prefill_logprobs(params, last.pools, seen, arriving, following)
        last.pools = self._head_prefill(batch, filled)
        return cast(PromptNumbers, numbers)

    def _chunks_through(self, batch: PrefillBatch) -> Array | None:
        seen = batch._replace(following=None)  # `following` is for a draft head only
        images = None if self._entry is None else self._entry.images
        return self._through(batch.tokens.size, lambda runtime, x: runtime.pass_prefill(seen, x), images)

    def _through(
        self, rows: int, run: Callable[[StageRuntime, Array | None], Array], x: Array | None = None
    ) -> Array | None:
        """Pass rows through all stages but the last; return the input of the last one, None in other processes."""
        for runtime, link in self._passing:
            if runtime is not None:
                x = run(runtime, x)
                self.handed = x if link.crosses else None
            x = link.carry(rows, x)
        return x

    def _state(self, microbatch: MicrobatchState) -> StepState:
        return StepState(self.runtimes[-1].pools, microbatch.last_tokens, microbatch.sampler, microbatch.features)

    def _update(self, microbatch: MicrobatchState, state: StepState) -> None:
        self.runtimes[-1].pools, microbatch.last_tokens, microbatch.sampler, microbatch.features = state
        microbatch.input_tokens = self._at_first(microbatch.last_tokens)

    def _each(self, call: Callable[[StageRuntime], None]) -> None:
        for runtime in (*self.runtimes, *self.drafting):
            if runtime.pools:  # not a head without a cache
                call(runtime)

    # ---- new weights, and memory that is given back

    def stage(self, model: Model, *, drafts: bool = False) -> list[dict[str, Any]]:
        """See `Executor.stage`."""
        if drafts:
            return [*({} for _ in self.runtimes), *(runtime.staged(model) for runtime in self.drafting)]
        placed = [runtime.staged(model) for runtime in self.runtimes]
        heads = (runtime.staged(model, placed[-1]) if runtime.stage.is_head else {} for runtime in self.drafting)
        return [*placed, *heads]

    def swap(self, weights: Sequence[list[dict[str, Any]]]) -> None:
        """See `Executor.swap`."""
        for staged in weights:
            for runtime, placed in zip((*self.runtimes, *self.drafting), staged, strict=True):
                runtime.take(placed)

    def sleep(self, *, cache: bool, weights: bool) -> None:
        """See `Executor.sleep`."""
        self.wait()
        for runtime in (*self.runtimes, *self.drafting):
            runtime.sleep(cache=cache, weights=weights)

    def wake(self) -> None:
        """See `Executor.wake`."""
        for runtime in (*self.runtimes, *self.drafting):
            runtime.wake()

    def deleted(self) -> str | None:
        """See `Executor.deleted`."""
        return next((path for runtime in (*self.runtimes, *self.drafting) if (path := runtime.deleted())), None)

    # ---- calls before READY

    def wait(self) -> None:
        pools = [runtime.pools for runtime in (*self.runtimes, *self.drafting)]
        jax.block_until_ready([*pools, *(microbatch.last_tokens for microbatch in self.microbatches)])

    def usage(self) -> Usage:
        """See `Executor.usage`."""
        slots = [vars(microbatch) for microbatch in self.microbatches], self._open_masks, self._no_asks
        kept = [runtime.kept() for runtime in self.runtimes]
        if self.microbatches:
            kept[-1] = self.runtimes[-1].kept(slots)
        for runtime in self.drafting:
            shares, theirs = dict(getattr(runtime.stage.model.config, "shares", ())), self.runtimes[-1].params
            kept.append(runtime.kept(shared=[own for own, name in shares.items() if name in theirs]))
        return measure(kept)

    def temporaries(self) -> int:
        return max((runtime.run.temporaries() for runtime in (*self.runtimes, *self.drafting)), default=0)

    def digest(self) -> str | None:
        return digest_of(runtime.run for runtime in (*self.runtimes, *self.drafting))


def _links(cuts: Sequence[Stage], meshes: Sequence[Mesh], engine: ResolvedEngine) -> list[Link]:
    """Make links from each stage but the last to the next one, for all numbers of rows that a step may have."""
    chunks = [*engine.prefill_sizes, *(size * count for size, count in engine.wide_prefills)]
    return [
        Link(source, target, stage.given, stage.model.dtype, (*engine.decode_sizes, *chunks))
        for stage, source, target in zip(cuts, meshes, meshes[1:], strict=False)
    ]


MakeExecutor = Callable[[Prepared, Mesh, CompileProgress | None], Executor]
"""Factory of an `Executor`."""
