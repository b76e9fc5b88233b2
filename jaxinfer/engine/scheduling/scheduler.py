"""Scheduler: plans the next step and commits its results. No jax.

Iteration-level scheduling (Orca, Yu et al. 2022): sequences enter and leave at every step, and there are no phases. The
computed tokens of a sequence catch up with the known ones: in each step every sequence that can decode does, then
prompts advance by chunks under the token budget, then waiting sequences are admitted.
"""

from __future__ import annotations

import heapq
import itertools
import time
from array import array
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Row

from jaxinfer.config import ResolvedEngine
from jaxinfer.engine.scheduling.decode import Constraints, DecodePlanner
from jaxinfer.engine.scheduling.draft_branches import RowResult
from jaxinfer.engine.scheduling.drafts import DraftPlanner
from jaxinfer.engine.scheduling.fair import Heap
from jaxinfer.engine.scheduling.images import PlaceAxes, PromptImages, images_of
from jaxinfer.engine.scheduling.pages import Costs, SequencePages
from jaxinfer.engine.scheduling.plan import DecodePlan, Draft, Preempted, StepPlan, StepResult
from jaxinfer.engine.scheduling.prefill import PrefillPlanner
from jaxinfer.engine.scheduling.queues import Queued, make_queue, require_capacity
from jaxinfer.engine.scheduling.sequence import Sequence, Status, needs_sampler_state
from jaxinfer.engine.scheduling.stats import StatsRecorder
from jaxinfer.kv.cache_key import cache_identity
from jaxinfer.kv.manager import KVManager
from jaxinfer.kv.radix import PageKeys
from jaxinfer.lora.queue import AdapterSource, with_adapters
from jaxinfer.lora.slots import Load
from jaxinfer.sampling_params import RequestError
from jaxinfer.spec import Drafter
from jaxinfer.structured.answers import UNAVAILABLE
from jaxinfer.structured.masks import Masks
from jaxinfer.types import FinishReason, PositionLogprobs, Request, SequenceDelta


