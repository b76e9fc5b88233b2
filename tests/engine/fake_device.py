"""A fake device that computes hashes instead of a model. No jax.

A token's slot in the KV pool holds a 64-bit number: a hash of the token, of the class of the program that computed it
and of all numbers that its attention reads, through the block table, at that moment. A row's answer is a hash of what
it reads. So a wrong page, a stale table, a missed copy, a bad swap, leftovers of a rejected draft, or a prompt token
that ran in the wrong program changes the answer. `FakeModel.alone` computes the same numbers for one isolated request,
without pages; every read is compared with it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxinfer.config import ResolvedEngine
from jaxinfer.engine.scheduling.buckets import Chunk, next_chunk, rule_size
from jaxinfer.engine.scheduling.plan import DecodePlan, PrefillPlan, StepPlan, StepResult
from jaxinfer.engine.scheduling.sequence import Sequence, needs_sampler_state
from jaxinfer.types import FinishReason, ImageInput, PositionLogprobs, Request, TokenLogprob

VOCAB, EOS = 11, 10
DECODE = -1  # class of the decode program
LOGPROBS = 7  # class of the prompt-logprobs program, where all other programs agree
MAX_LENGTH = 512
_MASK = 2**64 - 1
_WEIGHTS = np.random.default_rng(0).integers(2**64, size=MAX_LENGTH, dtype=np.uint64) | np.uint64(1)
_FACTORS = _WEIGHTS.tolist()


def mix(*parts: int) -> int:
    """Hash integers to 64 bits."""
    value = 0x9E3779B97F4A7C15
    for part in parts:
        value = ((value ^ part) * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & _MASK
        value ^= value >> 31
    return value


class Chain:
    """Numbers of consecutive tokens, each a hash of the tokens within the window of each group.

    Args:
        position: of the first token to be fed.
        adapter: content number of the adapter; 0: no adapter.
        context: by group, the numbers of all visible tokens before ``position``.
    """

    def __init__(
        self,
        windows: tuple[int | None, ...],
        position: int = 0,
        context: list[np.ndarray] | None = None,
        adapter: int = 0,
    ):
        self._adapter = adapter
        context = context or [np.zeros(0, np.uint64) for _ in windows]
        self._windows, self._first = windows, position
        self.position = position
        self._old = [numbers.tolist() for numbers in context]
        self.new: list[list[int]] = [[] for _ in windows]
        weights = _WEIGHTS[:position]
        self._sums = [int((numbers * weights[position - len(numbers) :]).sum()) for numbers in context]

    def feed(self, token: int, klass: int) -> int:
        """Add a token; return the hash of all that it sees, itself included."""
        at = self.position
        for group, window in enumerate(self._windows):
            if window is not None and (gone := at - window) >= 0:
                self._sums[group] -= _FACTORS[gone] * self._number(group, gone)
        seen = mix(sum(self._sums) & _MASK, token, at, klass + 1, *([self._adapter] if self._adapter else []))
        for group in range(len(self._windows)):
            number = mix(seen, group)
            self.new[group].append(number)
            self._sums[group] += _FACTORS[at] * number
        self.position = at + 1
        return mix(seen, sum(self._sums) & _MASK)

    def _number(self, group: int, position: int) -> int:
        """Return a token's number; 0 for a position that was outside the window before the first token."""
        if position >= self._first:
            return self.new[group][position - self._first]
        index = position - self._first + len(self._old[group])
        return self._old[group][index] if index >= 0 else 0


class Alone(NamedTuple):
    """The expected result of an isolated sample: its tokens with the prompt, the numbers of the fed tokens by group,
    and the log probabilities of all but the first token."""

    tokens: list[int]
    numbers: list[np.ndarray]
    logprobs: list[float]
    reason: FinishReason


