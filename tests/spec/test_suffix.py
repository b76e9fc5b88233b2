"""The suffix drafter against a search in plain lists."""

import collections

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.spec import SuffixDrafter
from jaxinfer.spec.suffix import PairChains, best_guess
from tests.spec.sequences import sequence

TEXT = st.lists(st.integers(0, 2), max_size=40) | st.lists(st.integers(0, 6), max_size=60)


def naive(text: list[int], context: list[int], limit: int, below: int) -> tuple[list[int], float]:
    """Search all occurrences of the last two tokens at every length, and count votes one by one."""
    places = [end for end in reversed(range(1, below)) if text[end - 1 : end + 1] == context[-2:]][:64]
    best: tuple[list[int], float] = ([], 0.0)
    if len(context) < 2 or not places:
        return best
    lengths = {
        end: next((n for n in range(len(context)) if n > end or text[end - n] != context[-1 - n]), len(context))
        for end in places
    }
    longest = max(lengths.values())
    for length in (longest, max(2, longest // 2), 2):
        voters = [end for end in places if lengths[end] >= length]
        count, known, draft, score = len(voters), list(text), list[int](), 0.0
        while len(draft) < min(limit, length):
            voters = [end + 1 for end in voters]
            votes = collections.Counter(known[end] for end in voters)
            token, most = votes.most_common(1)[0]
            if token < 0 or most / count < 0.1:
                break
            voters = [end for end in voters if known[end] == token]
            known.append(token)
            draft.append(token)
            score += most / count
        best = max(best, (draft, score), key=lambda guess: guess[1])
    return best


@given(text=TEXT, limit=st.integers(0, 8), cuts=st.lists(st.integers(1, 9), min_size=1, max_size=9))
def test_the_own_text_as_a_naive_search_finds_it(text: list[int], limit: int, cuts: list[int]) -> None:
    drafter, known = SuffixDrafter(1000), 0
    for cut in [*cuts, len(text)]:
        known = min(known + cut, len(text))
        drafts = drafter.propose(sequence(text[:known]), limit).tokens
        assert drafts.dtype == np.int32
        assert drafts.tolist() == naive(text[:known], text[:known][-24:], limit, known - 1)[0]


@given(texts=st.lists(TEXT.filter(lambda text: len(text) > 1), max_size=8), context=TEXT, forgotten=st.integers(0, 3))
def test_a_corpus_of_which_the_oldest_is_forgotten(texts: list[list[int]], context: list[int], forgotten: int) -> None:
    chains = PairChains()
    for text in texts:
        chains.extend(np.array([*text, -1], np.int32))
    for text in texts[:forgotten]:
        chains.forget(len(text) + 1)
    left = [token for text in texts[forgotten:] for token in (*text, -1)]
    assert chains.tokens.view().tolist() == left
    guess = best_guess(chains, np.array(context, np.int32), 6)
    wanted, score = naive(left, context, 6, len(left))
    assert guess.score == pytest.approx(score)
    assert guess.tokens == wanted
    assert len(chains._latest) <= 2 * len(left) + 1, "pairs that are gone are forgotten"


def test_what_was_answered_before_is_proposed_within_the_namespace_alone() -> None:
    drafter = SuffixDrafter(1000)
    drafter.end(sequence([1, 2, 3, 10, 11, 12, 13, 14], number=1, namespace=b"a", prompt=3))
    assert drafter.propose(sequence([9, 10, 11], 2, b"a"), 8).tokens.tolist() == [12, 13], "as many as match"
    assert drafter.propose(sequence([9, 10, 11], 3, b"b"), 8).tokens.tolist() == []
    assert drafter.propose(sequence([9, 1, 2], 4, b"a"), 8).tokens.tolist() == [], "prompts are not kept"
    drafter.reset()
    assert drafter.propose(sequence([9, 10, 11], 5, b"a"), 8).tokens.tolist() == []
    drafter.end(sequence(range(999), 6))
    assert drafter._kept == 1000


def test_the_most_frequent_continuation_wins_and_among_equals_the_latest() -> None:
    drafter = SuffixDrafter(1000)
    for number, last in enumerate([7, 8, 8, 7, 9]):
        drafter.end(sequence([1, 2, last, 5], number, prompt=0))
    assert drafter.propose(sequence([1, 2], 9), 1).tokens.tolist() == [7]
    drafter.end(sequence([1, 2, 8, 5], 10, prompt=0))
    assert drafter.propose(sequence([1, 2], 11), 1).tokens.tolist() == [8]


def test_a_loop_goes_on_beyond_what_is_known() -> None:
    text = [1, 2, 3, 1, 2, 3, 1, 2]
    assert SuffixDrafter(10).propose(sequence(text), 5).tokens.tolist() == [3, 1, 2, 3, 1]


def test_no_more_is_kept_than_asked() -> None:
    drafter = SuffixDrafter(50)
    for number in range(200):
        space = bytes([number % 3])
        drafter.propose(sequence([number, 1, 2, 3], number, space), 4)
        drafter.end(sequence([number, 1, 2, 3, *range(number % 7)], number, space, prompt=1))
        kept = sum(len(corpus.chains.tokens) for corpus in drafter._ended.values())
        assert kept == drafter._kept <= 50
    assert not drafter._own, "what has ended is gone"
    drafter.end(sequence(range(60), 999))
    assert drafter._kept <= 50, "an answer larger than all that is kept is not"
