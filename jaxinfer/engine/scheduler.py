"""What runs in the next step, and what its results mean. No jax.

First come, first served: a sequence is admitted when a slot and all the pages it can ever need are free. There are
no phases: in each step every running sequence that can decode does, and prompts that are not yet computed advance
by chunks under the token budget.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
from typing import NamedTuple

from jaxinfer.config import ResolvedEngine
from jaxinfer.engine.buckets import Chunk, next_chunk
from jaxinfer.engine.sequence import Sequence
from jaxinfer.kv.manager import KVManager
from jaxinfer.types import FinishReason, PositionLogprobs, Request, RequestError, SequenceDelta


class PrefillPlan(NamedTuple):
    sequence: Sequence
    chunk: Chunk
    logprobs: bool


class DecodePlan(NamedTuple):
    """``position`` is the fed token's; ``token`` is -1 where the device sampled it last."""

    sequence: Sequence
    position: int
    token: int


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """One step: sequences that take a slot, then prompt chunks in order, then one token for each decode row."""

    admitted: list[Sequence]
    prefills: list[PrefillPlan]
    decodes: list[DecodePlan]

    def __bool__(self) -> bool:
        return bool(self.prefills or self.decodes)


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What the device made of a plan: a token per decode row, logprobs where a request asked for them."""

    plan: StepPlan
    tokens: list[int]
    logprobs: list[PositionLogprobs | None]
    prompt_logprobs: list[list[PositionLogprobs]]


class Scheduler:
    """Owns every sequence from `add` until it finishes, its slot and its pages."""

    def __init__(self, engine: ResolvedEngine, kv: KVManager) -> None:
        self._engine, self._kv = engine, kv
        self._waiting: collections.deque[Sequence] = collections.deque()
        self._running: dict[int, Sequence] = {}
        self._free_slots = list(range(engine.max_num_seqs))  # a heap: the lowest free slot is taken first

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def add(self, request: Request) -> None:
        """Queue the ``n`` samples of a validated request.

        Raises:
            RequestError: the request can never fit, with the numbers.
        """
        samples = [Sequence(request, index) for index in range(request.params.n)]
        needed, total = self._kv.pages_for(samples[0].final_length), self._engine.num_pages
        if needed > total:
            length = samples[0].final_length
            raise RequestError(f"prompt and max_tokens = {length} tokens need {needed} KV pages, the pool has {total}")
        self._waiting.extend(samples)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one of its samples, wherever it is. Its pages are free at once: launched steps run
        before any later one that could be given them."""

        def meant(sequence: Sequence) -> bool:
            return sequence.request.request_id == request_id and index in (None, sequence.index)

        self._waiting = collections.deque(s for s in self._waiting if not meant(s))
        for sequence in [s for s in self._running.values() if meant(s)]:
            sequence.finish_reason = FinishReason.ABORT
            self._release(sequence)

    def plan(self) -> StepPlan:
        """Choose the next step and advance the scheduled lengths, before any earlier result is known."""
        admitted = self._admit()
        prefills = self._plan_prefills()
        return StepPlan(admitted, prefills, self._plan_decodes())

    def commit(self, result: StepResult | None) -> list[SequenceDelta]:
        """Take a step's results. A row of a sequence that has finished meanwhile is dropped."""
        if result is None:
            return []
        for prefill, logprobs in zip(result.plan.prefills, result.prompt_logprobs, strict=True):
            prefill.sequence.prompt_logprobs.extend(logprobs)
        rows = zip(result.plan.decodes, result.tokens, result.logprobs, strict=True)
        return [
            self._commit_row(row.sequence, token, logprobs)
            for row, token, logprobs in rows
            if not row.sequence.finished
        ]

    def _admit(self) -> list[Sequence]:
        admitted = []
        while self._waiting and self._free_slots and self._kv.has_room(self._waiting[0].final_length):
            sequence = self._waiting.popleft()
            sequence.slot = heapq.heappop(self._free_slots)
            self._kv.reserve(sequence.slot, sequence.final_length)
            self._running[sequence.slot] = sequence
            admitted.append(sequence)
        return admitted

    def _plan_prefills(self) -> list[PrefillPlan]:
        budget = self._engine.max_num_batched_tokens - self._engine.max_num_seqs
        plans: list[PrefillPlan] = []
        for sequence in self._running.values():
            wants = sequence.params.prompt_logprobs is not None
            while sequence.prefilling:
                chunk = next_chunk(
                    sequence.scheduled, sequence.prefill_end, self._engine.prefill_sizes, largest_only=wants
                )
                if chunk.size > budget:
                    return plans
                budget -= chunk.size
                sequence.scheduled += chunk.length
                plans.append(PrefillPlan(sequence, chunk, wants))
        return plans

    def _plan_decodes(self) -> list[DecodePlan]:
        plans = []
        for sequence in self._running.values():
            if sequence.decodable:
                position = sequence.scheduled
                token = sequence.prompt[-1] if position == sequence.prefill_end else -1
                plans.append(DecodePlan(sequence, position, token))
                sequence.scheduled += 1
        return plans

    def _commit_row(self, sequence: Sequence, token: int, logprobs: PositionLogprobs | None) -> SequenceDelta:
        first = not sequence.output
        sequence.append(token)
        if sequence.finished:
            self._release(sequence)
        return SequenceDelta(
            request_id=sequence.request.request_id,
            index=sequence.index,
            token_ids=[token],
            logprobs=[] if logprobs is None else [logprobs],
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
            prompt_logprobs=sequence.prompt_logprobs if first and sequence.params.prompt_logprobs is not None else None,
        )

    def _release(self, sequence: Sequence) -> None:
        self._kv.release(sequence.slot)
        heapq.heappush(self._free_slots, sequence.slot)
        del self._running[sequence.slot]

    def check(self) -> None:
        """Slots and pages are all accounted for."""
        self._kv.check()
        if sorted([*self._free_slots, *self._running]) != list(range(self._engine.max_num_seqs)):
            raise AssertionError(f"slots {self._free_slots} free and {sorted(self._running)} running are not all")
