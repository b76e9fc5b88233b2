"""Draft tokens, multi-step decode, static batching, and leaks."""

from __future__ import annotations

import gc
import random
from typing import Any

import numpy as np
import pytest

from jaxinfer.engine.scheduling.sequence import Sequence
from jaxinfer.spec import Drafted, Tree
from tests.engine.fake_device import EOS
from tests.engine.fake_loop import Loop, eos_request, ids, make_loop, make_request, rows, tokens_of

# ---- drafts


class Guess:
    """A drafter that proposes the tokens of the undisturbed run, wrong from the draft of index ``wrong`` on."""

    def __init__(self, wrong: int) -> None:
        self.wrong = wrong
        self.truth: list[int] = []
        self.ended: list[int] = []

    def propose(self, sequence: Drafted, limit: int) -> Tree:
        start = len(sequence.tokens)
        if sequence.number > 1:
            return Tree.chain(np.zeros(0, np.int32))
        assert sequence.tokens.tolist() == self.truth[:start]
        drafts = np.array(self.truth[start : start + limit], np.int32)
        drafts[self.wrong :] = (drafts[self.wrong :] + 1) % EOS
        return Tree.chain(drafts)

    def end(self, sequence: Drafted) -> None:
        self.ended.append(sequence.number)

    def reset(self) -> None:
        self.ended.clear()


def guessing_loop(
    wrong: int,
    *,
    prompt: int = 12,
    most: int = 21,
    presence_penalty: float = 0.0,
    speculation: dict[str, Any] | None = None,
    **changes,
) -> tuple[Loop, Guess]:
    guess = Guess(wrong)
    settings = {"rows": 8, "speculative_adaptive": False, **changes}
    loop = make_loop(speculative="ngram", num_speculative_tokens=4, **settings)
    loop.scheduler._drafts._drafter = guess
    own = {"presence_penalty": presence_penalty, "speculation": speculation}
    loop.add(make_request("a", prompt, most, **own))
    guess.truth = tokens_of(loop, "a")
    return loop, guess


@pytest.mark.parametrize(("wrong", "steps"), [(0, 21), (1, 11), (2, 7), (4, 5)])
def test_accepted_drafts_save_steps_and_rejected_ones_do_no_harm(wrong, steps):
    loop, guess = guessing_loop(wrong, async_scheduling=False)
    loop.drain()
    assert loop.steps == steps, "each step yields the drafts that came true and one token more"
    assert len(loop.outputs["a"][0].tokens) == 21
    assert guess.ended == [1]


@pytest.mark.parametrize("wrong", [0, 1, 2, 4])
def test_what_was_accepted_is_counted_by_place(wrong):
    loop, _ = guessing_loop(wrong, async_scheduling=False)
    loop.drain()
    stats = loop.scheduler.stats.snapshot()
    assert stats.draft_accepted == sum(stats.draft_accepted_at)
    assert stats.drafts <= loop.steps
    assert stats.draft_accepted == 21 - loop.steps
    assert len(stats.draft_accepted_at) == 4
    assert not any(stats.draft_accepted_at[wrong:])


def test_a_sequence_whose_drafts_fail_rests_and_is_tried_again():
    loop, _ = guessing_loop(0, most=90, speculative_adaptive=True)
    loop.drain()
    stats = loop.scheduler.stats.snapshot()
    assert 4 <= stats.drafts <= 12, "some at first, then ever fewer"
    assert loop.steps < 120, "while it rests nobody waits for the host"


@pytest.mark.parametrize("wrong", [0, 1, 2, 4])
def test_a_rest_ends_when_a_guess_that_was_not_fed_comes_true(wrong):
    loop, _ = guessing_loop(wrong, most=60, speculative_adaptive=True)
    load = loop.scheduler._drafts._tempo._load(1)
    load.drafts, load.rests, load._left = False, True, 1000
    for _ in range(12):
        loop.step()
    assert load.rests == (wrong < 2), "two tokens in a row, or it was chance"
    loop.drain()
    assert bool(loop.scheduler.stats.snapshot().draft_accepted) == (wrong >= 2)


BOUNDS = [(None, 5), ({}, 5), *(({"max_tokens": most}, steps) for most, steps in ((9, 5), (2, 7), (1, 11), (0, 21)))]


@pytest.mark.parametrize(("asked", "steps"), [*BOUNDS, ({"enabled": False}, 21)])
def test_a_request_bounds_its_drafts(asked, steps):
    loop, guess = guessing_loop(4, async_scheduling=False, speculation=asked)
    loop.drain()
    assert loop.steps == steps
    assert list(loop.outputs["a"][0].tokens) == guess.truth[12:]