@dataclasses.dataclass(frozen=True)
class FakeModel:
    """The arithmetic. ``classes``: class of each prefill size, as in the scheduler. If ``relaxed``, numbers do not
    depend on the program; if programs ``agree``, only on whether it gives prompt log probabilities."""

    windows: tuple[int | None, ...] = (None,)
    sizes: tuple[int, ...] = (8, 16)
    classes: tuple[tuple[int, int], ...] = ((8, 0), (16, 1))
    relaxed: bool = False
    agree: bool = False
    both_ways: bool = False

    @functools.cached_property
    def class_of(self) -> dict[int, int]:
        return dict.fromkeys(self.sizes, 0) if self.relaxed or self.agree else dict(self.classes)

    @property
    def decode_class(self) -> int:
        return 0 if self.relaxed or self.agree else DECODE

    def chunk_class(self, size: int, *, logprobs: bool) -> int:
        """Return the class of a chunk in the program of a size."""
        return LOGPROBS if logprobs and self.agree and not self.relaxed else self.class_of[size]

    def due(self, request: Request, position: int) -> int:
        """Return the class of the program that must compute a token."""
        end = len(request.prompt_token_ids) - 1
        if position >= end:
            return self.decode_class
        wants = request.params.prompt_logprobs is not None
        size = self._whole_size(request, position, end) if self.both_ways else rule_size(position, end, self.sizes)
        return self.chunk_class(self.sizes[-1] if wants else size, logprobs=wants)

    def _whole_size(self, request: Request, position: int, end: int) -> int:
        """Return the size of the chunk of a token where no image is split: the prompt is computed from its start."""
        spans, chunk = [(start, stop) for start, stop, _ in request.images], Chunk(0, 0, 0)
        while chunk.start + chunk.length <= position:
            start = chunk.start + chunk.length
            chunk = next_chunk(start, end, self.sizes, dict.fromkeys(self.sizes, 0), whole=spans)
            size = rule_size(start, end, self.sizes) if start + chunk.length == end else self.sizes[-1]
        return size

    def answer(self, request: Request, index: int, position: int, seen: int, state: int) -> tuple[int, float]:
        """Return the sampled token of a row and its log probability. An n-gram drafter can guess every second token."""
        value = mix(seen, request.params.seed or 0, index, state)
        if value % 17 == 0:
            return EOS, float(value >> 44)
        return (position * 3 % 5 if value % 16 < 12 else value % VOCAB), float(value >> 44)

    def first_state(self, request: Request) -> int:
        """Return the sampler state of a request before it generates."""
        return mix(*request.prompt_token_ids) if needs_sampler_state(request) else 0

    def next_state(self, request: Request, state: int, token: int) -> int:
        return mix(state, token) if needs_sampler_state(request) else 0

    def alone(self, request: Request, index: int) -> Alone:
        chain, state = Chain(self.windows, adapter=content_number(request)), self.first_state(request)
        rows = rows_of(request)
        tokens, logprobs = list(request.prompt_token_ids), []
        prompt, reason = len(tokens), None
        while reason is None:
            at = chain.position
            seen = chain.feed(rows.get(at, tokens[at]), self.due(request, at))
            if at + 1 < prompt:
                logprobs.append(float(seen >> 44))
                continue
            token, logprob = self.answer(request, index, at, seen, state)
            state = self.next_state(request, state, token)
            tokens.append(token)
            logprobs.append(logprob)
            reason = _reason(request, token, len(tokens) - prompt)
        return Alone(tokens, [np.array(numbers, np.uint64) for numbers in chain.new], logprobs, reason)


def content_number(request: Request) -> int:
    """Return the content number of a request's adapter: the value of each part of its slot once it is loaded."""
    return 0 if request.lora is None else int(request.lora.identity, 16)


def rows_of(request: Request) -> dict[int, int]:
    """Return what is read in place of each placeholder, by its position."""
    found, tokens = dict[int, int](), request.prompt_token_ids
    for start, stop, image in request.images:
        places = [at for at in range(start, stop) if tokens[at] == tokens[start]]
        found |= zip(places, (number for frame in image.frames for number in encoded(frame)), strict=True)
    return found


