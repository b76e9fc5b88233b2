"""All device memory of an engine's ranks, and the calls that change it: each is made once for all ranks.

What a rank's engine asks of its executor (`RankExecutor`) is written down. When all ranks have planned their step,
`Lockstep.run` makes the calls: what several ranks ask for is one call, in which those that ask for nothing do nothing.
The order of a rank's own calls is kept, so that its step means what it means to an engine with a device of its own.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, override

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float32, Int32, Shaped, UInt8

from jaxinfer.config import ResolvedEngine
from jaxinfer.engine.execution.compiled import CompileProgress, compile_stages
from jaxinfer.engine.execution.executor import Executor, SamplerSnapshot
from jaxinfer.engine.execution.placement import abstract_arrays, place_params
from jaxinfer.engine.execution.stages import Stage
from jaxinfer.engine.execution.step import DecodeBatch, PrefillBatch, StepState, pack
from jaxinfer.kv.pool import new_pools
from jaxinfer.kv.transfer import COPIES, TRANSFER_PAGES, HostPages, slot_bytes
from jaxinfer.models.model import Model
from jaxinfer.parallel.dp_attention import joined, rank_sharding
from jaxinfer.sampling import HostSlots, Logprobs, Sampled, SamplingLimits, SlotState, new_state


class Awaited:
    """One rank's part of an array that is there when the ranks have run."""

    def __init__(self) -> None:
        self.array: Array
        self._part = slice(None)
        self._to_host = False

    def arrive(self, array: Array, part: slice = slice(None)) -> None:
        """``part`` of the array's rows is the rank's."""
        self.array, self._part = array, part
        if self._to_host:
            array.copy_to_host_async()

    def copy_to_host_async(self) -> None:
        """It is copied as soon as it is there."""
        self._to_host = True

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(np.asarray(self.array)[self._part], dtype, copy=copy)


def _awaited(kind: Any) -> Any:
    """A named tuple of what is awaited."""
    return kind(*(Awaited() for _ in kind._fields))


class RankExecutor(Executor):
    """What the engine of one rank takes for its executor. Results are `Awaited`.

    Before READY, when one rank tries programs out, a call that must see what the device has done runs what was asked
    for so far. There is nothing for several steps in one call: settings refuse them beside ranks.

    Attributes:
        pending: the arguments of each kind of call, in order.
    """

    def __init__(self, lockstep: Lockstep, host: HostPages) -> None:
        self._all, self._host = lockstep, host
        self.pending: dict[str, collections.deque[tuple[Any, ...]]] = collections.defaultdict(collections.deque)

    @override
    def decode(self, microbatch: int, batch: DecodeBatch) -> Sampled:
        sampled: Sampled = _awaited(Sampled)._replace(logprobs=_awaited(Logprobs))
        self.pending["decode"].append((batch, sampled))
        return sampled

    @override
    def prefill(self, batch: PrefillBatch) -> None:
        self.pending["prefill"].append((batch,))

    @override
    def prefill_logprobs(self, batch: PrefillBatch, following: Int32[np.ndarray, " chunk"]) -> Logprobs:
        logprobs: Logprobs = _awaited(Logprobs)
        self.pending["prefill_logprobs"].append((batch, following, logprobs))
        return logprobs

    @override
    def copy(self, source: Int32[np.ndarray, "groups copies"], target: Int32[np.ndarray, "groups copies"]) -> None:
        self.pending["copy"].append((source, target))

    @override
    def export(self, source: Int32[np.ndarray, "groups pages"], hosts: Sequence[int]) -> None:
        self.pending["export"].append((source, lambda pages: self._host.put(hosts, pages)))

    @override
    def settle(self, hosts: Sequence[int]) -> None:
        self._host.settle(hosts)

    @override
    def restore(self, hosts: Sequence[int], target: Int32[np.ndarray, "groups pages"]) -> None:
        self.pending["restore"].append((lambda: self._host.take(hosts, TRANSFER_PAGES), target))

    @override
    def pages(self, source: Int32[np.ndarray, "groups pages"]) -> UInt8[np.ndarray, "pages slots bytes"]:
        self._all.run()  # what is to be seen
        found: list[Array] = []
        self.pending["export"].append((source, found.append))
        self._all.run()
        return slot_bytes(np.asarray(found[0]))

    @override
    def set_slots(self, microbatch: int, fields: Mapping[str, Shaped[np.ndarray, "rows *shape"]]) -> None:
        self.pending["set_slots"].append((dict(fields),))

    @override
    def admit(self, slot: int, prompt: Bool[np.ndarray, " vocab"], bias: Float32[np.ndarray, " vocab"]) -> None:
        self.pending["admit"].append((np.int32(slot), prompt, bias))

    @override
    def save_slot(self, slot: int) -> SamplerSnapshot:
        state: SlotState = _awaited(SlotState)
        self.pending["save_slot"].append((np.int32(slot), state))
        return SamplerSnapshot(state)

    @override
    def restore_slot(self, slot: int, kept: SamplerSnapshot) -> None:
        self.pending["restore_slot"].append((np.int32(slot), kept.state))

    @override
    def wait(self) -> None:
        self._all.wait()

    @override
    def temporaries(self) -> int:
        return self._all.programs.temporaries()

    @override
    def parameters(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(self._all.params))

    @property
    @override
    def platform(self) -> str:
        return str(self._all.mesh.devices.flat[0].platform)