@pytest.mark.parametrize("asked", [{"enabled": False}, {"max_tokens": 0}])
@pytest.mark.parametrize("adaptive", [False, True])
def test_whose_requests_want_no_drafts_wait_for_none(adaptive, asked):
    loop, _ = guessing_loop(4, speculation=asked, speculative_adaptive=adaptive)
    plain = make_loop(rows=8)
    plain.run(make_request("a", 12, 21))
    loop.drain()
    assert loop.steps == plain.steps
    assert not loop.scheduler.stats.snapshot().drafts


def test_a_full_batch_neither_drafts_nor_waits():
    loop = make_loop(speculative="ngram", rows=2, max_num_seqs=2, num_speculative_tokens=1)
    loop.run(make_request("a", (1, 2, 3, 4) * 6, 40), make_request("b", (1, 2, 3, 4) * 6, 40, seed=3, cache_salt="b"))
    plain = make_loop(rows=2, max_num_seqs=2)
    plain.run(make_request("a", (1, 2, 3, 4) * 6, 40), make_request("b", (1, 2, 3, 4) * 6, 40, seed=3, cache_salt="b"))
    assert loop.steps <= plain.steps + 4


def test_sequences_draft_in_step_whenever_they_came():
    """Otherwise some would be in flight while the rest are planned, and each step would run a subset."""
    loop, _ = guessing_loop(0, most=60)
    for number in range(3):
        for _ in range(3 + 2 * number):
            loop.step()
        loop.add(make_request(f"b{number}", 12, 60, seed=number, cache_salt=f"{number}"))
    for _ in range(6):
        loop.step()
    assert loop.scheduler.running > 2
    for _ in range(10):
        running = loop.scheduler.running
        assert len({row.sequence for row in loop.step().decodes}) in (0, running)
    loop.drain()


def test_drafts_use_idle_rows_only():
    loop, _ = guessing_loop(4, rows=0, async_scheduling=False)  # five rows: the row and four drafts of one sequence
    loop.step()
    loop.add(make_request("b", 12, 6, seed=5, presence_penalty=1.0))
    plan = loop.step()
    assert rows(plan) == [("a", 16), ("a", 17), ("a", 18), ("a", 19), ("b", 11)]
    loop.drain()


def test_there_are_no_drafts_beyond_the_last_token():
    loop, _ = guessing_loop(4, most=3, async_scheduling=False)
    assert rows(loop.step()) == [("a", 11), ("a", 12), ("a", 13)]
    loop.drain()


def test_drafts_of_a_sequence_with_sampler_state_come_true():
    loop, _ = guessing_loop(4, async_scheduling=False, presence_penalty=1.0)
    loop.drain()
    assert loop.steps == 5


def test_a_draft_never_makes_anybody_give_way():
    loop, _ = guessing_loop(4, prompt=10, num_pages=4, max_model_len=32, async_scheduling=False)
    loop.add(make_request("b", 9, 6, seed=5, presence_penalty=1.0, cache_salt="b"))
    assert rows(loop.step()) == [("a", 9), ("a", 10), ("a", 11), ("a", 12), ("a", 13)]
    plan = loop.step()
    assert rows(plan) == [("a", 14), ("a", 15), ("b", 8)], "16 needs a page, and all four are taken"
    assert not plan.preempted
    plan = loop.step()
    assert ids(preempted.sequence for preempted in plan.preempted) == ["b"], "now it is a token that is due"
    assert rows(plan)[0] == ("a", 16)
    loop.drain()


def test_what_a_draft_model_drafts_is_fed_and_counted():
    loop = make_loop(rows=8, speculative="draft_model", num_speculative_tokens=4, speculative_adaptive=False)
    loop.run(make_request("a", 12, 30))
    stats = loop.scheduler.stats.snapshot()
    assert 0 < stats.draft_accepted < stats.draft_tokens
    assert loop.steps < 25


def test_a_draft_model_sees_what_was_generated_without_it():
    """No sequence drafts while the batch is full; the draft model then catches up in chunks of the configured sizes."""
    settings = {"num_speculative_tokens": 2, "speculative_adaptive": False, "num_pages": 60}
    loop = make_loop(speculative="draft_model", **settings)
    for name, most in (("a", 60), ("b", 30), ("c", 30)):
        loop.add(make_request(name, 5, most))
    seen = [loop.step() for _ in range(60) if loop.busy]
    (chunks,) = ([prefill.chunk for prefill in plan.draft_prefills] for plan in seen if plan.draft_prefills)
    assert [chunk.size for chunk in chunks] == [16, 16]
    assert chunks[0].length == 16
    assert chunks[1].start == chunks[0].start + 16
    loop.drain()


