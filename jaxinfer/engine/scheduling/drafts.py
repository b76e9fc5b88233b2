"""Planning of drafts in the otherwise idle rows of a step: for which sequences, and how many tokens. No jax."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as Row
from typing import NamedTuple

from jaxinfer.config import ResolvedEngine
from jaxinfer.engine.scheduling.buckets import Chunk
from jaxinfer.engine.scheduling.draft_branches import BranchPlanner, Tree
from jaxinfer.engine.scheduling.pages import SequencePages
from jaxinfer.engine.scheduling.plan import DecodePlan, Draft, Pairs, PrefillPlan, StepPlan
from jaxinfer.engine.scheduling.sequence import Sequence
from jaxinfer.engine.scheduling.stats import StatsRecorder
from jaxinfer.sampling_params import Speculation
from jaxinfer.spec import WORTH, WORTH_OF_A_PASS, Drafted, Drafter, ThroughputMonitor
from jaxinfer.types import SequenceDelta

_ANEW = 16
"""Minimum number of positions that a restarted draft head sees, if that many are kept."""


class DraftPlanner:
    """Plans draft rows after the rows of sequences, and learns from their outcome.

    Drafts need the last token on the host, so sequences that draft wait until the step before is read. All wait or
    none: otherwise steps would alternate between the sequences that wait and those that do not.

    Args:
        clock: clock in seconds.
    """

    def __init__(
        self,
        engine: ResolvedEngine,
        pages: SequencePages,
        drafter: Drafter,
        stats: StatsRecorder,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pages, self._drafter, self._stats = pages, drafter, stats
        self._forced, self._most = engine.num_speculative_tokens, engine.num_speculative_tokens * engine.guesses
        self._rows = engine.rows // engine.microbatches
        self._adaptive, self._tempo, self._plans = engine.speculative_adaptive, ThroughputMonitor(clock), 0
        self._on_device, self._sizes = engine.drafts_on_device, engine.prefill_sizes
        self._by_head, self._window, self._page = engine.drafts_by_head, engine.feature_window, engine.page_size
        self._from_one_state = engine.drafts_from_one_state
        self._worth = WORTH_OF_A_PASS if self._on_device and not self._from_one_state else WORTH
        self._paths, self._states = engine.speculative_tree, engine.num_states > 0
        self.branches, self._tree = BranchPlanner(engine, pages), engine.draft_tree
        self.forced = list[Draft]()
        """Drafts of grammar-forced tokens in the latest plan; no step waits for them."""
        self._watched: Draft | None = None  # a guess that was not fed
        self.waits = False
        """Whether the current plan drafts: its sequences wait for the host."""

    def begin(self, sequences: Iterable[Sequence], count: int) -> None:
        """Begin a plan of ``count`` sequences: choose whether it drafts."""
        self._plans += 1
        idle = self._rows - count
        if self._adaptive and self._tempo.rests(count) and idle > 0 and not self._on_device:
            self._watch(sequences, count)
        pays = not self._adaptive or self._tempo.drafts(count)
        self.waits = idle > 0 and pays and any(map(self._most_for, sequences))

    def _watch(self, sequences: Iterable[Sequence], count: int) -> None:
        """Test whether drafts would be accepted again, one sequence after the other: a guess that is not fed delays no
        step. Two accepted tokens in a row end the pause."""
        if self._watched is not None:
            accepted, failed = self._watched.outcome()
            if accepted > 1:
                self._tempo.wake(count)
            elif not failed and not self._watched.sequence.finished:
                return  # the next tokens will show
        self._watched = None
        sequence = next(itertools.islice(sequences, self._plans % max(1, count), None), None)
        if sequence is not None and not sequence.prefilling:
            paths = self._drafter.propose(self._drafted(sequence), self._allowed(sequence)).paths(1)
            tokens = paths[0] if paths else []
            self._watched = Draft(sequence, len(sequence.tokens), tokens) if len(tokens) > 1 else None

    def _most_for(self, sequence: Sequence) -> int:
        """Return the maximum draft tokens that are worth a row."""
        most, acceptance = self._allowed(sequence), sequence.acceptance
        if not self._adaptive:
            return most
        return 0 if self._plans < acceptance.resume else min(most, acceptance.depth(self._worth))

    def _allowed(self, sequence: Sequence) -> int:
        if sequence.is_held or sequence.forced or (sequence.held is not None and sequence.stateful):
            return 0  # the mask after a draft token is only known once it is sampled, or the token needs no guess
        room = None if sequence.thought is None or sequence.thought.over else sequence.thought.room
        return _asked(sequence, self._most if room is None else min(self._most, max(0, room - 1)))

    # ---- a plan

    def add(self, rows: list[DecodePlan], spare: int | None = None) -> tuple[list[DecodePlan], list[Draft] | None]:
        """Return the rows with draft rows, which follow their sequence's own rows in order of position, path by path,
        and the drafts. ``spare``: see `DecodePlanner.plan`."""
        self.forced = []
        if not self.waits and not any(map(_is_certain, rows)):
            return rows, None
        used = {row.row for row in rows}
        idle = [row for row in range(self._rows) if row not in used]
        if not idle:
            return rows, [] if self.waits else None
        wanted = [self._wanted(row, len(idle)) for row in rows]
        planned, trees = list[DecodePlan](), list[Tree]()
        for row, want, count in zip(rows, wanted, _deal(wanted, len(idle)), strict=True):
            planned.append(row)
            fed = self._feed(row, want.tokens[:count], idle, planned)
            draft = Draft(row.sequence, row.position + 1, fed)
            if fed and row.sequence.is_held:
                self.forced.append(draft)
            elif fed and not want.known:
                trees.append(Tree(draft, want.others, want.rate))
        drafts = [tree.draft for tree in trees]
        if spare is not None and idle and any(tree.others for tree in trees):
            planned, drafts = self.branches.add(planned, trees, idle, spare)
        return planned, drafts if self.waits else None

    def _wanted(self, row: DecodePlan, idle: int) -> _Wanted:
        """Return the tokens to feed after a row: known tokens after a preemption, else the drafter's."""
        sequence = row.sequence
        room = min(idle, sequence.final_length - sequence.scheduled)
        if sequence.forced:
            first = sequence.scheduled - sequence.prompt_end - 1
            tokens = [] if self._states else [*sequence.forced[first : first + room]]
            return _Wanted(tokens, 1.0, known=True)
        known = sequence.tokens[sequence.scheduled : sequence.scheduled + room]
        # The sampler counts recomputed tokens one by one, and a grammar has a mask for one row only. A recurrent state
        # continues from the token that the device has drawn.
        if row.token < 0 or (known and (self._states or sequence.stateful or sequence.held is not None)):
            return _Wanted([], 0.0)
        if known:
            return _Wanted(known.tolist(), 1.0, known=True)
        if sequence.is_held:
            return _Wanted(_forced(sequence)[: min(room, _asked(sequence, self._forced))], 1.0)
        limit = min(room, self._most_for(sequence)) if self.waits else 0
        if limit <= 0 or (self._by_head and self._unseen(sequence) is None):
            return _Wanted([], 0.0)
        # Paths accepted by rules other than the draw may contradict one another.
        most = 1 if sequence.params.typical else self._paths
        paths = self._drafter.propose(self._drafted(sequence), limit).paths(most) or [[]]
        if self._tree:
            paths = [path[: len(ranks)] for path, ranks in zip(paths, self._tree, strict=False)]
        return _Wanted(paths[0], sequence.acceptance.rate, others=paths[1:])

    def _feed(self, row: DecodePlan, tokens: list[int], idle: list[int], planned: list[DecodePlan]) -> list[int]:
        """Plan rows for draft tokens as far as there are pages; return the planned tokens."""
        sequence = row.sequence
        newest = sequence.prefill_end < row.position == len(sequence.tokens) - 1
        for count, token in enumerate(tokens):
            if not self._pages.extend(sequence, sequence.scheduled + 1, slide=newest):
                return tokens[:count]
            planned.append(DecodePlan(sequence, idle.pop(), sequence.scheduled, token))
            sequence.scheduled += 1
            sequence.in_flight += 1
        return tokens

    def catch_up(self, drafts: Iterable[Draft]) -> tuple[list[PrefillPlan], list[Pairs]]:
        """Return the chunks or pairs that a draft model or head has not seen, of sequences that it is to draft for."""
        if not self._on_device:
            return [], []
        return ([], self._pairs(drafts)) if self._by_head else (self._chunks(drafts), [])

    def _chunks(self, drafts: Iterable[Draft]) -> list[PrefillPlan]:
        """Return chunks of the tokens generated while nothing was drafted."""
        chunks = list[PrefillPlan]()
        for sequence, start, *_ in drafts:
            at, end = max(sequence.drafted, sequence.prompt_end), start - 1
            while at < end:
                length = min(end - at, self._sizes[-1])
                size = next(size for size in self._sizes if size >= length)
                chunks.append(PrefillPlan(sequence, Chunk(at, length, size), logprobs=False))
                at += length
        return chunks

    def _pairs(self, drafts: Iterable[Draft]) -> list[Pairs]:
        found = list[Pairs]()
        for sequence, start, *_ in drafts:
            unseen = self._unseen(sequence)
            assert unseen is not None
            first, sequence.base = unseen
            sequence.drafted = start - 1
            found.append(Pairs(sequence, first, start - 1))
        return found

    def _unseen(self, sequence: Sequence) -> tuple[int, int] | None:
        """Return the positions from which a draft head continues, and from which it has seen all; None: it cannot yet.

        Where features in between were not kept, it restarts at the start of a page, the last one that leaves it some
        positions: computing all kept ones would cost more than it gains. A few may be missing: for these it has the
        pairs that it guessed.
        """
        newest = len(sequence.tokens) - 2
        if newest < sequence.kept:
            return None
        if self._from_one_state:
            return newest, 0
        first = max(sequence.kept, newest + 1 - self._window)
        if sequence.drafted + self._most >= first:
            return max(sequence.drafted, first), sequence.base
        first = max(-(-first // self._page), (newest + 1 - _ANEW) // self._page) * self._page
        return (first, first) if first <= newest else None

    def _drafted(self, sequence: Sequence) -> Drafted:
        keys = self._pages.keys(sequence)
        return Drafted(sequence.arrival, keys.namespace, sequence.prompt_end + 1, keys.tokens)

    # ---- outcome of a plan

    def committed(self, plan: StepPlan, deltas: Collection[SequenceDelta]) -> None:
        """Learn from a plan whose results are known, and report draft counts in its ``deltas``."""
        drafted = plan.drafts or plan.forced
        by_sequence = {(delta.request_id, delta.index): delta for delta in deltas} if drafted else {}
        for draft in plan.drafts or ():
            accepted, failed = draft.outcome()
            draft.sequence.acceptance.note(accepted, failed, self._plans)
            self._stats.drafted(draft.size, accepted, max(map(len, draft.paths)))
            _tell(by_sequence, draft, accepted)
            if draft.sequence.scheduled >= draft.start and not self._by_head:  # else its pages are gone
                draft.sequence.drafted = draft.start + accepted
        for draft in plan.forced:
            accepted, _ = draft.outcome()
            self._stats.drafted(draft.size, accepted, draft.size)
            _tell(by_sequence, draft, accepted)
        tokens = sum(len(delta.token_ids) for delta in deltas)
        rows = len(plan.decodes) - sum(draft.rows for draft in (*(plan.drafts or ()), *plan.forced))
        self._tempo.note(rows, plan.drafts is not None, tokens / rows if rows and not plan.prefills else None)

    def end(self, sequence: Sequence) -> None:
        """Record that a sequence has ended."""
        self._drafter.end(self._drafted(sequence))

    def reset(self) -> None:
        """Drop what drafters learnt from finished sequences: it is kept by prefix cache namespace."""
        self._drafter.reset()


class _Wanted(NamedTuple):
    """Tokens to feed after a row, their acceptance rate, and further paths."""

    tokens: list[int]
    rate: float
    known: bool = False
    others: Row[list[int]] = ()


def _asked(sequence: Sequence, most: int) -> int:
    """Return the draft tokens that the request allows, at most ``most``."""
    asked = sequence.params.speculation
    return asked.most(most) if isinstance(asked, Speculation) else most


def _is_certain(row: DecodePlan) -> bool:
    """Whether tokens after a row are known, or forced by the request or a grammar."""
    sequence = row.sequence
    return row.position + 1 < len(sequence.tokens) or bool(sequence.forced or _forced(sequence))


def _forced(sequence: Sequence) -> list[int]:
    """Return grammar-forced tokens whose successors have known masks."""
    certain = sequence.held is not None and (sequence.thought is None or sequence.thought.over)
    return sequence.held.forced if sequence.held is not None and certain else []


def _deal(wanted: list[_Wanted], idle: int) -> list[int]:
    """Return the number of tokens fed per row: each of the ``idle`` rows goes to the likeliest next token."""
    if sum(len(want.tokens) for want in wanted) <= idle:
        return [len(want.tokens) for want in wanted]
    counts = [0] * len(wanted)
    likely = [(-want.rate, place) for place, want in enumerate(wanted) if want.tokens]
    heapq.heapify(likely)
    for _ in range(idle):
        chance, place = heapq.heappop(likely)
        counts[place] += 1
        if counts[place] < len(wanted[place].tokens):
            heapq.heappush(likely, (chance * wanted[place].rate, place))
    return counts


def _tell(deltas: Mapping[tuple[str, int], SequenceDelta], draft: Draft, accepted: int) -> None:
    """Add draft counts to the delta of the sequence, unless it has ended meanwhile."""
    if (delta := deltas.get((draft.sequence.request.request_id, draft.sequence.index))) is not None:
        delta.draft_tokens += draft.size
        delta.draft_accepted += accepted
