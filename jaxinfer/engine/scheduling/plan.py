"""Plans and results of steps: small host records between scheduler and runner. No jax."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from collections.abc import Sequence as Row
from typing import NamedTuple

import numpy as np

from jaxinfer.engine.scheduling.buckets import Chunk
from jaxinfer.engine.scheduling.sequence import Sequence
from jaxinfer.kv.moves import Copy, Export, Import
from jaxinfer.types import PositionLogprobs


class PrefillPlan(NamedTuple):
    """``chunk`` of a sequence's prompt; ``logprobs``: the caller wants the log probabilities of its tokens."""

    sequence: Sequence
    chunk: Chunk
    logprobs: bool


class DecodePlan(NamedTuple):
    """One row of the decode program.

    ``position`` is the fed token's; ``token`` is -1 where the device sampled it last, and below where a draft model
    drafts it in this very step (`jaxinfer.spec.DeviceDrafter`). ``row`` is that of the sequence's slot in its
    microbatch, or for a draft token any row that is idle otherwise. ``branch`` is the slot of the KV cache whose pages
    it has, where it is of a further path (`Branch`); 0: it has the pages of the sequence.
    """

    sequence: Sequence
    row: int
    position: int
    token: int
    branch: int = 0


class LoraLoad(NamedTuple):
    """One part of an adapter (`jaxinfer.lora.parts`) that goes into a slot of the banks."""

    slot: int
    part: int
    arrays: Mapping[str, np.ndarray]


class Branch(NamedTuple):
    """A further path of a draft, in pages of its own: those of a ``slot`` of the KV cache behind all that have rows."""

    slot: int
    tokens: list[int]


class Draft(NamedTuple):
    """Draft tokens that rows of a step are fed, from position ``start`` on; see `DecodePlan` for those below 0. Further
    paths from there on are ``branches``."""

    sequence: Sequence
    start: int
    tokens: list[int]
    branches: tuple[Branch, ...] = ()

    @property
    def paths(self) -> list[list[int]]:
        return [self.tokens, *(branch.tokens for branch in self.branches)]

    @property
    def rows(self) -> int:
        """Rows that it takes: one for each token of each path, and the last known token's of each branch."""
        return sum(map(len, self.paths)) + len(self.branches)

    @property
    def size(self) -> int:
        """Tokens that are proposed: what paths begin with alike counts once."""
        if not self.branches:
            return len(self.tokens)
        return len({tuple(path[:end]) for path in self.paths for end in range(1, len(path) + 1)})

    def outcome(self) -> tuple[int, int]:
        """How many behind each other were accepted, and whether what was proposed next failed (1), or nothing was or
        the sequence ended before it (0). To be asked when the step's results are known."""
        paths = self.paths
        known = self.sequence.tokens[self.start : self.start + max(map(len, paths))].tolist()
        agree = ((one == other for one, other in zip(known, path, strict=False)) for path in paths)
        accepted = max(sum(itertools.takewhile(bool, each)) for each in agree)
        goes_on = any(len(path) > accepted and path[:accepted] == known[:accepted] for path in paths)
        return accepted, int(goes_on and accepted < len(known))


class Pairs(NamedTuple):
    """Positions of a sequence, from ``start`` up to ``end``, of which a draft head is to compute the pairs."""

    sequence: Sequence
    start: int
    end: int


class Preempted(NamedTuple):
    """A sequence that leaves ``slot`` and will be back: its sampler state must be kept."""

    sequence: Sequence
    slot: int


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """One step, in the order in which the device runs it.

    Attributes:
        exports, copies, imports: pages that go to the host, to other pages, and back from the host.
        preempted: sequences that are preempted; their slots may be taken again in this step.
        admitted: sequences that take a slot, new or back from the host.
        prefills: prompt chunks; those of one prompt in order.
        decodes: one token each; a sequence's rows in order of position.
        steps: how often the decode rows run, each time on what they sampled before (at most: until one stops).
        microbatch: the part of the slots that the decode rows belong to, see `ResolvedEngine.microbatches`.
        drafts: those among the decode rows; None: sequences did not wait for any.
        draft_prefills: chunks of known tokens that the draft model has not seen, before it drafts.
        pairs: what a draft head has not seen of the sequences that it drafts for.
        masks: of decode rows, by row, that a grammar holds: the tokens that they may say, as int32 words.
        forced: drafts among the decode rows, besides ``drafts``, of what a grammar leaves no choice about.
        loads: parts of adapters, to be written before any program runs.
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
    loads: Row[LoraLoad] = ()

    def __bool__(self) -> bool:
        runs, moves = self.prefills or self.decodes, self.exports or self.copies or self.imports
        return bool(runs or moves or self.admitted or self.preempted or self.loads)


@dataclasses.dataclass(frozen=True)
class StepResult:
    """Results of a plan from the device.

    ``tokens[i]`` and ``logprobs[i]`` are those of decode row i, one entry for each of the steps that ran
    (``logprobs[i]`` is empty where the request asked for none); ``prompt_logprobs[i]`` belongs to prefill i.
    Whoever reads the result owns its lists.
    """

    plan: StepPlan
    tokens: list[list[int]]
    logprobs: list[Row[PositionLogprobs]]
    prompt_logprobs: list[list[PositionLogprobs]]
