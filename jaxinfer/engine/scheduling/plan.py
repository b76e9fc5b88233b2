"""Plans and results of steps: small host records between scheduler and runner. No jax."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from collections.abc import Sequence as Row
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32

from jaxinfer.engine.scheduling.buckets import Chunk
from jaxinfer.engine.scheduling.encoder_cache import Encode
from jaxinfer.engine.scheduling.sequence import Sequence
from jaxinfer.kv.store import Copy, Export, Import
from jaxinfer.lora.slots import Load
from jaxinfer.types import PositionLogprobs


class PrefillPlan(NamedTuple):
    """``chunk`` of a sequence's prompt; ``logprobs``: the request wants the log probabilities of its tokens.
    ``rows``: row of the encoder cache for each token, -1 where it is text; None: all are."""

    sequence: Sequence
    chunk: Chunk
    logprobs: bool
    rows: Int32[np.ndarray, " tokens"] | None = None


class DecodePlan(NamedTuple):
    """One row of the decode program.

    ``position`` is that of the fed token; ``token`` is -1 where the device sampled it last, and less where a draft
    model drafts it in this very step (`jaxinfer.spec.DeviceDrafter`). ``row`` is that of the sequence's slot in its
    microbatch, or for a draft token any otherwise idle row. ``branch`` is the KV slot whose pages the row uses, where
    it is of a further path (`Branch`); 0: the pages of the sequence.
    """

    sequence: Sequence
    row: int
    position: int
    token: int
    branch: int = 0


class Branch(NamedTuple):
    """A further path of a draft, with its own pages: those of a KV ``slot`` after all slots that have rows."""

    slot: int
    tokens: list[int]


class Draft(NamedTuple):
    """Draft tokens that rows of a step are fed, from position ``start`` on; see `DecodePlan` for those below 0.
    ``branches`` are further paths from there on."""

    sequence: Sequence
    start: int
    tokens: list[int]
    branches: tuple[Branch, ...] = ()

    @property
    def paths(self) -> list[list[int]]:
        return [self.tokens, *(branch.tokens for branch in self.branches)]

    @property
    def rows(self) -> int:
        """Number of rows: one for each token of each path, and one for the last known token of each branch."""
        return sum(map(len, self.paths)) + len(self.branches)

    @property
    def size(self) -> int:
        """Number of proposed tokens: common prefixes of paths count once."""
        if not self.branches:
            return len(self.tokens)
        return len({tuple(path[:end]) for path in self.paths for end in range(1, len(path) + 1)})

    def outcome(self) -> tuple[int, int]:
        """Return the number of accepted tokens along the best path, and whether the next proposed token was rejected
        (1), or there was none or the sequence ended before it (0). To be called once the step's results are known."""
        paths = self.paths
        known = self.sequence.tokens[self.start : self.start + max(map(len, paths))].tolist()
        agree = ((one == other for one, other in zip(known, path, strict=False)) for path in paths)
        accepted = max(sum(itertools.takewhile(bool, each)) for each in agree)
        goes_on = any(len(path) > accepted and path[:accepted] == known[:accepted] for path in paths)
        return accepted, int(goes_on and accepted < len(known))


class Pairs(NamedTuple):
    """Positions of a sequence, from ``start`` up to ``end``, for which a draft head is to compute the pairs."""

    sequence: Sequence
    start: int
    end: int


class Preempted(NamedTuple):
    """A sequence that is preempted from ``slot`` and will resume: its sampler state must be kept."""

    sequence: Sequence
    slot: int


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """One step, in the order in which the device runs it.

    Attributes:
        exports, copies, imports: pages to copy to the host, to other pages, and back from the host.
        preempted: sequences that are preempted; their slots may be taken again in this step.
        admitted: sequences that take a slot, new or swapped in.
        prefills: prompt chunks; those of one prompt in order.
        decodes: one token each; a sequence's rows in order of position.
        steps: how often the decode rows run, each time on their last samples (at most: until one stops).
        microbatch: microbatch of slots that the decode rows belong to, see `ResolvedEngine.microbatches`.
        drafts: drafts among the decode rows; None: the step did not wait for drafts.
        draft_prefills: chunks of known tokens that the draft model has not seen, before it drafts.
        pairs: pairs that a draft head has not seen, of the sequences that it drafts for.
        masks: allowed tokens of grammar-constrained decode rows, by row, as int32 words.
        forced: drafts among the decode rows, besides ``drafts``, of tokens forced by a grammar.
        loads: adapter weights, to be written before any program runs.
        encodes: images to encode before the chunks.
    """

    exports: list[Export] = dataclasses.field(default_factory=list)
    copies: list[Copy] = dataclasses.field(default_factory=list)
    imports: list[Import] = dataclasses.field(default_factory=list)
    preempted: list[Preempted] = dataclasses.field(default_factory=list)
    admitted: list[Sequence] = dataclasses.field(default_factory=list)
    prefills: list[PrefillPlan] = dataclasses.field(default_factory=list)
    decodes: list[DecodePlan] = dataclasses.field(default_factory=list)
    steps: int = 1
    microbatch: int = 0
    drafts: list[Draft] | None = None
    draft_prefills: list[PrefillPlan] = dataclasses.field(default_factory=list)
    pairs: list[Pairs] = dataclasses.field(default_factory=list)
    masks: Mapping[int, np.ndarray] = dataclasses.field(default_factory=dict)
    forced: list[Draft] = dataclasses.field(default_factory=list)
    loads: Row[Load] = ()
    encodes: Row[Encode] = ()

    def __bool__(self) -> bool:
        runs, moves = self.prefills or self.decodes or self.encodes, self.exports or self.copies or self.imports
        return bool(runs or moves or self.admitted or self.preempted or self.loads)


@dataclasses.dataclass(frozen=True)
class StepResult:
    """Results of a plan from the device.

    ``tokens[i]`` and ``logprobs[i]`` are those of decode row i, one entry per executed step (``logprobs[i]`` is empty
    where the request wants none); ``prompt_logprobs[i]`` belongs to prefill i. The caller owns the lists.
    """

    plan: StepPlan
    tokens: list[list[int]]
    logprobs: list[Row[PositionLogprobs]]
    prompt_logprobs: list[list[PositionLogprobs]]


@runtime_checkable
class PlanRunner(Protocol):
    """Executes plans. The result of `launch` is opaque to the loop."""

    def launch(self, plan: StepPlan) -> Any:
        """Start a step without waiting for it; None: the plan is empty."""

    def read(self, launched: Any) -> StepResult | None:
        """Wait for a step and copy its results to the host; None for None."""
