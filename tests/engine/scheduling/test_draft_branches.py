"""Draft trees: rows and pages of branches, the winning path, and the sequences that branches must not disturb."""

from __future__ import annotations

import numpy as np
import pytest

from jaxinfer.engine.scheduling.draft_branches import Tree as Planned
from jaxinfer.engine.scheduling.draft_branches import _candidates
from jaxinfer.engine.scheduling.pages import SequencePages
from jaxinfer.engine.scheduling.plan import Branch, Draft
from jaxinfer.spec import Drafted, Tree
from tests.engine.fake_device import EOS
from tests.engine.fake_loop import RECOMPUTE, SWAP, Loop, make_loop, make_request, rows, tokens_of


class Paths:
    """A drafter of three paths: path ``place`` has up to ``right`` true tokens, the other paths are wrong from
    ``shared`` on."""

    def __init__(self, place: int, shared: int = 0, right: int = 4) -> None:
        self.place, self.shared, self.right = place, shared, right
        self.truth: dict[int, list[int]] = {}

    def propose(self, sequence: Drafted, limit: int) -> Tree:
        start = len(sequence.tokens)
        truth = [*self.truth[sequence.number][start : start + limit], 0, 0, 0, 0][:limit]
        paths = [truth[: self.shared] + [(token + by) % EOS for token in truth[self.shared :]] for by in (1, 2)]
        paths.insert(self.place, truth[: self.right] + [(token + 3) % EOS for token in truth[self.right :]])
        return Tree.of_paths(paths)

    def end(self, sequence: Drafted) -> None: ...
    def reset(self) -> None: ...


def tree_loop(place: int, *, shared: int = 0, right: int = 4, requests: int = 1, prompt: int = 12, **changes) -> Loop:
    paths = Paths(place, shared, right)
    own = {name: changes.pop(name) for name in ("presence_penalty", "priority") if name in changes}
    settings = {
        "rows": 15,
        "speculative_adaptive": False,
        "num_speculative_tokens": 4,
        "speculative_tree": 3,
        **changes,
    }
    loop = make_loop(speculative="ngram", **settings)
    loop.scheduler._drafts._drafter = paths
    for number in range(requests):
        loop.add(make_request(str(number), prompt, 21, seed=number, cache_salt=str(number), **own))
        paths.truth[number + 1] = tokens_of(loop, str(number))
    return loop


# ---- acceptance


