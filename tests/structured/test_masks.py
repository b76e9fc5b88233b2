"""Masks from helper processes: those that hang or die are replaced, and nobody but the culprit notices."""

import gc
import pathlib
import time
import types

import pytest

from jaxinfer.structured import masks as masking
from jaxinfer.structured.helper import Answer
from jaxinfer.structured.masks import Held, Masks
from tests.serve.processes import wait_until
from tests.structured import stuck_helper
from tests.structured.test_grammar import BYTES

PATIENCE = 120.0

has_shares = pytest.mark.skipif(
    not pathlib.Path("/proc/self/autogroup").exists(), reason="sessions have no shares of the processor here"
)


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
    """A thought may end while its grammar compiles."""
    held = masks.open("regex", "abc")
    ready(masks, held)
    held.told, held.ready = len(held.said) - 1, False
    held.hear(Answer(None, [], [[7]]), iter(()), BYTES.words)
    assert not held.ready
    assert allowed(held) == []
    held.told = len(held.said)
    held.hear(Answer(None, [], [[7]]), iter(()), BYTES.words)
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
    masks._workers[0]._helper._process.kill()
    masks._workers[0]._helper._process.wait()
    masks.advance(held, b"a")
    ready(masks, held)
    assert held.error is None
    assert allowed(held) == [ord("b")]


def test_an_answer_that_comes_while_one_looks_at_the_clock_ends_no_helper(masks, monkeypatch):
    held = masks.open("regex", "ab")
    ready(masks, held)
    worker = masks._workers[0]

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


def nice(masks: Masks) -> int:
    """How far the helper's session stands behind others."""
    helper = masks._workers[0]._helper
    assert helper is not None
    assert helper._process is not None
    return int(pathlib.Path(f"/proc/{helper._process.pid}/autogroup").read_text(encoding="ascii").split()[-1])


@has_shares
def test_who_learns_a_grammar_stands_back_and_comes_forward_for_masks(masks):
    held = masks.open("regex", "a*")
    ready(masks, held)
    assert nice(masks) == 19
    masks.advance(held, b"a")
    ready(masks, held)
    assert nice(masks) == 0


@has_shares
def test_who_takes_long_for_a_mask_stands_back(masks, monkeypatch):
    held = masks.open("regex", "a*")
    ready(masks, held)
    masks.advance(held, b"a")
    monkeypatch.setattr(masking, "_LONG_SECONDS", 0.0)
    ready(masks, held)  # its answer may have come before anybody looked
    (worker,) = masks._workers
    worker._since = time.monotonic() - 1
    masks.send()
    assert nice(masks) == 19


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
    process = masks._workers[0]._helper._process
    del masks
    gc.collect()
    wait_until(lambda: process.poll() is not None)
