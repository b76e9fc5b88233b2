"""Commands of an executor as data: host numbers and arrays, which can be sent to another process unchanged.

A new operation is one dataclass here and one case in `LocalExecutor.run`. Fields of a command must be supported by
`jaxinfer.parallel.messages`: integers, tuples of them, arrays, records and mappings of arrays.
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
from jaxinfer.engine.scheduling.usage import Usage
from jaxinfer.models.model import Model
from jaxinfer.sampling import Logprobs, Sampled


class DecodeBatch(NamedTuple):
    """Decode rows of one token each, from the host.

    ``positions`` -1 marks an idle row; ``tokens`` -1 takes the token that the slot sampled last, -2 the first token
    that a draft model drafted for it (`Draft`), -3 the second, and so on. ``generated``: tokens that the sequence has
    generated before the one that this row samples.

    ``owners``: the slot whose parameters each row uses. A row is its slot's own where the two are equal; any other row
    is fed a draft, see `jaxinfer.sampling.drafts`. None: all rows are their slots' own. ``branches``: path of each row
    among a slot's drafts (0: that of its own row); None: there is one.

    ``loras``: bank slot of each row's adapter; -1: no adapter. None: the engine has no adapters.

    ``shifts``: what is added to each position for the rotary position, after images; None: the model has one axis.
    """

    tokens: Int[Any, " rows"]
    positions: Int[Any, " rows"]
    generated: Int[Any, " rows"]
    tables: Int[Any, "groups rows width"]
    owners: Int[Any, " rows"] | None = None
    branches: Int[Any, " rows"] | None = None
    loras: Int[Any, " rows"] | None = None
    shifts: Int[Any, " rows"] | None = None


class DraftBatch(NamedTuple):
    """Inputs of a draft model, one row for each slot of a microbatch, with the pages of the slot.

    ``tokens`` are fed at ``positions`` (-1: the row is idle), ``limits`` more are drafted after each. ``generated``: as
    in `DecodeBatch`, for the first drafted token.
    """

    tokens: Int[Any, " rows"]
    positions: Int[Any, " rows"]
    generated: Int[Any, " rows"]
    limits: Int[Any, " rows"]
    tables: Int[Any, "groups rows width"]


class HeadBatch(NamedTuple):
    """Pairs that a draft head has not seen, and the slots of a microbatch that it drafts for.

    A pair is the kept feature of a position (-1: the row is idle) of the slot ``owners``, and the token that follows.
    Each slot continues after the pair in row ``last`` with ``limits`` tokens of each path (0: none), before which
    ``generated`` tokens were generated. ``tables`` of paths begin with the page of position ``bases``: earlier
    positions were never computed.
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

    A chunk of length 0 is idle. ``following``: the token after each chunk, for a draft head; None: the head does not
    run on the chunks. ``loras``: adapter of each chunk, as of a row of `DecodeBatch`.

    Of models with a vision tower, else None: ``images`` is the row of the encoder cache that is the embedding of each
    token, -1 of text; ``axes`` are rotary positions on three axes, None where there is one; ``ends`` the last position
    that each token sees, None where no image is attended to in both directions.
    """

    tokens: Int[Any, "batch chunk"]
    starts: Int[Any, " batch"]
    lengths: Int[Any, " batch"]
    tables: Int[Any, "groups batch width"]
    following: Int[Any, " batch"] | None = None
    loras: Int[Any, " batch"] | None = None
    images: Int[Any, "batch chunk"] | None = None
    axes: Int[Any, "batch 3 chunk"] | None = None
    ends: Int[Any, "batch chunk"] | None = None

    def for_drafts(self) -> PrefillBatch:
        """Return the chunks as a draft model or head takes them: without adapters and images."""
        return self._replace(loras=None, images=None, axes=None, ends=None)


def as_text(batch: PrefillBatch, engine: ResolvedEngine) -> PrefillBatch:
    """Return chunks of text with the arrays that an engine with images needs."""
    if engine.images is None:
        return batch
    count, size = batch.tokens.shape
    at = (batch.starts[:, None] + np.arange(size, dtype=np.int32)).astype(np.int32)
    axes = at[:, None] + np.zeros((3, 1), np.int32) if engine.images.axes else None
    ends = at if engine.images.both_ways else None
    return batch._replace(images=np.full((count, size), -1, np.int32), axes=axes, ends=ends)


def idle_batch(engine: ResolvedEngine, groups: int, rows: int | None = None) -> DecodeBatch:
    """Make a batch of ``rows`` idle rows (None: all of a microbatch). ``groups``: number of cache groups."""
    rows = rows or engine.decode_sizes[-1]
    none, tables = np.full(rows, -1, np.int32), np.zeros((groups, rows, engine.table_width), np.int32)
    owners = None if engine.speculative is None else np.arange(rows, dtype=np.int32)
    branches = np.zeros(rows, np.int32) if engine.drafts_trees else None
    shifts = np.zeros(rows, np.int32) if engine.images is not None and engine.images.axes else None
    return DecodeBatch(none, none, none, tables, owners, branches, none if engine.lora_slots else None, shifts)


def with_rows(batch: DecodeBatch, like: DecodeBatch) -> DecodeBatch:
    """Resize the batch to the rows of ``like``, which also provides additional rows."""
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
    """Operation of an executor: a frozen dataclass. ``Result`` is the return type of `Executor.run` for it.

    Attributes:
        by_last_stage: only processes with the last pipeline stage have results; the others return ``...`` for each.
    """

    by_last_stage: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        dataclasses.dataclass(frozen=True, eq=False)(cls)


# ---- steps


class Decode(Command[Sampled]):
    """Sample one token for each row of a microbatch. ``masks``: allowed tokens of rows with a grammar, see
    `jaxinfer.sampling.sample`; None: there is no grammar. ``asks``: what rows ask of the outputs for training; None:
    nothing."""

    microbatch: int
    batch: DecodeBatch
    masks: Int32[np.ndarray, "rows words"] | None = None
    asks: Int32[np.ndarray, "rows asks"] | None = None
    by_last_stage = True


class DecodeMany(Command[tuple[Sampled, Array]]):
    """Run several decode steps in one call, with one pipeline stage only. Also returns the number of steps that ran."""

    batch: DecodeBatch
    steps: int
    by_last_stage = True


class Draft(Command[Array]):
    """Draft tokens for the slots of a microbatch, by the draft model: ``[rows, drafts + 1]``, of which the last is no
    draft. Rows of the next `Decode` with placeholder tokens read them on the device."""

    microbatch: int
    batch: DraftBatch
    by_last_stage = True


class HeadDraft(Command[Array]):
    """Draft like `Draft`, by a head that reads the features kept by the model's steps: ``[rows, drafts]``."""

    microbatch: int
    batch: HeadBatch
    by_last_stage = True


