"""Incremental detokenising: exact text for each new token, in the context of the prompt, at constant cost."""

from __future__ import annotations

from collections.abc import Sequence

from jaxinfer.text.pieces import TextStream
from jaxinfer.text.tokenizer import Tokenizer

_LONGEST_CHARACTER = 4


class Detokenizer:
    """The text of a continuation, piece by piece.

    Let ``D(ids)`` be ``tokenizer.decode(ids, skip_special_tokens)``. All that :meth:`push` and :meth:`finish` return
    is, put together, ``D(prompt + output)`` without ``D(prompt)`` in front. Where the prompt ends within a character
    and the output completes it, so that ``D(prompt)`` is no beginning of ``D(prompt + output)``, the character belongs
    to the output. However the output is split into pushes, the whole is the same, and no part of a character (U+FFFD)
    is returned before it is certain that no later token completes it.

    At most three bytes are kept back; a push costs O(new tokens), construction the last few tokens of the prompt.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        tail, self._at_start = self._context(prompt_ids)
        self._stream = TextStream(tokenizer.rule, self._at_start)
        self._stream.feed(self._bytes(tail))
        self._owed = self._stream.pending()

    def push(self, ids: Sequence[int]) -> str:
        """The text that the token ``ids`` add; empty while a character is incomplete. Unknown ids add nothing."""
        return self._after_prompt(self._stream.feed(self._bytes(ids)))

    def finish(self) -> str:
        """The text left at the end of the output: U+FFFD for a character that was never completed."""
        return self._after_prompt(self._stream.feed(b"", final=True))

    def _context(self, prompt_ids: Sequence[int]) -> tuple[Sequence[int], bool]:
        """The end of the prompt that decides what follows, and whether that is all of the prompt.

        A character has at most four bytes, so the last few decide what is incomplete; what is stripped from the start
        of a text no longer matters once that many characters have passed.
        """
        wanted = _LONGEST_CHARACTER * (1 + len(self._tokenizer.rule.strip))
        for start in range(len(prompt_ids) - 1, -1, -1):
            visible = self._tokenizer.visible(prompt_ids[start : start + 1], self._skip)
            wanted -= len(self._tokenizer.to_bytes(visible))
            if wanted <= 0:
                return prompt_ids[start:], False
        return prompt_ids, True

    def _bytes(self, ids: Sequence[int]) -> bytes:
        visible = self._tokenizer.visible(ids, self._skip)
        data = self._tokenizer.to_bytes(visible, self._at_start)
        self._at_start = self._at_start and not visible
        return data

    def _after_prompt(self, text: str) -> str:
        """Removes what ``D(prompt)`` already shows of a character that the prompt left incomplete."""
        if self._owed and text:
            text, self._owed = text.removeprefix(self._owed), ""
        return text