class Scheduler:
    """Owner of every sequence from `add` until it finishes, with its slot and its pages.

    Args:
        classes, decode_agrees: bitwise equivalent programs, see `buckets.next_chunk` and `SequencePages`.
        drafter: proposes tokens to verify in idle rows; None: no speculation.
        masks: source of grammar masks; None: requests have no grammars.
        loras: source of adapters; None: requests have none, and `lora_usage` returns None.
        costs: costs for the choice between swapping and recomputing a preempted sequence.
        axes: rotary positions on three axes of prompts with images; None: the model has one.
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
        masks: Masks | None = None,
        loras: AdapterSource | None = None,
        decode_agrees: bool = False,
        axes: PlaceAxes | None = None,
    ) -> None:
        self._engine, self._kv, self._clock, self._axes = engine, kv, clock, axes
        self._costs = costs or Costs()
        self._pages = SequencePages(engine, kv, classes, decode_agrees=decode_agrees)
        chunk = engine.prefill_sizes[-1] if engine.batching == "continuous" else None
        queue = make_queue(engine.scheduling_policy, engine.max_num_seqs, chunk=chunk)
        self.stats = stats or StatsRecorder(clock)
        self._loras, self._queue = with_adapters(queue, engine.lora_slots, loras, self.stats)
        self.lora_usage = self._loras.usage
        self._deadlines: Heap[str, str] = Heap()  # unfinished requests, earliest deadline first
        self._prefill = PrefillPlanner(engine, self._pages, self._queue, self.stats)
        self._drafts = None if drafter is None else DraftPlanner(engine, self._pages, drafter, self.stats, clock)
        self._constraints = Constraints(masks or Masks(None, 0), stateful=engine.num_states > 0)
        self._decode = DecodePlanner(engine, self._pages, self._drafts, self._constraints)
        self._siblings = Siblings(self._enqueue)
        self._running: dict[int, Sequence] = {}
        self._free_slots = list(range(engine.max_num_seqs))  # a heap: the lowest free slot is taken first
        self._requests: dict[str, list[Sequence]] = {}
        self._ended: list[SequenceDelta] = []  # finished without a row, for the next commit
        self._preempted: set[Sequence] = set()  # waiting sequences that were preempted
        self._arrivals = itertools.count(1)
        self._gave_way: Sequence | None = None  # preempted in the current plan for the next queued sequence
        self._batch_runs = False  # static batching: no admission until all have ended
        self._draining: set[str] | None = None  # requests that end before the engine pauses; None: it admits all
        self._set_aside: list[Sequence] = []  # waiting sequences of other requests, while it drains
        self._restarted: list[Preempted] = []  # for the next plan

    # ---- requests

    @property
    def has_work(self) -> bool:
        return bool(self._requests or self._ended)

    @property
    def has_ended(self) -> bool:
        """Whether sequences have ended without a row: the next `commit` reports them."""
        return bool(self._ended)

    @property
    def waiting(self) -> dict[str, int]:
        """Sequences without a slot by reason: new, preempted, those of either kind whose adapter is not resident, and
        samples waiting for the prompt of their request."""
        adapter, preempted = len(self._loras.held), len(self._preempted - self._loras.held)
        new = len(self._queue) + len(self._set_aside) - adapter - preempted
        counts = {"capacity": new, "preempted": preempted, "adapter": adapter}
        return counts | {"sibling": self._siblings.waiting}

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def queued(self) -> Queued:
        """Counts of the waiting queue. From any thread."""
        aside = list(self._set_aside)
        count, tokens = len(self._queue) + len(aside), sum(len(sequence.prompt) for sequence in aside)
        return Queued(count, count + self._siblings.waiting, self._queue.tokens + tokens)

    def cached(self, request: Request) -> int:
        """Return how many prompt tokens would hit the prefix cache now."""
        return self._pages.cached(self._sequence(request, 0, images_of(request, self._engine, self._axes)))

    def add(self, request: Request) -> None:
        """Queue the ``n`` samples of a validated request. The first one's prompt is computed, the others share it.

        Raises:
            RequestError: the id is in use, or the request can never fit, with the numbers.
            QueueFullError: the waiting queue is full.
        """
        if request.request_id in self._requests:
            raise RequestError("request_id", f"={request.request_id!r} is in use")
        if request.params.grammar is not None and not self._constraints.served:
            raise RequestError("structured_outputs", "is not served by this engine")
        images = images_of(request, self._engine, self._axes)
        samples = [self._sequence(request, index, images) for index in range(request.params.n)]
        self._refuse(samples)
        self._loras.enter(request)
        self._requests[request.request_id] = samples
        self._siblings.add(samples)
        for sample in samples:
            self.stats.queued(sample)
        self._enqueue(samples[0])
        if request.deadline is not None:
            self._deadlines.put(request.request_id, request.deadline, request.request_id)

    def reset_prefix_cache(self) -> int:
        """Drop every cached page and what drafters learnt; return the number of pages. See `KVManager`."""
        if self._drafts is not None:
            self._drafts.reset()
        return self._kv.reset_prefix_cache()

    def abort(self, request_id: str, index: int | None = None, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request or one of its samples, in any state. Its pages are free at once: launched steps run before any
        later step that could be given them."""
        for sequence in list(self._requests.get(request_id, ())):
            if index in (None, sequence.index):
                self._end(sequence, reason)

    def abort_all(self) -> None:
        """End all requests; the next `commit` reports each sample."""
        for samples in list(self._requests.values()):
            for sequence in samples:
                if sequence.finish_reason is None:
                    self._end_between(sequence, FinishReason.ABORT)

    # ---- pauses and new weights

    def drain(self) -> None:
        """Admit only requests of which a sample has begun; the others wait until `resume`."""
        begun = {id for id, samples in self._requests.items() if any(sample.begun for sample in samples)}
        self._draining = begun

    @property
    def drained(self) -> bool:
        """Whether all requests have ended that had begun before `drain`."""
        return self._draining is not None and self._requests.keys().isdisjoint(self._draining)

    def resume(self) -> None:
        """Admit all requests again."""
        self._draining = None
        for sequence in self._set_aside:
            self._queue.push(sequence)
        self._set_aside.clear()

    def restart(self) -> None:
        """Recompute under other weights, or into new pools, what was computed: running sequences wait again with the
        tokens that they have, and nothing is cached. No step may be in flight."""
        for sequence in list(self._running.values()):
            self._restarted.append(self._preempt(sequence, swap=False))
        for samples in self._requests.values():
            for sequence in samples:
                if sequence.status is Status.WAITING:
                    self._pages.drop(sequence)
                    sequence.restart()
        self._prefill.encoder.reset()
        self._kv.reset_prefix_cache()

    def _next(self) -> Sequence | None:
        """Return the waiting sequence to admit next. While the engine drains, set aside those that may not begin."""
        while (first := self._queue.peek()) is not None:
            if self._draining is None or first.request.request_id in self._draining:
                return first
            self._queue.remove(first)
            self._set_aside.append(first)
        return None

    def _sequence(self, request: Request, index: int, images: PromptImages | None = None) -> Sequence:
        assert request.params.max_tokens is not None  # resolved when the request was validated
        prompt = request.prompt_token_ids
        return Sequence(
            request,
            index,
            next(self._arrivals),
            tokens=array("i", prompt),
            keys=PageKeys(cache_identity(request), self._engine.page_size, images.marks if images else ()),
            images=images,
            prefill_end=len(prompt) - 1,
            final_length=len(prompt) + request.params.max_tokens - 1,
            stateful=needs_sampler_state(request),
        )

    def _refuse(self, samples: list[Sequence]) -> None:
        length, engine = samples[0].final_length, self._engine
        needed = self._kv.pages_for(length)
        if needed > engine.num_pages:
            reason = f"and max_tokens = {length} tokens need {needed} KV pages, the pool has {engine.num_pages}"
            raise RequestError("prompt", reason)
        self.check_capacity(samples[0].request)

    def check_capacity(self, request: Request, ahead: int = 0) -> None:
        """Raise QueueFullError for a request over the queue limits, with ``ahead`` more requests on their way before
        it. From any thread: it only reads, and sees the state at some moment of the call."""
        require_capacity(self._engine, self.queued, request, ahead)

    def _enqueue(self, sequence: Sequence) -> None:
        sequence.status = Status.WAITING
        self._queue.push(sequence)

    # ---- one step

    def plan(self) -> StepPlan:
        """Choose the next step and advance the scheduled lengths, before any earlier result is known."""
        self._expire()
        self._end_constrained()
        loads = self._load_adapters()
        self._prefill.begin(decoding=any(not sequence.prefilling for sequence in self._running.values()))
        self._batch_runs = self._batch_runs and bool(self._running)
        self._decode.advance(self._running)
        preempted, admitted = self._grow(), list[Sequence]()
        outranked = [] if preempted or self._batch_runs else self._preempt_lower_priority()
        # Prompts being computed, in the order in which they proceed.
        started = sorted((s for s in self._running.values() if s.prefilling), key=self._queue.rank)
        if started:
            self._admit(preempted, admitted, started)
        self._continue(started, preempted)
        self._admit(preempted, admitted)
        self._constraints.admit(admitted)
        self._constraints.send()
        decodes, steps, drafts = self._decodes(admitted)
        masks = self._constraints.masks(decodes)
        prefills, catch_up = self._prefill.plans, self._drafts.catch_up(drafts or ()) if self._drafts else ([], [])
        self._siblings.release([*(plan.sequence for plan in prefills), *admitted])
        moves, gone = self._kv.take_moves(), [*self._restarted, *preempted, *outranked]
        self._restarted = []
        place, forced = self._decode.microbatch, self._drafts.forced if self._drafts else []
        made = StepPlan(
            *moves,
            gone,
            admitted,
            prefills,
            decodes,
            steps,
            place,
            drafts,
            *catch_up,
            masks,
            forced,
            loads,
            self._prefill.encoder.encodes,
        )
        self._loras.launched(bool(made))
        return made

    def commit(self, result: StepResult | None) -> list[SequenceDelta]:
        """Commit a step's results. Rows of sequences that have finished meanwhile are dropped."""
        deltas, self._ended = self._ended, []
        if result is None:
            return deltas
        self._loras.read()
        for prefill, prompt_logprobs in zip(result.plan.prefills, result.prompt_logprobs, strict=True):
            known = prefill.sequence.prompt_logprobs
            if len(known) == prefill.chunk.start + 1:  # not again after a preemption
                known.extend(prompt_logprobs)
        emitted: list[Sequence] = []
        last, several = None, result.plan.steps > 1
        delta: SequenceDelta | None = None
        results: Iterable[RowResult] = zip(result.plan.decodes, result.tokens, result.logprobs, strict=True)
        if self._drafts is not None:
            results = self._drafts.branches.settle(result.plan, results)
        for row, tokens, logprobs in results:
            sequence = row.sequence
            sequence.in_flight -= 1
            if sequence.finish_reason is not None:
                continue
            if sequence.thought is not None and self._constraints.outdated(row, result.plan.masks):
                continue
            before = delta if sequence is last else None
            if several:  # a sequence may have stopped early
                sequence.scheduled = min(sequence.scheduled, row.position + len(tokens))
            last, delta = sequence, self._commit_row(row, tokens, logprobs, before)
            if delta is not None and before is None:
                deltas.append(delta)
                emitted.append(sequence)
        self.stats.emitted(emitted)
        self._constraints.send()
        if self._drafts is not None:
            self._drafts.committed(result.plan, deltas)
        return deltas

    # ---- planning

    def _expire(self) -> None:
        now = self._clock() if len(self._deadlines) else 0.0
        while (first := self._deadlines.first()) is not None and first[0] <= now:
            request_id = first[1]
            self._deadlines.discard(request_id)
            for sequence in list(self._requests.get(request_id, ())):
                if sequence.finish_reason is None:
                    self._end_between(sequence, FinishReason.DEADLINE)

    def _end_constrained(self) -> None:
        """End the outputs that their grammars complete, and those whose grammars failed."""
        for sequence, error in self._constraints.over():
            failed = FinishReason.UNAVAILABLE if error == UNAVAILABLE else FinishReason.ERROR
            self._end_between(sequence, FinishReason.STOP if error is None else failed, error)

    def _load_adapters(self) -> list[Load]:
        """Return the adapters to load before the step; end sequences with unavailable adapters."""
        loads, failed = self._loras.begin()
        for sequence, error in failed:
            self._end_between(sequence, FinishReason.UNAVAILABLE, error)
        return loads

    def _end_between(self, sequence: Sequence, reason: FinishReason, stop_reason: str | None = None) -> None:
        """End a sequence outside the commit of a row."""
        self._end(sequence, reason)
        request_id = sequence.request.request_id
        self._ended.append(SequenceDelta(request_id, sequence.index, [], (), reason, stop_reason))

    def rest(self) -> None:
        """Wait briefly for a mask or an adapter, where nothing runs."""
        self._constraints.rest()
        self._loras.rest()

    def _grow(self) -> list[Preempted]:
        """Give a page to each decoding sequence that needs one; without a free page, preempt another sequence."""
        preempted: list[Preempted] = []
        short = [
            s for s in self._decode.members(self._running).values() if s.capacity <= s.scheduled and not s.prefilling
        ]
        for sequence in sorted(short, key=self._queue.rank):
            while sequence.status is Status.RUNNING:
                if self._pages.extend(sequence, sequence.scheduled + 1, slide=True):
                    break
                preempted.append(self._preempt())
        return preempted

    def _preempt(self, sequence: Sequence | None = None, *, swap: bool = True) -> Preempted:
        """Take the slot and the pages of a running sequence (None: the one of lowest rank), which it computes again
        unless they are swapped."""
        sequence = sequence or max(self._running.values(), key=self._queue.rank)
        preempted = Preempted(sequence, sequence.slot)
        # While tokens are recomputed, the sampler counts them again: that state would be lost beside the saved one.
        swapped = self._pages.preempt(sequence, self._costs, swap=swap and sequence.sampler_state is None)
        self.stats.preempted("swap" if swapped else "recompute")
        self._preempted.add(sequence)
        self._enqueue(sequence)  # before `_vacate`: so its tenant stays present all the time
        self._vacate(sequence)
        return preempted

    def _continue(self, started: list[Sequence], preempted: list[Preempted]) -> None:
        """Plan chunks of the running prompts. Where the first ones want pages that those behind them hold, these must
        proceed."""
        for limited in (True, False):
            for sequence in started:
                self._prefill.extend(sequence, limited=limited)
            if self._prefill.plans:
                break
        if started and not self._prefill.plans and 1 < len(started) == len(self._running):
            preempted.append(self._preempt())  # prompts hold all pages and none can proceed

    def _preempt_lower_priority(self) -> list[Preempted]:
        """Preempt a running sequence that the policy ranks after the first waiting one, where no slot is free."""
        first, self._gave_way = self._next(), None
        if first is None or self._free_slots:
            return []
        self._gave_way = self._queue.preemption_victim()
        return [] if self._gave_way is None else [self._preempt(self._gave_way)]

    def _admit(self, preempted: list[Preempted], admitted: list[Sequence], started: Row[Sequence] = ()) -> None:
        """Give slots and first chunks to the next waiting sequences, those that precede the ``started`` prompts."""
        # Not in a step that preempts: the freed pages are for the running sequences.
        if preempted or self._batch_runs or not self._free_slots or not len(self._queue):
            return
        # Leave a page for each sequence that may still need one, so that none is preempted for a newcomer.
        spare = sum(other.capacity < other.final_length for other in self._running.values())
        # And the pages that started prompts need to finish: else they would preempt each other forever.
        ends = (self._kv.pages_for(other.prefill_end) - other.capacity // self._engine.page_size for other in started)
        theirs = sum(max(0, pages) for pages in ends)
        while self._free_slots and (sequence := self._next()) is not None:
            if sequence.leader in self._prefill.filled:
                break  # the prefix to share is computed in this very step
            if sequence.stateful and sequence.in_flight:
                break  # its saved sampler state counts tokens that are not known yet
            if sequence is self._gave_way or not all(map(self._queue.precedes, started)):
                break
            slot, swapped = self._free_slots[0], sequence.swapped is not None
            cached = self._pages.place(sequence, slot, self._prefill.budget, spare + theirs)
            if cached is None:
                break
            sequence.charged = max(sequence.charged, cached)
            self._queue.pop()
            self._preempted.discard(sequence)
            if not swapped:
                self.stats.prefix(len(sequence.tokens) - 1, cached)
            if sequence.cached is None:
                sequence.cached = min(cached, sequence.prompt_end)
            self.stats.scheduled(sequence)
            sequence.slot, sequence.status = heapq.heappop(self._free_slots), Status.RUNNING
            self._running[slot] = sequence
            admitted.append(sequence)
            self._prefill.extend(sequence, theirs)
            spare += sequence.capacity < sequence.final_length

    def _decodes(self, admitted: list[Sequence]) -> tuple[list[DecodePlan], int, list[Draft] | None]:
        """Return rows, steps and drafts; none in static batching until the batch is full and prompts are computed."""
        if self._engine.batching == "static":
            self._batch_runs = self._batch_runs or not (self._prefill.plans or admitted)
            if not self._batch_runs:
                return [], 1, None
        alone = not (self._prefill.plans or self._prefill.encoder.encodes or len(self._queue))
        return self._decode.plan(self._running, alone=alone, spare=self._spare() if self._engine.drafts_trees else None)

    def _spare(self) -> int | None:
        """Return the pages that tree drafts must leave free; None: a sequence waits for pages."""
        if self._free_slots and len(self._queue):
            return None
        return sum(other.capacity < other.final_length for other in self._running.values())

    # ---- results

    def _commit_row(
        self, row: DecodePlan, tokens: list[int], logprobs: Row[PositionLogprobs], delta: SequenceDelta | None
    ) -> SequenceDelta | None:
        """Add a row's tokens to its sequence and to ``delta``, that of earlier rows; None if there are none."""
        sequence, _, at, fed, _ = row
        known = sequence.tokens
        again = len(known) - 1 - at
        if fed >= 0 and (again < 0 or known[at] != fed):
            sequence.scheduled = min(sequence.scheduled, at)  # a draft that was rejected
            return delta
        if again < 0:
            raise AssertionError(f"a row of position {at} was read when {len(known)} tokens are known")
        if again:
            for have, token in zip(known[at + 1 :], tokens, strict=False):
                self.stats.replayed(have == token or sequence.redrawn)
            tokens, logprobs = tokens[again:], logprobs[again:]
            if not tokens:
                return delta
        taken = sequence.take(tokens)
        self._queue.charge(sequence, output=taken)
        if taken < len(tokens):
            tokens, logprobs = tokens[:taken], logprobs[:taken]
        if sequence.finish_reason is None:
            self._constraints.said(sequence, tokens)
        delta = sequence.added(delta, tokens, logprobs)
        if sequence.finish_reason is not None:
            delta.finish_reason, delta.stop_reason = sequence.finish_reason, sequence.stop_reason
            self._retire(sequence)
        return delta

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        if sequence.finish_reason is None:
            sequence.finish_reason = reason
            self._retire(sequence)

    def _retire(self, sequence: Sequence) -> None:
        """Remove a finished sequence from its queue or slot."""
        if sequence.status is Status.RUNNING:
            self._pages.release(sequence)
            self._vacate(sequence)
        elif sequence.status is Status.WAITING_FOR_PROMPT:
            self._siblings.ended()
        elif sequence.status is Status.WAITING:
            self._set_aside.remove(sequence) if sequence in self._set_aside else self._queue.remove(sequence)
            self._preempted.discard(sequence)
            self._pages.drop(sequence)
        if self._drafts is not None:
            self._drafts.end(sequence)
        self._constraints.end(sequence)
        sequence.status = Status.FINISHED
        self._siblings.release_of(sequence)
        self.stats.finished(sequence)
        samples = self._requests[sequence.request.request_id]
        if all(sample.status is Status.FINISHED for sample in samples):
            del self._requests[sequence.request.request_id]
            self._loras.done(sequence.request)
            self._deadlines.discard(sequence.request.request_id)

    def _vacate(self, sequence: Sequence) -> None:
        self._queue.left(sequence)
        heapq.heappush(self._free_slots, sequence.slot)
        del self._running[sequence.slot]
        sequence.slot = sequence.sampled = -1

    def check(self) -> None:
        """Check that slots, pages and sequences are all accounted for."""
        self._kv.check()
        self._loras.check(self._running.values())
        self._prefill.encoder.check()
        self._pages.check(self._running.values(), self._engine.branches)
        if sorted([*self._free_slots, *self._running]) != list(range(self._engine.max_num_seqs)):
            raise AssertionError(f"slots {self._free_slots} free and {sorted(self._running)} running are not all")
        alive = {id(s): s for samples in self._requests.values() for s in samples if s.status is not Status.FINISHED}
        queued, running = [*self._queue, *self._set_aside], list(self._running.values())
        siblings = [s for s in alive.values() if s.status is Status.WAITING_FOR_PROMPT]
        if sorted(map(id, [*queued, *running, *siblings])) != sorted(alive):
            raise AssertionError(
                f"{len(alive)} sequences live: {len(queued)} wait, {len(running)} run, {len(siblings)} are held"
            )


class Siblings:
    """Samples ``waiting`` for the prompt of their first one; each is passed to ``enqueue`` when the prompt is ready."""

    def __init__(self, enqueue: Callable[[Sequence], None]) -> None:
        self._enqueue = enqueue
        self.waiting = 0

    def add(self, samples: list[Sequence]) -> None:
        """Add all samples of a new request: the first one leads the others."""
        samples[0].followers = samples[1:]
        for sample in samples[1:]:
            sample.status, sample.leader = Status.WAITING_FOR_PROMPT, samples[0]
        self.waiting += len(samples) - 1

    def release(self, leaders: Iterable[Sequence]) -> None:
        """Enqueue the followers of leaders whose prompt is planned to its end."""
        for leader in leaders:
            if leader.followers and not leader.prefilling:
                self.release_of(leader)

    def release_of(self, leader: Sequence) -> None:
        """Enqueue the followers of a leader that has ended, or whose prompt is computed."""
        for follower in leader.followers:
            if follower.status is Status.WAITING_FOR_PROMPT:
                self.waiting -= 1
                self._enqueue(follower)
        leader.followers = []

    def ended(self) -> None:
        """Record that a sample has ended while it waited."""
        self.waiting -= 1
