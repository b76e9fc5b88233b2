"""Text that comes in parts, read by coroutines that wait for more.

A reader is a generator: ``yield`` means that it cannot decide without more text. What it decides follows from the
characters alone, never from how they were split, so that a stream and its whole give the same. What is read is let go
of: nothing is looked at more often than a marker is long.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator

type Wait[T] = Generator[None, None, T]
type Sink = Callable[[str], None]

_SPACE = re.compile(r"[ \t\r\n]*")


class Markers:
    """Texts to look for, none of which begins another.

    Raises:
        ValueError: one does, or is empty.
    """

    def __init__(self, *markers: str) -> None:
        for marker in markers:
            if not marker or any(other != marker and other.startswith(marker) for other in markers):
                raise ValueError(f"the marker {marker!r} begins another")
        self.texts = markers
        self.pattern = re.compile("|".join(map(re.escape, markers)))
        self._longest = max(map(len, markers))
        self._beginnings = {marker[:size] for marker in markers for size in range(1, len(marker))}

    def begun(self, text: str, at: int) -> int:
        """Length of the longest end of ``text[at:]`` that may be the beginning of a marker."""
        most = min(self._longest - 1, len(text) - at)
        return next((size for size in range(most, 0, -1) if text[-size:] in self._beginnings), 0)


class Source:
    """The text so far, from where it has been read to.

    Attributes:
        position: how many characters were read.
        cut: the text has ended before the model ended it.
    """

    def __init__(self) -> None:
        self._text, self._at, self._ended = "", 0, False
        self._copy: Sink | None = None
        self._copied: list[str] = []
        self.position, self.cut = 0, False

    def add(self, text: str) -> None:
        self._text, self._at = self._text[self._at :] + text, 0

    def end(self, *, cut: bool = False) -> None:
        """There will be no more."""
        self._ended, self.cut = True, cut

    # ---- what may have to be given back

    def copy(self, text: str = "") -> None:
        """Begin to copy what is read, behind ``text``."""
        self._copied = [text]
        self._copy = self._copied.append

    def copied(self) -> str:
        """The copy, which ends."""
        parts, self._copied, self._copy = self._copied, [], None
        return "".join(parts)

    def echo(self, sink: Sink) -> None:
        """Let a sink have what is read, until `copied`."""
        self._copied, self._copy = [], sink

    def unread(self, text: str) -> None:
        """Give back the marker that was read last."""
        if self._copied and self._copied[-1] == text:
            self._copied.pop()
        self._give_back(text)

    def _give_back(self, text: str) -> None:
        self._text, self._at = text + self._text[self._at :], 0
        self.position -= len(text)

    def look[T](self, reader: Wait[T]) -> Wait[T]:
        """The result of a reader, whose text stays unread."""
        return (yield from self._tried(reader, lambda found: False))

    def attempt[T](self, reader: Wait[T]) -> Wait[T]:
        """The result of a reader, whose text stays unread where that is false."""
        return (yield from self._tried(reader, bool))

    def _tried[T](self, reader: Wait[T], keep: Callable[[T], bool]) -> Wait[T]:
        outer = self._copy, self._copied
        self.copy()
        found = yield from reader
        text = self.copied()
        self._copy, self._copied = outer
        if not keep(found):
            self._give_back(text)
        elif self._copy is not None:
            self._copy(text)
        return found

    # ---- reading

    def take(self, count: int) -> str:
        """Read so many characters that are there."""
        text = self._text[self._at : self._at + count]
        self._at += count
        self.position += len(text)
        if self._copy is not None:
            self._copy(text)
        return text

    def more(self) -> Wait[bool]:
        """Wait for text. False: there is no more."""
        known = len(self._text) - self._at
        while len(self._text) - self._at == known and not self._ended:
            yield
        return len(self._text) - self._at > known

    def peek(self, count: int) -> Wait[str]:
        """The next characters, unread; fewer at the end."""
        while len(self._text) - self._at < count and (yield from self.more()):
            pass
        return self._text[self._at : self._at + count]

    def ahead(self, marker: str) -> Wait[bool]:
        """Whether ``marker`` comes next."""
        while True:
            have = self._text[self._at : self._at + len(marker)]
            if have == marker:
                return True
            if not marker.startswith(have) or not (yield from self.more()):
                return False

    def starts(self, marker: str) -> Wait[bool]:
        """Read ``marker``, if it comes next."""
        found = yield from self.ahead(marker)
        if found:
            self.take(len(marker))
        return found

    def skip(self, run: re.Pattern[str]) -> Wait[None]:
        """Read all characters of a class. ``run``: any number of them."""
        while True:
            match = run.match(self._text, self._at)
            self.take(match.end() - self._at if match else 0)
            if self._at < len(self._text) or not (yield from self.more()):
                return

    def skip_space(self) -> Wait[None]:
        yield from self.skip(_SPACE)

    def ended(self) -> Wait[bool]:
        """Whether nothing but space comes."""
        yield from self.skip_space()
        return not (yield from self.peek(1))

    def which(self, markers: Markers) -> Wait[str]:
        """Read the marker that comes next; "": none does."""
        for marker in markers.texts:
            if (yield from self.starts(marker)):
                return marker
        return ""

    def scan(self, character: re.Pattern[str], sink: Sink) -> Wait[str]:
        """Read up to a character of a class, which stays unread. Returns it; "": there is none."""
        while True:
            match = character.search(self._text, self._at)
            if (count := (match.start() if match else len(self._text)) - self._at) > 0:
                sink(self.take(count))
            if match:
                return match[0]
            if not (yield from self.more()):
                return ""

    def until(self, markers: Markers, sink: Sink, most: int | None = None) -> Wait[str | None]:
        """Read up to the first of the markers and that too. Returns it.

        Args:
            sink: gets what stands before it, as soon as it is certain to be no part of one.
            most: so many characters may stand before it.

        Returns:
            None: no marker. All of the text has been read, or ``most`` characters.
        """
        while True:
            match = markers.pattern.search(self._text, self._at)
            end = match.start() if match else len(self._text) - markers.begun(self._text, self._at)
            count = end - self._at
            if most is not None and count > most:
                sink(self.take(most))
                return None
            if count > 0:
                most = None if most is None else most - count
                sink(self.take(count))
            if match:
                return self.take(len(match[0]))
            if not (yield from self.more()):
                self._give_up(sink, most)
                return None

    def _give_up(self, sink: Sink, most: int | None) -> None:
        """At the end the beginning of a marker is none."""
        count = len(self._text) - self._at
        if count:
            sink(self.take(count if most is None else min(count, most)))

    def gather(self, markers: Markers, most: int) -> Wait[tuple[str, str | None]]:
        """What stands before the first of the markers, and that marker; see `until`."""
        parts: list[str] = []
        marker = yield from self.until(markers, parts.append, most)
        return "".join(parts), marker

    def rest(self, sink: Sink) -> Wait[None]:
        """Read all that comes."""
        while True:
            if self._at < len(self._text):
                sink(self.take(len(self._text) - self._at))
            if not (yield from self.more()):
                return


def ignore(text: str) -> None:
    """Sink for what nobody needs."""
