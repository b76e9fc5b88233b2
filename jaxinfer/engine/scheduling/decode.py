"""Planning of decode rows: one for each sequence that can decode, and drafts in idle rows. No jax."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping
from collections.abc import Sequence as Row

import numpy as np

from jaxinfer.config import ResolvedEngine
from jaxinfer.engine.scheduling.drafts import DraftPlanner
from jaxinfer.engine.scheduling.pages import SequencePages
from jaxinfer.engine.scheduling.plan import DecodePlan, Draft
from jaxinfer.engine.scheduling.sequence import Sequence
from jaxinfer.structured.masks import Masks, only
from jaxinfer.structured.matcher import LEAD
from jaxinfer.structured.thinking import Thought

_PATIENCE, _PATIENCE_ALONE = 0.002, 0.02
"""Seconds that a plan waits for masks just requested: while the device runs the step before; and where all sequences
have grammars, so that no other could proceed. Later plans do not wait again for a sequence that is late, nor for a
first mask while other sequences can proceed."""
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
        """Advance to the next microbatch: one decodes in each plan, in turn, of those that can; ``running`` by slot."""
        count = self._engine.microbatches
        after = [(self.microbatch + 1 + more) % count for more in range(count)]
        if count > 1:
            ready = {slot % count for slot, sequence in running.items() if not sequence.prefilling}
            after = [microbatch for microbatch in after if microbatch in ready] or after
        self.microbatch = after[0]

    def members(self, running: Mapping[int, Sequence]) -> Mapping[int, Sequence]:
        """Return the running sequences whose slots decode in this plan."""
        count = self._engine.microbatches
        if count == 1:
            return running
        return {slot: sequence for slot, sequence in running.items() if slot % count == self.microbatch}

    # ---- rows

    def plan(
        self, running: Mapping[int, Sequence], *, alone: bool, spare: int | None = None
    ) -> tuple[list[DecodePlan], int, list[Draft] | None]:
        """Plan the rows of a step, the number of steps that the device may run without the host, and the drafts.

        Args:
            alone: no sequence waits, and no prompt is computed in this step.
            spare: pages that tree drafts leave free; None: no tree drafts.
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
        """Return the steps the device may run alone: none waits, none ends by length, and there are enough pages."""
        steps = 1
        if rows and alone and not any(map(_needs_host, rows)):
            steps = min(self._engine.multi_step, *(row.sequence.final_length - row.position for row in rows))
        known = any(row.position + 1 < len(row.sequence.tokens) for row in rows)
        if known or not all(self._pages.extend(row.sequence, row.position + steps, slide=True) for row in rows):
            steps = 1
        for row in rows:
            row.sequence.scheduled += steps - 1  # not `sampled`: a run may stop early, so the host feeds the next token
        return steps


