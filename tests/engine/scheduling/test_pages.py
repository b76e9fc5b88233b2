"""Preemption: the choice of sequence, swap or recompute, and outputs identical to undisturbed runs."""

from __future__ import annotations

import dataclasses
from array import array

import pytest

from jaxinfer.engine.scheduling.pages import Costs, prefer_swap
from jaxinfer.engine.scheduling.sequence import Sequence
from jaxinfer.kv.radix import PageKeys
from jaxinfer.types import FinishReason
from tests.engine.fake_loop import RECOMPUTE, SWAP, Loop, ids, make_loop, make_request

WAYS = {"swap": SWAP, "recompute": RECOMPUTE}


def tight_loop(way: str, **changes) -> Loop:
    """Return a loop with six pages of 8 tokens for three slots."""
    return make_loop(**{"costs": WAYS[way], "host_pages": 8, "num_pages": 6, "max_model_len": 48, **changes})


def preemptions(loop: Loop) -> dict[str, int]:
    return {kind: count for kind, count in loop.scheduler.stats.snapshot().preemptions.items() if count}


def three_that_grow(**changes):
    """Return requests that begin with one page each and end with five."""
    return [make_request(name, 6, 30, seed=ord(name), cache_salt=name, **changes) for name in "abc"]


def preempted_in(loop: Loop) -> list[str]:
    order: list[str] = []
    while loop.busy:
        order += [preempted.sequence.request.request_id for preempted in loop.step().preempted]
    loop.check_idle()
    return order


# ---- swap or recompute


def sequence_of(prompt: int, generated: int) -> Sequence:
    request = make_request("a", prompt, 100)
    tokens = array("i", [*request.prompt_token_ids, *[1] * generated])
    return Sequence(request, 0, 1, tokens, PageKeys(b"", 8), prompt - 1, prompt + 99)


def test_swapping_is_chosen_where_it_costs_less():
    costs = Costs(swap_page=1.0, prefill_token=0.1, decode_step=2.0)
    assert not prefer_swap(sequence_of(101, 0), 11, costs, 100), "100 prompt tokens take 10 seconds"
    assert prefer_swap(sequence_of(101, 0), 9, costs, 100)
    assert prefer_swap(sequence_of(101, 1), 11, costs, 100), "and a generated one 2"
    assert not prefer_swap(sequence_of(101, 1), 11, costs, 101), "but in a chunk a tenth of one"
    assert not prefer_swap(sequence_of(1, 0), 1, costs, 0)


# ---- choice of the sequence


def test_the_latest_gives_way():
    loop = tight_loop("swap")
    for request in three_that_grow():
        loop.add(request)
    assert preempted_in(loop)[:2] == ["c", "b"]


def test_under_the_priority_policy_the_least_urgent_gives_way():
    loop = tight_loop("recompute", scheduling_policy="priority")
    for request, priority in zip(three_that_grow(), (2, 0, 1), strict=True):
        loop.add(dataclasses.replace(request, priority=priority))
    assert preempted_in(loop)[:2] == ["a", "c"]


def test_who_was_preempted_comes_back_before_those_who_came_later():
    loop = tight_loop("recompute")
    for request in [*three_that_grow(), make_request("d", 3, 3)]:
        loop.add(request)
    admitted = []
    while loop.busy:
        admitted += [sequence.request.request_id for sequence in loop.step().admitted]
    assert admitted.index("d") > max(index for index, name in enumerate(admitted) if name == "c")


def test_nobody_is_admitted_in_a_step_that_throws_somebody_out():
    loop = tight_loop("recompute")
    for request in [*three_that_grow(), make_request("d", 3, 3)]:
        loop.add(request)
    while loop.busy:
        plan = loop.step()
        assert not (plan.preempted and plan.admitted)


# ---- swap and recompute


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("asynchronous", [True, False])
def test_they_go_on_with_the_same_tokens(way, asynchronous):
    loop = tight_loop(way, async_scheduling=asynchronous)
    loop.run(*three_that_grow())
    assert set(preemptions(loop)) == {way}
    assert all(len(output[0].tokens) == 30 for output in loop.outputs.values())


def test_swapped_pages_come_back_and_nothing_is_computed_again():
    loop = tight_loop("swap", async_scheduling=False, enable_prefix_caching=False)
    loop.run(*three_that_grow())
    assert loop.device.moved["exports"] == loop.device.moved["imports"] > 0
    assert loop.device.computed == {"prefill": 3 * 5, "decode": 3 * 30}


def test_without_room_on_the_host_they_are_computed_again():
    loop = tight_loop("swap", host_pages=1)
    loop.run(*three_that_grow())
    assert set(preemptions(loop)) == {"recompute"}


ALIKE = {"exact": {"decode_agrees": True}, "relaxed": {"exactness": "relaxed"}}


