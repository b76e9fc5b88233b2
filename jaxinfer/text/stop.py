"""Stop strings in streamed text: found however the text is split, and never partly emitted."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from jaxinfer.sampling_params import RequestError


class Emitted(NamedTuple):
    """Text that may be emitted, and the stop string that ended it (None: none has been found)."""

    text: str
    stop: str | None = None


class StopMatcher:
    """Streaming matcher that ends a text at the first stop string.

    The stop string that is completed first wins, character by character; of several completed at the same character the
    longest. The result therefore does not depend on how the text is split into pushes. (In engines that check the list
    of stop strings after each token, list order decides when one token completes several.) The text ends before the
    stop string or, with ``include_stop_str_in_output``, after it.

    The text held back is the longest suffix that could begin a stop string. A push costs O(characters) for each stop
    string (the automaton of Knuth, Morris and Pratt, 1977), not O(length of the output).

    Raises:
        RequestError: a stop string is empty.
    """

    def __init__(self, stops: Sequence[str], include_stop_str_in_output: bool = False) -> None:
        if not all(stops):
            raise RequestError("stop", "must not contain an empty string")
        # Longest first, so that the first one found at a character wins.
        self._automata = [_Automaton(stop) for stop in sorted(set(stops), key=len, reverse=True)]
        self._include = include_stop_str_in_output
        self._pending = ""
        self._stop: str | None = None

    def push(self, text: str) -> Emitted:
        """Take more text. After a stop string has been found, no more text is emitted."""
        if self._stop is not None:
            return Emitted("", self._stop)
        if not self._automata:
            return Emitted(text)
        for position, character in enumerate(text):
            self._stop = next((automaton.stop for automaton in self._automata if automaton.take(character)), None)
            if self._stop is not None:
                return self._ended(self._pending + text[: position + 1], self._stop)
        return Emitted(self._release(self._pending + text))

    def skip(self, text: str) -> str:
        """Take text in which no stop string ends the output; a later `push` may complete one that begins in it."""
        if not self._automata:
            return text
        for character in text:
            for automaton in self._automata:
                automaton.take(character)
        return self._release(self._pending + text)

    def finish(self) -> str:
        """Return the text held back, at the end of an output in which no stop string was completed."""
        rest, self._pending = self._pending, ""
        for automaton in self._automata:
            automaton.matched = 0
        return rest

    def _ended(self, text: str, stop: str) -> Emitted:
        self._pending = ""
        return Emitted(text if self._include else text.removesuffix(stop), stop)

    def _release(self, text: str) -> str:
        pending = max(automaton.matched for automaton in self._automata)
        end = len(text) - pending
        self._pending = text[end:]
        return text[:end]


@dataclasses.dataclass
class _Automaton:
    """KMP automaton of one stop string: its first ``matched`` characters are a suffix of the text so far."""

    stop: str
    matched: int = 0

    def __post_init__(self) -> None:
        self._borders = _borders(self.stop)

    def take(self, character: str) -> bool:
        """Return whether the stop string ends here; ``matched`` is then the overlap with a next occurrence."""
        while self.matched and self.stop[self.matched] != character:
            self.matched = self._borders[self.matched - 1]
        self.matched += self.stop[self.matched] == character
        if self.matched < len(self.stop):
            return False
        self.matched = self._borders[-1]
        return True


def _borders(word: str) -> list[int]:
    """Return, for each prefix of ``word``, the length of its longest proper prefix that is also its suffix."""
    borders = [0]
    for character in word[1:]:
        length = borders[-1]
        while length and word[length] != character:
            length = borders[length - 1]
        borders.append(length + (word[length] == character))
    return borders
