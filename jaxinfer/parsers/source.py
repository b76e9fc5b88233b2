"""Incremental text source, read by coroutines that wait for more text.

A reader is a generator: ``yield`` means that it cannot decide without more text. Its decisions depend on the characters
alone, never on how they were split, so that streamed and whole text give identical results. Text that was read is
dropped: a character is examined again at most as often as a marker is long.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator

type Wait[T] = Generator[None, None, T]
type Sink = Callable[[str], None]

_SPACE = re.compile(r"[ \t\r\n]*")


class Markers:
    """Texts to search for, none of which is a prefix of another.

    Raises:
        ValueError: one is a prefix of another, or is empty.
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
        """Return the length of the longest suffix of ``text[at:]`` that may begin a marker."""
        most = min(self._longest - 1, len(text) - at)
        return next((size for size in range(most, 0, -1) if text[-size:] in self._beginnings), 0)


class Source:
    """Buffered text with a read position.

    Attributes:
        position: number of characters read.
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
        """Mark the end of the text."""
        self._ended, self.cut = True, cut

    # ---- unreading

    def copy(self, text: str = "") -> None:
        """Start recording the text that is read, after ``text``."""
        self._copied = [text]
        self._copy = self._copied.append

    def copied(self) -> str:
        """Stop recording and return the recorded text."""
        parts, self._copied, self._copy = self._copied, [], None
        return "".join(parts)

    def echo(self, sink: Sink) -> None:
        """Send the text that is read to a sink, until `copied`."""
        self._copied, self._copy = [], sink

    def unread(self, text: str) -> None:
        """Unread the marker that was read last."""
        if self._copied and self._copied[-1] == text:
            self._copied.pop()
        self._give_back(text)

    def _give_back(self, text: str) -> None:
        self._text, self._at = text + self._text[self._at :], 0
        self.position -= len(text)

    def look[T](self, reader: Wait[T]) -> Wait[T]:
        """Run a reader and unread its text."""
        return (yield from self._tried(reader, lambda found: False))

    def attempt[T](self, reader: Wait[T]) -> Wait[T]:
        """Run a reader and unread its text if the result is false."""
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
        """Read ``count`` characters, which must be buffered."""
        text = self._text[self._at : self._at + count]
        self._at += count
        self.position += len(text)
        if self._copy is not None:
            self._copy(text)
        return text

    def more(self) -> Wait[bool]:
        """Wait for text. False: the text has ended."""
        known = len(self._text) - self._at
        while len(self._text) - self._at == known and not self._ended:
            yield
        return len(self._text) - self._at > known

    def peek(self, count: int) -> Wait[str]:
        """Return the next characters, unread; fewer at the end."""
        while len(self._text) - self._at < count and (yield from self.more()):
            pass
        return self._text[self._at : self._at + count]

    def ahead(self, marker: str) -> Wait[bool]:
        """Return whether ``marker`` comes next."""
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
        """Skip characters of a class. ``run``: matches any number of them."""
        while True:
            match = run.match(self._text, self._at)
            self.take(match.end() - self._at if match else 0)
            if self._at < len(self._text) or not (yield from self.more()):
                return

    def skip_space(self) -> Wait[None]:
        yield from self.skip(_SPACE)

    def ended(self) -> Wait[bool]:
        """Return whether only whitespace is left."""
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
        """Read up to and including the first of the markers, and return it.

        Args:
            sink: receives the text before the marker as soon as it cannot be part of one.
            most: maximum characters before the marker.

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
        """Pass an incomplete marker at the end to the sink as text."""
        count = len(self._text) - self._at
        if count:
            sink(self.take(count if most is None else min(count, most)))

    def gather(self, markers: Markers, most: int) -> Wait[tuple[str, str | None]]:
        """Return the text before the first of the markers, and that marker; see `until`."""
        parts: list[str] = []
        marker = yield from self.until(markers, parts.append, most)
        return "".join(parts), marker

    def rest(self, sink: Sink) -> Wait[None]:
        """Read the rest of the text."""
        while True:
            if self._at < len(self._text):
                sink(self.take(len(self._text) - self._at))
            if not (yield from self.more()):
                return


def ignore(text: str) -> None:
    """Discard text."""
