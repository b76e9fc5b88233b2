"""Incremental pattern search that examines each character once, for any pattern."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from jaxinfer.parsers.response_template.program import BEGIN, CHAR, MATCH, SAVE, SPLIT, Program


class Thread(NamedTuple):
    """A thread of the pattern automaton. ``place``: instruction; ``start``: position in the text; ``kept``: slots."""

    place: int
    start: int
    kept: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Match:
    """A match from ``start`` to ``end``; ``kept``: named groups with their positions."""

    start: int
    end: int
    kept: dict[str, tuple[int, int]]


class Search:
    """Search for the first match of a pattern, with the preferences of Python's ``re.search``.

    Args:
        at: position in the text at which the search begins.
        reach: maximum characters of a match; None: unbounded.

    Attributes:
        position: current position.
        match: the best so far; final if nothing is pending.
    """

    def __init__(self, program: Program, at: int = 0, reach: int | None = None) -> None:
        self.position = at
        self.match: Match | None = None
        self._program, self._reach = program, reach
        self._none = (-1,) * (2 * len(program.names))
        self._threads: list[Thread] = []
        self._seen = set[int]()

    @property
    def pending(self) -> int | None:
        """First position of a match that is still possible, or may still change."""
        return self._threads[0].start if self._threads else None

    @property
    def is_final(self) -> bool:
        return self.match is not None and not self._threads

    def run(self, text: str, base: int, upto: int) -> None:
        """Search ``text``, which begins at position ``base``, up to position ``upto``."""
        while self.position < upto and not self.is_final:
            self._skip(text, base, upto)
            if self.position < upto:
                self._step(text[self.position - base])

    def end(self) -> None:
        """Mark the end of the text."""
        self._threads = []

    def _skip(self, text: str, base: int, upto: int) -> None:
        """Skip characters that change only group positions; the last few are stepped through to set those."""
        if self.position == 0:
            return
        places = tuple(thread.place for thread in self._threads)
        quiet = self._program.quiet_until(places, seeding=self.match is None)
        if quiet is None:
            return
        found = quiet.search(text, self.position - base, upto - base)
        end = found.start() + base if found else upto
        if self._threads and self._reach is not None:
            end = min(end, self._threads[0].start + self._reach)
        said = len(self._threads) + 1 if self._threads else 0
        self.position = max(self.position, end - said)

    def _step(self, character: str) -> None:
        if self.match is None:
            self._follow(Thread(0, self.position, self._none))
        threads, self._threads, self._seen = self._threads, [], set()
        self.position += 1
        for thread in threads:
            one = self._program.code[thread.place].one
            within = self._reach is None or self.position - thread.start <= self._reach
            fits = within and one is not None and one.match(character) is not None
            if fits and self._follow(thread._replace(place=thread.place + 1)):
                break  # the remaining threads are less preferred

    def _follow(self, thread: Thread) -> bool:
        """Advance a thread up to instructions that consume a character. True: the pattern matches."""
        stack = [thread]
        while stack:
            thread = stack.pop()
            if thread.place in self._seen:
                continue
            self._seen.add(thread.place)
            if self._program.code[thread.place].kind == MATCH:
                self.match = self._matched(thread)
                return True
            stack += self._next(thread)
        return False

    def _next(self, thread: Thread) -> Sequence[Thread]:
        """Return the successors of a thread, the preferred one last; none if it waits for a character."""
        place, start, kept = thread
        step = self._program.code[place]
        if step.kind == CHAR:
            self._threads.append(thread)
            return ()
        if step.kind == SPLIT:
            return Thread(step.second, start, kept), Thread(step.first, start, kept)
        if step.kind == SAVE:
            kept = (*kept[: step.first], self.position, *kept[step.first + 1 :])
        return () if step.kind == BEGIN and self.position else (Thread(place + 1, start, kept),)

    def _matched(self, thread: Thread) -> Match:
        kept = thread.kept
        pairs = {name: (kept[2 * i], kept[2 * i + 1]) for i, name in enumerate(self._program.names)}
        return Match(thread.start, self.position, {name: pair for name, pair in pairs.items() if -1 not in pair})


class Finder:
    """Incremental search for all non-overlapping matches of a pattern that never matches the empty string."""

    def __init__(self, program: Program) -> None:
        self._program, self._search = program, Search(program)
        self._parts: list[str] = []
        self._length = 0
        self._found: list[Match] = []

    def add(self, text: str) -> None:
        base, self._length = self._length, self._length + len(text)
        self._parts.append(text)
        self._search.run(text, base, self._length)
        while self._search.is_final:
            self._again(text, base)

    def end(self) -> tuple[str, list[Match]]:
        """Return the whole text, and its matches."""
        text = "".join(self._parts)
        self._search.end()
        while self._search.match is not None:
            self._again(text, 0)
            self._search.end()
        return text, self._found

    def _again(self, text: str, base: int) -> None:
        """Record the match, and search after it: in ``text``, or from an earlier position."""
        match = self._search.match
        assert match is not None
        self._found.append(match)
        self._search = Search(self._program, match.end)
        if match.end < base:
            text, base = "".join(self._parts), 0
        self._search.run(text, base, self._length)


def find_all(program: Program, text: str) -> list[Match]:
    """Return all non-overlapping matches of a pattern that never matches the empty string."""
    finder = Finder(program)
    finder.add(text)
    return finder.end()[1]
