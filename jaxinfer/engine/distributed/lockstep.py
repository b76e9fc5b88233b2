"""Lockstep execution of data-parallel attention ranks: one set of device arrays, each command run once for all ranks.

The executor of a rank's engine (`RankExecutor`) queues commands. When all ranks have planned their step, `Lockstep.run`
merges their commands: those of one type become one call, in which ranks without a command do nothing. The order of a
rank's own commands is kept, so that its step is the same as on an engine with its own device.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Int32, UInt8

from jaxinfer.engine.execution import commands
from jaxinfer.engine.execution.commands import (
    Command,
    DecodeBatch,
    Executor,
    PrefillBatch,
    PromptNumbers,
    as_text,
    idle_batch,
    with_rows,
)
from jaxinfer.engine.execution.compiled import CompileProgress, compile_stages
from jaxinfer.engine.execution.encoder import text_part
from jaxinfer.engine.execution.memory import Kept, measure
from jaxinfer.engine.execution.placement import abstract_arrays, place_params, put_part, targets_of
from jaxinfer.engine.execution.prepare import Prepared
from jaxinfer.engine.execution.stages import Stage, returns_experts
from jaxinfer.engine.execution.step import StepState, pack
from jaxinfer.engine.scheduling.usage import Usage
from jaxinfer.kv.pool import new_pools
from jaxinfer.kv.transfer import COPIES, TRANSFERS, HostPages, moved_pages, slot_bytes
from jaxinfer.models.model import Model
from jaxinfer.parallel.arrays import overlaid, placed_like, zeros
from jaxinfer.parallel.dp_attention import joined, of_ranks, rank_sharding
from jaxinfer.parallel.processes import on_host, own_devices
from jaxinfer.quant.banks import Banked, slot_specs
from jaxinfer.sampling import Extras, HostSlots, Logprobs, Sampled, SamplingLimits, SlotState, new_state
from jaxinfer.sampling.training import WIDTH as ASKS
from jaxinfer.types import VISION


class Awaited:
    """A rank's slice of an array that is available once the ranks have run."""

    def __init__(self) -> None:
        self.array: Array
        self._part = slice(None)
        self._to_host = False

    def arrive(self, array: Array, part: slice = slice(None)) -> None:
        """Set the array, of which ``part`` selects the rank's rows."""
        self.array, self._part = array, part
        if self._to_host:
            array.copy_to_host_async()

    def copy_to_host_async(self) -> None:
        """Copy the array to the host as soon as it arrives."""
        self._to_host = True

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(np.asarray(self.array)[self._part], dtype, copy=copy)


def _awaited(kind: Any) -> Any:
    return kind(*(Awaited() for _ in kind._fields))


