"""Parallel samples of a request, which wait for the prompt of their first sample."""

from __future__ import annotations

from jaxinfer.engine.scheduling.scheduler import Siblings
from jaxinfer.engine.scheduling.sequence import Sequence, Status
from tests.engine.scheduling.test_queues import make_sequence


def three() -> tuple[Siblings, list[Sequence], list[Sequence]]:
    enqueued: list[Sequence] = []
    siblings, samples = Siblings(enqueued.append), [make_sequence(number) for number in range(3)]
    siblings.add(samples)
    return siblings, samples, enqueued


def test_followers_wait_until_the_prompt_is_planned() -> None:
    siblings, (leader, *others), enqueued = three()
    assert siblings.waiting == 2
    assert all(other.status is Status.WAITING_FOR_PROMPT and other.leader is leader for other in others)
    leader.scheduled = leader.prefill_end - 1
    siblings.release([leader])
    assert enqueued == []
    leader.scheduled = leader.prefill_end
    siblings.release([leader])
    assert enqueued == others
    assert siblings.waiting == 0
    siblings.release([leader])
    assert enqueued == others, "once"


def test_who_ended_meanwhile_is_not_enqueued() -> None:
    siblings, (leader, first, second), enqueued = three()
    first.status = Status.FINISHED
    siblings.ended()
    siblings.release_of(leader)
    assert enqueued == [second]
    assert siblings.waiting == 0
