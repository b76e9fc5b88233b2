"""Each behaviour of the scheduler alone, against an arithmetic device.

The loop compares every output with the request's undisturbed run, so a test only checks what is specific to it.
"""

from __future__ import annotations

import dataclasses

import pytest

from jaxinfer.engine.scheduling.buckets import Chunk
from jaxinfer.sampling_params import QueueFullError, RequestError
from jaxinfer.types import FinishReason
from tests.engine.fake_device import EOS
from tests.engine.fake_loop import Loop, chunks, eos_request, ids, make_loop, make_request, rows, tokens_of

# ---- chunks and budget


def test_a_prompt_advances_by_chunks_under_the_budget():
    loop = make_loop(max_num_batched_tokens=16 + 3)
    loop.add(make_request("a", 41))
    assert chunks(loop.step()) == [("a", Chunk(0, 16, 16))]
    assert chunks(loop.step()) == [("a", Chunk(16, 16, 16))]
    plan = loop.step()
    assert chunks(plan) == [("a", Chunk(32, 8, 8))]
    assert rows(plan) == [("a", 40)], "the last prompt token is a decode row of the same step"
    loop.drain()


def test_a_budget_that_holds_the_whole_prompt_takes_one_step():
    loop = make_loop(max_num_batched_tokens=40 + 3)
    loop.add(make_request("a", 41))
    assert chunks(loop.step()) == [("a", Chunk(0, 16, 16)), ("a", Chunk(16, 16, 16)), ("a", Chunk(32, 8, 8))]
    loop.drain()


def test_a_prompt_of_one_token_needs_no_prefill():
    loop = make_loop()
    loop.add(make_request("a", 1))
    plan = loop.step()
    assert (chunks(plan), rows(plan)) == ([], [("a", 0)])
    loop.drain()


def test_who_came_first_gets_the_budget_and_the_next_one_what_is_left():
    loop = make_loop(max_num_batched_tokens=24 + 3)
    loop.add(make_request("a", 60))
    loop.add(make_request("b", 9, cache_salt="b"))
    loop.add(make_request("c", 17, cache_salt="c"))
    assert chunks(loop.step()) == [("a", Chunk(0, 16, 16)), ("b", Chunk(0, 8, 8))]
    plan = loop.step()
    assert chunks(plan) == [("a", Chunk(16, 16, 16))], "c's chunk is larger than what is left"
    assert rows(plan) == [("b", 9)]
    while loop.step().prefills[0].sequence.request.request_id == "a":
        assert len(loop.plan.prefills) == 1
    assert chunks(loop.plan) == [("c", Chunk(0, 16, 16))]
    loop.drain()


def test_a_request_that_came_first_is_admitted_first():
    loop = make_loop(max_num_seqs=1, max_num_batched_tokens=17)
    names = ["c", "a", "b"]
    for name in names:
        loop.add(make_request(name, 5, 2))
    order = []
    while loop.busy:
        order += ids(loop.step().admitted)
    assert order == names


# ---- prefix cache


def test_a_prompt_that_is_cached_whole_is_not_computed_again():
    loop = make_loop(num_pages=24)
    loop.run(make_request("a", 33))
    before = loop.device.computed["prefill"]
    loop.add(make_request("b", 33, 6))
    plan = loop.step()
    assert (chunks(plan), rows(plan)) == ([], [("b", 32)])
    loop.drain()
    assert (before, loop.device.computed["prefill"]) == (32, 32)
    assert [loop.outputs[name][0].cached_tokens for name in "ab"] == [0, 32]
    assert loop.scheduler.stats.snapshot().prefix_hits == 32


def test_the_tokens_of_a_page_that_only_begins_alike_are_copied():
    loop = make_loop(classes=(0, 0))
    loop.add(make_request("a", tuple(range(9)) * 4))
    loop.drain()
    other = tuple(range(9)) * 2 + (0, 1, 3) + (5,) * 15
    loop.add(make_request("b", other))
    plan = loop.step()
    assert chunks(plan)[0] == ("b", Chunk(20, 12, 16)), "16 tokens of two whole pages and 4 of the third"
    assert len(plan.copies) == 1
    loop.drain()