@pytest.mark.parametrize("mode", ALIKE)
@pytest.mark.parametrize("asynchronous", [True, False])
def test_where_pages_are_alike_generated_tokens_are_computed_again_in_chunks(mode, asynchronous):
    settings = {"enable_prefix_caching": False, "async_scheduling": asynchronous}
    loop = tight_loop("recompute", **settings, **ALIKE[mode])
    loop.run(*three_that_grow())
    assert set(preemptions(loop)) == {"recompute"}
    assert loop.device.computed["decode"] == 3 * 30, "each is a row once"
    assert loop.device.computed["prefill"] > 3 * 5
    assert loop.scheduler.stats.snapshot().replayed_tokens == 0


@pytest.mark.parametrize("changes", [{"presence_penalty": 1.0}, {"prompt_logprobs": 1}])
def test_in_rows_where_the_sampler_counts_them_or_the_prompt_had_another_program(changes):
    loop = tight_loop("recompute", enable_prefix_caching=False, decode_agrees=True)
    loop.run(*three_that_grow(**changes))
    assert loop.scheduler.stats.snapshot().replayed_tokens > 0


def test_chunks_make_computing_again_cheaper_than_swapping():
    for agrees, way in ((False, "swap"), (True, "recompute")):
        costs = Costs(swap_page=1.0, prefill_token=0.01, decode_step=1.0)
        loop = tight_loop("swap", costs=costs, decode_agrees=agrees)
        loop.run(*three_that_grow())
        assert set(preemptions(loop)) == {way}


def test_what_chunks_compute_again_is_found_if_pages_were_left():
    computed = {}
    for caching in (True, False):
        loop = tight_loop("recompute", enable_prefix_caching=caching, decode_agrees=True)
        loop.run(*three_that_grow())
        computed[caching] = loop.device.computed["prefill"]
    assert computed[True] < computed[False]


def test_tokens_computed_again_are_compared_and_not_given_out_twice():
    loop = tight_loop("recompute", enable_prefix_caching=False)
    loop.run(*three_that_grow())
    stats = loop.scheduler.stats.snapshot()
    assert stats.replayed_tokens > 0
    assert stats.replay_mismatches == 0
    assert stats.generated_tokens == 3 * 30


def test_a_replay_that_differs_is_counted_and_what_was_given_out_stands():
    loop = tight_loop("recompute", enable_prefix_caching=False, async_scheduling=False)
    for request in three_that_grow():
        loop.add(request)
    while not any(sequence.generated > 2 for sequence in loop.plan.admitted):
        loop.step()
    sequence = next(sequence for sequence in loop.plan.admitted if sequence.generated > 2)
    known = list(sequence.tokens)
    plan = loop.scheduler.plan()
    launched = loop.device.launch(plan)
    row = next(index for index, row in enumerate(plan.decodes) if row.sequence is sequence)
    launched.result.tokens[row][0] ^= 1
    loop.scheduler.commit(launched.result)
    assert loop.scheduler.stats.snapshot().replay_mismatches == 1
    assert list(sequence.tokens) == known


def test_what_was_computed_may_still_be_found_in_the_cache():
    computed = {}
    for caching in (True, False):
        loop = tight_loop("recompute", enable_prefix_caching=caching, async_scheduling=False)
        loop.run(*three_that_grow())
        computed[caching] = sum(loop.device.computed.values())
    assert computed[True] < computed[False]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_state_of_the_sampler_comes_back(way, asynchronous):
    loop = tight_loop(way, async_scheduling=asynchronous)
    loop.run(*three_that_grow(presence_penalty=1.0))
    assert set(preemptions(loop)) == {way}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("classes", [(0, 0), (0, 1)])
def test_prompt_logprobs_come_once_and_whole(way, classes):
    loop = tight_loop(way, classes=classes)
    loop.run(*three_that_grow(prompt_logprobs=1, logprobs=1))
    assert set(preemptions(loop)) == {way}
    loop.run(make_request("d", 6, 30, seed=1, cache_salt="a"))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("agrees", [False, True])
def test_samples_of_one_prompt(way, agrees):
    loop = tight_loop(way, decode_agrees=agrees)
    loop.run(make_request("a", 14, 26, n=4))
    assert preemptions(loop)[way] > 0
    assert [len(output.tokens) for output in loop.outputs["a"]] == [26] * 4


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("agrees", [False, True])
def test_with_drafts(way, agrees):
    loop = tight_loop(way, speculative="ngram", rows=9, decode_agrees=agrees)
    loop.run(*[make_request(name, (1, 2, 3, 4) * 3, 30, seed=ord(name), cache_salt=name) for name in "abc"])
    assert preemptions(loop)[way] > 0
    assert loop.scheduler.stats.snapshot().draft_tokens > 0


