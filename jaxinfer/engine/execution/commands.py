"""Commands of an executor as data: numbers and arrays of the host, which may cross to another process as they are.

A new operation is one dataclass here and one case in `LocalExecutor.run`. What a command may hold is what
`jaxinfer.parallel.messages` takes: integers, tuples of them, arrays, records and mappings of arrays.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, dataclass_transform, runtime_checkable

import numpy as np
from jaxtyping import Array, Bool, Float32, Int, Int32, Shaped, UInt8

from jaxinfer.config import ResolvedEngine
from jaxinfer.sampling import Logprobs, Sampled


class DecodeBatch(NamedTuple):
    """One token per row, from the host.

    ``positions`` -1 marks an idle row; ``tokens`` -1 takes what the slot sampled last, -2 the first token that a draft
    model drafted for it (`Draft`), -3 the second, and so on. ``generated``: tokens that the sequence has generated
    before the one that this row samples.

    ``owners`` names the slot whose parameters each row uses. A row is its slot's own where the two are equal; any other
    one is fed a draft, see `jaxinfer.sampling.drafts`. None: all rows are their slots' own. ``branches`` tells apart
    the paths of a slot's drafts (0: the one of its own row); None: there is one.

    ``loras``: the bank slot of each row's adapter; -1: it has none. None: the engine has no adapters.
    """

    tokens: Int[Any, " rows"]
    positions: Int[Any, " rows"]
    generated: Int[Any, " rows"]
    tables: Int[Any, "groups rows width"]
    owners: Int[Any, " rows"] | None = None
    branches: Int[Any, " rows"] | None = None
    loras: Int[Any, " rows"] | None = None


class DraftBatch(NamedTuple):
    """Where a draft model goes on, one row for each slot of a microbatch; its pages are the slot's.

    ``tokens`` are fed at ``positions`` (-1: the row is idle), ``limits`` more are drafted behind each. ``generated``:
    as in `DecodeBatch`, of the first token that is drafted.
    """

    tokens: Int[Any, " rows"]
    positions: Int[Any, " rows"]
    generated: Int[Any, " rows"]
    limits: Int[Any, " rows"]
    tables: Int[Any, "groups rows width"]


class HeadBatch(NamedTuple):
    """Pairs of a draft head that it has not seen, and the slots of a microbatch that it drafts for.

    A pair is the kept feature of a position (-1: the row is idle) of the slot ``owners``, and the token that follows.
    Each slot goes on behind the pair in row ``last`` with ``limits`` tokens of each path (0: none), before which
    ``generated`` were. ``tables`` of paths begin with the page of position ``bases``: what lies before was never
    computed.
    """

    owners: Int[Any, " rows"]
    tokens: Int[Any, " rows"]
    positions: Int[Any, " rows"]
    last: Int[Any, " rows"]
    generated: Int[Any, " rows"]
    bases: Int[Any, " rows"]
    limits: Int[Any, "rows paths"]
    tables: Int[Any, "groups paths rows width"]


class PrefillBatch(NamedTuple):
    """Prompt chunks: ``lengths`` tokens from ``starts``; ``tokens`` is padded to the program's size.

    A chunk of length 0 is idle. ``following``: the tokens behind the chunks, for a draft head; None: it sees none of
    them. ``loras``: of each chunk, as of a row of `DecodeBatch`.
    """

    tokens: Int[Any, "batch chunk"]
    starts: Int[Any, " batch"]
    lengths: Int[Any, " batch"]
    tables: Int[Any, "groups batch width"]
    following: Int[Any, " batch"] | None = None
    loras: Int[Any, " batch"] | None = None


def idle_batch(engine: ResolvedEngine, groups: int, rows: int | None = None) -> DecodeBatch:
    """So many rows (None: all of a microbatch), of which none decodes. ``groups`` of the cache."""
    rows = rows or engine.decode_sizes[-1]
    none, tables = np.full(rows, -1, np.int32), np.zeros((groups, rows, engine.table_width), np.int32)
    owners = None if engine.speculative is None else np.arange(rows, dtype=np.int32)
    branches = np.zeros(rows, np.int32) if engine.drafts_trees else None
    return DecodeBatch(none, none, none, tables, owners, branches, none if engine.lora_slots else None)


def with_rows(batch: DecodeBatch, like: DecodeBatch) -> DecodeBatch:
    """The batch with as many rows as ``like``, whose own fill it up."""
    count, rows = batch.positions.shape[0], like.positions.shape[0]
    tables = np.concatenate([batch.tables[:, :rows], like.tables[:, count:]], axis=1)
    pairs = {name: (getattr(batch, name), getattr(like, name)) for name in batch._fields if name != "tables"}
    filled = {
        name: None if own is None else np.concatenate([own[:rows], other[count:]])
        for name, (own, other) in pairs.items()
    }
    return DecodeBatch(tables=tables, **filled)


@dataclass_transform(frozen_default=True, eq_default=False)
class Command[Result]:
    """Something that an executor does: a frozen dataclass. ``Result`` is what `Executor.run` returns for it.

    Attributes:
        by_last_stage: only a process that has the last pipeline stage has results; others have None in their place.
    """

    by_last_stage: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        dataclasses.dataclass(frozen=True, eq=False)(cls)


# ---- steps


class Decode(Command[Sampled]):
    """Sample one token for each row of a microbatch. ``masks``: what rows with a grammar may say, see
    `jaxinfer.sampling.sample`; None: there is none."""

    microbatch: int
    batch: DecodeBatch
    masks: Int32[np.ndarray, "rows words"] | None = None
    by_last_stage = True


class DecodeMany(Command[tuple[Sampled, Array]]):
    """Run several decode steps in one call, where there is one stage. Also gives how many ran."""

    batch: DecodeBatch
    steps: int
    by_last_stage = True


class Draft(Command[Array]):
    """Draft tokens for the slots of a microbatch, by the draft model: ``[rows, drafts + 1]``, of which the last is no
    draft. Those of the next `Decode` that ask for them are fed them on the device."""

    microbatch: int
    batch: DraftBatch
    by_last_stage = True


class HeadDraft(Command[Array]):
    """Draft as by `Draft`, by a head that reads what the model's steps have kept: ``[rows, drafts]``."""

    microbatch: int
    batch: HeadBatch
    by_last_stage = True