def test_pages_of_a_prompt_are_shared_while_it_still_runs():
    loop = make_loop()
    loop.add(make_request("a", 33, 20))
    loop.step()
    loop.step()
    loop.step()
    loop.add(make_request("b", 33, 20))
    assert chunks(loop.step()) == []
    assert loop.kv.usage().held < 2 * 5
    loop.drain()


def test_requests_of_different_salts_share_nothing():
    loop = make_loop()
    loop.run(make_request("a", 33, cache_salt="x"), make_request("b", 33, cache_salt="y"))
    assert loop.device.computed["prefill"] == 64


def test_without_prefix_caching_nothing_is_found_but_forks_share():
    loop = make_loop(enable_prefix_caching=False)
    loop.run(make_request("a", 33))
    loop.run(make_request("b", 33, n=3))
    assert loop.device.computed["prefill"] == 64
    assert loop.scheduler.stats.snapshot().prefix_hits == 32 * 2, "the two forks"


def test_a_page_is_reused_only_by_who_would_compute_it_in_the_same_class():
    long = 61  # tokens 32 to 39 are due in size 16; as the tail of a prompt of 41 they are due in size 8
    for classes, hit in (((0, 1), 32), ((0, 0), 40)):
        loop = make_loop(classes=classes)
        loop.run(make_request("a", 41))
        loop.add(make_request("b", long))
        assert chunks(loop.step())[0][1].start == hit
        loop.drain()


def test_a_follow_up_turn_reuses_what_was_generated_where_pages_are_alike():
    for changes, hit in (({}, 16), ({"exactness": "relaxed"}, 40), ({"decode_agrees": True}, 40)):
        loop = make_loop(**changes, classes=(0, 0), max_num_batched_tokens=51)
        loop.run(make_request("a", 20, 24))
        turn = (*tokens_of(loop, "a"), 1, 2, 3, 4)
        loop.add(make_request("b", turn))
        assert chunks(loop.step())[0][1].start == hit
        loop.drain()
        assert loop.outputs["b"][0].cached_tokens == hit


def test_nobody_finds_what_follows_a_prompt_with_log_probabilities():
    loop = make_loop(decode_agrees=True, max_num_batched_tokens=51)
    loop.run(make_request("a", 20, 24, prompt_logprobs=1))
    loop.run(make_request("b", (*tokens_of(loop, "a"), 1)))
    assert loop.outputs["b"][0].cached_tokens == 0


def test_prompt_logprobs_compute_the_whole_prompt_in_the_largest_size():
    loop = make_loop(max_num_batched_tokens=67)
    loop.run(make_request("a", 41))
    loop.add(make_request("b", 41, prompt_logprobs=1))
    assert chunks(loop.step()) == [("b", Chunk(0, 16, 16)), ("b", Chunk(16, 16, 16)), ("b", Chunk(32, 8, 16))]
    loop.drain()
    loop.run(make_request("c", 41))
    assert loop.device.computed["prefill"] == 2 * 40, "and leave the cache as it was"


def test_resetting_the_prefix_cache_forgets_what_nobody_uses():
    loop = make_loop()
    loop.run(make_request("a", 33))
    assert loop.kv.reset_prefix_cache() == 4
    assert loop.kv.usage().cached == 0
    loop.run(make_request("b", 33))
    assert loop.device.computed["prefill"] == 64


# ---- samples of one request


def test_samples_share_the_pages_of_their_prompt():
    loop = make_loop()
    loop.add(make_request("a", 20, 4, n=3))
    while loop.scheduler.running < 3:
        loop.step()
    assert loop.kv.usage().held == 2 + 3, "two whole pages for all, and one each for what follows"
    loop.drain()
    assert loop.device.computed["prefill"] == 19
    assert loop.device.moved["copies"] == 2


def test_a_sample_whose_leader_is_gone_computes_or_finds_the_prompt_itself():
    loop = make_loop()
    loop.add(make_request("a", 60, 8, n=3))
    loop.step()
    loop.abort("a", 0)
    loop.drain()
    assert loop.outputs["a"][0].reason is FinishReason.ABORT
    assert all(len(output.tokens) == 8 for output in loop.outputs["a"][1:])


def test_samples_of_a_prompt_of_one_token():
    loop = make_loop()
    assert [len(tokens) for tokens in loop.run(make_request("a", 1, 9, n=3))[0]] == [9, 9, 9]


