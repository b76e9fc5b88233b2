"""Incremental search for the next of several delimiters: the first one, and the longest of those at one position."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jaxinfer.parsers.response_template.program import Program
from jaxinfer.parsers.response_template.search import Search
from jaxinfer.parsers.response_template.template import Field

REACH = 1024
"""Maximum characters of a delimiter: this much of an answer is buffered, and examined again."""
_WINDOW = 256


@dataclasses.dataclass(frozen=True)
class Found:
    """A delimiter that was found. ``kept``: the texts of its named groups."""

    field: Field
    program: Program
    start: int
    end: int
    text: str
    kept: Mapping[str, str]


class Scanner:
    """Incremental scanner for delimiters. Positions are counted from the first character.

    Args:
        watched: fields, each with whether its begin delimiter is watched, or its end delimiter.
    """

    def __init__(self, watched: Sequence[tuple[Field, bool]]) -> None:
        self._text, self._base, self._at = "", 0, 0
        self._ended = False
        self._searches: list[tuple[Field, Program, Search]] = []
        self.watch(watched, 0)

    def watch(self, watched: Sequence[tuple[Field, bool]], at: int) -> None:
        """Watch other delimiters, from a position on; text before it has been read."""
        programs = [(field, field.open if opens else field.close) for field, opens in watched]
        self._searches = [
            (field, program, Search(program, at, REACH)) for field, program in programs if program is not None
        ]
        self._text, self._base, self._at = self._text[at - self._base :], at, at

    def add(self, text: str) -> None:
        self._text += text

    def end(self) -> None:
        """Mark the end of the text."""
        self._ended = True

    def find(self) -> Found | None:
        """Return the next delimiter; None: it is not known yet, or there is none."""
        end = self._base + len(self._text)
        while (found := self._decided(end)) is None and self._at < end:
            self._at = min(end, self._at + _WINDOW)
            for _, _, search in self._searches:
                search.run(self._text, self._base, self._at)
        return found

    def take(self) -> tuple[int, str]:
        """Consume and return the text that can no longer be part of a delimiter, with its position."""
        first = min([self._at, *(place for _, _, search in self._searches if (place := _first(search)) is not None)])
        text, base = self._text[: first - self._base], self._base
        self._text, self._base = self._text[first - base :], first
        return base, text

    def _decided(self, end: int) -> Found | None:
        if self._ended and self._at == end:
            self._end_searches()
        finals = [
            (match.start, -match.end, field.open is not program, field.name, index)
            for index, (field, program, search) in enumerate(self._searches)
            if search.is_final and (match := search.match) is not None
        ]
        if not finals:
            return None
        start, *_, index = min(finals)
        open_ = (search.pending for _, _, search in self._searches)
        return None if any(place is not None and place <= start for place in open_) else self._found(index)

    def _end_searches(self) -> None:
        for _, _, search in self._searches:
            search.end()

    def _found(self, index: int) -> Found:
        field, program, search = self._searches[index]
        match = search.match
        assert match is not None
        base, text = self._base, self._text
        kept = {name: text[begin - base : end - base] for name, (begin, end) in match.kept.items()}
        return Found(field, program, match.start, match.end, text[match.start - base : match.end - base], kept)


def _first(search: Search) -> int | None:
    """Return the first position of a match that a search has found, or may find."""
    places = [place for place in (search.pending, search.match.start if search.match else None) if place is not None]
    return min(places, default=None)