class DraftPrefill(Command[None]):
    """Compute the draft model's keys and values of tokens that only the model itself has seen."""

    batch: PrefillBatch


class Prefill(Command[None]):
    """Compute keys and values of prompt chunks."""

    batch: PrefillBatch


class PrefillLogprobs(Command[Logprobs]):
    """Compute one chunk of the largest size, and how probable each token ``following`` in the prompt was."""

    batch: PrefillBatch
    following: Int32[np.ndarray, " chunk"]
    by_last_stage = True


# ---- adapters


class LoadLora(Command[None]):
    """Write one part of an adapter (`jaxinfer.lora.parts`) into a slot of the banks, for programs that follow."""

    slot: int
    part: int
    arrays: Mapping[str, Float32[np.ndarray, "..."]]


# ---- pages, in all layers. Ids stand by group of the cache; a target beyond the pool is dropped.


class CopyPages(Command[None]):
    """Copy pages to other pages."""

    source: Int32[np.ndarray, "groups copies"]
    target: Int32[np.ndarray, "groups copies"]


class ExportPages(Command[None]):
    """Copy pages to pages of the host, as many as one call takes (`jaxinfer.kv.transfer.TRANSFERS`)."""

    source: Int32[np.ndarray, "groups pages"]
    hosts: Sequence[int]


class ImportPages(Command[None]):
    """Copy pages back from the host, as many as one call takes."""

    hosts: Sequence[int]
    target: Int32[np.ndarray, "groups pages"]


class ReadPages(Command[UInt8[np.ndarray, "pages slots bytes"]]):
    """Read the bytes of each slot of pages, as many as one call exports, as far as the process has them. Waits."""

    source: Int32[np.ndarray, "groups pages"]


class ReadStates(Command[UInt8[np.ndarray, " bytes"]]):
    """Read the bytes of states in all layers, as far as the process has them. Waits."""

    states: Sequence[int]


# ---- slots; each is a row of its microbatch


class SetSlots(Command[None]):
    """Set sampling parameters of a microbatch's slots, by name in `SlotParams`."""

    microbatch: int
    fields: Mapping[str, Shaped[np.ndarray, "rows *shape"]]


class AdmitSlot(Command[None]):
    """Begin the sampler state of a slot anew."""

    slot: int
    prompt: Bool[np.ndarray, " vocab"]
    bias: Float32[np.ndarray, " vocab"]


class SaveSlot(Command[None]):
    """Copy the sampler state of a slot; the executor keeps it by the number ``snapshot``."""

    slot: int
    snapshot: int


class RestoreSlot(Command[None]):
    """Give a slot the sampler state of a snapshot."""

    slot: int
    snapshot: int


class SaveSampler(Command[None]):
    """Copy the sampler state of all slots of a microbatch. Waits."""

    microbatch: int
    snapshot: int


class RestoreSampler(Command[None]):
    """Give all slots of a microbatch the sampler state of a snapshot."""

    microbatch: int
    snapshot: int


class DropSnapshots(Command[None]):
    """Forget snapshots."""

    snapshots: Sequence[int]


class ReadLastTokens(Command[Int32[np.ndarray, " rows"]]):
    """Read what the slots of a microbatch sampled last. Waits."""

    microbatch: int
    by_last_stage = True


COMMANDS: Mapping[str, type[Command[Any]]] = {kind.__name__: kind for kind in Command.__subclasses__()}
"""Commands by name: nothing else is run for another process."""


@runtime_checkable
class Executor(Protocol):
    """Owns all device memory of an engine and runs commands in the order of the calls."""

    def run[Result](self, command: Command[Result]) -> Result:
        """Send a command on its way. Waits for nothing where the command does not say so."""
        ...

    def wait(self) -> None:
        """Wait until all that was sent has run."""
        ...

    def temporaries(self) -> int:
        """Bytes that the hungriest program uses on a device while it runs."""
        ...

    def digest(self) -> str | None:
        """Of all its executables; None: nobody knows those of all."""
        ...


class SamplerSnapshot:
    """The number of a snapshot that executors keep, as long as somebody refers to this."""

    def __init__(self, number: int) -> None:
        self.number = number


class SnapshotNumbers:
    """Gives out numbers of snapshots and notes those that nobody refers to any more."""

    def __init__(self) -> None:
        self._numbers, self._dropped = itertools.count(), collections.deque[int]()

    def new(self) -> SamplerSnapshot:
        snapshot = SamplerSnapshot(next(self._numbers))
        weakref.finalize(snapshot, self._dropped.append, snapshot.number)
        return snapshot

    def take_dropped(self) -> tuple[int, ...]:
        """The snapshots to forget, once."""
        return tuple(self._dropped.popleft() for _ in range(len(self._dropped)))
