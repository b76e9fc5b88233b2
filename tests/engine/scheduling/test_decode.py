"""Sequences constrained by grammars: the rows of each step, and masks that come early, late or never."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jaxinfer.engine.scheduling.decode import Constraints
from jaxinfer.engine.scheduling.plan import StepPlan
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.structured.masks import Held
from jaxinfer.structured.matcher import LEAD
from jaxinfer.types import FinishReason, Request, SequenceDelta, Thinking
from tests.serve.fake_engine import FakeEngine, expected_tokens


class ByHand:
    """A grammar backend whose masks become ready when the test sets them."""

    helpers = 1

    def __init__(self) -> None:
        self.held: list[Held] = []
        self.closed: list[Held] = []
        self.waited: list[list[int]] = []

    def open(self, kind: str, text: str, scope: str) -> Held:
        self.held.append(Held(len(self.held), (kind, text, scope)))
        return self.held[-1]

    def advance(self, held: Held, tokens: Iterable[int]) -> None:
        held.said.extend(tokens)
        held.ready = held.late = False

    def close(self, held: Held) -> None:
        self.closed.append(held)

    def wait(self, those: Sequence[Held], seconds: float) -> None:
        self.waited.append([each.number for each in those])
        for each in those:
            each.late = not each.ready

    def wait_any(self, those: Sequence[Held], seconds: float) -> None: ...
    def send(self) -> None: ...


class Noting:
    """A wrapper of a fake engine's runner that records the plans."""

    def __init__(self, runner: Any) -> None:
        self.plans, self._runner = list[StepPlan](), runner

    def launch(self, plan: StepPlan) -> Any:
        self.plans.append(plan)
        return self._runner.launch(plan)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


class Stage:
    """A fake engine, its plans, and masks set by hand."""

    def __init__(self, **settings: Any) -> None:
        self.masks, self.engine = ByHand(), FakeEngine(**{"max_num_seqs": 4, **settings})
        scheduler: Any = self.engine._scheduler
        given: Any = self.masks
        scheduler._constraints = scheduler._decode._constraints = Constraints(given)
        noting: Any = Noting(self.engine._runner)
        self.plans, self.engine._runner = noting.plans, noting

    def add(
        self, name: str, constrained: bool, most: int = 50, thinking: Thinking | None = None, **params: Any
    ) -> None:
        given = {"regex": "a"} if constrained else None
        sampling = SamplingParams(seed=1, max_tokens=most, structured_outputs=given, **params)
        self.engine.add(Request(name, (5, 6), sampling, thinking=thinking))

    def give(self, number: int, mask: int = 1, forced: Sequence[int] = ()) -> None:
        held = self.masks.held[number]
        held.ready, held.masks = True, [np.full(3, mask + each, np.int32) for each in range(1 + len(forced))]
        held.forced = list(forced)

    def step(self) -> list[str]:
        """Run a step and return the request id of each row of its plan."""
        self.deltas: list[SequenceDelta] = self.engine.step()
        self.engine.check()
        return [row.sequence.request.request_id for row in self.plans[-1].decodes]


def test_a_late_mask_leaves_out_its_own_row_alone():
    stage = Stage()
    stage.add("held", True)
    stage.add("free", False)
    assert [stage.step() for _ in range(4)] == [["free"]] * 4
    assert stage.masks.waited == [], "to learn a grammar may take long"
    stage.give(0)
    assert stage.step() == ["held", "free"]
    assert stage.plans[-1].masks.keys() == {0}
    assert stage.step() == ["free"], "its token is not known yet"
    assert stage.step() == ["free"], "it is known, and the mask behind it is not"
    assert stage.masks.held[0].said == stage.engine._scheduler._running[0].tokens[2:].tolist()
    stage.give(0, 7)
    assert stage.step() == ["held", "free"]
    assert stage.plans[-1].masks[0].tolist() == [7, 7, 7]
    assert stage.masks.waited == [[0]], "it is waited for once"


def test_nobody_waits_for_who_was_slow_until_it_is_fast_again():
    stage = Stage()
    for name in ("fast", "slow"):
        stage.add(name, True)
    stage.step()
    slow = stage.masks.held[1]
    stage.give(0)
    stage.give(1)
    slow.slow = True
    assert stage.step() == ["fast", "slow"]
    stage.step()
    stage.masks.waited.clear()
    stage.step()
    assert stage.masks.waited == [[0]], "also where all have grammars"
    stage.give(0)
    stage.give(1)
    slow.slow = False
    assert stage.step() == ["fast", "slow"]
    stage.masks.waited.clear()
    stage.step()
    stage.step()
    assert stage.masks.waited == [[0, 1]]


def test_those_with_grammars_run_together():
    """Otherwise each step would run half of them."""
    stage = Stage()
    stage.add("a", True)
    stage.add("b", True)
    assert stage.step() == []
    stage.give(0)
    assert stage.step() == ["a"]
    stage.give(1)
    assert stage.step() == [], "a is in flight"
    stage.give(0)
    assert stage.step() == ["a", "b"]