def encoded(image: ImageInput) -> list[int]:
    """Return what the encoder makes of an image: a number for each of its rows."""
    return [mix(int(image.digest, 16), row) for row in range(image.patches.shape[0])]


def _reason(request: Request, token: int, generated: int) -> FinishReason | None:
    if token in request.stop_token_ids and generated >= request.params.min_tokens:
        return FinishReason.STOP
    return FinishReason.LENGTH if generated == request.params.max_tokens else None


class Launched(NamedTuple):
    result: StepResult


class FakeDevice:
    """Execute plans as they are launched, in the documented order, and reject what a plan must not contain.

    Args:
        alone: returns the isolated run of a sample, with which each read is compared.
        running: returns the sequences that hold pages, by slot, as the host knows them at a launch.
        cached: returns whether a page of a group is in the prefix cache.
    """

    def __init__(
        self,
        model: FakeModel,
        engine: ResolvedEngine,
        tables: np.ndarray,
        alone: Callable[[Sequence], Alone],
        running: Callable[[], Mapping[int, Sequence]],
        cached: Callable[[int, int], bool],
    ) -> None:
        self._model, self._engine, self._live_tables = model, engine, tables
        self._alone, self._running, self._cached = alone, running, cached
        shape = (len(model.windows), engine.num_pages, engine.page_size)
        self._numbers = np.zeros(shape, np.uint64)
        self._notes = np.zeros(shape, np.int64)  # writer of each slot: arrival, position and class
        self._host: dict[int, list[tuple[np.ndarray, np.ndarray] | None]] = {}
        self._owners: dict[int, Sequence] = {}
        self._states: dict[int, int] = {}
        self._microbatch = 0
        self._begun: dict[int, int] = {}  # by slot: sampler state before its rows of this step
        self._counted: dict[int, int] = {}  # by slot: position up to which this step's tokens are in the state
        self._before = 0, 0, False  # previous row: sampled token, its state, whether its drafts are true
        self._last: dict[int, tuple[Sequence, int, int]] = {}  # by slot: sequence, position and token last sampled
        self._drafted_to: dict[int, int] = {}  # by arrival: number of tokens whose keys the draft model has
        self._encoded: dict[int, int] = {}  # rows of the encoder cache
        self._banks: dict[int, dict[int, dict[str, np.ndarray]]] = {}  # adapter banks by slot and part
        self.computed = {"prefill": 0, "decode": 0}  # tokens
        self.moved = {"exports": 0, "copies": 0, "imports": 0}

    def launch(self, plan: StepPlan) -> Launched | None:
        """Execute a plan as the runner's launch does; an empty plan launches nothing."""
        if not plan:
            return None
        self._tables, self._microbatch = self._live_tables.copy(), plan.microbatch
        for slot, part, arrays in plan.loads:
            self._banks.setdefault(slot, {})[part] = {name: array.copy() for name, array in arrays.items()}
        for image, rows in plan.encodes:
            assert all(0 <= row < self._engine.encoder_cache_size for row in rows), "a row beyond the encoder cache"
            self._encoded |= dict(zip(rows.tolist(), encoded(image), strict=True))
        self._move(plan)
        self._seat(plan)
        self._holders = self._count_holders(plan)
        plan = self._drafted(plan) if self._engine.drafts_on_device else plan
        self._check(plan)
        prompt_logprobs = [self._prefill(prefill) for prefill in plan.prefills]
        tokens, logprobs = self._decode(plan)
        return Launched(StepResult(plan, tokens, logprobs, prompt_logprobs))

    # ---- moves and slots

    def _move(self, plan: StepPlan) -> None:
        for source, host in plan.exports:
            self._host[host] = [None if page < 0 else self._page(group, page) for group, page in enumerate(source)]
        written: set[tuple[int, int]] = set()
        for copy in plan.copies:
            assert not written & set(enumerate(copy.source)), "a copy reads what a copy of the same step wrote"
            for group, (source, target) in enumerate(zip(copy.source, copy.target, strict=True)):
                if source >= 0 and target >= 0:
                    self._put(group, target, self._page(group, source))
                    written.add((group, target))
        for host, target in plan.imports:
            for group, page in enumerate(target):
                if page >= 0:
                    content = self._host[host][group]
                    assert content is not None, f"host page {host} has nothing of group {group}"
                    self._put(group, page, content)
        for name in self.moved:
            self.moved[name] += len(getattr(plan, name))

    def _page(self, group: int, page: int) -> tuple[np.ndarray, np.ndarray]:
        return self._numbers[group, page].copy(), self._notes[group, page].copy()

    def _put(self, group: int, page: int, content: tuple[np.ndarray, np.ndarray]) -> None:
        self._numbers[group, page], self._notes[group, page] = content

    def _seat(self, plan: StepPlan) -> None:
        for sequence, slot in plan.preempted:
            assert self._owners.pop(slot) is sequence, "a slot is preempted that another sequence has"
            if sequence.swapped is None:
                self._drafted_to.pop(sequence.arrival, None)
            if sequence.stateful and sequence.sampler_state is None:
                sequence.sampler_state = self._states[slot]
        taken = [sequence.slot for sequence in plan.admitted]
        assert len(set(taken)) == len(taken), "two sequences were given one slot"
        for sequence in plan.admitted:
            self._owners[sequence.slot] = sequence
            self._states[sequence.slot] = self._model.first_state(sequence.request)
        for sequence, _, position, *_ in plan.decodes:
            if sequence.sampler_state is not None and position + 1 == len(sequence.tokens):
                saved: Any = sequence.sampler_state
                self._states[sequence.slot], sequence.sampler_state = saved, None

    # ---- a draft model

    def _drafted(self, plan: StepPlan) -> StepPlan:
        """Return the plan with the draft model's tokens, three of four of them true. The draft model must have seen all
        tokens that the model has."""
        found: dict[int, list[int]] = {}
        for sequence, chunk, *_ in plan.prefills:  # computed by the draft model, too
            if chunk.start <= (before := self._reach(sequence)):
                self._drafted_to[sequence.arrival] = max(before, chunk.start + chunk.length)
        reach = {draft.sequence.arrival: self._reach(draft.sequence) for draft in plan.drafts or ()}
        for sequence, chunk, *_ in plan.draft_prefills:
            assert chunk.start <= reach[sequence.arrival], "the draft model would see nothing of some tokens"
            assert 0 < chunk.length <= chunk.size
            assert chunk.start + chunk.length < len(sequence.tokens), "a chunk of tokens that are not known"
            reach[sequence.arrival] = max(reach[sequence.arrival], chunk.start + chunk.length)
        for sequence, start, names, *_ in plan.drafts or ():
            assert names == list(range(-2, -2 - len(names), -1)), "a draft is named otherwise"
            assert reach[sequence.arrival] >= start - 1, "the draft model has not seen all that is known"
            assert start == len(sequence.tokens), "a draft behind tokens that are not known"
            found[sequence.arrival] = said = self._said(sequence, start, len(names))
            known = self._alone(sequence).tokens[start : start + len(names)]
            right = sum(itertools.takewhile(bool, (one == other for one, other in zip(said, known, strict=False))))
            self._drafted_to[sequence.arrival] = start + right
        decodes = [
            row._replace(token=found[row.sequence.arrival][-2 - row.token]) if row.token < -1 else row
            for row in plan.decodes
        ]
        drafts = [draft._replace(tokens=found[draft.sequence.arrival]) for draft in plan.drafts or ()]
        return dataclasses.replace(plan, decodes=decodes, drafts=None if plan.drafts is None else drafts)

    def _reach(self, sequence: Sequence) -> int:
        return max(sequence.prompt_end, self._drafted_to.get(sequence.arrival, 0))

    def _said(self, sequence: Sequence, start: int, count: int) -> list[int]:
        known = self._alone(sequence).tokens
        truth = [known[at] if at < len(known) else 0 for at in range(start, start + count)]
        return [token if mix(sequence.arrival, start + i) % 4 else (token + 1) % EOS for i, token in enumerate(truth)]

    # ---- plan invariants

    def _check(self, plan: StepPlan) -> None:
        budget = self._engine.max_num_batched_tokens - self._engine.max_num_seqs
        assert sum(prefill.chunk.size for prefill in plan.prefills) <= budget, "over the token budget"
        rows = [row.row for row in plan.decodes]
        assert len(set(rows)) == len(rows), "a row is used twice"
        assert all(0 <= row < self._engine.rows // self._engine.microbatches for row in rows), (
            "no such row in the program"
        )
        reach: dict[int, int] = {}
        for prefill in plan.prefills:
            sequence, chunk = prefill.sequence, prefill.chunk
            assert self._owners.get(sequence.slot) is sequence, "a prompt runs in a slot that is not its own"
            assert chunk.start == reach.get(id(sequence), chunk.start), "chunks of a prompt are out of order"
            assert 0 < chunk.length <= chunk.size, f"{chunk} has no room for its tokens"
            assert chunk.start + chunk.length <= sequence.prefill_end, f"{chunk} goes too far"
            assert chunk.start + chunk.length < len(sequence.tokens), "the last known token is a row"
            assert prefill.logprobs == (sequence.params.prompt_logprobs is not None)
            spans = sequence.images.spans if sequence.images is not None else ()
            assert not any(first < chunk.start + chunk.length < last for first, last in spans), "an image is split"
            reach[id(sequence)] = chunk.start + chunk.length
        self._check_rows(plan, reach)

    def _check_rows(self, plan: StepPlan, reach: dict[int, int]) -> None:
        before: dict[tuple[int, int], int] = {}
        for row in plan.decodes:
            sequence, path = row.sequence, (id(row.sequence), row.branch)
            first = path not in before
            assert self._owners.get(sequence.slot) is sequence, "a row of a sequence whose slot is another's"
            assert reach.get(id(sequence), sequence.prefill_end) == sequence.prefill_end, (
                "decodes before its prompt ends"
            )
            assert sequence.prefill_end <= row.position < sequence.final_length, "a position that has no row"
            assert self._own(row) == (first and not row.branch), "the first row of a sequence is its slot"
            assert not row.branch or row.branch in sequence.branches, "a branch of somebody else"
            assert first or row.position == before[path] + 1, "rows of a path are out of order"
            assert first or row.token >= 0, "a draft row without a token"
            before[path] = row.position
        assert plan.steps == 1 or len(before) == len(plan.decodes), "drafts in a run of several steps"
        assert 1 <= plan.steps <= max(1, self._engine.multi_step)

    def _count_holders(self, plan: StepPlan) -> np.ndarray:
        """Return by group and page how many running sequences have the page in table and window."""
        holders = np.zeros(self._numbers.shape[:2], np.int32)
        starts = {id(row.sequence): row.position for row in reversed(plan.decodes)}
        for branch, rows in itertools.groupby(plan.decodes, key=lambda row: row.branch):
            if branch:
                first, *_, last = rows
                self._hold(holders, branch, first.position, -(-(last.position + 1) // self._engine.page_size))
        starts |= {id(prefill.sequence): prefill.chunk.start for prefill in reversed(plan.prefills)}
        for slot, sequence in self._running().items():
            last = -(-sequence.capacity // self._engine.page_size)
            self._hold(holders, slot, starts.get(id(sequence), sequence.scheduled), last)
        return holders

    def _hold(self, holders: np.ndarray, slot: int, start: int, last: int) -> None:
        """Count the pages visible to a query of a slot's table at ``start``, up to page ``last``."""
        for group, window in enumerate(self._model.windows):
            first = 0 if window is None else max(0, start - window + 1) // self._engine.page_size
            np.add.at(holders[group], self._tables[group, slot, first:last], 1)

    # ---- reading and writing through the tables

    def _context(self, sequence: Sequence, position: int, *, compare: bool, branch: int = 0) -> list[np.ndarray]:
        """Return by group the numbers before ``position`` that a query there sees."""
        size, context = self._engine.page_size, []
        for group, window in enumerate(self._model.windows):
            first = 0 if window is None else max(0, position - window + 1)
            pages = self._tables[group, branch or sequence.slot, first // size : -(-position // size)]
            at = slice(first % size, first % size + position - first)
            numbers = self._numbers[group, pages].reshape(-1)[at]
            if compare:
                want = self._alone(sequence).numbers[group][first:position]
                if not np.array_equal(numbers[: len(want)], want):
                    self._explain(sequence, group, first, numbers, want, self._notes[group, pages].reshape(-1)[at])
            context.append(numbers)
        return context

    def _explain(
        self, sequence: Sequence, group: int, first: int, got: np.ndarray, want: np.ndarray, notes: np.ndarray
    ) -> None:
        wrong = int(np.flatnonzero(got[: len(want)] != want)[0])
        arrival, position, klass = _unpack(int(notes[wrong]))
        raise AssertionError(
            f"sample {sequence.index} of {sequence.request.request_id} (arrival {sequence.arrival}, slot "
            f"{sequence.slot}, prompt of {len(sequence.prompt)}) reads at position {first + wrong} of group {group} "
            f"what arrival {arrival} wrote at position {position} in class {klass}; "
            f"due is class {self._model.due(sequence.request, first + wrong)}"
        )

    def _write(self, sequence: Sequence, start: int, numbers: list[list[int]], klass: int, branch: int = 0) -> None:
        size, count = self._engine.page_size, len(numbers[0])
        at = np.arange(start, start + count)
        assert branch or start + count <= sequence.capacity, "a token without a page"
        for group, new in enumerate(numbers):
            pages = self._tables[group, branch or sequence.slot, at // size]
            holders = self._holders[group, pages]
            assert (holders > 0).all(), "a page is written that the sequence does not hold"
            assert (holders == 1).all(), "a page is written that another sequence holds"
            assert not any(self._cached(group, page) for page in set(pages.tolist())), "a cached page is written"
            self._numbers[group, pages, at % size] = new
            self._notes[group, pages, at % size] = _pack(sequence.arrival, at, klass)

    # ---- programs

    def _adapter(self, sequence: Sequence) -> int:
        """Return the adapter content in a row's slot: all parts must have the same content."""
        if sequence.request.lora is None:
            assert sequence.lora_slot == -1, "a row without an adapter has a slot"
            return 0
        assert 0 <= sequence.lora_slot < self._engine.lora_slots, "a row has no slot for its adapter"
        numbers = {int(array[0]) for part in self._banks[sequence.lora_slot].values() for array in part.values()}
        assert len(numbers) == 1, f"slot {sequence.lora_slot} has parts of {len(numbers)} adapters"
        return numbers.pop()

    def _prefill(self, plan: PrefillPlan) -> list[PositionLogprobs]:
        sequence, (start, length, size) = plan.sequence, plan.chunk
        klass = self._model.chunk_class(size, logprobs=plan.logprobs)
        chain = Chain(self._model.windows, start, self._context(sequence, start, compare=True), self._adapter(sequence))
        prompt = sequence.prompt
        tokens = list(sequence.tokens[start : start + length])
        if plan.rows is not None:
            tokens = [token if row < 0 else self._encoded[row] for token, row in zip(tokens, plan.rows, strict=True)]
        seen = [chain.feed(token, klass) for token in tokens]
        self._write(sequence, start, chain.new, klass)
        self.computed["prefill"] += length
        if not plan.logprobs:
            return []
        return [position_logprobs(prompt[start + i + 1], float(value >> 44)) for i, value in enumerate(seen)]

    def _decode(self, plan: StepPlan) -> tuple[list[list[int]], list[list[PositionLogprobs]]]:
        tokens: list[list[int]] = [[] for _ in plan.decodes]
        logprobs: list[list[PositionLogprobs]] = [[] for _ in plan.decodes]
        untrue: set[tuple[int, int]] = set()  # paths with a wrong draft in this step
        self._counted.clear()
        for step in range(plan.steps):
            stops = False
            for index, row in enumerate(plan.decodes):
                row = row if step == 0 else row._replace(position=row.position + step, token=-1)
                token, logprob = self._row(row, untrue)
                tokens[index].append(token)
                if row.sequence.params.logprobs is not None:
                    logprobs[index].append(position_logprobs(token, logprob))
                generated = row.position - row.sequence.prompt_end + 1
                stops |= _reason(row.sequence.request, token, generated) is FinishReason.STOP
            if stops:
                break
        return tokens, logprobs

    def _row(self, row: DecodePlan, untrue: set[tuple[int, int]]) -> tuple[int, float]:
        sequence, position, path = row.sequence, row.position, (id(row.sequence), row.branch)
        token, known = self._input(row), self._alone(sequence).tokens
        if position < len(known) and token != known[position]:
            assert not self._known(row), f"position {position} is fed {token}, not {known[position]}"
            untrue.add(path)
        context = self._context(sequence, position, compare=path not in untrue, branch=row.branch)
        chain = Chain(self._model.windows, position, context, self._adapter(sequence))
        klass = self._model.decode_class
        seen = chain.feed(token, klass)
        self._write(sequence, position, chain.new, klass, row.branch)
        self.computed["decode"] += 1
        state, accepted = self._sampler_state(row, token)
        sampled, logprob = self._model.answer(sequence.request, sequence.index, position, seen, state)
        if accepted and position > self._counted.get(sequence.slot, -1):
            self._counted[sequence.slot] = position
            self._states[sequence.slot] = self._model.next_state(sequence.request, state, sampled)
        if self._own(row):
            self._last[sequence.slot] = sequence, position, sampled
        self._before = sampled, state, accepted
        return sampled, logprob

    def _sampler_state(self, row: DecodePlan, fed: int) -> tuple[int, bool]:
        """Return the sampler state of a row, as if the drafts up to it were accepted, and whether they are."""
        slot = row.sequence.slot
        if self._own(row):
            self._begun[slot] = self._states[slot]
            return self._states[slot], True
        if self._known(row):
            return self._begun[slot], True
        sampled, state, accepted = self._before
        return self._model.next_state(row.sequence.request, state, fed), accepted and sampled == fed

    def _own(self, row: DecodePlan) -> bool:
        """Whether a row is the slot row of its sequence, not a draft row."""
        return row.row * self._engine.microbatches + self._microbatch == row.sequence.slot

    def _known(self, row: DecodePlan) -> bool:
        """Whether the row's input token is known: a slot row, or its copy where a branch begins."""
        return self._own(row) or (row.branch > 0 and row.position == len(row.sequence.tokens) - 1)

    def _input(self, row: DecodePlan) -> int:
        if row.token >= 0:
            return row.token
        owner, position, token = self._last[row.sequence.slot]
        assert owner is row.sequence, "the token that the slot sampled last is another sequence's"
        assert position == row.position - 1, "the token that the slot sampled last is not the one before"
        return token


def _pack(arrival: int, positions: np.ndarray, klass: int) -> np.ndarray:
    return (arrival << 24) | (positions << 8) | (klass + 1)


def _unpack(note: int) -> tuple[int, int, int]:
    return note >> 24, note >> 8 & 0xFFFF, (note & 0xFF) - 1


def position_logprobs(token: int, logprob: float) -> PositionLogprobs:
    return PositionLogprobs(TokenLogprob(token, logprob, 1), ())
