"""The n-gram drafter proposes the same tokens as a naive search."""

import itertools
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.spec import Drafter, NgramDrafter
from tests.spec.sequences import sequence


def naive(history: list[int], min_n: int, max_n: int, limit: int) -> list[int]:
    """Search the longest suffix first, latest occurrence first; copy tokens one by one."""
    for n in range(max_n, min_n - 1, -1):
        for start in range(len(history) - n - 1, -1, -1):
            if len(history) > n and history[start : start + n] == history[-n:]:
                known = list(history)
                for source in range(start + n, start + n + limit):
                    known.append(known[source])
                return known[len(history) :]
    return []


@pytest.mark.parametrize("lengths", [(1, 1), (2, 3), (2, 4)])
def test_same_as_a_naive_search_for_every_short_history(lengths: tuple[int, int]) -> None:
    drafter = NgramDrafter(*lengths)
    for length in range(8):
        for history in itertools.product(range(3), repeat=length):
            drafts = drafter.propose(sequence(history), 3).tokens
            assert drafts.tolist() == naive(list(history), *lengths, 3), history


@given(
    history=st.lists(st.integers(0, 2), max_size=24) | st.lists(st.integers(0, 9), max_size=40),
    lengths=st.tuples(st.integers(1, 5), st.integers(1, 5)).map(sorted),
    limit=st.integers(0, 6),
    recent=st.sampled_from([2, 6, 256]),
)
def test_same_as_a_naive_search(history: list[int], lengths: list[int], limit: int, recent: int) -> None:
    drafter = NgramDrafter(min_n=lengths[0], max_n=lengths[1])
    with mock.patch("jaxinfer.spec.ngram._RECENT", recent):
        drafts = drafter.propose(sequence(history), limit).tokens
    assert drafts.dtype == np.int32
    assert drafts.tolist() == naive(history, *lengths, limit)


@pytest.mark.parametrize("recent", [7, 256])
@pytest.mark.parametrize(
    ("history", "limit", "expected"),
    [
        ([1, 2, 3, 9, 1, 2], 4, [3, 9, 1, 2]),
        ([1, 2, 5, 1, 2, 6, 1, 2], 1, [6]),  # the latest occurrence
        ([7, 1, 2, 5, 8, 1, 2, 6, 7, 1, 2], 1, [5]),  # a longer match precedes a later one
        ([4, 4, 4], 5, [4, 4, 4, 4, 4]),  # a loop continues up to the limit
        ([1, 2, 3, 4], 4, []),
        ([1, 9, 1], 4, []),  # one token is shorter than min_n
        ([1, 2], 4, []),
        ([1], 4, []),
        ([], 4, []),
        ([1, 2, 3, 1, 2], 0, []),
    ],
)
def test_what_is_proposed(history: list[int], limit: int, expected: list[int], recent: int) -> None:
    drafter: Drafter = NgramDrafter()
    with mock.patch("jaxinfer.spec.ngram._RECENT", recent):
        assert drafter.propose(sequence(history), limit).tokens.tolist() == expected


def test_the_history_is_left_alone() -> None:
    given = sequence([1, 2, 3, 1, 2])
    drafts = NgramDrafter().propose(given, 2).tokens
    drafts[:] = 0
    assert given.tokens.tolist() == [1, 2, 3, 1, 2]


@pytest.mark.parametrize("lengths", [(0, 2), (3, 2), (-1, -1)])
def test_impossible_lengths_are_refused(lengths: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=f"min_n = {lengths[0]} and max_n = {lengths[1]}"):
        NgramDrafter(*lengths)
