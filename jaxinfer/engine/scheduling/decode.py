"""The rows of the decode program: one for each sequence that can decode, and drafts in those that are idle. No jax."""

from __future__ import annotations

from collections.abc import Mapping

from jaxinfer.config import ResolvedEngine
from jaxinfer.engine.scheduling.drafts import DraftPlanner
from jaxinfer.engine.scheduling.pages import SequencePages
from jaxinfer.engine.scheduling.plan import DecodePlan, Draft
from jaxinfer.engine.scheduling.sequence import Sequence


class DecodePlanner:
    """Plans rows, advances the scheduled lengths of their sequences, and takes the pages that they need.

    Args:
        drafts: plans tokens to verify in idle rows; None: no speculation.
    """

    def __init__(self, engine: ResolvedEngine, pages: SequencePages, drafts: DraftPlanner | None) -> None:
        self._engine, self._pages, self._drafts = engine, pages, drafts
        self.microbatch = 0
        """Microbatch whose slots decode in the plan that is being made."""

    # ---- microbatches

    def advance(self, running: Mapping[int, Sequence]) -> None:
        """Go on to the next microbatch: one decodes in each plan, in turn, of those that can; ``running`` by slot."""
        count = self._engine.microbatches
        after = [(self.microbatch + 1 + more) % count for more in range(count)]
        if count > 1:
            ready = {slot % count for slot, sequence in running.items() if not sequence.prefilling}
            after = [microbatch for microbatch in after if microbatch in ready] or after
        self.microbatch = after[0]

    def members(self, running: Mapping[int, Sequence]) -> Mapping[int, Sequence]:
        """The running sequences whose slots decode in this plan."""
        count = self._engine.microbatches
        if count == 1:
            return running
        return {slot: sequence for slot, sequence in running.items() if slot % count == self.microbatch}

    # ---- rows

    def plan(
        self, running: Mapping[int, Sequence], *, alone: bool, spare: int | None = None
    ) -> tuple[list[DecodePlan], int, list[Draft] | None]:
        """The rows of a step, how many steps the device may run without the host, and the drafts among the rows.

        Args:
            alone: nobody waits, and no prompt is computed in this step.
            spare: pages that drafts with several paths leave for others; None: they get none.
        """
        rows: list[DecodePlan] = []
        count, members = self._engine.microbatches, self.members(running)
        if self._drafts is not None:
            self._drafts.begin(members.values(), len(members))
        waits = self._drafts is not None and self._drafts.waits
        if waits and any(sequence.in_flight for sequence in members.values()):
            return [], 1, None  # all wait for all: else each step would have some of them
        for slot, sequence in members.items():
            position = sequence.scheduled
            if position < sequence.prefill_end or position >= sequence.final_length:
                continue
            if position >= sequence.capacity and not self._pages.extend(sequence, position + 1):
                continue
            token = sequence.token_at(position)
            if token is None:
                continue
            rows.append(DecodePlan(sequence, slot // count, position, token))
            sequence.scheduled, sequence.sampled = position + 1, position
            sequence.in_flight += 1
        steps = self._steps(rows, alone) if self._engine.multi_step > 1 else 1
        if self._drafts is None:
            return rows, steps, None
        rows, drafts = self._drafts.add(rows, spare)
        return rows, steps, drafts

    def _steps(self, rows: list[DecodePlan], alone: bool) -> int:
        """Number of steps that the device may run alone: nobody waits, nothing ends by length, and pages are there."""
        steps = 1
        if rows and alone:
            steps = min(self._engine.multi_step, *(row.sequence.final_length - row.position for row in rows))
        known = any(row.position + 1 < len(row.sequence.tokens) for row in rows)
        if known or not all(self._pages.extend(row.sequence, row.position + steps, slide=True) for row in rows):
            steps = 1
        for row in rows:
            row.sequence.scheduled += steps - 1  # not `sampled`: a run may stop early, so the host feeds the next one
        return steps