class RankExecutor(Executor):
    """The `Executor` of one rank's engine. Results are `Awaited`; `wait` is for all ranks, which probe together.

    Before READY, when one rank probes programs, a command that must see device results runs all queued commands first.
    Multi-step decoding is not supported: settings reject it with ranks.

    Attributes:
        pending: the commands of each type, in order, with the objects that await their results.
    """

    def __init__(self, lockstep: Lockstep, host: HostPages) -> None:
        self._all, self.host = lockstep, host
        self._snapshots: dict[int, SlotState] = {}
        self.pending: dict[type[Command[Any]], collections.deque[tuple[Any, Any]]]
        self.pending = collections.defaultdict(collections.deque)

    def run[Result](self, command: Command[Result]) -> Result:
        return cast(Result, self._run(command))

    def _run(self, command: Command[Any]) -> Any:
        match command:
            case commands.Decode():
                return self._ask(
                    command, _awaited(Sampled)._replace(logprobs=_awaited(Logprobs), extras=self._extras())
                )
            case commands.PrefillLogprobs():
                return self._ask(command, PromptNumbers(_awaited(Logprobs), self._routed()))
            case commands.Prefill() | commands.CopyPages() | commands.SetSlots() | commands.AdmitSlot():
                return self._ask(command, None)
            case commands.LoadLora() | commands.Encode():
                return self._ask(command, None)
            case commands.ExportPages() | commands.ImportPages():
                return self._ask(command, self.host)
            case commands.ReadPages(source):
                return self._read_pages(source)
            case commands.SaveSlot(_, snapshot):
                self._snapshots[snapshot] = self._ask(command, _awaited(SlotState))
                return None
            case commands.RestoreSlot(_, snapshot):
                return self._ask(command, self._snapshots[snapshot])
            case commands.DropSnapshots(snapshots):
                return [self._snapshots.pop(number, None) for number in snapshots]
        raise TypeError(f"no rank runs {command!r}")

    def _extras(self) -> Extras | None:
        return _awaited(Extras)._replace(routed=self._routed()) if self._all.asks else None

    def _routed(self) -> Any:
        return Awaited() if self._all.routed else None

    def _ask(self, command: Command[Any], awaiting: Any) -> Any:
        self.pending[type(command)].append((command, awaiting))
        return awaiting

    def _read_pages(self, source: Int32[np.ndarray, "groups pages"]) -> UInt8[np.ndarray, "pages slots bytes"]:
        self._all.run()  # the commands to be observed
        pages = range(source.shape[1])
        found = HostPages(len(pages))
        self._ask(commands.ExportPages(source, pages), found)
        self._all.run()
        return slot_bytes(np.concatenate([np.asarray(page) for page in found.take(pages)]))

    def wait(self) -> None:
        self._all.wait()

    def stage(self, model: Model, *, drafts: bool = False) -> Any:
        return self._all.stage(model)

    def swap(self, weights: Sequence[Any]) -> None:
        self._all.swap(weights)

    def sleep(self, *, cache: bool, weights: bool) -> None:
        self._all.sleep(cache=cache, weights=weights)

    def wake(self) -> None:
        self._all.wake()

    def usage(self) -> Usage:
        return self._all.usage()

    def temporaries(self) -> int:
        return self._all.programs.temporaries()


class _IdleOperands(NamedTuple):
    """Operands of a call for a rank without a command."""

    pages: np.ndarray
    hosted: list[Array]
    vocab: tuple[np.ndarray, np.ndarray]
    slot: np.int32


