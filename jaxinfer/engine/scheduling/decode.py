"""The rows of the decode program: one for each sequence that can decode, and drafts in those that are idle. No jax."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping
from collections.abc import Sequence as Row

import numpy as np

from jaxinfer.config import ResolvedEngine
from jaxinfer.engine.scheduling.drafts import DraftPlanner
from jaxinfer.engine.scheduling.pages import SequencePages
from jaxinfer.engine.scheduling.plan import DecodePlan, Draft
from jaxinfer.engine.scheduling.sequence import Sequence
from jaxinfer.structured.masks import Masks
from jaxinfer.structured.matcher import LEAD
from jaxinfer.structured.thinking import Thought

_PATIENCE, _PATIENCE_ALONE = 0.002, 0.02
"""Seconds that a plan waits for masks that were asked for just now: while the device runs the step before, and where
all sequences have grammars, so that nobody else could go on. Who is not ready then is not waited for again, nor is who
has no mask yet beside others."""
_NAP = 0.002  # seconds, where there is nothing else to do


class DecodePlanner:
    """Plans rows, advances the scheduled lengths of their sequences, and takes the pages that they need.

    Args:
        drafts: plans tokens to verify in idle rows; None: no speculation.
        constraints: knows when sequences with grammars may decode.
    """

    def __init__(
        self, engine: ResolvedEngine, pages: SequencePages, drafts: DraftPlanner | None, constraints: Constraints
    ) -> None:
        self._engine, self._pages, self._drafts, self._constraints = engine, pages, drafts, constraints
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
        constrained = self._constraints.begin(members.values())
        for slot, sequence in members.items():
            position = sequence.scheduled
            if position < sequence.prefill_end or position >= sequence.final_length:
                continue
            if constrained and not self._constraints.may(sequence, position):
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
        if rows and alone and not any(row.sequence.held or row.sequence.thought for row in rows):
            steps = min(self._engine.multi_step, *(row.sequence.final_length - row.position for row in rows))
        known = any(row.position + 1 < len(row.sequence.tokens) for row in rows)
        if known or not all(self._pages.extend(row.sequence, row.position + steps, slide=True) for row in rows):
            steps = 1
        for row in rows:
            row.sequence.scheduled += steps - 1  # not `sampled`: a run may stop early, so the host feeds the next one
        return steps


class Constraints:
    """Sequences that grammars hold: when each may decode, under which mask, and when its output is whole.

    The tokens that such a sequence may say next depend on the one that it says now, so it waits until that has been
    read, and its mask is there. All of them wait for those in flight: else half of them would run in each step. Whose
    mask is late leaves out the step alone; everybody else goes on.

    A thought in front of the answer is free, up to its budget, and waits for nobody. When its end is read, rows behind
    it may be on their way: what they sample is dropped (`outdated`), since no grammar held them.

    Args:
        stateful: layers have states (`CacheSpec.stateful`).
    """

    def __init__(self, masks: Masks, *, stateful: bool = False) -> None:
        self._masks, self._stateful = masks, stateful
        self._open: set[Sequence] = set()
        self._blocked = False

    @property
    def served(self) -> bool:
        """Whether sequences may have grammars."""
        return self._masks.helpers > 0

    def admit(self, admitted: Iterable[Sequence]) -> None:
        """Open the grammars of those that have their first slot: they compile while the prompts are computed."""
        for sequence in admitted:
            params, thinking = sequence.params, sequence.request.thinking
            if sequence in self._open or (params.grammar is None and thinking is None):
                continue
            self._open.add(sequence)
            if thinking is not None:
                sequence.thought = Thought(thinking, params.thinking_token_budget)
            if params.grammar is not None:
                sequence.held = self._masks.open(*params.grammar, sequence.request.cache_scope)

    def said(self, sequence: Sequence, tokens: list[int]) -> None:
        """Note tokens that a sequence has been given, and goes on behind."""
        answer: Row[int] = tokens
        if (thought := sequence.thought) is not None and not thought.over:
            was_open, answer = thought.open, thought.say(tokens)
            answer = [LEAD, *answer] if was_open and thought.over else answer
        if sequence.held is not None and answer:
            self._masks.advance(sequence.held, answer)

    def end(self, sequence: Sequence) -> None:
        """Note that a sequence has ended."""
        if sequence in self._open:
            self._open.remove(sequence)
            if sequence.held is not None:
                self._masks.close(sequence.held)

    def send(self) -> None:
        """Ask for what was noted."""
        self._masks.send()

    def over(self) -> list[tuple[Sequence, str | None]]:
        """Sequences whose output is whole (None), or whose grammar failed, and why."""
        found = [(each, each.held) for each in self._open if each.held is not None and each.held.ready]
        return [(each, held.error) for each, held in found if held.stopped or held.error is not None]

    def outdated(self, row: DecodePlan, masks: Container[int]) -> bool:
        """Whether a row of a plan with these masks was planned within a thought that has ended: its sequence goes on
        from there once more."""
        sequence, thought = row.sequence, row.sequence.thought
        if sequence.held is None or thought is None or not thought.over:
            return False
        if row.row in masks or row.position + 1 < len(sequence.tokens):
            return False
        sequence.scheduled = min(sequence.scheduled, row.position)
        return True

    # ---- a plan

    def begin(self, members: Collection[Sequence]) -> bool:
        """Begin a plan of these sequences: choose whether those with grammars are in it, and wait a moment for them.

        Returns whether anybody may be held up, and `may` is to be asked.
        """
        self._blocked = False
        if not self._open:
            return False
        held = [each for each in members if each in self._open and each.is_held and not each.prefilling]
        alone = len(held) == len(members)
        self._blocked = any(each.in_flight and each.scheduled >= len(each.tokens) for each in held)
        missing = [each.held for each in held if each.held is not None and not (each.held.ready or each.held.late)]
        # To learn a grammar may take a second, and masks of some take so long that each would hold up everybody.
        expected = [each for each in missing if (alone or each.said) and not each.slow]
        if expected and not self._blocked:
            self._masks.wait(expected, _PATIENCE_ALONE if alone else _PATIENCE)
        return True

    def may(self, sequence: Sequence, position: int) -> bool:
        """Whether a row at ``position`` may be planned. What is computed again needs no mask: what it samples is known,
        and dropped."""
        ahead = position + 1 - len(sequence.tokens)
        if ahead < 0 or sequence not in self._open:
            return True
        if sequence.is_held:
            return ahead == 0 and not self._blocked and sequence.held is not None and sequence.held.mask is not None
        # What the sampler counted of a row that is dropped it would count twice; and a state cannot be taken back.
        counted = self._stateful or sequence.stateful
        return ahead == 0 or (_is_free(sequence, ahead) and not (counted and sequence.held is not None))

    def masks(self, rows: Iterable[DecodePlan]) -> dict[int, np.ndarray]:
        """The masks of a plan's rows, by row."""
        if not self._open:
            return {}
        ahead = ((row, row.position + 1 - len(row.sequence.tokens)) for row in rows if row.sequence in self._open)
        found = ((row.row, _mask(row.sequence, count)) for row, count in ahead if count >= 0)
        return {row: mask for row, mask in found if mask is not None}

    def rest(self) -> None:
        """Wait a while for any mask, when there is nothing else to do."""
        expected = [each.held for each in self._open if each.held is not None and not each.held.ready]
        if expected:
            self._masks.wait_any(expected, _NAP)


def _is_free(sequence: Sequence, ahead: int) -> bool:
    """Whether the token of no grammar that comes behind so many unknown ones may be any."""
    thought = sequence.thought
    return thought is None or thought.over or thought.room is None or ahead < thought.room


def _mask(sequence: Sequence, ahead: int) -> np.ndarray | None:
    """The tokens that may come behind so many unknown ones; None: all."""
    held, thought = sequence.held, sequence.thought
    if held is not None and sequence.is_held:
        return held.masks[ahead] if thought is None or thought.over else thought.beginning(held.masks[0])
    return None if thought is None or _is_free(sequence, ahead) else thought.closing()