class DraftPrefill(Command[None]):
    """Compute the draft model's keys and values of tokens that only the model itself has seen."""

    batch: PrefillBatch


class Prefill(Command[None]):
    """Compute keys and values of prompt chunks."""

    batch: PrefillBatch


class PromptNumbers(NamedTuple):
    """What a chunk returns of its prompt: log probabilities of the tokens that follow, and the experts of the chunk's
    own tokens in each layer that has any; None: the engine does not return them."""

    logprobs: Logprobs
    routed: Int32[Array, "chunk layers top_k"] | None = None


class PrefillLogprobs(Command[PromptNumbers]):
    """Compute one chunk of the largest size, and the log probability of each token ``following`` in the prompt."""

    batch: PrefillBatch
    following: Int32[np.ndarray, " chunk"]
    by_last_stage = True


# ---- images


class Encode(Command[None]):
    """Encode one image into ``rows`` of the encoder cache, for prompt chunks that follow. ``layout``: see `Tower`."""

    patches: UInt8[np.ndarray, "patches values"]
    layout: Mapping[str, Shaped[np.ndarray, "..."]]
    rows: Int32[np.ndarray, " outputs"]


# ---- adapters


class LoadLora(Command[None]):
    """Write the weights of one adapted module (`jaxinfer.lora.parts`) into a bank slot, for programs that follow."""

    slot: int
    part: int
    arrays: Mapping[str, Float32[np.ndarray, "..."]]


# ---- pages, in all layers. Ids are by group of the cache; a target beyond the pool is dropped.


class CopyPages(Command[None]):
    """Copy pages to other pages."""

    source: Int32[np.ndarray, "groups copies"]
    target: Int32[np.ndarray, "groups copies"]


