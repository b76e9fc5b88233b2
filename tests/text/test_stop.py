"""Tests of stop strings: the same result for every split, no stop string in the text, and minimal hold-back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.sampling_params import RequestError
from jaxinfer.text import Emitted, StopMatcher

ALPHABET = "ab한"
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=4) | st.text("ab", min_size=5, max_size=9), max_size=4)
PIECES = st.lists(st.text(ALPHABET, max_size=5) | st.text("ab", max_size=5), max_size=8)


def reference(text: str, stops: list[str], include: bool) -> Emitted:
    """Return the shortest prefix of ``text`` that ends with a stop string, and the longest such string."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return Emitted(text[:end] if include else text[: end - len(stop)], stop)
    return Emitted(text)


def may_begin_a_stop(text: str, stops: list[str]) -> int:
    """Return the length of the longest suffix of ``text`` that is a prefix of a stop string."""
    return max((n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0)


@given(PIECES, STOPS, st.booleans())
def test_any_split_gives_the_answer_of_the_whole(pieces: list[str], stops: list[str], include: bool) -> None:
    matcher = StopMatcher(stops, include)
    emitted = [matcher.push(piece) for piece in pieces]
    text = "".join(part.text for part in emitted) + matcher.finish()
    stop = next((part.stop for part in emitted if part.stop is not None), None)
    assert (text, stop) == reference("".join(pieces), stops, include)


@given(PIECES, STOPS)
def test_exactly_what_could_begin_a_stop_is_held_back(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    seen = shown = ""
    for piece in pieces:
        seen += piece
        part = matcher.push(piece)
        shown += part.text
        if part.stop is not None:
            return
        assert shown == seen[: len(seen) - may_begin_a_stop(seen, stops)]


@pytest.mark.parametrize(
    ("stops", "pieces", "shown", "stop"),
    [
        (["\n\n"], ["one\n", "two\n", "\nthree"], "one\ntwo", "\n\n"),
        (["stop"], ["a s", "to", "a sto", "p b"], "a stoa ", "stop"),
        (["aab"], ["aaaaa", "b"], "aaa", "aab"),
        (["aabaaab"], ["aabaa", "aabaaab"], "aabaa", "aabaaab"),
        (["aabaaac"], ["aabaaab", "aaac"], "aaba", "aabaaac"),
        (["abcd", "bc"], ["abcd"], "a", "bc"),  # completed first
        (["b", "ab"], ["xab"], "x", "ab"),  # both completed at once: the longest
        (["한국"], ["안녕 한", "국어"], "안녕 ", "한국"),
    ],
)
def test_cases(stops: list[str], pieces: list[str], shown: str, stop: str) -> None:
    matcher = StopMatcher(stops)
    emitted = [matcher.push(piece) for piece in pieces]
    assert "".join(part.text for part in emitted) == shown
    assert emitted[-1].stop == stop


def test_after_a_stop_nothing_comes_out() -> None:
    matcher = StopMatcher(["x"], include_stop_str_in_output=True)
    assert matcher.push("axb") == Emitted("ax", "x")
    assert matcher.push("more") == Emitted("", "x")
    assert matcher.finish() == ""


def test_finish_gives_back_what_was_held_and_starts_afresh() -> None:
    matcher = StopMatcher(["stop"])
    assert matcher.push("a st") == Emitted("a ")
    assert matcher.finish() == "st"
    assert matcher.finish() == ""
    assert matcher.push("op") == Emitted("op")


def test_without_stop_strings_all_passes() -> None:
    assert StopMatcher([]).push("anything") == Emitted("anything")


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(RequestError, match="stop must not contain an empty string"):
        StopMatcher(["a", ""])
