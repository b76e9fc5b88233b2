"""Tests of searches against Python's own, over random patterns and texts, and for all partitions."""

import itertools
import re

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jaxinfer.parsers.pattern import PatternError, can_be_empty, read_pattern
from jaxinfer.parsers.response_template.program import compiled
from jaxinfer.parsers.response_template.search import Finder, Match, Search, find_all
from tests.parsers.test_registry import partitions

ATOMS = [
    "a",
    "b",
    "<",
    r"\|",
    ".",
    "[ab]",
    "[^<]",
    r"[^\s<]",
    r"\s",
    r"\w",
    r"\S",
    "x",
    "{",
    "ab",
    "<a",
    r"\x61",
    "[]a]",
]
QUANTIFIERS = ["*", "+", "?", "*?", "+?", "??", "{1,2}", "{2}", "{,2}", "{1,}?"]
PATTERNS = st.recursive(
    st.sampled_from(ATOMS),
    lambda inner: (
        st.tuples(inner, inner).map("".join)
        | st.tuples(inner, inner).map(lambda two: f"(?:{two[0]}|{two[1]})")
        | st.tuples(inner, st.sampled_from(QUANTIFIERS)).map(lambda two: f"(?:{two[0]}){two[1]}")
        | inner.map(lambda one: f"(?P<n{len(one)}>{one})")
        | inner.map("^{}".format)
    ),
    max_leaves=8,
)
TEXTS = st.text("ab<|x {", max_size=24)


def oracle(pattern: str, text: str) -> Match | None:
    match = re.compile(pattern, re.DOTALL).search(text)
    if match is None:
        return None
    return Match(
        *match.span(), {name: match.span(name) for name, value in match.groupdict().items() if value is not None}
    )


@settings(max_examples=300)
@given(st.data(), PATTERNS, TEXTS)
def test_a_search_finds_what_python_finds(data: st.DataObject, pattern: str, text: str) -> None:
    try:
        node = read_pattern(pattern)
    except PatternError:
        assume(False)
    assume(text and not can_be_empty(node))
    search = Search(compiled(node))
    for edge in [*data.draw(partitions(len(text))), len(text)]:
        search.run(text, 0, edge)
    search.end()
    assert search.match == oracle(pattern, text)


@pytest.mark.parametrize("pattern", [r"<(?P<key>\w+)>(?P<value>.*?)</", "a+", "a|ab|b", r"\s*x"])
@given(st.data(), st.lists(st.sampled_from(["<a>", "</a>", "a", "ab", " ", "x"]), max_size=12).map("".join))
def test_all_places_are_those_of_python(pattern: str, data: st.DataObject, text: str) -> None:
    program = compiled(pattern)
    wanted = [match.span() for match in re.finditer(pattern, text, re.DOTALL)]
    assert [(match.start, match.end) for match in find_all(program, text)] == wanted
    finder, edges = Finder(program), [0, *data.draw(partitions(len(text))), len(text)]
    for first, last in itertools.pairwise(edges):
        finder.add(text[first:last])
    assert finder.end() == (text, find_all(program, text))


def test_a_match_is_known_with_its_last_character() -> None:
    search = Search(compiled(r"<(?:a|ab)>"))
    search.run("x<ab>", 0, 5)
    assert search.is_final
    search = Search(compiled("a|ab+"))
    search.run("a", 0, 1)
    assert search.is_final  # the first alternative has precedence over the longer one


def test_what_may_still_fit_is_pending() -> None:
    search = Search(compiled(r"\s*<b>"))
    search.run("a  <", 0, 4)
    assert (search.pending, search.match) == (1, None)
    search.run("a  <c", 0, 5)
    assert search.pending is None


def test_a_search_reaches_so_far() -> None:
    near, far = (Search(compiled("a.*?b"), reach=5) for _ in range(2))
    near.run("axxxb", 0, 5)
    far.run("axxxxb", 0, 6)
    assert (near.match, far.match, far.pending) == (Match(0, 5, {}), None, None)


@pytest.mark.parametrize("pattern", ["(?:a+)+b", "(?:a|a)+b", ".?" * 60 + "Q", r"(?:\w+\s?)+;"])
def test_no_text_costs_more_than_its_length(pattern: str) -> None:
    """Search is linear on patterns that make Python's own backtrack exponentially."""
    program = compiled(pattern)
    search, text = Search(program), "a" * 1500
    for edge in range(1, len(text)):
        search.run(text, 0, edge)
        assert len(search._threads) <= len(program.code)
    assert search.match is None


def test_a_place_that_is_known_late_is_looked_behind_again() -> None:
    finder = Finder(compiled("a(?:x+y)?|x"))
    for part in ("a", "xx", "x", "-a"):
        finder.add(part)
    text, found = finder.end()
    assert [text[match.start : match.end] for match in found] == ["a", "x", "x", "x", "a"]