class ExportPages(Command[None]):
    """Copy pages to host pages, as many as one call takes (`jaxinfer.kv.transfer.TRANSFERS`)."""

    source: Int32[np.ndarray, "groups pages"]
    hosts: Sequence[int]


class ImportPages(Command[None]):
    """Copy pages back from the host, as many as one call takes."""

    hosts: Sequence[int]
    target: Int32[np.ndarray, "groups pages"]


class ReadPages(Command[UInt8[np.ndarray, "pages slots bytes"]]):
    """Read the bytes of each slot of pages, as many as one call exports, as far as the process has them. Blocks."""

    source: Int32[np.ndarray, "groups pages"]


class ReadStates(Command[UInt8[np.ndarray, " bytes"]]):
    """Read the bytes of states in all layers, as far as the process has them. Blocks."""

    states: Sequence[int]


# ---- slots; each is a row of its microbatch


class SetSlots(Command[None]):
    """Set sampling parameters of a microbatch's slots, by name in `SlotParams`."""

    microbatch: int
    fields: Mapping[str, Shaped[np.ndarray, "rows *shape"]]


class AdmitSlot(Command[None]):
    """Reset the sampler state of a slot for a new request."""

    slot: int
    prompt: Bool[np.ndarray, " vocab"]
    bias: Float32[np.ndarray, " vocab"]


class SaveSlot(Command[None]):
    """Copy the sampler state of a slot; the executor stores it under the number ``snapshot``."""

    slot: int
    snapshot: int


class RestoreSlot(Command[None]):
    """Restore a slot's sampler state from a snapshot."""

    slot: int
    snapshot: int


class DropSnapshots(Command[None]):
    """Drop snapshots."""

    snapshots: Sequence[int]


class ReadLastTokens(Command[Int32[np.ndarray, " rows"]]):
    """Read the tokens that the slots of a microbatch sampled last. Blocks."""

    microbatch: int
    by_last_stage = True


COMMANDS: Mapping[str, type[Command[Any]]] = {kind.__name__: kind for kind in Command.__subclasses__()}
"""Commands by name: no other code runs on behalf of another process."""


@runtime_checkable
class Executor(Protocol):
    """Owner of all device memory of an engine; runs commands in the order of the calls."""

    def run[Result](self, command: Command[Result]) -> Result:
        """Launch a command. Does not block unless the command documents it."""

    def wait(self) -> None:
        """Wait until all launched commands have run."""

    def usage(self) -> Usage:
        """Return the memory of the devices. From any thread."""
        return Usage()

    def temporaries(self) -> int:
        """Return the bytes that the program with the largest working set uses on a device while it runs."""
        return 0

    def stage(self, model: Model, *, drafts: bool = False) -> Any:
        """Place parameters of a prepared model, perhaps not all, or of its draft model, next to those in use. From any
        thread; does not wait for the copies."""
        raise _no_memory()

    def swap(self, weights: Sequence[Any]) -> None:
        """Use what `stage` has placed, for programs that follow."""
        raise _no_memory()

    def sleep(self, *, cache: bool, weights: bool) -> None:
        """Free the memory of pools and encoder cache, or of the parameters."""
        raise _no_memory()

    def wake(self) -> None:
        """Make empty pools."""
        raise _no_memory()

    def deleted(self) -> str | None:
        """Return the path of a parameter that another owner of its array has deleted."""
        return None

    def digest(self) -> str | None:
        """Return a digest of all executables; None: it is not known for all of them."""
        return None


def _no_memory() -> NotImplementedError:
    return NotImplementedError("this executor runs programs with the memory of another one")


class SamplerSnapshot:
    """Number of a snapshot that executors keep as long as this object is referenced."""

    def __init__(self, number: int) -> None:
        self.number = number


class SnapshotNumbers:
    """Allocator of snapshot numbers that records those without references."""

    def __init__(self) -> None:
        self._numbers, self._dropped = itertools.count(), collections.deque[int]()

    def new(self) -> SamplerSnapshot:
        snapshot = SamplerSnapshot(next(self._numbers))
        weakref.finalize(snapshot, self._dropped.append, snapshot.number)
        return snapshot

    def take_dropped(self) -> tuple[int, ...]:
        """Return the snapshots to drop, each once."""
        return tuple(self._dropped.popleft() for _ in range(len(self._dropped)))