class Constraints:
    """Grammar-constrained sequences: when each may decode, with which mask, and when its output is complete.

    The allowed next tokens of such a sequence depend on its current token, so it waits until that has been read, and
    its mask is available. All of them wait for those in flight: else half of them would run in each step. A sequence
    with a late mask skips the step; all other sequences proceed.

    Thinking before the answer is unconstrained, up to its budget, and waits for no mask. When its end is read, rows
    after it may be in flight: their samples are dropped (`outdated`), since no grammar constrained them.

    Forced tokens are known ahead: their rows have masks, and wait for nothing.

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
        """Open the grammars of sequences that have their first slot: they compile while the prompts are computed."""
        for sequence in admitted:
            params, thinking = sequence.params, sequence.request.thinking
            if sequence in self._open or (params.grammar is None and thinking is None and not sequence.forced):
                continue
            self._open.add(sequence)
            if thinking is not None:
                sequence.thought = Thought(thinking, params.thinking_token_budget)
            if params.grammar is not None:
                sequence.held = self._masks.open(*params.grammar, sequence.request.cache_scope)

    def said(self, sequence: Sequence, tokens: list[int]) -> None:
        """Record the tokens that a sequence has been given."""
        answer: Row[int] = tokens
        if (thought := sequence.thought) is not None and not thought.over:
            was_open, answer = thought.open, thought.say(tokens)
            answer = [LEAD, *answer] if was_open and thought.over else answer
        if sequence.held is not None and answer:
            self._masks.advance(sequence.held, answer)

    def end(self, sequence: Sequence) -> None:
        """Record that a sequence has ended."""
        if sequence in self._open:
            self._open.remove(sequence)
            if sequence.held is not None:
                self._masks.close(sequence.held)

    def send(self) -> None:
        """Send the recorded tokens to the grammar helpers."""
        self._masks.send()

    def over(self) -> list[tuple[Sequence, str | None]]:
        """Return sequences with a complete output (None) or a failed grammar, with its error."""
        found = [(each, each.held) for each in self._open if each.held is not None and each.held.ready]
        return [(each, held.error) for each, held in found if held.stopped or held.error is not None]

    def outdated(self, row: DecodePlan, masks: Container[int]) -> bool:
        """Whether a row of a plan with these masks was planned within thinking that has ended: its sequence is rolled
        back to the row."""
        sequence, thought = row.sequence, row.sequence.thought
        if sequence.held is None or thought is None or not thought.over:
            return False
        if row.row in masks or row.position + 1 < len(sequence.tokens):
            return False
        sequence.scheduled = min(sequence.scheduled, row.position)
        return True

    # ---- a plan

    def begin(self, members: Collection[Sequence]) -> bool:
        """Begin a plan of these sequences: choose whether those with grammars are in it, and wait briefly for them.

        Returns whether any may be blocked, so that `may` is to be called.
        """
        self._blocked = False
        if not self._open:
            return False
        held = [each for each in members if each in self._open and each.is_held and not each.prefilling]
        alone = len(held) == len(members)
        self._blocked = any(each.in_flight and each.scheduled >= len(each.tokens) for each in held)
        missing = [each.held for each in held if each.held is not None and not (each.held.ready or each.held.late)]
        # Compiling a grammar may take a second, and some masks take so long that each would delay all sequences.
        expected = [each for each in missing if (alone or each.said) and not each.slow]
        if expected and not self._blocked:
            self._masks.wait(expected, _PATIENCE_ALONE if alone else _PATIENCE)
        return True

    def may(self, sequence: Sequence, position: int) -> bool:
        """Whether a row at ``position`` may be planned. Recomputed tokens need no mask: the sampled token is known, and
        dropped."""
        ahead = position + 1 - len(sequence.tokens)
        if ahead < 0 or sequence not in self._open:
            return True
        if sequence.is_held:
            return ahead == 0 and not self._blocked and sequence.held is not None and sequence.held.mask is not None
        # The sampler would count the token of a dropped row twice; and a state cannot be rolled back.
        counted = self._stateful or sequence.stateful
        return ahead == 0 or (_is_free(sequence, ahead) and not (counted and sequence.held is not None))

    def masks(self, rows: Iterable[DecodePlan]) -> dict[int, np.ndarray]:
        """Return the masks of a plan's rows, by row."""
        if not self._open:
            return {}
        found = ((row.row, _mask(row)) for row in rows if row.sequence in self._open)
        return {row: mask for row, mask in found if mask is not None}

    def rest(self) -> None:
        """Wait briefly for any mask, when there is nothing else to do."""
        expected = [each.held for each in self._open if each.held is not None and not each.held.ready]
        if expected:
            self._masks.wait_any(expected, _NAP)


def _is_free(sequence: Sequence, ahead: int) -> bool:
    """Whether the token after ``ahead`` unknown ones is unconstrained by the thinking budget."""
    thought = sequence.thought
    return thought is None or thought.over or thought.room is None or ahead < thought.room


def _needs_host(row: DecodePlan) -> bool:
    """Whether each step of a row takes arrays of the host: a mask, or what it asks of the outputs for training."""
    sequence = row.sequence
    return bool(sequence.held or sequence.thought or sequence.forced or sequence.params.training_output)


def _mask(row: DecodePlan) -> np.ndarray | None:
    """Return the mask of the token after a row; None: all tokens are allowed."""
    sequence, ahead = row.sequence, row.position + 1 - len(row.sequence.tokens)
    if sequence.forced:
        return only(sequence.forced[row.position - sequence.prompt_end])
    if ahead < 0:
        return None
    held, thought = sequence.held, sequence.thought
    if held is not None and sequence.is_held:
        return held.masks[ahead] if thought is None or thought.over else thought.beginning(held.masks[0])
    return None if thought is None or _is_free(sequence, ahead) else thought.closing()
