"""Matchers: masks against the library's own word for each token, going back, what is remembered."""

import numpy as np
import pytest

from jaxinfer.structured import matcher as matching
from jaxinfer.structured.grammar import GrammarError
from jaxinfer.structured.matcher import Matchers, Vocabulary
from tests.structured.test_grammar import BYTES

WORDS = Vocabulary([b"a", b"ab", b"b", b"ba", b"<s>", b"</s>", b"", b"a", b"abab"], frozenset({4, 5}), (5,), 70)


def test_a_mask_has_a_bit_for_each_token_that_the_grammar_takes():
    matchers = Matchers(WORDS)
    mask = np.frombuffer(matchers.new("regex", "(ab)+").mask(), np.int32)
    assert mask.shape == (WORDS.words,) == (3,)
    assert [i for i in range(70) if mask[i // 32] >> (i % 32) & 1] == [0, 1, 7, 8]


def test_the_end_is_allowed_exactly_where_the_grammar_accepts():
    matcher = Matchers(WORDS).new("regex", "(ab)+")
    seen = []
    for token in (0, 2, 1):
        ends = bool(matcher.mask()[0] >> 5 & 1)
        assert ends == matcher.accepting
        seen.append(ends)
        matcher.consume([token])
    assert seen == [False, False, True]
    assert not matcher.stopped


def test_a_finished_grammar_stops():
    matcher = Matchers(WORDS).new("regex", "ab")
    matcher.consume([1])
    matcher.mask()
    assert matcher.stopped


def test_going_back_undoes_tokens():
    matcher = Matchers(WORDS).new("regex", "(ab)+")
    before = matcher.mask()
    matcher.consume([0, 2])
    after = matcher.mask()
    matcher.consume([8])
    matcher.rollback(1)
    assert matcher.mask() == after != before
    matcher.rollback(2)
    assert matcher.mask() == before


def test_a_token_that_is_not_allowed_is_an_error_for_good():
    matcher = Matchers(WORDS).new("regex", "(ab)+")
    for token in (2, 0):
        with pytest.raises(GrammarError):
            matcher.consume([token])


def test_matchers_of_one_grammar_do_not_share_their_place():
    matchers = Matchers(WORDS)
    one, other = (matchers.new("regex", "(ab)+") for _ in range(2))
    one.consume([0])
    assert one.mask() != other.mask()


def test_a_vocabulary_survives_the_way_to_a_helper():
    assert Vocabulary.unpacked(WORDS.packed()) == Vocabulary(
        list(WORDS.tokens), WORDS.special, list(WORDS.ends), WORDS.size
    )
    raw = Vocabulary([b"\n", b"\xff\x00", b""], frozenset(), [2], 3)
    assert Vocabulary.unpacked(raw.packed()) == raw


def test_no_more_is_remembered_than_there_is_room_for(monkeypatch):
    monkeypatch.setattr(matching, "_MAX_CACHED_CHARACTERS", 100)
    matchers = Matchers(BYTES)
    for number in range(40):
        matchers.new("regex", f"a{{{number + 1}}}bcdefghij")
    assert matchers._size <= 100
    assert matchers._size == sum(len(text) for _, _, text in matchers._cached)


def test_what_one_tenant_has_compiled_tells_another_nothing():
    matchers = Matchers(BYTES)
    matchers.new("regex", "a", "one")
    matchers.new("regex", "a", "other")
    assert len(matchers._cached) == 2
