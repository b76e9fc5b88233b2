"""Mapping between the tokens of an output and its parsed text."""

from __future__ import annotations

import codecs
import dataclasses
from collections.abc import Callable, Iterator

from jaxinfer.text.output import OutputDelta
from jaxinfer.types import PositionLogprobs


@dataclasses.dataclass(slots=True)
class TokenText:
    """A token and its text, which is empty within a multi-byte character."""

    text: str
    logprobs: PositionLogprobs | None


class TokenTexts:
    """A splitter of output text by tokens, which keeps the tokens that no parser event has covered yet.

    A parser may hold text back and emit it later: its events belong to the last tokens.

    Args:
        spell: returns the bytes of a token.
        hidden: ids of tokens that the text excludes.
    """

    def __init__(self, spell: Callable[[int], bytes], hidden: frozenset[int]) -> None:
        self._spell, self._hidden = spell, hidden
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._ahead = 0  # characters of tokens whose text is held back, for a stop string
        self._said: list[TokenText] = []

    def texts(self, delta: OutputDelta) -> Iterator[str]:
        """Yield the text of each token of a delta; text without a token goes to the last one."""
        at, last = 0, len(delta.token_ids) - 1
        for rank, token in enumerate(delta.token_ids):
            characters = self._spelt(token)
            end = len(delta.text) if rank == last else min(max(at, at + self._ahead + characters), len(delta.text))
            self._ahead += characters - (end - at)
            if token not in self._hidden:
                self._said.append(TokenText(delta.text[at:end], delta.logprobs[rank] if delta.logprobs else None))
            yield delta.text[at:end]
            at = end
        if not delta.token_ids and delta.text:
            yield delta.text

    def taken(self, text: str) -> list[TokenText]:
        """Return the last tokens, with the text ``text``. Earlier tokens, of a marker or of whitespace that was left
        out, are dropped."""
        found: list[TokenText] = []
        while self._said and (text or not self._said[-1].text):
            last = self._said[-1].text
            if found and not (text.endswith(last) or last.endswith(text)):  # the parser has inserted text before it
                break
            found.append(self._said.pop())
            text = text[: len(text) - len(last)] if len(last) < len(text) else ""
        self._said.clear()
        return found[::-1]

    def _spelt(self, token: int) -> int:
        return 0 if token in self._hidden else len(self._characters.decode(self._spell(token)))