# ---- finished sequences


@pytest.mark.parametrize(("asynchronous", "wasted"), [(True, 1), (False, 0)])
def test_an_end_that_is_seen_one_step_late_costs_one_row(asynchronous, wasted):
    loop = make_loop(async_scheduling=asynchronous)
    request, length = eos_request(loop, 3)
    assert len(loop.run(request)[0][0]) == length
    assert loop.device.computed["decode"] == length + wasted


@pytest.mark.parametrize("asynchronous", [True, False])
def test_an_end_by_length_costs_no_row(asynchronous):
    loop = make_loop(async_scheduling=asynchronous)
    loop.run(make_request("a", 12, 7))
    assert loop.device.computed["decode"] == 7


def test_min_tokens_holds_back_the_end():
    loop = make_loop()
    request, length = eos_request(loop, 2)
    later = dataclasses.replace(request, params=dataclasses.replace(request.params, min_tokens=length + 1))
    tokens = loop.run(later)[0][0]
    assert len(tokens) > length
    assert tokens[length - 1] == EOS


def test_a_slot_and_pages_are_taken_over_in_the_step_after_the_end():
    loop = make_loop(max_num_seqs=1, max_num_batched_tokens=17, async_scheduling=False)
    loop.add(make_request("a", 3, 2))
    loop.add(make_request("b", 3, 2))
    assert [ids(loop.step().admitted) for _ in range(3)] == [["a"], [], ["b"]]
    loop.drain()


# ---- rejected requests


def test_what_can_never_fit_is_refused_with_the_numbers():
    loop = make_loop(num_pages=16)
    with pytest.raises(RequestError, match="139 tokens need 18 KV pages, the pool has 16"):
        loop.add(make_request("a", 100, 40))
    assert not loop.busy


def test_what_just_fits_runs():
    loop = make_loop(num_pages=16)
    assert len(loop.run(make_request("a", 100, 29))[0][0]) == 29


def test_an_id_that_is_in_use_is_refused():
    loop = make_loop()
    loop.add(make_request("a", 5))
    with pytest.raises(RequestError, match="request_id='a' is in use"):
        loop.add(make_request("a", 5))
    loop.drain()
    loop.run(make_request("a", 5))


def test_too_many_waiting_requests_are_refused():
    loop = make_loop(max_num_seqs=1, max_num_batched_tokens=17, max_waiting_requests=2)
    loop.add(make_request("a", 5))
    loop.step()
    loop.add(make_request("b", 5))
    loop.add(make_request("c", 5))
    with pytest.raises(QueueFullError, match=r"max_waiting_requests = 2, behind \d+ slots"):
        loop.add(make_request("d", 5))
    loop.drain()
    loop.run(make_request("d", 5))


def test_too_many_waiting_tokens_are_refused():
    loop = make_loop(max_num_seqs=1, max_num_batched_tokens=17, max_waiting_tokens=50)
    loop.add(make_request("a", 30))
    with pytest.raises(QueueFullError, match="51 tokens would wait, max_waiting_tokens = 50"):
        loop.add(make_request("b", 21))
    loop.add(make_request("b", 20))
    loop.drain()
    loop.run(make_request("longer than all that may wait", 60))


def test_too_many_waiting_sequences_are_refused():
    loop = make_loop(max_num_seqs=2, max_num_batched_tokens=18, max_waiting_sequences=5)
    loop.add(make_request("a", 5, n=4))  # three of them wait for the prompt of the first
    with pytest.raises(QueueFullError, match="6 sequences would wait, max_waiting_sequences = 5"):
        loop.add(make_request("b", 5, n=2))
    loop.add(make_request("b", 5))
    loop.drain()
    loop.run(make_request("more than may wait", 5, n=7))


# ---- deadlines and aborts


def test_a_deadline_ends_a_request_that_waits():
    loop = make_loop(max_num_seqs=1, max_num_batched_tokens=17)
    loop.add(make_request("a", 5, 20))
    loop.add(make_request("b", 5, 20, deadline=4.0))
    loop.drain()
    output = loop.outputs["b"][0]
    assert (output.reason, output.tokens) == (FinishReason.DEADLINE, [])
    assert len(loop.outputs["a"][0].tokens) == 20


