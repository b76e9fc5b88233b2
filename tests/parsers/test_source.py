"""Tests of readers over chunked text: markers, and text held back for them."""

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.parsers.source import Markers, Source, Wait

MARKERS = ("<ab>", "<a", "aab", "b>a")


def run[T](parts: list[str], read: Wait[T], source: Source) -> T:
    """Return the result of a reader for these chunks."""
    for part in [None, *parts]:
        if part is None:
            source.end() if not parts else None
        else:
            source.add(part)
        try:
            next(read)
        except StopIteration as stop:
            return stop.value
    source.end()
    with pytest.raises(StopIteration) as stop:
        next(read)
    return stop.value.value


@given(st.lists(st.text("<ab>", max_size=4), max_size=8), st.none() | st.integers(0, 9))
def test_until_finds_the_first_marker_however_the_text_is_split(parts: list[str], most: int | None) -> None:
    text, markers = "".join(parts), Markers("<ab>", "aab", "b>a")
    match = re.search("<ab>|aab|b>a", text)
    before = text[: match.start()] if match else text
    wanted = (before, match[0] if match else None)
    if most is not None and len(before) > most:
        wanted = (before[:most], None)
    got: list[str] = []
    source = Source()
    marker = run(parts, source.until(markers, got.append, most), source)
    assert ("".join(got), marker) == wanted


def test_no_marker_begins_another() -> None:
    for wrong in (MARKERS, ("",)):
        with pytest.raises(ValueError, match="begins another"):
            Markers(*wrong)


@pytest.mark.parametrize(
    ("text", "begun"), [("x<", 1), ("x<a", 2), ("<ab", 3), ("xb>", 2), ("xaa", 2), ("x", 0), ("", 0)]
)
def test_exactly_what_may_begin_a_marker_is_held_back(text: str, begun: int) -> None:
    assert Markers("<ab>", "aab", "b>a").begun(text, 0) == begun


@given(st.lists(st.text(" \nab", max_size=3), max_size=6))
def test_a_copy_is_what_has_been_read(parts: list[str]) -> None:
    def read() -> Wait[tuple[bool, str]]:
        source.copy("<")
        yield from source.skip_space()
        found = yield from source.starts("ab")
        return found, source.copied()

    source, text = Source(), "".join(parts)
    stripped = text.lstrip()
    space = text[: len(text) - len(stripped)]
    assert run(parts, read(), source) == (
        stripped.startswith("ab"),
        f"<{space}{'ab' if stripped.startswith('ab') else ''}",
    )


@pytest.mark.parametrize("parts", list(itertools.product(["", "a", "ab"], repeat=2)))
def test_peek_reads_nothing(parts: tuple[str, str]) -> None:
    def read() -> Wait[list[str]]:
        first = yield from source.peek(2)
        second = yield from source.peek(3)
        rest: list[str] = []
        yield from source.rest(rest.append)
        return [first, second, "".join(rest)]

    source, text = Source(), "".join(parts)
    assert run(list(parts), read(), source) == [text[:2], text[:3], text]