@pytest.mark.parametrize("penalty", [0.0, 1.0])
@pytest.mark.parametrize(("place", "shared"), [(0, 0), (1, 0), (2, 0), (1, 3), (2, 1)])
def test_it_does_not_matter_where_the_truth_stands(place, shared, penalty):
    """The index of the right path is irrelevant, except for the first token, whose page this step may compute."""
    loop = tree_loop(place, shared=shared, async_scheduling=False, presence_penalty=penalty)
    loop.drain()
    first = 4 if place == 0 else shared
    assert loop.steps == 1 + -(-(21 - 1 - first) // 5)
    stats = loop.scheduler.stats.snapshot()
    assert stats.draft_accepted == sum(stats.draft_accepted_at) == 21 - loop.steps
    assert len(stats.draft_accepted_at) == 4, "by depth"
    assert loop.steps - 1 <= stats.drafts <= loop.steps


@pytest.mark.parametrize("length", [12, 30])
def test_a_page_that_is_computed_in_the_same_step_is_not_copied(length):
    """The last chunk of a prompt runs before the rows of its first token, and after the copies."""
    loop = tree_loop(1, prompt=length)
    loop.drain()
    assert loop.scheduler.stats.snapshot().draft_accepted


def test_where_two_paths_are_equally_right_the_sequence_keeps_its_pages(monkeypatch):
    monkeypatch.setattr(SequencePages, "adopt", None)
    loop = tree_loop(1, shared=2, right=2)
    loop.drain()
    assert loop.scheduler.stats.snapshot().draft_accepted >= 12


def test_what_several_paths_have_in_common_counts_once():
    loop = tree_loop(1, shared=2, async_scheduling=False)
    loop.step()
    loop.step()
    stats = loop.scheduler.stats.snapshot()
    assert stats.draft_tokens == 4 + (2 + 3 * 2)


@pytest.mark.parametrize(
    ("paths", "known", "outcome"),
    [
        ([[1, 2, 3]], [1, 2, 9], (2, 1)),
        ([[1, 2, 3]], [1, 2, 3, 9], (3, 0)),
        ([[1, 2, 3]], [1, 2], (2, 0)),  # the sequence ended
        ([[1, 2, 3], [4, 5]], [4, 9], (1, 1)),
        ([[1, 2, 3], [4]], [4, 9], (1, 0)),  # no draft tokens after it
        ([[1, 2, 3], [4]], [5], (0, 1)),
        ([[1, 2, 3], [1, 5, 6]], [1, 5, 6, 7], (3, 0)),
        ([[1], [1, 5, 6]], [1, 9], (1, 1)),
    ],
)
def test_what_became_of_a_tree(paths, known, outcome):
    class Known:
        tokens = np.array([0, *known])

    draft = Draft(Known(), 1, paths[0], tuple(Branch(9, path) for path in paths[1:]))
    assert draft.outcome() == outcome


# ---- rows of branches


class Sequence:
    prefill_end = 3


def planned(rate: float, *paths: list[int]) -> Planned:
    return Planned(Draft(Sequence(), 5, paths[0]), list(paths[1:]), rate)


def test_where_a_path_leaves_the_others_it_is_tried_as_often_as_those_fail():
    tree = planned(0.5, [1, 2, 3], [1, 2, 4], [5, 6, 7], [8], [1, 2])
    found = [(each.path, each.shared, each.chance) for each in _candidates([tree], 0.0)]
    assert found == [
        ([1, 2, 4], 2, 0.5**3 * 0.5),
        ([5, 6, 7], 0, 0.5 * 0.5**2),  # two paths begin differently, though with the same token
        ([8], 0, 0.5 * 0.5**3),
    ]
    assert [each.path for each in _candidates([tree], 0.1)] == [[5, 6, 7]], "adaptive"
    values = [each.value for each in _candidates([planned(0.5, [1], [2, 3]), planned(0.5, [1], [2])], 0.0)]
    assert values == [0.25 * 1.5 / 3, 0.25 / 2], "tokens for each row"


def test_branches_take_what_the_main_paths_leave():
    """Slots take three of 15 rows, two main paths four each, and one branch of three fits the four left."""
    loop = tree_loop(1, requests=2, async_scheduling=False)
    for _ in range(3):
        plan = loop.step()
    assert len({row.row for row in plan.decodes}) == len(plan.decodes) == 15
    branches = [row for row in plan.decodes if row.branch]
    assert len(branches) == 5, "the last known token, and a path"
    at = [row.position for row in branches]
    assert at == list(range(at[0], at[0] + 5))
    assert at[0] == len(branches[0].sequence.tokens) - 1 - 5, "five tokens were accepted"
    assert rows(plan).count(("0", at[0])) + rows(plan).count(("1", at[0])) >= 2
    loop.drain()


def test_a_full_batch_has_no_branches():
    loop = tree_loop(1, requests=3, rows=0, speculative_tree=2, num_speculative_tokens=1)
    while loop.busy:
        plan = loop.step()
        assert len(plan.decodes) <= loop.engine.rows == 4
    loop.check_idle()


# ---- sequences that branches must not disturb


def in_flight(loop: Loop):
    """Step until a sequence has branches in flight."""
    for _ in range(20):
        loop.core._runner.plan = None
        if loop.core.launch():
            (sequence,) = loop.scheduler._running.values()
            if sequence.branches:
                return sequence
        for delta in loop.core.read(False):
            loop.outputs[delta.request_id][delta.index].take(delta, loop.now)
    raise AssertionError("nothing was drafted in several paths")


@pytest.mark.parametrize("penalty", [0.0, 1.0])
@pytest.mark.parametrize("costs", [SWAP, RECOMPUTE])
@pytest.mark.parametrize("agrees", [False, True])
def test_who_is_preempted_while_branches_are_on_their_way_is_computed_again(costs, penalty, agrees):
    """The sampler state counts the winning path, whose pages are gone: swapped-in pages would not match it."""
    loop = tree_loop(1, costs=costs, host_pages=20, presence_penalty=penalty, decode_agrees=agrees)
    sequence = in_flight(loop)
    loop.scheduler._preempt()
    assert not sequence.branches
    assert sequence.swapped is None
    loop.scheduler.check()
    loop.scheduler._kv.take_moves()
    for delta in loop.core.read(False):
        loop.outputs[delta.request_id][delta.index].take(delta, loop.now)
    assert sequence.generated > 5, "what the branch has brought is known"
    loop.device._owners.clear()
    loop.drain()
    loop.check_empty()


def test_an_end_lets_go_of_branches_that_are_on_their_way():
    loop = tree_loop(1)
    sequence = in_flight(loop)
    loop.abort("0")
    assert not sequence.branches
    loop.scheduler.check()
    loop.drain()
    loop.check_empty()


def test_nobody_has_branches_while_another_waits_for_pages():
    loop, waited = tree_loop(1, requests=3, num_pages=10, max_model_len=64), 0
    while loop.busy:
        loop.step()
        if loop.scheduler._free_slots and len(loop.scheduler._queue):
            assert not any(row.branch for row in loop.plan.decodes)
            waited += bool(loop.plan.drafts)
    assert waited
    loop.check_empty()


@pytest.mark.parametrize(("pages", "branches"), [(5, 1), (6, 2), (24, 2)])
def test_short_pages_mean_fewer_branches(pages, branches):
    loop = tree_loop(2, num_pages=pages, max_model_len=40, async_scheduling=False)
    most = 0
    while loop.busy:
        plan = loop.step()
        most = max(most, len({row.branch for row in plan.decodes if row.branch}))
    assert most == branches
    assert not sum(loop.scheduler.stats.snapshot().preemptions.values())
    loop.check_empty()
