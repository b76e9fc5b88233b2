"""The delimiter that comes next, of several: the first, of those at one place the longest."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jaxinfer.parsers.response_template.program import Program
from jaxinfer.parsers.response_template.search import Search
from jaxinfer.parsers.response_template.template import Field

REACH = 1024
"""Characters that a delimiter may have: so much of an answer waits, and is looked at again."""
_WINDOW = 256


@dataclasses.dataclass(frozen=True)
class Found:
    """A delimiter. ``kept``: the texts of its named parts."""

    field: Field
    program: Program
    start: int
    end: int
    text: str
    kept: Mapping[str, str]


class Scanner:
    """Looks for delimiters in text that comes in parts. Places are counted from the first character on.

    Args:
        watched: fields, and whether their beginnings are looked for, or their ends.
    """

    def __init__(self, watched: Sequence[tuple[Field, bool]]) -> None:
        self._text, self._base, self._at = "", 0, 0
        self._ended = False
        self._searches: list[tuple[Field, Program, Search]] = []
        self.watch(watched, 0)

    def watch(self, watched: Sequence[tuple[Field, bool]], at: int) -> None:
        """Look for other delimiters, from a place on: what is in front of it has been read."""
        programs = [(field, field.open if opens else field.close) for field, opens in watched]
        self._searches = [
            (field, program, Search(program, at, REACH)) for field, program in programs if program is not None
        ]
        self._text, self._base, self._at = self._text[at - self._base :], at, at

    def add(self, text: str) -> None:
        self._text += text

    def end(self) -> None:
        """There will be no more text."""
        self._ended = True

    def find(self) -> Found | None:
        """The next delimiter; None: it is not known yet, or there is none."""
        end = self._base + len(self._text)
        while (found := self._decided(end)) is None and self._at < end:
            self._at = min(end, self._at + _WINDOW)
            for _, _, search in self._searches:
                search.run(self._text, self._base, self._at)
        return found

    def take(self) -> tuple[int, str]:
        """What cannot be part of a delimiter any more, with its place; it is read now."""
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
    """Where what a search has found, or may find, begins."""
    places = [place for place in (search.pending, search.match.start if search.match else None) if place is not None]
    return min(places, default=None)
