"""Tree drafts: selection of further paths for idle rows, and of the path that the model accepted. No jax.

A branch has its own pages: those of the sequence up to the last known token, the last of them a copy. Its rows are
ordinary ones, the last known token's first, so a path is bitwise the same as it would be alone. When it wins, the
sequence continues with its pages.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Row
from typing import NamedTuple

from jaxinfer.config import ResolvedEngine
from jaxinfer.engine.scheduling.pages import SequencePages
from jaxinfer.engine.scheduling.plan import Branch, DecodePlan, Draft, StepPlan
from jaxinfer.engine.scheduling.sequence import Sequence
from jaxinfer.spec import WORTH
from jaxinfer.types import PositionLogprobs

RowResult = tuple[DecodePlan, list[int], Row[PositionLogprobs]]


class Tree(NamedTuple):
    """A draft to feed, its further paths, and the acceptance rate of its tokens."""

    draft: Draft
    others: Row[list[int]]
    rate: float


class _Candidate(NamedTuple):
    """A further path of a draft. ``shared``: length of its longest common prefix with an earlier path; ``chance``:
    probability that the next token is accepted."""

    place: int
    path: list[int]
    shared: int
    chance: float
    value: float


class BranchPlanner:
    """Plans rows of branches in the idle rows that are left after the main paths."""

    def __init__(self, engine: ResolvedEngine, pages: SequencePages) -> None:
        self._pages, self._worth = pages, WORTH if engine.speculative_adaptive else 0.0

    def add(
        self, planned: list[DecodePlan], trees: list[Tree], idle: list[int], spare: int
    ) -> tuple[list[DecodePlan], list[Draft]]:
        """Return the rows with those of branches, after the other rows of their sequence, and the drafts with branches.

        Args:
            planned: rows of main paths.
            idle: rows that are left.
            spare: pages to leave free for other sequences.
        """
        branches: list[list[Branch]] = [[] for _ in trees]
        rows: dict[Sequence, list[DecodePlan]] = {}
        for place, path, shared, _, _ in sorted(_candidates(trees, self._worth), key=lambda one: -one.value):
            draft = trees[place].draft
            path = path[: max(len(idle) - 1, 0)]  # a row for the last known token
            slot = self._pages.branch(draft.sequence, len(path), spare) if len(path) > shared else None
            if slot is not None:
                branches[place].append(Branch(slot, path))
                rows.setdefault(draft.sequence, []).extend(_rows(draft, slot, path, idle))
        drafts = [tree.draft._replace(branches=tuple(own)) for tree, own in zip(trees, branches, strict=True)]
        if not rows:
            return planned, drafts
        groups = itertools.groupby(planned, key=lambda row: row.sequence)
        return [row for sequence, own in groups for row in (*own, *rows.get(sequence, ()))], drafts

    def settle(self, plan: StepPlan, results: Iterable[RowResult]) -> Iterable[RowResult]:
        """Return the results of a plan's rows without those of rejected paths; sequences continue with the pages of the
        winning paths. On equal length the main path wins, else the first."""
        drafts = {draft.sequence: draft for draft in plan.drafts or () if draft.branches}
        if not drafts:
            return results
        rows = list(results)
        sampled: dict[tuple[Sequence, int], list[int]] = {}
        for row, tokens, _ in rows:
            if row.sequence in drafts:
                sampled.setdefault((row.sequence, row.branch), []).append(tokens[0])
        won = {sequence: self._settle(draft, sampled) for sequence, draft in drafts.items()}
        for sequence, start, _ in plan.pairs:  # a draft head has seen these in the main path's pages only
            sequence.drafted = start if won.get(sequence) else sequence.drafted
        return _counting(rows, drafts, won)

    def _settle(self, draft: Draft, sampled: dict[tuple[Sequence, int], list[int]]) -> int:
        """Return the branch that won; 0: the main path."""
        sequence, paths = draft.sequence, {0: draft.tokens, **dict(draft.branches)}
        accepted = {slot: _agree(path, sampled[sequence, slot]) for slot, path in paths.items()}
        won = max(paths, key=lambda slot: accepted[slot])
        if won in sequence.branches:  # else its pages are gone: the sequence has ended, or waits
            self._pages.adopt(sequence, won, draft.start + len(paths[won]))
        self._pages.drop_branches(sequence)
        return won


def _candidates(trees: list[Tree], worth: float) -> Iterator[_Candidate]:
    """Yield the further paths whose first own token is accepted with a probability of at least ``worth``. Later
    children of a node are tried where the earlier ones fail."""
    for place, (draft, others, rate) in enumerate(trees):
        if draft.start - 1 <= draft.sequence.prefill_end:
            continue  # its chunks may be computed in this very step, after pages are copied
        earlier = [draft.tokens]
        for path in others:
            alike = [_agree(path, other) for other in earlier]
            shared = max(alike)
            chance = rate ** (shared + 1) * (1 - rate) ** alike.count(shared)
            own = sum(rate**more for more in range(len(path) - shared))
            if own and chance >= worth:
                yield _Candidate(place, path, shared, chance, chance * own / (1 + len(path)))
            earlier.append(path)


def _rows(draft: Draft, slot: int, path: list[int], idle: list[int]) -> list[DecodePlan]:
    """Plan the rows of a branch: the last known token, so that its keys are in the branch's page, and the path."""
    sequence, first = draft.sequence, draft.start - 1
    fed = [sequence.tokens[first], *path]
    sequence.in_flight += len(fed)
    return [DecodePlan(sequence, idle.pop(), first + more, token, slot) for more, token in enumerate(fed)]


def _counting(rows: list[RowResult], drafts: dict[Sequence, Draft], won: dict[Sequence, int]) -> Iterator[RowResult]:
    """Yield the rows of sequences themselves, and after them those of the winning paths. The row of a branch for the
    last known token only repeats the sequence's own row."""
    for result in rows:
        row = result[0]
        own = row.branch == 0 and (row.sequence not in drafts or row.position < drafts[row.sequence].start)
        behind = row.branch == won.get(row.sequence) and row.position >= drafts[row.sequence].start
        if own or behind:
            yield result
        else:
            row.sequence.in_flight -= 1


def _agree(path: Iterable[int], other: Iterable[int]) -> int:
    """Return the length of the common prefix of two texts."""
    return sum(itertools.takewhile(bool, (one == another for one, another in zip(path, other, strict=False))))
