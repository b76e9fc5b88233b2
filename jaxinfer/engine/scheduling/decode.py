"""The rows of the decode program: one for each sequence that can decode, and drafts in those that are idle. No jax."""

from __future__ import annotations

from collections.abc import Mapping

from jaxinfer.config import ResolvedEngine
from jaxinfer.engine.scheduling.pages import SequencePages
from jaxinfer.engine.scheduling.plan import DecodePlan
from jaxinfer.engine.scheduling.sequence import Sequence
from jaxinfer.engine.scheduling.stats import StatsRecorder
from jaxinfer.spec import Drafter


class DecodePlanner:
    """Plans rows, advances the scheduled lengths of their sequences, and takes the pages that they need.

    Args:
        drafter: proposes tokens to verify in idle rows; None: no speculation.
    """

    def __init__(
        self, engine: ResolvedEngine, pages: SequencePages, drafter: Drafter | None, stats: StatsRecorder
    ) -> None:
        self._engine, self._pages, self._drafter, self._stats = engine, pages, drafter, stats
        self.microbatch = 0
        """Microbatch whose slots decode in the plan that is being made."""

    # ---- microbatches

    def advance(self, running: Mapping[int, Sequence]) -> None:
        """Go on to the next microbatch: one decodes in each plan, one after the other; who cannot is left out.

        Args:
            running: by slot.
        """
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

    def plan(self, running: Mapping[int, Sequence], *, alone: bool) -> tuple[list[DecodePlan], int]:
        """The rows of a step, and how many steps the device may run without the host.

        Args:
            alone: nobody waits, and no prompt is computed in this step.
        """
        rows: list[DecodePlan] = []
        count = self._engine.microbatches
        for slot, sequence in self.members(running).items():
            position = sequence.scheduled
            if position < sequence.prefill_end or position >= sequence.final_length:
                continue
            if position >= sequence.capacity and not self._pages.extend(sequence, position + 1):
                continue
            token = sequence.token_at(position)
            if token is None or (sequence.in_flight and self._waits_for_host(sequence)):
                continue
            rows.append(DecodePlan(sequence, slot // count, position, token))
            sequence.scheduled, sequence.sampled = position + 1, position
            sequence.in_flight += 1
        steps = self._steps(rows, alone) if self._engine.multi_step > 1 else 1
        return rows if self._drafter is None else self._with_drafts(rows), steps

    def _waits_for_host(self, sequence: Sequence) -> bool:
        """Whether the next row waits for what is in flight: a draft needs the last token."""
        return self._drafter is not None and not sequence.stateful

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

    # ---- drafts

    def _with_drafts(self, rows: list[DecodePlan]) -> list[DecodePlan]:
        used = {row.row for row in rows}
        idle = [row for row in range(self._engine.rows // self._engine.microbatches) if row not in used]
        planned: list[DecodePlan] = []
        for row in rows:
            planned.append(row)
            sequence = row.sequence
            if sequence.stateful or row.token < 0:
                continue
            newest = sequence.generated > 0 and row.position == len(sequence.tokens) - 1
            for token in self._propose(sequence, len(idle)):
                if not self._pages.extend(sequence, sequence.scheduled + 1, slide=newest):
                    break
                planned.append(DecodePlan(sequence, idle.pop(), sequence.scheduled, token))
                sequence.scheduled += 1
                sequence.in_flight += 1
        return planned

    def _propose(self, sequence: Sequence, idle: int) -> list[int]:
        """Tokens to feed behind the next one: known tokens after a preemption, else the drafter's."""
        assert self._drafter is not None
        room = min(idle, sequence.final_length - sequence.scheduled)
        known = sequence.tokens[sequence.scheduled : sequence.scheduled + room]
        if known or not room:
            return known.tolist()
        drafts = self._drafter.propose(
            self._pages.keys(sequence).tokens, min(room, self._engine.num_speculative_tokens)
        )
        self._stats.drafted(len(drafts))
        return drafts.tolist()