def test_a_deadline_ends_a_request_that_runs_and_keeps_what_it_had():
    loop = make_loop()
    loop.add(make_request("a", 5, 20, deadline=8.0, n=2))
    loop.drain()
    for output in loop.outputs["a"]:
        assert output.reason is FinishReason.DEADLINE
        assert 3 <= len(output.tokens) <= 8


def test_a_deadline_does_not_end_a_sample_twice():
    loop = make_loop(async_scheduling=False)
    loop.add(make_request("a", 5, 20, deadline=8.0, n=2))
    loop.step()
    loop.step()
    loop.scheduler.abort("a", 1)
    loop.outputs["a"][1].reason = FinishReason.ABORT
    loop.drain()
    assert loop.outputs["a"][0].reason is FinishReason.DEADLINE


def test_the_deadline_of_an_earlier_request_does_not_end_a_later_one_of_its_name():
    loop = make_loop()
    loop.run(make_request("a", 5, 2, deadline=50.0))
    loop.now = 48.0
    assert len(loop.run(make_request("a", 5, 20))[0][0]) == 20


@pytest.mark.parametrize("steps", range(8))
@pytest.mark.parametrize("n", [1, 2])
def test_an_abort_frees_everything_within_two_steps(steps, n):
    loop = make_loop(max_num_seqs=2, max_num_batched_tokens=18)
    loop.add(make_request("a", 44, 30, n=n))
    for _ in range(steps):
        loop.step()
    loop.abort("a")
    loop.step()
    loop.step()
    assert not loop.busy
    loop.check_idle()


def test_aborting_what_is_not_there_does_nothing():
    loop = make_loop()
    loop.scheduler.abort("nobody")
    loop.run(make_request("a", 5))
    loop.scheduler.abort("a")
    assert not loop.busy


# ---- policies


def finish_order(loop: Loop) -> list[str]:
    order: list[str] = []
    while loop.busy:
        loop.step()
        order += [name for name in loop.outputs if name not in order and name not in loop.live]
    return order


def test_priority_serves_the_lower_number_first_and_equals_by_arrival():
    loop = make_loop(scheduling_policy="priority", max_num_seqs=1, max_num_batched_tokens=17)
    for name, priority in (("a", 2), ("b", 0), ("c", 1), ("d", 0)):
        loop.add(make_request(name, 5, 3, priority=priority))
    assert finish_order(loop) == ["b", "d", "c", "a"]


def test_priority_takes_the_slot_of_one_that_runs():
    loop = make_loop(scheduling_policy="priority", max_num_seqs=1, max_num_batched_tokens=17)
    loop.add(make_request("slow", 5, 30, priority=1))
    for _ in range(4):
        loop.step()
    loop.add(make_request("urgent", 5, 3, priority=0))
    assert finish_order(loop) == ["urgent", "slow"]
    assert len(loop.outputs["slow"][0].tokens) == 30


def test_fair_serves_a_tenant_that_comes_late_before_the_flood_is_over():
    ends = {}
    for policy in ("fcfs", "fair"):
        loop = make_loop(scheduling_policy=policy, max_num_seqs=2, max_num_batched_tokens=18)
        for number in range(30):
            loop.add(make_request(f"flood{number}", 60, 8, tenant="flood", cache_salt=str(number)))
        loop.step()
        loop.add(make_request("late", 5, 4, tenant="late"))
        ends[policy] = finish_order(loop).index("late")
    assert ends["fcfs"] == 30
    assert ends["fair"] <= 18, "no more than two quanta of 512 tokens and two costs of 68 come before"


# ---- capacity


def test_pages_for_all_slots_fill_all_slots():
    """The scheduler keeps no pages free for a sequence that holds all the pages it can need."""
    loop = make_loop(num_pages=9, max_model_len=24, max_num_batched_tokens=72 + 3)
    for name in "ab":
        loop.add(make_request(name, 17, 8, cache_salt=name))
    assert rows(loop.step()) == [("a", 16), ("b", 16)], "both hold three pages, their last"
    loop.add(make_request("c", 17, 8, cache_salt="c"))
    assert ids(loop.step().admitted) == ["c"]
    loop.drain()
    assert not sum(loop.scheduler.stats.snapshot().preemptions.values())
