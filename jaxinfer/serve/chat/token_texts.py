"""What each token of an output says, and which tokens said what a parser has found."""

from __future__ import annotations

import codecs
import dataclasses
from collections.abc import Callable, Iterator

from jaxinfer.text.output import OutputDelta
from jaxinfer.types import PositionLogprobs


@dataclasses.dataclass(slots=True)
class Said:
    """A token, and what it has said: nothing, if it is within a character."""

    text: str
    logprobs: PositionLogprobs | None


class TokenTexts:
    """Parts a text by its tokens, and keeps those of which no event has told yet.

    A parser may hold text back, and gives it later: the events that come are of the last tokens.

    Args:
        spell: the bytes of a token.
        hidden: tokens that are no part of the text.
    """

    def __init__(self, spell: Callable[[int], bytes], hidden: frozenset[int]) -> None:
        self._spell, self._hidden = spell, hidden
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._ahead = 0  # characters of tokens whose text is held back, for a stop string
        self._said: list[Said] = []

    def texts(self, delta: OutputDelta) -> Iterator[str]:
        """What each token says; a rest that is no token's own comes with the last one."""
        at, last = 0, len(delta.token_ids) - 1
        for rank, token in enumerate(delta.token_ids):
            characters = self._spelt(token)
            end = len(delta.text) if rank == last else min(max(at, at + self._ahead + characters), len(delta.text))
            self._ahead += characters - (end - at)
            if token not in self._hidden:
                self._said.append(Said(delta.text[at:end], delta.logprobs[rank] if delta.logprobs else None))
            yield delta.text[at:end]
            at = end
        if not delta.token_ids and delta.text:
            yield delta.text

    def taken(self, text: str) -> list[Said]:
        """The last tokens, which said ``text``. Those in front of them have said a marker, or a space that is left
        out: they are no part's."""
        found: list[Said] = []
        while self._said and (text or not self._said[-1].text):
            last = self._said[-1].text
            if found and not (text.endswith(last) or last.endswith(text)):  # a parser has put something in front
                break
            found.append(self._said.pop())
            text = text[: len(text) - len(last)] if len(last) < len(text) else ""
        self._said.clear()
        return found[::-1]

    def _spelt(self, token: int) -> int:
        return 0 if token in self._hidden else len(self._characters.decode(self._spell(token)))
