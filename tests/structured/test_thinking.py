"""Tests of reasoning: its start and end, tokens passed to the grammar, and thinking token budgets."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.structured.thinking import Thought
from jaxinfer.types import Thinking

BEGIN, END = 40, 41


def bits(mask: np.ndarray) -> list[int]:
    return [i for i in range(32 * mask.size) if mask[i // 32] >> (i % 32) & 1]


def mask_of(*tokens: int) -> np.ndarray:
    mask = np.zeros(2, np.int64)
    for token in tokens:
        mask[token // 32] |= 1 << token % 32
    return mask.astype(np.uint32).view(np.int32)


@pytest.mark.parametrize(
    ("is_open", "tokens", "answer"),
    [
        (True, [1, 2, END, 3, END], [3, END]),
        (True, [1, BEGIN, 2], []),
        (False, [BEGIN, 1, END, 3], [3]),
        (False, [3, BEGIN, 1, END], [3, BEGIN, 1, END]),
        (False, [END, 1], [END, 1]),
    ],
)
@given(cuts=st.lists(st.integers(0, 6)))
def test_what_is_behind_a_thought_is_heard_however_it_comes(is_open, tokens, answer, cuts):
    thought, found = Thought(Thinking(BEGIN, END, is_open), None), []
    edges = [0, *sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    for first, last in itertools.pairwise(edges):
        found += thought.say(tokens[first:last])
    assert found == answer
    assert thought.over != thought.open
    assert thought.over == (END in tokens or (tokens[0] != BEGIN and not is_open))


def test_a_first_token_may_begin_a_thought_or_be_the_grammars():
    for token, over in ((BEGIN, False), (7, True)):
        thought = Thought(Thinking(BEGIN, END, False), None)
        given = mask_of(7, 8)
        assert bits(thought.beginning(given)) == [7, 8, BEGIN]
        assert bits(given) == [7, 8], "the grammar's own mask stays"
        thought.say([token])
        assert thought.over == over


def test_what_the_grammar_allows_itself_begins_no_thought():
    thought = Thought(Thinking(BEGIN, END, False), None)
    assert bits(thought.beginning(mask_of(7, BEGIN))) == [7, BEGIN]
    assert thought.say([BEGIN, 7]) == [BEGIN, 7]


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("budget", [0, 1, 5])
def test_a_budget_leaves_so_many_tokens_and_then_the_end_alone(is_open, budget):
    thought, tags = Thought(Thinking(BEGIN, END, is_open), budget), 0 if is_open else 1
    assert thought.room == budget + tags
    thought.say([BEGIN] * tags)
    for said in range(budget):
        assert thought.room == budget - said
        thought.say([1])
    assert thought.open
    assert thought.room == 0
    assert bits(thought.closing()) == [END]


def test_no_budget_leaves_any_number():
    thought = Thought(Thinking(BEGIN, END, True), None)
    thought.say([1] * 1000)
    assert thought.room is None
