"""Rounds of weight synchronisation."""

import types
from typing import Any

import pytest

from jaxinfer.integrations.rounds import Round, StaleRoundError


def request(uuid: int, req_id: str = "a") -> Any:
    return types.SimpleNamespace(policy_version=uuid, extra_config={"req_id": req_id, "uuid": uuid})


def reached(round_: Round, given: Any, *phases: str) -> list[bool]:
    """Return whether each phase had work, which is then done."""
    found = []
    for phase in phases:
        found.append(round_.admit(given, phase))
        if found[-1]:
            round_.phase = phase
    return found


def test_every_phase_has_its_work_once():
    one, given = Round(), request(1)
    phases = ("prepared", "prepared", "h2d_done", "prepared", "committed", "h2d_done", "committed", "aborted")
    assert reached(one, given, *phases) == [True, False, True, False, True, False, False, False]
    assert one.phase == "committed"


def test_an_abort_ends_a_round_in_any_phase():
    for before in ((), ("prepared",), ("prepared", "h2d_done")):
        one, given = Round(), request(1)
        reached(one, given, *before)
        assert reached(one, given, "aborted", "aborted") == [True, False]
        for phase in ("prepared", "h2d_done", "committed"):
            with pytest.raises(StaleRoundError):
                one.admit(given, phase)


@pytest.mark.parametrize(
    ("given", "phase"),
    [(request(1), "prepared"), (request(1), "aborted"), (request(2, "b"), "h2d_done"), (request(3), "h2d_done")],
)
def test_calls_of_other_rounds_are_refused(given: Any, phase: str):
    one = Round()
    reached(one, request(2), "prepared")
    with pytest.raises(StaleRoundError):
        one.admit(given, phase)
    assert (one.uuid, one.req_id, one.phase) == (2, "a", "prepared")


def test_a_later_round_opens_with_prepare_or_abort():
    for phase in ("prepared", "aborted"):
        one = Round()
        reached(one, request(2), "prepared")
        assert reached(one, request(5, "c"), phase) == [True]
        assert (one.uuid, one.req_id, one.policy_version) == (5, "c", 5)
