"""Stop strings in a stream of text: found wherever the text is split, and never partly shown."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from jaxinfer.sampling_params import RequestError


class Emitted(NamedTuple):
    """Text that may be shown, and the stop string that ended it (None: none has been found)."""

    text: str
    stop: str | None = None


class StopMatcher:
    """Ends a text at the first stop string.

    The stop string that is complete first wins, character by character; of several that are complete at the same
    character the longest. The answer is therefore the same however the text is split into pushes. (Engines that look
    through the list of stop strings after each token choose by that list where one token completes several.) The text
    ends before the stop string or, with ``include_stop_str_in_output``, behind it.

    Held back is exactly the longest end of the text that could begin a stop string. A push costs O(characters) for
    each stop string (the automaton of Knuth, Morris and Pratt, 1977), not O(length of the output).

    Raises:
        RequestError: a stop string is empty.
    """

    def __init__(self, stops: Sequence[str], include_stop_str_in_output: bool = False) -> None:
        if not all(stops):
            raise RequestError("stop", "must not contain an empty string")
        # Longest first, so that the first one found at a character is the one that wins.
        self._automata = [_Automaton(stop) for stop in sorted(set(stops), key=len, reverse=True)]
        self._include = include_stop_str_in_output
        self._pending = ""
        self._stop: str | None = None

    def push(self, text: str) -> Emitted:
        """Take more text. After a stop string has been found, nothing more comes out."""
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
        """Take text in which no stop string ends the output; one that begins in it may be completed by a `push`."""
        if not self._automata:
            return text
        for character in text:
            for automaton in self._automata:
                automaton.take(character)
        return self._release(self._pending + text)

    def finish(self) -> str:
        """The text held back, at the end of an output in which no stop string was completed."""
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
    """Follows one stop string: ``matched`` of its characters are the end of the text so far."""

    stop: str
    matched: int = 0

    def __post_init__(self) -> None:
        self._borders = _borders(self.stop)

    def take(self, character: str) -> bool:
        """Whether the stop string ends with this character; then ``matched`` is how another one could have begun."""
        while self.matched and self.stop[self.matched] != character:
            self.matched = self._borders[self.matched - 1]
        self.matched += self.stop[self.matched] == character
        if self.matched < len(self.stop):
            return False
        self.matched = self._borders[-1]
        return True


def _borders(word: str) -> list[int]:
    """The length, for each beginning of ``word``, of its longest proper prefix that is also its suffix."""
    borders = [0]
    for character in word[1:]:
        length = borders[-1]
        while length and word[length] != character:
            length = borders[length - 1]
        borders.append(length + (word[length] == character))
    return borders
