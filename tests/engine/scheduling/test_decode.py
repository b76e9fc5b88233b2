"""Sequences that grammars hold: who is in which step, when masks come early, late or never."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jaxinfer.engine.scheduling.decode import Constraints
from jaxinfer.engine.scheduling.plan import StepPlan
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.structured.masks import Held
from jaxinfer.types import FinishReason, Request, SequenceDelta
from tests.serve.fake_engine import FakeEngine


class ByHand:
    """Masks that come when the test says so."""

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
    """A fake engine's runner that keeps the plans."""

    def __init__(self, runner: Any) -> None:
        self.plans, self._runner = list[StepPlan](), runner

    def launch(self, plan: StepPlan) -> Any:
        self.plans.append(plan)
        return self._runner.launch(plan)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


class Stage:
    """A fake engine, its plans, and masks by hand."""

    def __init__(self, **settings: Any) -> None:
        self.masks, self.engine = ByHand(), FakeEngine(**{"max_num_seqs": 4, **settings})
        scheduler: Any = self.engine._scheduler
        given: Any = self.masks
        scheduler._constraints = scheduler._decode._constraints = Constraints(given)
        noting: Any = Noting(self.engine._runner)
        self.plans, self.engine._runner = noting.plans, noting

    def add(self, name: str, constrained: bool, most: int = 50) -> None:
        params = SamplingParams(seed=1, max_tokens=most, structured_outputs={"regex": "a"} if constrained else None)
        self.engine.add(Request(name, (5, 6), params))

    def give(self, number: int, mask: int = 1) -> None:
        held = self.masks.held[number]
        held.ready, held.masks = True, [np.full(3, mask, np.int32)]

    def step(self) -> list[str]:
        """Whose rows the plan of a step has."""
        self.deltas: list[SequenceDelta] = self.engine.step()
        self.engine.check()
        return [row.sequence.request.request_id for row in self.plans[-1].decodes]


def test_a_late_mask_leaves_out_its_own_row_alone():
    stage = Stage()
    stage.add("held", True)
    stage.add("free", False)
    assert [stage.step() for _ in range(4)] == [["free"]] * 4
    assert stage.masks.waited == [[0]], "it is waited for once"
    stage.give(0)
    assert stage.step() == ["held", "free"]
    assert stage.plans[-1].masks.keys() == {0}
    assert stage.step() == ["free"], "its token is not known yet"
    assert stage.step() == ["free"], "it is known, and the mask behind it is not"
    assert stage.masks.held[0].said == stage.engine._scheduler._running[0].tokens[2:].tolist()
    stage.give(0, 7)
    assert stage.step() == ["held", "free"]
    assert stage.plans[-1].masks[0].tolist() == [7, 7, 7]
    assert stage.masks.waited == [[0], [0]]


def test_those_with_grammars_run_together():
    """Else each step would have half of them."""
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
