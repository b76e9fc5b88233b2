"""Plans and results of steps: small host records between scheduler and runner. No jax."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence as Row
from typing import NamedTuple

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
    microbatch, or for a draft token any row that is idle otherwise.
    """

    sequence: Sequence
    row: int
    position: int
    token: int


class Draft(NamedTuple):
    """Draft tokens that rows of a step are fed, from position ``start`` on; see `DecodePlan` for those below 0."""

    sequence: Sequence
    start: int
    tokens: list[int]

    def outcome(self) -> tuple[int, int]:
        """How many were accepted, and whether the next one failed (1) or the sequence ended before it (0). To be asked
        when the step's results are known."""
        known = self.sequence.tokens[self.start : self.start + len(self.tokens)].tolist()
        agree = (one == other for one, other in zip(known, self.tokens, strict=False))
        accepted = sum(itertools.takewhile(bool, agree))
        return accepted, int(accepted < len(known))


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

    def __bool__(self) -> bool:
        runs, moves = self.prefills or self.decodes, self.exports or self.copies or self.imports
        return bool(runs or moves or self.admitted or self.preempted)


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
