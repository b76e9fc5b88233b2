"""Planning of the prompt chunks of a step under its token budget. No jax."""

from __future__ import annotations

from jaxinfer.config import ResolvedEngine
from jaxinfer.engine.scheduling.pages import SequencePages
from jaxinfer.engine.scheduling.plan import PrefillPlan
from jaxinfer.engine.scheduling.queues import Queue
from jaxinfer.engine.scheduling.sequence import Sequence, Status


class PrefillPlanner:
    """Plans chunks, advances the scheduled lengths of their sequences, and takes the pages that they need.

    Args:
        queue: bounds and counts the prompt tokens of its sequences.

    Attributes:
        budget: tokens that are left in the step.
        plans: chunks of the step that is being planned.
        filled: sequences with chunks in it: their pages may be shared from the next step on.
    """

    def __init__(self, engine: ResolvedEngine, pages: SequencePages, queue: Queue) -> None:
        self._pages, self._queue = pages, queue
        self._tokens = engine.max_num_batched_tokens - engine.max_num_seqs
        self.budget = 0
        self.plans: list[PrefillPlan] = []
        self.filled: list[Sequence] = []

    def begin(self) -> None:
        """Begin a step. Pages filled by the step before are launched: later steps may read them."""
        for sequence in self.filled:
            if sequence.status is Status.RUNNING:
                self._pages.publish(sequence)
        self.budget = self._tokens
        self.plans, self.filled = [], []

    def extend(self, sequence: Sequence, spare: int = 0) -> None:
        """Plan chunks of one prompt as far as the budget and pages, less ``spare``, allow."""
        if not sequence.prefilling:
            return
        before, limit = len(self.plans), self._queue.prompt_limit(sequence)
        kept = 0 if limit is None else max(0, self._tokens - limit)
        while sequence.prefilling:
            chunk = self._pages.next_chunk(sequence, sequence.scheduled)
            end, first = sequence.scheduled + chunk.length, len(self.plans) == before
            if chunk.size > self.budget - kept or not self._pages.extend(sequence, end, slide=first, spare=spare):
                break
            self.budget -= chunk.size
            sequence.scheduled += chunk.length
            self.plans.append(PrefillPlan(sequence, chunk, sequence.params.prompt_logprobs is not None))
        if len(self.plans) > before:
            self.filled.append(sequence)
            # Tokens recomputed after a preemption were charged before.
            computed = min(sequence.scheduled, sequence.prompt_end)
            self._queue.charge(sequence, prompt=max(0, computed - sequence.charged))
            sequence.charged = max(sequence.charged, computed)