def test_the_ngram_drafter_drafts():
    loop = make_loop(speculative="ngram", rows=8)
    loop.run(make_request("a", (1, 2, 3, 4) * 6, 40), make_request("b", (1, 2, 3, 4) * 6, 40, seed=3))
    stats = loop.scheduler.stats.snapshot()
    assert stats.draft_tokens > 0
    assert loop.steps < 80


# ---- multi-step decode


def test_the_device_runs_several_steps_alone_when_nobody_waits():
    loop = make_loop(multi_step=4, async_scheduling=False)
    loop.add(make_request("a", 9, 11))
    assert [loop.step().steps for _ in range(4)] == [1, 4, 4, 2]
    assert not loop.busy


def test_the_device_stops_early_when_a_sequence_ends():
    loop = make_loop(multi_step=4, async_scheduling=False)
    request, length = eos_request(loop, 6)
    loop.add(request)
    loop.add(make_request("b", 5, 30))
    loop.drain()
    assert loop.device.computed["decode"] == length + 30


def test_who_runs_several_steps_is_planned_again_when_they_are_read():
    loop = make_loop(multi_step=4)
    request, _ = eos_request(loop, 6)
    loop.add(request)
    loop.add(make_request("b", 5, 30))
    before = 1
    while loop.busy:
        plan = loop.step()
        assert before == 1 or not plan.decodes
        before = plan.steps


def test_one_step_only_while_somebody_waits_or_a_prompt_advances():
    loop = make_loop(multi_step=4, max_num_seqs=2, max_num_batched_tokens=18, async_scheduling=False)
    loop.add(make_request("a", 5, 20))
    loop.step()
    loop.add(make_request("b", 60, 20))
    while loop.scheduler.running == 2 and not rows(loop.step())[1:]:
        assert loop.plan.steps == 1
    loop.add(make_request("c", 5, 20))
    assert loop.step().steps == 1
    loop.drain()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_no_more_steps_than_pages(asynchronous):
    loop = make_loop(
        multi_step=8, num_pages=4, max_model_len=32, async_scheduling=asynchronous, enable_prefix_caching=False
    )
    loop.run(make_request("a", 9, 20), make_request("b", 9, 20))
    assert len(loop.outputs["b"][0].tokens) == 20


# ---- static batching


def test_static_batching_admits_nobody_until_all_have_ended():
    loop = make_loop(batching="static", max_num_seqs=2, max_num_batched_tokens=18)
    for number in range(5):
        loop.add(make_request(str(number), 9, 4 + 3 * number))
    groups = []
    while loop.busy:
        before = loop.scheduler.running
        if admitted := ids(loop.step().admitted):
            if not before:
                groups.append([])
            groups[-1] += admitted
    assert groups == [["0", "1"], ["2", "3"], ["4"]]


# ---- leaks


def test_ten_thousand_requests_with_random_aborts_leave_nothing_behind(unchecked):
    rng = random.Random(7)
    loop = make_loop(max_num_seqs=8, max_num_batched_tokens=40, num_pages=32, host_pages=4)
    objects = []
    for number in range(10_000):
        n = 2 if rng.random() < 0.1 else 1
        loop.add(make_request(str(number), rng.randrange(1, 12), rng.randrange(1, 4), n=n, seed=number))
        if rng.random() < 0.3:
            loop.abort(rng.choice(list(loop.live)[-8:]))
        while len(loop.scheduler._queue) > 4:
            loop.step()
        for name in [name for name in loop.outputs if name not in loop.live][:-32]:
            del loop.outputs[name]
        if number in (4_999, 9_999):
            loop.drain()
            objects.append(things_alive(loop))
    assert loop.kv.usage().held == 0
    assert loop.scheduler._requests == {}
    assert not loop.scheduler._running
    assert not len(loop.scheduler._queue)
    assert not loop.scheduler._prefill.filled
    assert abs(objects[1] - objects[0]) < 100, "what is alive does not grow with what has been served"


def things_alive(loop: Loop) -> int:
    """Return the number of objects that the garbage collector tracks while nothing runs."""
    loop.outputs.clear()
    loop.kv.reset_prefix_cache()
    gc.collect()
    return len(gc.get_objects())


def test_no_sequence_outlives_its_request():
    loop = make_loop(speculative="ngram", rows=6)
    for number in range(50):
        loop.add(make_request(str(number), 20, 6, n=2, deadline=1000.0 if number % 2 else None))
    for number in range(0, 50, 3):
        loop.abort(str(number))
    loop.drain()
    loop.outputs.clear()
    loop.device._owners.clear()
    loop.device._last.clear()
    loop.plan = None
    gc.collect()
    assert sum(isinstance(thing, Sequence) for thing in gc.get_objects()) == 0