@pytest.mark.parametrize("way", WAYS)
def test_with_several_steps_on_the_device(way):
    loop = tight_loop(way, multi_step=4)
    loop.run(*three_that_grow(stops=True))
    loop.run(*[dataclasses.replace(request, request_id=f"later {request.request_id}") for request in three_that_grow()])
    assert preemptions(loop)[way] > 0


def test_known_tokens_are_fed_one_by_one():
    """Sampling them again on the device would give the same tokens, unless results differ by a bit."""
    loop = tight_loop("recompute", multi_step=4, async_scheduling=False, enable_prefix_caching=False)
    for request in three_that_grow():
        loop.add(request)
    replays = 0
    while loop.busy:
        known = {name: 6 + len(outputs[0].tokens) for name, outputs in loop.outputs.items()}
        plan = loop.step()
        if any(row.position + 1 < known[row.sequence.request.request_id] for row in plan.decodes):
            replays += 1
            assert plan.steps == 1
    assert replays


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("windows", [(8,), (None, 12), (20, None, 5)])
@pytest.mark.parametrize("agrees", [False, True])
def test_with_windows(way, windows, agrees):
    loop = tight_loop(way, windows=windows, decode_agrees=agrees)
    loop.run(*three_that_grow())


def test_of_prompts_that_hold_all_pages_and_cannot_go_on_one_gives_way():
    loop = tight_loop("swap", num_pages=7, scheduling_policy="priority", max_num_batched_tokens=16 + 3)
    for name in "xy":
        loop.add(make_request(name, 6, 24, priority=0, cache_salt=name))
    loop.add(make_request("a", 44, 4, priority=2, cache_salt="a"))
    while not loop.step().preempted:
        pass
    assert loop.plan.preempted[0].sequence.swapped is not None
    loop.abort("x")
    loop.abort("y")
    loop.add(make_request("b", 44, 4, priority=1, cache_salt="b"))
    assert [prefill.sequence.request.request_id for prefill in loop.step().prefills] == ["b"]
    assert loop.kv.usage().held == 4 + 2, "four came back from the host, and neither can have the two that are next"
    assert preempted_in(loop) == ["a"]


def test_what_is_computed_again_costs_its_tenant_again():
    loop = tight_loop("recompute")
    for request in three_that_grow():
        loop.add(request)
    while not loop.step().preempted:
        pass
    assert {(preempted.sequence.scheduled, preempted.sequence.capacity) for preempted in loop.plan.preempted} == {
        (0, 0)
    }
    loop.drain()


@pytest.mark.parametrize("way", WAYS)
def test_one_that_was_preempted_may_be_aborted(way):
    loop = tight_loop(way)
    for request in three_that_grow():
        loop.add(request)
    while not loop.plan.preempted:
        loop.step()
    loop.abort("c")
    loop.drain()
    assert loop.outputs["c"][0].reason is FinishReason.ABORT
    loop.check_empty()


def test_evicted_prefixes_live_on_the_host_and_come_back():
    loop = tight_loop("recompute", host_pages=4, max_num_seqs=1, max_num_batched_tokens=17)
    loop.run(make_request("a", 33, 2, cache_salt="a"))
    loop.run(make_request("b", 33, 2, cache_salt="b"))
    assert loop.device.moved["exports"] > 0
    loop.run(make_request("again", 33, 2, cache_salt="a"))
    assert loop.device.moved["imports"] > 0
    assert loop.device.computed["prefill"] == 64


# ---- tokens sampled in the old slot


def moved_in_flight(costs: Costs, when: int) -> Loop:
    """Three stages: after ``when`` steps an urgent request preempts a sequence, which takes the slot of an aborted one
    while its tokens sampled in the old slot are in flight."""
    loop = make_loop(
        costs=costs,
        host_pages=8,
        max_num_seqs=6,
        max_num_batched_tokens=22,
        num_pages=48,
        pipeline_parallel_size=3,
        scheduling_policy="priority",
    )
    for name in ("a", "aborted", "b", "c", "d", "moves"):
        loop.add(make_request(name, 5, 30, seed=len(name), priority=int(name == "moves"), cache_salt=name))
    for _ in range(when):
        loop.step()
    loop.add(make_request("urgent", 5, 30, seed=7, priority=-1, cache_salt="urgent"))
    assert ids(preempted.sequence for preempted in loop.step().preempted) == ["moves"]
    loop.abort("aborted")
    assert ids(loop.step().admitted) == ["moves"]
    return loop


@pytest.mark.parametrize("when", [8, 9, 10])
@pytest.mark.parametrize("way", WAYS)
def test_another_slot_has_nothing_of_what_is_in_flight(way, when):
    loop = moved_in_flight(WAYS[way], when)
    loop.drain()
    assert preemptions(loop) == {way: 1}