def test_a_whole_output_ends_and_a_failure_says_why():
    stage = Stage()
    for name in ("whole", "failed"):
        stage.add(name, True)
    stage.step()
    stage.give(0)
    stage.give(1)
    assert stage.step() == ["whole", "failed"]
    stage.step()
    whole, failed = stage.masks.held
    whole.ready = whole.stopped = failed.ready = True
    failed.error = "it took too long"
    stage.step()
    ends = {each.request_id: (each.token_ids, each.finish_reason, each.stop_reason) for each in stage.deltas}
    assert ends == {
        "whole": ([], FinishReason.STOP, None),
        "failed": ([], FinishReason.ERROR, "it took too long"),
    }
    assert sorted(each.number for each in stage.masks.closed) == [0, 1]
    assert not stage.engine.has_work


def test_an_abort_closes_a_grammar():
    stage = Stage()
    stage.add("a", True)
    stage.step()
    stage.engine.abort("a")
    assert stage.masks.closed == stage.masks.held


def test_what_ends_by_length_closes_its_grammar():
    stage = Stage()
    stage.add("a", True, most=1)
    stage.step()
    stage.give(0)
    assert stage.step() == ["a"]
    while stage.engine.has_work:
        stage.step()
    assert stage.masks.closed == stage.masks.held
    assert stage.masks.held[0].said == []


def rows(stage: Stage) -> list[tuple[str, int, int]]:
    """Return request id, position and token fed of each row of the last plan."""
    return [(row.sequence.request.request_id, row.position, row.token) for row in stage.plans[-1].decodes]


def test_what_is_forced_takes_idle_rows_under_the_masks_behind_it():
    stage = Stage(speculative="grammar")
    stage.add("held", True)
    stage.add("free", False)
    stage.step()
    stage.give(0, 1, [30, 31, 32])
    stage.step()
    assert rows(stage)[:-1] == [("held", 1, 6), ("held", 2, 30), ("held", 3, 31), ("held", 4, 32)]
    assert rows(stage)[-1][0] == "free"
    plan = stage.plans[-1]
    masks = {row.position: plan.masks[row.row][0] for row in plan.decodes if row.row in plan.masks}
    assert masks == {1: 1, 2: 2, 3: 3, 4: 4}
    assert plan.drafts is None, "nobody waits for it"
    assert [draft.tokens for draft in plan.forced] == [[30, 31, 32]]
    stage.step()
    stage.step()
    sequence = stage.engine._scheduler._running[0]
    assert sequence.scheduled == len(sequence.tokens) - 1, "the fake model says something else"
    assert stage.engine.stats().draft_tokens == 3


def test_a_request_may_refuse_drafts():
    stage = Stage(speculative="grammar")
    stage.add("held", True, speculation={"max_tokens": 1})
    stage.step()
    stage.give(0, 1, [30, 31, 32])
    stage.step()
    assert rows(stage) == [("held", 1, 6), ("held", 2, 30)]


def test_a_thought_is_pipelined_and_what_ran_ahead_of_its_end_runs_again():
    stage, said = Stage(), expected_tokens((5, 6), 1, 0, 6)
    assert said[3] not in said[:3]
    stage.add("a", True, thinking=Thinking(None, said[3], is_open=True))
    for position in range(1, 6):
        assert stage.step() == ["a"]
        assert rows(stage) == [("a", position, 6 if position == 1 else -1)]
        assert not stage.plans[-1].masks
    (sequence,) = stage.engine._scheduler._running.values()
    assert sequence.tokens.tolist() == [5, 6, *said[:4]], "the row behind the end is on its way"
    assert stage.masks.held[0].said == [LEAD]
    assert stage.step() == []
    assert sequence.tokens.tolist() == [5, 6, *said[:4]], "no grammar held it"
    stage.give(0)
    stage.step()
    assert rows(stage) == [("a", 5, said[3])]
    assert stage.plans[-1].masks.keys() == {0}
    stage.step()
    assert sequence.tokens.tolist() == [5, 6, *said[:5]]
    assert stage.masks.held[0].said == [LEAD, said[4]]


def test_nothing_runs_ahead_of_a_budget():
    stage = Stage()
    stage.add("a", False, thinking=Thinking(None, 70, is_open=True), thinking_token_budget=2)
    assert [stage.step() for _ in range(2)] == [["a"]] * 2
    assert stage.step() == [], "whether the thought has ended is not known yet"
    assert stage.step() == ["a"]
    mask = stage.plans[-1].masks[0].view(np.uint32)
    assert [i for i in range(32 * mask.size) if mask[i // 32] >> (i % 32) & 1] == [70]


def test_sampler_state_is_not_counted_twice():
    """Penalties count on the device, so rows after a thought that may be dropped do not run ahead."""
    stage = Stage()
    stage.add("a", True, thinking=Thinking(None, 70, is_open=True), frequency_penalty=1.0)
    assert [stage.step() for _ in range(4)] == [["a"], [], ["a"], []]