class _Nothing(NamedTuple):
    """What a call is given for a rank that did not ask for it."""

    decode: DecodeBatch
    pages: np.ndarray
    vocab: tuple[np.ndarray, np.ndarray]
    slot: np.int32


class Lockstep:
    """Every rank's parameters, pools and slots, and the programs of them all. Nothing waits, `wait` aside.

    Args:
        model: in the form of `spread_model`.
        engine: of each rank.
        mesh: of the ranks.
        progress: of the compilations.

    Attributes:
        ranks: what their engines call.
        programs: take and give arrays of all ranks (`jaxinfer.parallel.dp_attention`).
        classes: see `Proved`: chunks of sizes that are equal in it may run in one program.
    """

    def __init__(
        self,
        model: Model,
        engine: ResolvedEngine,
        limits: SamplingLimits,
        mesh: Mesh,
        progress: CompileProgress | None = None,
    ) -> None:
        self._engine, self._model, self.mesh = engine, model, mesh
        self._own, count = rank_sharding(mesh), mesh.shape["dp_attn"]
        self.classes: Mapping[int, int] = {size: size for size in engine.prefill_sizes}
        self.params = place_params(model, mesh)
        spec, page = model.cache_spec, engine.page_size
        self.pools = new_pools(spec, count * engine.num_pages, page, model.dtype, self._own)
        self._device_slots = [HostSlots(engine.rows, limits).snapshot()._asdict() for _ in range(count)]
        self._slots = self._placed(HostSlots(count * engine.rows, limits).snapshot())
        self.last_tokens, self.sampler = self._new_slots(count * engine.rows, limits)
        hosts = [HostPages(spec, engine.host_pages, page, model.dtype) for _ in range(count)]
        self.ranks = [RankExecutor(self, host) for host in hosts]
        stage = Stage(model)
        arrays = abstract_arrays(stage, engine, limits, mesh)
        self.programs: Any = compile_stages([stage], [arrays], engine, progress)[0]
        self._nothing = self._asks_nothing()

    def _placed(self, tree: Any) -> Any:
        return jax.device_put(tree, self._own)

    def _new_slots(self, rows: int, limits: SamplingLimits) -> tuple[Array, SlotState]:
        """What all slots sampled last, and what the sampler keeps of them, made where it stays."""
        vocab = self._model.config.vocab_size

        def new() -> tuple[Array, SlotState]:
            return jnp.zeros(rows, jnp.int32), new_state(rows, vocab, limits)

        made: tuple[Array, SlotState] = jax.jit(new, out_shardings=self._own)()
        return made

    def _asks_nothing(self) -> _Nothing:
        """Rows without a position, pages and slots beyond the last."""
        engine, groups, vocab = self._engine, len(self._model.cache_spec.windows), self._model.config.vocab_size
        none, tables = np.full(engine.rows, -1, np.int32), np.zeros((groups, engine.rows, engine.table_width), np.int32)
        owners = None if engine.speculative is None else np.arange(engine.rows, dtype=np.int32)
        pages = np.full((groups, max(COPIES, TRANSFER_PAGES)), engine.num_pages, np.int32)
        rows = np.zeros(vocab, np.bool_), np.zeros(vocab, np.float32)
        return _Nothing(DecodeBatch(none, none, none, tables, owners), pages, rows, np.int32(engine.rows))

    def run(self) -> None:
        """Make the calls that the ranks have asked for, in the order in which a step asks for them."""
        calls: dict[str, Callable[[list[Any]], None]] = {
            "export": self._export,
            "copy": self._copy,
            "restore": self._restore,
            "save_slot": self._keep,
            "restore_slot": self._resume,
            "admit": self._admit,
            "set_slots": self._set_slots,
            "prefill_logprobs": self._prefill_logprobs,
            "prefill": self._prefill,
            "decode": self._decode,
        }
        for kind, call in calls.items():
            while any(rank.pending[kind] for rank in self.ranks):
                taken = self._together if kind == "prefill" else self._next
                call(taken(kind))

    def _next(self, kind: str) -> list[Any]:
        """The next call of each rank; None where it has none."""
        return [rank.pending[kind].popleft() if rank.pending[kind] else None for rank in self.ranks]

    def wait(self) -> None:
        """Until all that was asked for has run."""
        self.run()
        jax.block_until_ready((self.pools, self.last_tokens))

    # ---- pages

    def _export(self, asked: list[Any]) -> None:
        none = self._nothing.pages[:, :TRANSFER_PAGES]
        pages = self.programs.export(self.pools, joined([none if own is None else own[0] for own in asked]))
        for own, part in zip(asked, self._parts(pages), strict=True):
            if own is not None:
                own[1](part)

    def _copy(self, asked: list[Any]) -> None:
        none = (self._nothing.pages[:, :COPIES],) * 2
        self.pools = self.programs.copy(self.pools, *joined([own or none for own in asked]))

    def _restore(self, asked: list[Any]) -> None:
        given = [None if own is None else own[0]() for own in asked]
        any_pages = next(pages for pages in given if pages is not None)  # they go nowhere
        pages = joined([any_pages if own is None else own for own in given])
        none = self._nothing.pages[:, :TRANSFER_PAGES]
        target = joined([none if own is None else own[1] for own in asked])
        self.pools = self.programs.restore(self.pools, pages, target)

    def _parts(self, array: Array) -> list[Array]:
        """Each rank's part, on its device."""
        where = {shard.device: shard.data for shard in array.addressable_shards}
        return [where[device] for device in self.mesh.devices.flat]

    # ---- slots

    def _set_slots(self, asked: list[Any]) -> None:
        changed = set[str]()
        for device_slots, own in zip(self._device_slots, asked, strict=True):
            if own is not None:
                device_slots.update(own[0])
                changed |= own[0].keys()
        fields = {
            name: np.concatenate([device_slots[name] for device_slots in self._device_slots])
            for name in sorted(changed)
        }
        self._slots = self._slots._replace(**self._placed(fields))

    def _slot_numbers(self, asked: list[Any]) -> Int32[np.ndarray, " ranks"]:
        return np.array([self._nothing.slot if own is None else own[0] for own in asked])

    def _admit(self, asked: list[Any]) -> None:
        rows = joined([self._nothing.vocab if own is None else own[1:] for own in asked])
        self.sampler = self.programs.admit(self.sampler, self._slot_numbers(asked), *rows)

    def _keep(self, asked: list[Any]) -> None:
        kept = self.programs.save_slot(self.sampler, self._slot_numbers(asked))
        for field, array in enumerate(kept):
            for own, part in zip(asked, self._parts(array), strict=True):
                if own is not None:
                    own[1][field].arrive(part)

    def _resume(self, asked: list[Any]) -> None:
        """Each row goes back to the device that it has never left; the others are given rows of their own."""
        slots, spare = self._slot_numbers(asked), self.programs.save_slot(self.sampler, self._slot_numbers(asked))
        rows = []
        for field, array in enumerate(spare):
            parts = zip(asked, self._parts(array), strict=True)
            own = [part if mine is None else mine[1][field].array for mine, part in parts]
            rows.append(jax.make_array_from_single_device_arrays(array.shape, self._own, own))
        self.sampler = self.programs.restore_slot(self.sampler, slots, SlotState(*rows))

    # ---- steps

    def _together(self, kind: str) -> list[Any]:
        """The next call of each rank whose chunks can run beside those of the largest size."""
        sizes = [rank.pending[kind][0][0].tokens.shape[1] if rank.pending[kind] else 0 for rank in self.ranks]
        largest, classes = max(sizes), self.classes
        fits = [size == largest or (size > 0 and classes[size] == classes[largest]) for size in sizes]
        return [rank.pending[kind].popleft()[0] if fit else None for rank, fit in zip(self.ranks, fits, strict=True)]

    def _prefill(self, asked: list[Any]) -> None:
        """A rank's chunks run in the widest program that one of them needs: the runner has proved it equal."""
        shapes = [batch.tokens.shape for batch in asked if batch is not None]
        side, size = max(count for count, _ in shapes), max(size for _, size in shapes)
        batch = joined([pack(self._chunks(own, side, size)) for own in asked])
        self.pools = self.programs.prefill[size, side](self.params, self.pools, batch, None)

    def _chunks(self, given: PrefillBatch | None, side: int, size: int) -> PrefillBatch:
        """As many chunks of this size, those that were not ``given`` empty."""
        starts = np.zeros(side, np.int32)
        tables = np.zeros((self._nothing.pages.shape[0], side, self._engine.table_width), np.int32)
        wide = PrefillBatch(np.zeros((side, size), np.int32), starts, starts.copy(), tables)
        if given is not None:
            count, chunk = given.tokens.shape
            wide.tokens[:count, :chunk], wide.starts[:count], wide.lengths[:count] = given[:3]
            wide.tables[:, :count] = given.tables
        return wide

    def _prefill_logprobs(self, asked: list[Any]) -> None:
        size = self._engine.prefill_sizes[-1]
        none = self._chunks(None, 1, size), np.zeros(size, np.int32)
        given = [none if own is None else own[:2] for own in asked]
        batch, following = joined([(pack(batch), following) for batch, following in given])
        self.pools, logprobs = self.programs.prefill_logprobs(self.params, self.pools, batch, None, following)
        self._deal(logprobs, [None if own is None else own[2] for own in asked], size)

    def _decode(self, asked: list[Any]) -> None:
        batch = joined([pack(self._nothing.decode if own is None else own[0]) for own in asked])
        state = StepState(self.pools, self.last_tokens, self.sampler)
        state, sampled = self.programs.decode(self.params, self._slots, state, batch, None)
        self.pools, self.last_tokens, self.sampler = state
        self._deal(sampled, [None if own is None else own[1] for own in asked], self._engine.rows)

    def _deal(self, results: Any, awaited: list[Any], rows: int) -> None:
        """To each rank that awaits them its rows of the results."""
        for number, own in enumerate(awaited):
            if own is not None:
                part = slice(number * rows, (number + 1) * rows)
                jax.tree.map(lambda array, mine, part=part: mine.arrive(array, part), results, own)
