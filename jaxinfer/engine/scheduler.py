"""What runs in the next step, and what its results mean. No jax.

Iteration-level scheduling (Orca, Yu et al. 2022): sequences enter and leave at every step, and there are no phases.
What is computed of a sequence chases what is known of it: each step every sequence that can decode does, then prompts
advance by chunks under the token budget, then waiting sequences are admitted.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Mapping

from jaxinfer.config import ResolvedEngine
from jaxinfer.engine.buckets import next_chunk, page_code
from jaxinfer.engine.plan import DecodePlan, Parked, PrefillPlan, StepPlan, StepResult
from jaxinfer.engine.preemption import Costs, prefer_swap, victim
from jaxinfer.engine.queues import Deadlines, make_queue
from jaxinfer.engine.sequence import Sequence, Status
from jaxinfer.engine.stats import StatsRecorder
from jaxinfer.kv.manager import KVManager, Match
from jaxinfer.kv.radix import PageKeys
from jaxinfer.spec import Drafter
from jaxinfer.types import (
    FinishReason,
    PositionLogprobs,
    QueueFullError,
    Request,
    RequestError,
    SequenceDelta,
    needs_sampler_state,
)


class Scheduler:
    """Owns every sequence from `add` until it finishes, its slot and its pages.

    Args:
        classes: prefill sizes with equal bits, see `buckets.next_chunk`.
        drafter: proposes tokens to verify in idle rows; None: no speculation.
        costs: what decides between swapping and recomputing a preempted sequence.
    """

    def __init__(
        self,
        engine: ResolvedEngine,
        kv: KVManager,
        classes: Mapping[int, int],
        *,
        drafter: Drafter | None = None,
        costs: Costs | None = None,
        stats: StatsRecorder | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self._kv, self._drafter, self._clock = engine, kv, drafter, clock
        self._costs = costs or Costs()
        self._relaxed = engine.exactness == "relaxed"
        self._classes = dict.fromkeys(engine.prefill_sizes, 0) if self._relaxed else dict(classes)
        self._queue = make_queue(engine.scheduling_policy)
        self._deadlines = Deadlines()
        self.stats = stats or StatsRecorder(clock)
        self._running: dict[int, Sequence] = {}
        self._free_slots = list(range(engine.max_num_seqs))  # a heap: the lowest free slot is taken first
        self._requests: dict[str, list[Sequence]] = {}
        self._filled: list[Sequence] = []  # pages of these may be shared from the next plan on
        self._ended: list[SequenceDelta] = []  # ends that no row brought, for the next commit
        self._arrivals = 0
        self._several = False  # the last plan runs several steps on the device

    # ---- requests

    @property
    def has_work(self) -> bool:
        return bool(self._requests or self._ended)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def running(self) -> int:
        return len(self._running)

    def add(self, request: Request) -> None:
        """Queue the ``n`` samples of a validated request. The first one's prompt is computed, the others share it.

        Raises:
            RequestError: the id is in use, or the request can never fit, with the numbers.
            QueueFullError: too much is waiting.
        """
        if request.request_id in self._requests:
            raise RequestError(f"request_id={request.request_id!r} is in use")
        samples = [self._sequence(request, index) for index in range(request.params.n)]
        self._refuse(samples)
        self._requests[request.request_id] = samples
        samples[0].followers = samples[1:]
        for sample in samples[1:]:
            sample.status, sample.leader = Status.HELD, samples[0]
        self._enqueue(samples[0])
        if request.deadline is not None:
            self._deadlines.add(request.deadline, request.request_id)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one of its samples, wherever it is. Its pages are free at once: launched steps run
        before any later one that could be given them."""
        for sequence in list(self._requests.get(request_id, ())):
            if index in (None, sequence.index):
                self._end(sequence, FinishReason.ABORT)

    def _sequence(self, request: Request, index: int) -> Sequence:
        assert request.params.max_tokens is not None  # resolved when the request was validated
        self._arrivals += 1
        prompt = request.prompt_token_ids
        return Sequence(
            request,
            index,
            self._arrivals,
            tokens=list(prompt),
            keys=PageKeys(request.cache_salt.encode(), self._engine.page_size),
            prefill_end=len(prompt) - 1,
            final_length=len(prompt) + request.params.max_tokens - 1,
            stateful=needs_sampler_state(request),
        )

    def _refuse(self, samples: list[Sequence]) -> None:
        length, engine = samples[0].final_length, self._engine
        needed = self._kv.pages_for(length)
        if needed > engine.num_pages:
            raise RequestError(
                f"prompt and max_tokens = {length} tokens need {needed} KV pages, the pool has {engine.num_pages}"
            )
        requests, tokens = engine.max_waiting_requests, engine.max_waiting_tokens
        if requests is not None and len(self._queue) >= requests:
            raise QueueFullError(f"{len(self._queue)} requests wait already, max_waiting_requests = {requests}")
        more = self._queue.tokens + len(samples[0].prompt)
        if tokens is not None and more > tokens:
            raise QueueFullError(f"{more} prompt tokens would wait, max_waiting_tokens = {tokens}")

    def _enqueue(self, sequence: Sequence) -> None:
        sequence.status = Status.WAITING
        self._queue.push(sequence)

    # ---- one step

    def plan(self) -> StepPlan:
        """Choose the next step and advance the scheduled lengths, before any earlier result is known."""
        self._expire()
        self._publish()
        parked = self._grow()
        prefills: list[PrefillPlan] = []
        budget = self._engine.max_num_batched_tokens - self._engine.max_num_seqs
        for sequence in self._running.values():
            if sequence.prefilling:
                budget = self._prefill(sequence, budget, prefills)
        admitted = self._admit(budget, prefills)
        decodes, steps = self._decodes(bool(prefills))
        self._release_followers([*(plan.sequence for plan in prefills), *admitted])
        return StepPlan(*self._kv.take_moves(), parked, admitted, prefills, decodes, steps)

    def commit(self, result: StepResult | None) -> list[SequenceDelta]:
        """Take a step's results. A row of a sequence that has finished meanwhile is dropped."""
        deltas, self._ended = self._ended, []
        if result is None:
            return deltas
        for prefill, prompt_logprobs in zip(result.plan.prefills, result.prompt_logprobs, strict=True):
            prefill.sequence.prompt_logprobs.extend(prompt_logprobs)
        emitted: list[Sequence] = []
        for row, tokens, logprobs in zip(result.plan.decodes, result.tokens, result.logprobs, strict=True):
            sequence = row.sequence
            sequence.in_flight -= 1
            if sequence.finish_reason is not None:
                continue
            delta = deltas[-1] if emitted and sequence is emitted[-1] else None
            if result.plan.steps > 1:  # one may have stopped early
                sequence.scheduled = min(sequence.scheduled, row.position + len(tokens))
            delta = self._commit_row(row, tokens, logprobs, delta)
            if delta is not None and not (emitted and sequence is emitted[-1]):
                deltas.append(delta)
                emitted.append(sequence)
        self.stats.emitted(emitted)
        return deltas

    # ---- planning

    def _expire(self) -> None:
        for request_id in self._deadlines.pop_expired(self._clock):
            for sequence in list(self._requests.get(request_id, ())):
                self._end(sequence, FinishReason.DEADLINE)
                self._ended.append(_delta(sequence))

    def _publish(self) -> None:
        """What earlier plans filled was launched: later steps may read it."""
        for sequence in self._filled:
            if sequence.status is Status.RUNNING:
                self._publish_one(sequence)
        self._filled = []

    def _publish_one(self, sequence: Sequence) -> None:
        computed = min(sequence.scheduled, len(sequence.tokens))
        if sequence.params.prompt_logprobs is None:
            self._kv.publish(sequence.slot, self._keys(sequence), self._codes(sequence), computed)

    def _grow(self) -> list[Parked]:
        """A page for each decoding sequence that needs one; where there is none, another sequence gives way."""
        parked: list[Parked] = []
        short = [s for s in self._running.values() if s.capacity <= s.scheduled and not s.prefilling]
        for sequence in sorted(short, key=self._queue.rank):
            while sequence.status is Status.RUNNING and not self._extend(sequence, sequence.scheduled + 1):
                parked.append(self._preempt(victim(self._running.values(), self._queue.rank)))
        return parked

    def _extend(self, sequence: Sequence, length: int) -> bool:
        length = min(length, sequence.final_length)
        if length <= sequence.capacity:
            return True
        self._kv.slide(sequence.slot, sequence.scheduled)
        if not self._kv.extend(sequence.slot, length):
            return False
        sequence.capacity = self._kv.pages_for(length) * self._engine.page_size
        return True

    def _preempt(self, sequence: Sequence) -> Parked:
        slot, computed = sequence.slot, min(sequence.scheduled, len(sequence.tokens))
        if prefer_swap(sequence, self._kv.pages_for(sequence.scheduled), self._costs):
            sequence.swapped = self._kv.swap_out(slot, sequence.scheduled)
        if sequence.swapped is None:
            self._kv.publish(slot, self._keys(sequence), self._codes(sequence), computed)
            self._kv.release(slot)
            sequence.scheduled = 0
        self.stats.preempted("recompute" if sequence.swapped is None else "swap")
        self._vacate(sequence)
        self._enqueue(sequence)
        return Parked(sequence, slot)

    def _prefill(self, sequence: Sequence, budget: int, plans: list[PrefillPlan]) -> int:
        """Chunks of one prompt as far as budget and pages reach; the budget that is left."""
        wants = sequence.params.prompt_logprobs is not None
        while sequence.prefilling:
            chunk = next_chunk(
                sequence.scheduled, sequence.prefill_end, self._engine.prefill_sizes, self._classes, largest_only=wants
            )
            if chunk.size > budget or not self._extend(sequence, sequence.scheduled + chunk.length):
                break
            budget -= chunk.size
            sequence.scheduled += chunk.length
            plans.append(PrefillPlan(sequence, chunk, wants))
            if not self._filled or self._filled[-1] is not sequence:
                self._filled.append(sequence)
        return budget

    def _admit(self, budget: int, plans: list[PrefillPlan]) -> list[Sequence]:
        admitted: list[Sequence] = []
        if self._engine.batching == "static" and self._running:
            return admitted
        while self._free_slots and (sequence := self._queue.peek()) is not None:
            if not self._place(sequence, self._free_slots[0], budget):
                break
            self._queue.pop()
            sequence.slot = heapq.heappop(self._free_slots)
            sequence.status = Status.RUNNING
            self._running[sequence.slot] = sequence
            self.stats.scheduled(sequence)
            admitted.append(sequence)
            budget = self._prefill(sequence, budget, plans)
        return admitted

    def _place(self, sequence: Sequence, slot: int, budget: int) -> bool:
        """Give a waiting sequence the pages to go on with, and leave one for each that runs."""
        if sequence.swapped is not None:
            return self._swap_in(sequence, slot)
        leader = sequence.leader
        if leader is not None and leader.status is Status.RUNNING and not sequence.generated and not leader.prefilling:
            return self._fork(sequence, slot, leader)
        match = self._match(sequence)
        start, length = match.tokens, match.tokens + 1
        if start < sequence.prefill_end:
            chunk = next_chunk(
                start,
                sequence.prefill_end,
                self._engine.prefill_sizes,
                self._classes,
                largest_only=sequence.params.prompt_logprobs is not None,
            )
            if chunk.size > budget:
                return False
            length = start + chunk.length
        fresh = self._kv.pages_for(length) - start // self._engine.page_size
        if self._running and self._kv.available < fresh + len(self._running):
            return False
        if not self._kv.admit(slot, match, length):
            return False
        self.stats.prefix(len(sequence.tokens) - 1, match.tokens)
        return self._placed(sequence, start, length)

    def _swap_in(self, sequence: Sequence, slot: int) -> bool:
        assert sequence.swapped is not None
        if self._running and self._kv.available < self._kv.pages_for(sequence.scheduled) + len(self._running):
            return False
        if not self._kv.swap_in(slot, sequence.swapped):
            return False
        sequence.swapped = None
        return self._placed(sequence, sequence.scheduled, sequence.scheduled)

    def _fork(self, sequence: Sequence, slot: int, leader: Sequence) -> bool:
        if self._kv.available < 1 + len(self._running):
            return False
        if not self._kv.fork(leader.slot, slot, sequence.prefill_end):
            return False
        return self._placed(sequence, sequence.prefill_end, sequence.prefill_end)

    def _placed(self, sequence: Sequence, computed: int, length: int) -> bool:
        sequence.scheduled = computed
        sequence.capacity = self._kv.pages_for(length) * self._engine.page_size
        return True

    def _match(self, sequence: Sequence) -> Match:
        limit = 0 if sequence.params.prompt_logprobs is not None else len(sequence.tokens) - 1
        return self._kv.match(self._keys(sequence), self._codes(sequence), limit)

    def _keys(self, sequence: Sequence) -> PageKeys:
        sequence.keys.extend(sequence.tokens[len(sequence.keys.tokens) :])
        return sequence.keys

    def _codes(self, sequence: Sequence) -> list[int]:
        """The code of every page of the known tokens."""
        engine, codes = self._engine, sequence.codes
        for page in range(len(codes), self._kv.pages_for(len(sequence.tokens))):
            end = sequence.final_length if self._relaxed else sequence.prefill_end
            codes.append(
                0 if self._relaxed else page_code(page, engine.page_size, end, engine.prefill_sizes, self._classes)
            )
        return codes

    def _decodes(self, prefills: bool) -> tuple[list[DecodePlan], int]:
        """A row for each sequence that can decode, and drafts in rows that are idle otherwise."""
        rows: list[DecodePlan] = []
        host = self._drafter is not None or self._engine.multi_step > 1
        for slot, sequence in self._running.items():
            position = sequence.scheduled
            if position < sequence.prefill_end or position >= sequence.final_length:
                continue
            if position >= sequence.capacity and not self._extend(sequence, position + 1):
                continue
            if host and sequence.in_flight and self._waits_for_host(sequence):
                continue
            tokens = sequence.tokens
            rows.append(DecodePlan(sequence, slot, position, tokens[position] if position < len(tokens) else -1))
            sequence.scheduled = position + 1
            sequence.in_flight += 1
        steps = self._steps(rows, prefills) if host else 1
        if self._drafter is not None:
            rows = self._with_drafts(rows)
        return rows, steps

    def _waits_for_host(self, sequence: Sequence) -> bool:
        """Its next input is the host's to choose: a draft needs the last token, and a run of steps may stop early."""
        return self._several or (self._drafter is not None and not sequence.stateful)

    def _steps(self, rows: list[DecodePlan], prefills: bool) -> int:
        """How many steps the device may run alone: nobody waits, nothing ends by length, and pages are there."""
        steps = 1
        if rows and not prefills and not len(self._queue):
            steps = min(self._engine.multi_step, *(row.sequence.final_length - row.position for row in rows))
        known = any(row.position + 1 < len(row.sequence.tokens) for row in rows)
        if known or not all(self._extend(row.sequence, row.position + steps) for row in rows):
            steps = 1
        for row in rows:
            row.sequence.scheduled += steps - 1
        self._several = steps > 1
        return steps

    def _with_drafts(self, rows: list[DecodePlan]) -> list[DecodePlan]:
        used = {row.row for row in rows}
        idle = [row for row in range(self._engine.rows) if row not in used]
        planned: list[DecodePlan] = []
        for row in rows:
            planned.append(row)
            sequence = row.sequence
            if sequence.stateful or row.token < 0:
                continue
            for token in self._proposals(sequence, len(idle)):
                if not self._extend(sequence, sequence.scheduled + 1):
                    break
                planned.append(DecodePlan(sequence, idle.pop(), sequence.scheduled, token))
                sequence.scheduled += 1
                sequence.in_flight += 1
        return planned

    def _proposals(self, sequence: Sequence, idle: int) -> list[int]:
        """What to feed behind the next token: known tokens after a preemption, else the drafter's."""
        assert self._drafter is not None
        room = min(idle, sequence.final_length - sequence.scheduled)
        known = sequence.tokens[sequence.scheduled : sequence.scheduled + room]
        if known or not room:
            return known
        drafts = self._drafter.propose(self._keys(sequence).tokens, min(room, self._engine.num_speculative_tokens))
        self.stats.drafted(len(drafts))
        return drafts.tolist()

    def _release_followers(self, started: list[Sequence]) -> None:
        for sequence in started:
            if sequence.followers and not sequence.prefilling:
                self._queue_followers(sequence)

    def _queue_followers(self, sequence: Sequence) -> None:
        for follower in sequence.followers:
            if follower.status is Status.HELD:
                self._enqueue(follower)
        sequence.followers = []

    # ---- results

    def _commit_row(
        self, row: DecodePlan, tokens: list[int], logprobs: list[PositionLogprobs | None], delta: SequenceDelta | None
    ) -> SequenceDelta | None:
        """What one row adds to its sequence; None if that is nothing."""
        sequence, at = row.sequence, row.position
        known = sequence.tokens
        if row.token >= 0 and (at >= len(known) or known[at] != row.token):
            sequence.scheduled = min(sequence.scheduled, at)  # a draft that did not come true
            return delta
        for token, logprob in zip(tokens, logprobs, strict=True):
            at += 1
            if at < len(known):
                self.stats.replayed(known[at] == token)
                continue
            sequence.append(token)
            delta = delta or _delta(sequence)
            if at == sequence.prefill_end + 1 and sequence.params.prompt_logprobs is not None:
                delta.prompt_logprobs = sequence.prompt_logprobs
            delta.token_ids.append(token)
            if logprob is not None:
                delta.logprobs.append(logprob)
            if sequence.finish_reason is not None:
                delta.finish_reason, delta.stop_reason = sequence.finish_reason, sequence.stop_reason
                self._retire(sequence)
                return delta
        return delta

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        if sequence.finish_reason is None:
            sequence.finish_reason = reason
            self._retire(sequence)

    def _retire(self, sequence: Sequence) -> None:
        """Take a finished sequence out of wherever it is."""
        if sequence.status is Status.RUNNING:
            if self._relaxed:
                self._publish_one(sequence)
            self._kv.release(sequence.slot)
            self._vacate(sequence)
        elif sequence.status is Status.WAITING:
            self._queue.remove(sequence)
            if sequence.swapped is not None:
                self._kv.drop(sequence.swapped)
        sequence.status = Status.FINISHED
        self._queue_followers(sequence)
        self.stats.finished(sequence)
        samples = self._requests[sequence.request.request_id]
        if all(sample.status is Status.FINISHED for sample in samples):
            del self._requests[sequence.request.request_id]

    def _vacate(self, sequence: Sequence) -> None:
        heapq.heappush(self._free_slots, sequence.slot)
        del self._running[sequence.slot]
        sequence.slot, sequence.capacity = -1, 0

    def check(self) -> None:
        """Slots, pages and sequences are all accounted for."""
        self._kv.check()
        if sorted([*self._free_slots, *self._running]) != list(range(self._engine.max_num_seqs)):
            raise AssertionError(f"slots {self._free_slots} free and {sorted(self._running)} running are not all")
        alive = {id(s): s for samples in self._requests.values() for s in samples if s.status is not Status.FINISHED}
        queued, running = list(self._queue), list(self._running.values())
        held = [s for s in alive.values() if s.status is Status.HELD]
        if sorted(map(id, [*queued, *running, *held])) != sorted(alive):
            raise AssertionError(
                f"{len(alive)} sequences live: {len(queued)} wait, {len(running)} run, {len(held)} are held"
            )


def _delta(sequence: Sequence) -> SequenceDelta:
    return SequenceDelta(sequence.request.request_id, sequence.index, [], [], finish_reason=sequence.finish_reason)
