"""Incremental detokenizer: exact text for each new token, in the context of the prompt, at constant cost."""

from __future__ import annotations

from collections.abc import Sequence

from jaxinfer.text.pieces import TextStream
from jaxinfer.text.tokenizer import Tokenizer

_LONGEST_CHARACTER = 4


class Detokenizer:
    """Incremental text of a continuation.

    Let ``D(ids)`` be ``tokenizer.decode(ids, skip_special_tokens)``. The concatenation of all that :meth:`push` and
    :meth:`finish` return is ``D(prompt + output)`` with the prefix ``D(prompt)`` removed. If the prompt ends within a
    character that the output completes, so that ``D(prompt)`` is not a prefix of ``D(prompt + output)``, the character
    belongs to the output. The result does not depend on how the output is split into pushes, and no part of a character
    (U+FFFD) is returned before it is certain that no later token completes it.

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
        """Return the text that tokens ``ids`` add; empty while a character is incomplete. Unknown ids add no text."""
        return self._after_prompt(self._stream.feed(self._bytes(ids)))

    def finish(self) -> str:
        """Return the text left at the end of the output: U+FFFD for a character that was never completed."""
        return self._after_prompt(self._stream.feed(b"", final=True))

    def _context(self, prompt_ids: Sequence[int]) -> tuple[Sequence[int], bool]:
        """Return the end of the prompt that affects the output, and whether that is all of the prompt.

        A character has at most four bytes, so the last few determine an incomplete one; stripping at the start of a
        text has no effect after that many characters.
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
        """Remove the part of ``D(prompt)`` that shows a character left incomplete by the prompt."""
        if self._owed and text:
            text, self._owed = text.removeprefix(self._owed), ""
        return text