class Lockstep:
    """Parameters, pools and slots of all ranks, and their programs. Only `wait` blocks.

    Args:
        prepared: model, and settings of each rank.
        mesh: mesh of the ranks.
        progress: progress of the compilations.

    Attributes:
        ranks: executors for the engines of the ranks.
        programs: compiled programs over arrays of all ranks (`jaxinfer.parallel.dp_attention`).
        size_classes: see `Calibration`: chunks of sizes with equal numbers may run in one program.
        asks: by number of rows of a rank, what the ranks' rows ask of the outputs for training if none does; empty: the
            programs have no such outputs.
        routed: programs return experts.
    """

    def __init__(self, prepared: Prepared, mesh: Mesh, progress: CompileProgress | None = None) -> None:
        model, engine, limits = prepared
        self._engine, self._model, self.mesh = engine, model, mesh
        self._sharding, count = rank_sharding(mesh), mesh.shape["dp_attn"]
        self._hosted = on_host(self._sharding)
        self.size_classes: Mapping[int, int] = {size: size for size in engine.prefill_sizes}
        whole = place_params(model, mesh)
        self.params, self._tower = text_part(whole), whole.get(VISION)
        spec, page = model.cache_spec, engine.page_size
        self.pools = new_pools(spec, count * engine.num_pages, page, model.dtype, self._sharding)
        self._device_slots = [HostSlots(engine.rows, limits).snapshot()._asdict() for _ in range(count)]
        self._slots = self._placed(HostSlots(count * engine.rows, limits).snapshot())
        self.last_tokens, self.sampler = self._new_slots(count * engine.rows, limits)
        self.ranks = [RankExecutor(self, HostPages(engine.host_pages)) for _ in range(count)]
        stage = Stage(model)
        arrays = abstract_arrays(stage, engine, limits, mesh)
        self.banks, self.images = zeros(arrays.banks), zeros(of_ranks((arrays.images,), mesh)[0])
        self._of_parts = slot_specs(targets_of(stage, engine)) if self.banks else {}
        self.programs: Any = compile_stages([stage], [arrays], engine, progress)[0]
        self._idle = self._idle_operands()
        sizes = engine.decode_sizes if engine.enable_training_outputs else ()
        self.asks = {rows: self._placed(np.zeros((count * rows, ASKS), np.int32)) for rows in sizes}
        self.routed = returns_experts(model.params, engine)
        self._model = stage.without_weights().model

    def _placed(self, tree: Any) -> Any:
        return jax.device_put(tree, self._sharding)

    def _new_slots(self, rows: int, limits: SamplingLimits) -> tuple[Array, SlotState]:
        vocab = self._model.config.vocab_size

        def new() -> tuple[Array, SlotState]:
            return jnp.zeros(rows, jnp.int32), new_state(rows, vocab, limits)

        made: tuple[Array, SlotState] = jax.jit(new, out_shardings=self._sharding)()
        return made

    def _idle_operands(self) -> _IdleOperands:
        """Make operands that do nothing: rows without a position, pages and slots beyond the last."""
        engine, groups, vocab = self._engine, len(self._model.cache_spec.windows), self._model.config.vocab_size
        pages = np.full((groups, max(COPIES, *TRANSFERS)), engine.num_pages, np.int32)
        page = moved_pages(self._model.cache_spec, len(self.ranks), engine.page_size, self._model.dtype)
        hosted = self._parts(jax.device_put(np.zeros(page.shape, page.dtype), self._hosted))
        rows = np.zeros(vocab, np.bool_), np.zeros(vocab, np.float32)
        return _IdleOperands(pages, hosted, rows, np.int32(engine.rows))

    def run(self) -> None:
        """Run the queued commands of the ranks, in the order of a step."""
        calls: dict[type[Command[Any]], Callable[[list[Any]], None]] = {
            commands.ExportPages: self._export,
            commands.CopyPages: self._copy,
            commands.ImportPages: self._import,
            commands.SaveSlot: self._save,
            commands.AdmitSlot: self._admit,
            commands.RestoreSlot: self._restore,
            commands.SetSlots: self._set_slots,
            commands.LoadLora: self._load,
            commands.Encode: self._encode,
            commands.PrefillLogprobs: self._prefill_logprobs,
            commands.Prefill: self._prefill,
            commands.Decode: self._decode,
        }
        choose: dict[Any, Callable[[], list[Any]]] = {
            commands.Prefill: self._together,
            commands.Encode: self._of_one_size,
        }
        for kind, call in calls.items():
            while any(rank.pending[kind] for rank in self.ranks):
                call(choose.get(kind, functools.partial(self._next, kind))())

    def _next(self, kind: type[Command[Any]]) -> list[Any]:
        """Pop the next command of each rank, with the object that awaits its result; None where it has none."""
        return [rank.pending[kind].popleft() if rank.pending[kind] else None for rank in self.ranks]

    def wait(self) -> None:
        """Wait until all pending commands have run."""
        self.run()
        jax.block_until_ready((self.pools, self.last_tokens))

    def usage(self) -> Usage:
        """See `Executor.usage`."""
        slots = self._slots, self.last_tokens, self.sampler, self.asks
        kept = Kept(own_devices(self.mesh), (self.params, self._tower), self.pools, self.banks, self.images, slots)
        pages = sum(rank.host.nbytes for rank in self.ranks)
        return measure([kept._replace(temporaries=self.programs.temporaries(), host_pages=pages)])

    # ---- new weights, and memory that is given back

    def stage(self, model: Model) -> Any:
        """See `Executor.stage`."""
        return place_params(model, self.mesh)

    def swap(self, weights: Sequence[Any]) -> None:
        """See `Executor.swap`."""
        for placed in weights:
            self.params = overlaid(self.params, text_part(placed))
            if VISION in placed:
                self._tower = overlaid(self._tower, placed[VISION])

    def sleep(self, *, cache: bool, weights: bool) -> None:
        """See `Executor.sleep`."""
        self.wait()
        if cache:
            self.pools, self.images = placed_like(self.pools), placed_like(self.images)
            for rank in self.ranks:
                rank.host = HostPages(self._engine.host_pages)
        if weights:
            self.params, self._tower = placed_like(self.params), placed_like(self._tower)

    def wake(self) -> None:
        """See `Executor.wake`."""
        self.pools, self.images = zeros(self.pools), zeros(self.images)

    # ---- pages

    def _export(self, pending: list[tuple[commands.ExportPages, HostPages] | None]) -> None:
        for command, host in filter(None, pending):
            host.release(command.hosts)
        source = self._of_all([one and one[0].source for one in pending])
        pages = self.programs.export[source.shape[1]](self.pools, source)
        parts = zip(*map(self._parts, pages), strict=True)
        for one, own in zip(pending, parts, strict=True):
            if one is not None:
                one[1].put(one[0].hosts, own[: len(one[0].hosts)])

    def _copy(self, pending: list[tuple[commands.CopyPages, None] | None]) -> None:
        none = (self._idle.pages[:, :COPIES],) * 2
        self.pools = self.programs.copy(
            self.pools, *joined([(one[0].source, one[0].target) if one else none for one in pending])
        )

    def _import(self, pending: list[tuple[commands.ImportPages, HostPages] | None]) -> None:
        target = self._of_all([one and one[0].target for one in pending])
        count = target.shape[1]
        taken = [one[1].take(one[0].hosts) if one else () for one in pending]
        filled = [(*own, *(count - len(own)) * [idle]) for own, idle in zip(taken, self._idle.hosted, strict=True)]
        pages = [self._from_parts(parts, self._hosted) for parts in zip(*filled, strict=True)]
        self.pools = self.programs.restore[count](self.pools, tuple(pages), target)

    def _of_all(self, ids: Sequence[Int32[np.ndarray, "groups _"] | None]) -> Int32[np.ndarray, "rows _"]:
        """Join page ids of the ranks, padded to the largest count; padding and idle ranks use ids beyond the pool."""
        count = max(own.shape[1] for own in ids if own is not None)
        none = self._idle.pages[:, :count]
        return joined([none if own is None else np.append(own, none[:, own.shape[1] :], 1) for own in ids])

    def _from_parts(self, parts: Sequence[Array], sharding: NamedSharding) -> Array:
        """Assemble one array from the shards of the ranks, each on its device."""
        shape = len(parts), *parts[0].shape[1:]
        return jax.make_array_from_single_device_arrays(shape, sharding, list(parts))

    def _parts(self, array: Array) -> list[Array]:
        """Return the shards of the ranks, each on its device."""
        where = {shard.device: shard.data for shard in array.addressable_shards}
        return [where[device] for device in self.mesh.devices.flat]

    # ---- slots

    def _set_slots(self, pending: list[tuple[commands.SetSlots, None] | None]) -> None:
        changed = set[str]()
        for device_slots, one in zip(self._device_slots, pending, strict=True):
            if one is not None:
                device_slots.update(one[0].fields)
                changed |= one[0].fields.keys()
        fields = {name: np.concatenate([slots[name] for slots in self._device_slots]) for name in sorted(changed)}
        self._slots = self._slots._replace(**self._placed(fields))

    def _slot_numbers(self, pending: list[Any]) -> Int32[np.ndarray, " ranks"]:
        return np.array([one[0].slot if one else self._idle.slot for one in pending], np.int32)

    def _admit(self, pending: list[tuple[commands.AdmitSlot, None] | None]) -> None:
        rows = joined([(one[0].prompt, one[0].bias) if one else self._idle.vocab for one in pending])
        self.sampler = self.programs.admit(self.sampler, self._slot_numbers(pending), *rows)

    def _save(self, pending: list[tuple[commands.SaveSlot, SlotState] | None]) -> None:
        saved = self.programs.save_slot(self.sampler, self._slot_numbers(pending))
        for field, array in enumerate(saved):
            for one, part in zip(pending, self._parts(array), strict=True):
                if one is not None:
                    cast(Awaited, one[1][field]).arrive(part)

    def _restore(self, pending: list[tuple[commands.RestoreSlot, SlotState] | None]) -> None:
        """Restore each row on the device where it was saved; the other ranks rewrite their present rows."""
        slots, spare = self._slot_numbers(pending), self.programs.save_slot(self.sampler, self._slot_numbers(pending))
        rows = []
        for field, array in enumerate(spare):
            parts = zip(pending, self._parts(array), strict=True)
            local = [part if one is None else cast(Awaited, one[1][field]).array for one, part in parts]
            rows.append(jax.make_array_from_single_device_arrays(array.shape, self._sharding, local))
        self.sampler = self.programs.restore_slot(self.sampler, slots, SlotState(*rows))

    def _load(self, pending: list[tuple[commands.LoadLora, None] | None]) -> None:
        """Write the adapter weights of each rank, one rank after another: ranks may load different layers."""
        assert self.banks is not None
        for rank, one in enumerate(pending):
            if one is not None:
                slot, number, arrays = one[0].slot, one[0].part, one[0].arrays
                part = list(self._of_parts)[number]
                placed = put_part(part, arrays, self._of_parts[part], self.mesh)
                place = np.int32(rank * self._engine.lora_slots + slot)
                self.banks[part] = self.programs.load[part](self.banks[part], place, placed)

    # ---- images

    def _of_one_size(self) -> list[tuple[commands.Encode, None] | None]:
        """Pop the next image of each rank that runs in the same program as the first: another would change its bits."""
        waiting = [rank.pending[commands.Encode] for rank in self.ranks]
        sizes = [queue[0][0].patches.shape[0] if queue else 0 for queue in waiting]
        first = next(filter(None, sizes))
        return [queue.popleft() if size == first else None for queue, size in zip(waiting, sizes, strict=True)]

    def _encode(self, pending: list[tuple[commands.Encode, None] | None]) -> None:
        """Encode an image of each rank; a rank without one drops the rows of another's."""
        some = next(one[0] for one in pending if one is not None)
        nowhere = np.full_like(some.rows, self._engine.encoder_cache_size)
        given = [one[0] if one else dataclasses.replace(some, rows=nowhere) for one in pending]
        parts = [
            (each.patches, {name: np.atleast_1d(x) for name, x in each.layout.items()}, each.rows) for each in given
        ]
        program = self.programs.encode[some.patches.shape[0]]
        self.images = program(self._tower, self.images, *joined(parts))

    # ---- steps

    def _programs(self, batches: Sequence[DecodeBatch] | Sequence[PrefillBatch]) -> tuple[Any, Any, Any]:
        """Return the programs for the ranks' batches, their parameters and their packed batches: programs without
        adapters where no row of any rank has one."""
        if self.banks is not None and any(batch.loras is not None and (batch.loras >= 0).any() for batch in batches):
            return self.programs.adapted, Banked(self.params, self.banks), [pack(batch) for batch in batches]
        return self.programs, self.params, [pack(batch._replace(loras=None)) for batch in batches]

    def _together(self) -> list[tuple[commands.Prefill, None] | None]:
        """Pop the next chunks of each rank that may run in one program with those of the largest size."""
        waiting = [rank.pending[commands.Prefill] for rank in self.ranks]
        sizes = [queue[0][0].batch.tokens.shape[1] if queue else 0 for queue in waiting]
        largest, classes = max(sizes), self.size_classes
        fits = [size == largest or (size > 0 and classes[size] == classes[largest]) for size in sizes]
        return [queue.popleft() if fit else None for queue, fit in zip(waiting, fits, strict=True)]

    def _prefill(self, pending: list[tuple[commands.Prefill, None] | None]) -> None:
        """Run the chunks in the widest program that a rank needs: the probe has found it bitwise equivalent."""
        batches = [one[0].batch if one else None for one in pending]
        shapes = [batch.tokens.shape for batch in batches if batch is not None]
        side, size = max(count for count, _ in shapes), max(size for _, size in shapes)
        programs, params, packed = self._programs([self._chunks(one, side, size) for one in batches])
        self.pools = programs.prefill[size, side](params, self.pools, joined(packed), self.images)

    def _chunks(self, batch: PrefillBatch | None, side: int, size: int) -> PrefillBatch:
        """Pad a batch to ``side`` chunks of this size; the missing chunks are empty."""
        starts = np.zeros(side, np.int32)
        tables = np.zeros((self._idle.pages.shape[0], side, self._engine.table_width), np.int32)
        loras = np.full(side, -1, np.int32) if self.banks else None
        wide = as_text(
            PrefillBatch(np.zeros((side, size), np.int32), starts, starts.copy(), tables, loras=loras), self._engine
        )
        if batch is not None:
            count, chunk = batch.tokens.shape
            wide.tokens[:count, :chunk], wide.starts[:count], wide.lengths[:count] = batch[:3]
            wide.tables[:, :count] = batch.tables
            for name in ("images", "axes", "ends"):
                if (own := getattr(batch, name)) is not None:
                    getattr(wide, name)[:count, ..., :chunk] = own
            if loras is not None and batch.loras is not None:
                loras[:count] = batch.loras
        return wide

    def _prefill_logprobs(self, pending: list[tuple[commands.PrefillLogprobs, PromptNumbers] | None]) -> None:
        size = self._engine.prefill_sizes[-1]
        programs, params, packed = self._programs([self._chunks(one and one[0].batch, 1, size) for one in pending])
        nothing = np.zeros(size, np.int32)
        following = joined([one[0].following if one else nothing for one in pending])
        self.pools, numbers = programs.prefill_logprobs(params, self.pools, joined(packed), self.images, following)
        self._deal(numbers, pending, size)

    def _decode(self, pending: list[tuple[commands.Decode, Sampled] | None]) -> None:
        """Run as many rows per rank as the rank with the most rows needs."""
        rows = max(one[0].batch.positions.shape[0] for one in pending if one is not None)
        idle = idle_batch(self._engine, self._idle.pages.shape[0], rows)
        batches = [idle if one is None else with_rows(one[0].batch, like=idle) for one in pending]
        programs, params, packed = self._programs(batches)
        state = StepState(list(self.pools), self.last_tokens, self.sampler)
        asks = self._asks([None if one is None else one[0].asks for one in pending], rows)
        nothing = (None,) * 3  # hidden states, drafts, masks
        state, sampled = programs.decode[rows](params, self._slots, state, joined(packed), *nothing, asks)
        self.pools, self.last_tokens, self.sampler, _ = state
        self._deal(sampled, pending, rows)

    def _asks(self, asks: Sequence[Int32[np.ndarray, "_ asks"] | None], rows: int) -> Any:
        """Join what the ranks' rows ask of the outputs for training, for ``rows`` of each rank."""
        if all(own is None for own in asks):
            return self.asks.get(rows)
        wide = [np.zeros((0, ASKS), np.int32) if own is None else own for own in asks]
        return joined([np.pad(own, ((0, rows - len(own)), (0, 0))) for own in wide])

    def _deal(self, results: Any, pending: Sequence[Any], rows: int) -> None:
        """Hand each waiting rank its rows of the results."""
        for number, one in enumerate(pending):
            if one is not None:
                part = slice(number * rows, (number + 1) * rows)
                jax.tree.map(lambda array, awaiting, part=part: awaiting.arrive(array, part), results, one[1])
