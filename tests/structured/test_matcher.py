"""Tests of matchers: masks against the library's own check of each token, rollback, and caching."""

import msgspec
import numpy as np
import pytest

from jaxinfer.structured import matcher as matching
from jaxinfer.structured.helper import setup
from jaxinfer.structured.matcher import LEAD, GreedyTokenizer, Matchers, Vocabulary
from jaxinfer.structured.schemas import GrammarError
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


@pytest.mark.parametrize("vocabulary", [WORDS, Vocabulary([b"\n", b"\xff\x00", b""], frozenset(), [2], 3)])
def test_a_vocabulary_survives_the_way_to_a_helper(vocabulary):
    found = msgspec.msgpack.decode(setup(2.0, vocabulary, 5), type=tuple[float, Vocabulary, int])
    same = vocabulary._replace(tokens=list(vocabulary.tokens), ends=list(vocabulary.ends))
    assert found == (2.0, same, 5)


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


def bits(mask: bytes) -> list[int]:
    return [i for i in range(8 * len(mask)) if mask[i // 8] >> (i % 8) & 1]


def test_texts_are_spelt_in_the_longest_tokens():
    spell = GreedyTokenizer(WORDS).spell
    assert spell(b"ababa", 9) == [8, 0]
    assert spell(b"ababa", 1) == [8]
    assert spell(b"abba", 9) == [1, 3]
    assert spell(b"ab?ab", 9) == [1]
    assert spell(b"", 9) == []


def test_what_must_follow_comes_with_the_masks_behind_it():
    matcher = Matchers(BYTES).new("json", '{"enum": ["abc", "abd"]}')
    tokens, masks = matcher.ahead(9)
    assert bytes(tokens) == b'"ab'
    assert [bits(mask) for mask in masks] == [[ord("a")], [ord("b")], [ord("c"), ord("d")]]
    assert bits(matcher.mask()) == [ord('"')], "it is where it was"
    assert matcher.ahead(2) == (tokens[:2], masks[:2])
    matcher.consume(tokens)
    assert bits(matcher.mask()) == bits(masks[-1])
    assert matcher.ahead(9) == ([], [])


def test_behind_what_ends_an_output_there_is_no_mask():
    matcher = Matchers(BYTES).new("choice", '["yes"]')
    tokens, masks = matcher.ahead(9)
    assert bytes(tokens) == b"ye"
    assert [bits(mask) for mask in masks] == [[ord("e")], [ord("s")]]
    matcher.consume(b"yes")
    matcher.mask()
    assert matcher.stopped


def test_space_may_part_an_answer_from_the_thought_before_it():
    matcher = Matchers(BYTES).new("regex", "[ab]c")
    matcher.consume([LEAD])
    spaces = [ord(each) for each in "\t\n\v\f\r "]
    assert bits(matcher.mask()) == [*spaces, ord("a"), ord("b")]
    assert matcher.ahead(9) == ([], [])
    matcher.consume(b"\n")
    assert bits(matcher.mask()) == [ord("a"), ord("b")], "once"
    matcher.consume(b"a")
    assert matcher.ahead(9) == ([], [])
    other = Matchers(BYTES).new("regex", "[ab]c")
    other.consume([LEAD, ord("b")])
    assert bits(other.mask()) == [ord("c")]


def test_space_of_the_grammars_own_is_not_passed_over():
    matcher = Matchers(BYTES).new("regex", " a")
    matcher.consume([LEAD])
    assert bits(matcher.mask()) == [ord(" ")]
    matcher.consume(b" ")
    assert bits(matcher.mask()) == [ord("a")]


def test_a_model_without_an_end_token_ends_where_nothing_can_follow():
    matcher = Matchers(WORDS._replace(ends=(), special=frozenset(), size=4)).new("regex", "(ab){2}")
    assert bits(matcher.mask()) == [0, 1]
    matcher.consume([1, 1])
    matcher.mask()
    assert matcher.stopped
