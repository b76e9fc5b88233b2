"""Tests of masks from helper processes: hung or dead helpers are replaced without effects on other sequences."""

import errno
import gc
import io
import os
import sys
import threading
import time
import types
from typing import Any

import msgspec
import pytest

from jaxinfer.helper_process import has_low_priority, in_threads, write_frame
from jaxinfer.structured import helper, matching
from jaxinfer.structured import masks as masking
from jaxinfer.structured.answers import UNAVAILABLE, Answer, Ask
from jaxinfer.structured.masks import Held, Masks
from tests.serve.processes import wait_until
from tests.structured import stuck_helper
from tests.structured.test_grammar import BYTES

PATIENCE = 120.0

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="no thread may stand back here")


@pytest.fixture
def masks() -> Masks:
    return Masks(lambda: BYTES, 1)


def ready(masks: Masks, *those: Held) -> None:
    masks.send()
    masks.wait(those, PATIENCE)
    assert all(each.ready for each in those)


def allowed(held: Held) -> list[int]:
    if held.mask is None:
        return []
    return [token for token in range(257) if held.mask[token // 32] >> (token % 32) & 1]


def test_masks_come_one_behind_the_other(masks):
    held = masks.open("regex", "ab?")
    ready(masks, held)
    assert allowed(held) == [ord("a")]
    masks.advance(held, b"a")
    assert not held.ready
    ready(masks, held)
    assert allowed(held) == [ord("b"), 256]
    masks.advance(held, b"b")
    ready(masks, held)
    assert held.stopped
    assert held.mask is None
    assert held.error is None


def test_masks_behind_what_must_follow_come_at_once():
    masks = Masks(lambda: BYTES, 1, 3)
    held = masks.open("choice", '["perhaps", "permit"]')
    ready(masks, held)
    assert bytes(held.forced) == b"per"
    masks.advance(held, b"pe")
    assert held.ready
    assert bytes(held.forced) == b"r"
    assert allowed(held) == [ord("r")]
    masks.advance(held, b"r")
    assert held.ready
    assert allowed(held) == [ord("h"), ord("m")]
    masks.advance(held, b"m")
    assert not held.ready
    ready(masks, held)
    assert bytes(held.forced) == b"i"
    masks.advance(held, b"it")
    ready(masks, held)
    assert held.stopped


def test_what_is_said_instead_of_what_is_likely_is_asked_for():
    masks = Masks(lambda: BYTES._replace(tokens=[*BYTES.tokens, b"pe"], size=258), 1, 3)
    held = masks.open("choice", '["perhaps"]')
    ready(masks, held)
    assert held.forced[0] == 257
    masks.advance(held, b"p")
    assert not held.ready
    ready(masks, held)
    assert held.mask is not None
    assert held.forced[0] == ord("e")


def test_an_answer_that_is_overtaken_is_not_taken(masks):
    """A stale answer is discarded, as when reasoning ends while its grammar compiles."""
    held = masks.open("regex", "abc")
    ready(masks, held)
    held.told, held.ready = len(held.said) - 1, False
    held.hear(held.owner, Answer(None, [], [[7]]), BYTES.words)
    assert not held.ready
    assert allowed(held) == []
    held.told = len(held.said)
    held.hear(held.owner, Answer(None, [], [[7]]), BYTES.words)
    assert allowed(held) == [7]


def test_a_failing_grammar_is_its_own_affair(masks):
    bad, good = masks.open("json", '{"not": {}}'), masks.open("regex", "a")
    ready(masks, bad, good)
    assert "not" in (bad.error or "")
    assert bad.mask is None
    assert allowed(good) == [ord("a")]


def test_a_vocabulary_that_cannot_say_it_is_an_error():
    masks = Masks(lambda: BYTES._replace(tokens=BYTES.tokens[:98], special=frozenset(), ends=(97,), size=98), 1)
    held = masks.open("regex", "z")
    ready(masks, held)
    assert held.error is not None


def test_what_a_helper_knew_is_told_to_its_successor(masks):
    held, other = masks.open("regex", "abcd"), masks.open("regex", "x+")
    ready(masks, held, other)
    masks.advance(held, b"ab")
    ready(masks, held)
    masks._workers[0]._helper.kill()
    masks.advance(held, b"c")
    masks.advance(other, b"x")
    ready(masks, held, other)
    assert allowed(held) == [ord("d")]
    assert allowed(other) == [ord("x"), 256]


def test_a_helper_that_dies_between_two_questions_is_nobodys_fault(masks):
    held = masks.open("regex", "abcd")
    ready(masks, held)
    masks._workers[-2]._helper._process.kill()
    masks._workers[-2]._helper._process.wait()
    masks.advance(held, b"a")
    ready(masks, held)
    assert held.error is None
    assert allowed(held) == [ord("b")]


def test_an_answer_that_comes_while_one_looks_at_the_clock_ends_no_helper(masks, monkeypatch):
    held = masks.open("regex", "ab")
    ready(masks, held)
    worker = masks._workers[-2]

    def monotonic() -> float:
        worker._since = 0.0
        return 1e6

    worker._since = 1e6 - 1.0
    monkeypatch.setattr(masking, "time", types.SimpleNamespace(monotonic=monotonic))
    worker.send()
    assert not worker._helper._killed


def test_a_helper_that_hangs_is_stopped_and_the_others_go_on(masks, monkeypatch):
    monkeypatch.setattr(masking, "MODULE", stuck_helper.MODULE)
    before = masks.open("regex", "abc")
    ready(masks, before)
    masks.advance(before, b"a")
    stuck, behind = masks.open("regex", stuck_helper.STUCK), masks.open("regex", "x")
    ready(masks, before, stuck, behind)
    assert allowed(before) == [ord("b")]
    assert allowed(behind) == [ord("x")]
    assert "took too long" in (stuck.error or "")


def lower_priority(worker: Any) -> bool:
    """Return whether all threads of the helper except the first, which starts them, have idle priority."""
    first = worker._helper._process.pid
    threads = [int(each) for each in os.listdir(f"/proc/{first}/task")]
    assert os.sched_getscheduler(first) == os.SCHED_OTHER
    return all(os.sched_getscheduler(each) == os.SCHED_IDLE for each in threads if each != first)


@on_linux
def test_who_takes_long_for_a_mask_stands_back_and_comes_forward_for_the_next(masks, monkeypatch):
    held = masks.open("regex", "a*")
    ready(masks, held)
    masks.advance(held, b"a")
    ready(masks, held)
    worker = held.owner
    wait_until(lambda: not lower_priority(worker))  # the serving thread differs from the one that started
    worker._since, worker._hurried = time.monotonic() - masking._QUICK_SECONDS - 0.001, False
    masks.send()
    assert lower_priority(worker)
    masks.advance(held, b"a")
    ready(masks, held)
    wait_until(lambda: not lower_priority(worker))


@on_linux
def test_a_helper_stands_back_while_it_starts_and_while_it_learns(monkeypatch):
    asks = [Ask([(1, ("regex", "a*", ""), [])], []), Ask([(1, None, [97])], []), Ask([], [1])]
    reader, stood = io.BytesIO(), list[bool]()
    for frame in (helper.setup(100.0, BYTES), *map(msgspec.msgpack.encode, asks)):
        write_frame(reader, frame)
    reader.seek(0)
    allowed = list[float]()
    monkeypatch.setattr(helper, "allow_cpu", allowed.append)
    monkeypatch.setattr(matching, "allow_cpu", allowed.append)
    answers = list[bytes]()
    monkeypatch.setattr(
        helper, "write_frame", lambda _, frame: (stood.append(has_low_priority()), answers.append(frame))
    )
    in_threads(helper._Serving(reader, io.BytesIO()).serve)
    assert stood == [True, True, False, False]
    assert set(allowed) == {100.0}
    assert [answer.state for answer in msgspec.msgpack.decode(answers[1], type=list[Answer])] == [None]


def test_who_is_slow_is_said_to_be(monkeypatch):
    found = matching.Matching(BYTES, 100.0)
    assert not found._tried(1, ("regex", "a*", ""), []).slow
    assert not found._tried(1, None, [97]).slow
    monkeypatch.setattr(matching, "_SLOW_SECONDS", 0.0)
    assert found._tried(1, None, [97]).slow
    assert not found._tried(2, ("regex", "a*", ""), []).slow  # compilation may be slow
    held = Held(0, ("regex", "a*", ""))
    for slow in (True, False):
        held.hear(held.owner, Answer(None, [], [[97]], slow), 9)
        assert held.slow is slow


def test_what_is_late_is_said_to_be(masks):
    held = masks.open("regex", "a")
    masks.wait([held], 0.0)
    assert held.late
    ready(masks, held)
    assert not held.late


def test_what_ends_before_it_was_asked_is_forgotten(masks):
    one, other = masks.open("regex", "a+"), masks.open("regex", "b+")
    ready(masks, one, other)
    masks.advance(one, b"a")
    masks.close(one)
    masks.advance(other, b"b")
    ready(masks, other)
    assert allowed(other) == [ord("b"), 256]
    assert masks._workers[0].members == 1


def test_a_helper_ends_when_nobody_refers_to_its_masks():
    masks = Masks(lambda: BYTES, 1)
    held = masks.open("regex", "a")
    ready(masks, held)
    process = masks._workers[-2]._helper._process
    del masks
    gc.collect()
    wait_until(lambda: process.poll() is not None)


def test_a_quick_grammar_leaves_those_that_are_learnt_and_a_slow_one_stays_apart(masks):
    quick, learns, slow = masks._workers
    one, other = masks.open("regex", "a*", "x"), masks.open("regex", "b*", "x")
    assert one.owner is other.owner is learns
    ready(masks, one, other)
    other.burden = masking._QUICK_SECONDS
    for held in (one, other):
        masks.advance(held, held.grammar[1][:1].encode())
    assert (one.owner, other.owner) == (quick, slow)
    ready(masks, one, other)
    assert allowed(one) == [ord("a"), 256]
    assert allowed(other) == [ord("b"), 256]
    again = [masks.open("regex", text, "x") for text in ("a*", "b*")]
    assert [held.owner for held in again] == [quick, slow]
    assert masks.open("regex", "a*", "y").owner is learns  # usage by another tenant does not count
    masks.advance(other, b"b")
    assert other.owner is slow  # once slow, always slow


def test_a_sequence_that_has_moved_is_not_asked_about_where_it_still_queues(masks):
    """A sequence that changed its worker is skipped in the old queue, to which a later token had added it again."""
    quick, learns, _ = masks._workers
    held = masks.open("regex", "ab", "x")
    ready(masks, held)
    masks.advance(held, b"a")
    assert held.owner is quick
    assert learns._asked([held], [])[0] == []
    assert held.generation == -1
    held.hear(learns, Answer("late", [], []), 9)
    assert not held.ready
    ready(masks, held)
    assert held.error is None
    assert allowed(held) == [ord("b")]


def test_scopes_take_turns_where_grammars_are_learnt(masks):
    worker = masks._workers[-2]
    worker._ask = [Held(number, ("regex", "a", scope)) for number, scope in enumerate("xxxxyz")]
    assert [worker._next()[0].grammar[2] for _ in range(6)] == ["x", "y", "z", "x", "x", "x"]
    assert worker._next() == []
    quick = masks._workers[0]
    quick._ask = [Held(number, ("regex", "a", scope)) for number, scope in enumerate("xxy")]
    assert len(quick._next()) == 3


def failing(times: int) -> Any:
    """Return a `Helper.start` that first fails that many times for lack of descriptors."""
    left, start = [times], masking.Helper.start

    def tried(helper: masking.Helper) -> bool:
        if left[0]:
            left[0] -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return start(helper)

    return tried


def test_a_helper_that_cannot_start_is_tried_again(masks, monkeypatch):
    monkeypatch.setattr(masking, "_PAUSES", (0.0, 0.0))
    monkeypatch.setattr(masking.Helper, "start", failing(2))
    held = masks.open("regex", "a")
    ready(masks, held)
    assert held.error is None
    assert allowed(held) == [ord("a")]


def test_requests_fail_while_no_helper_can_start_and_the_next_are_served(masks, monkeypatch):
    monkeypatch.setattr(masking, "_PAUSES", (0.0,))
    monkeypatch.setattr(masking.Helper, "start", failing(2))
    one, other = masks.open("regex", "a"), masks.open("regex", "b")
    masks.send()
    masks.wait([one], PATIENCE)
    assert one.error == UNAVAILABLE
    ready(masks, other)
    assert allowed(other) == [ord("b")]


def test_requests_fail_while_no_thread_can_start_and_the_next_are_served(masks, monkeypatch):
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    held = masks.open("regex", "a")
    ready(masks, held)
    assert held.error == UNAVAILABLE
    monkeypatch.setattr(threading.Thread, "start", start)
    held = masks.open("regex", "a")
    ready(masks, held)
    assert allowed(held) == [ord("a")]
