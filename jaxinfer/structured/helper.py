"""A process that holds matchers: `python -m jaxinfer.structured.helper`, started by `masks.Masks` and by servers.

Grammars come with requests, and some take seconds and gigabytes to compile, or for one mask. Here they may: the memory,
and the processor's time for each frame, are bounded, and whoever started it kills it when it takes too long.

The first frame is JSON, the ``seconds`` of the processor that each matcher or check of a frame may take and, behind a
line, a `Vocabulary` (nothing: grammars are only checked). A question of `ask` has for an answer JSON that says for each
matcher whether it goes on (null), has ``stopped`` or has failed (a sentence), and behind a line the masks of those that
go on. A question of `check` has `GOOD` or `BAD` and a sentence for an answer.

Texts of grammars stand behind the JSON as they are: to quote a long one would hold the interpreter of whoever asks for
some hundredths of a second.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from jaxinfer.helper_process import BAD, GOOD, allow_cpu, begin, read_frame, write_frame
from jaxinfer.structured.grammar import GrammarError, compiled
from jaxinfer.structured.matcher import Matcher, Matchers, Vocabulary

MODULE = "jaxinfer.structured.helper"
STOPPED = "stopped"
_MAX_MEMORY_BYTES = 4 << 30


def setup(seconds: float, vocabulary: Vocabulary | None = None) -> bytes:
    """The first frame."""
    return json.dumps({"seconds": seconds}).encode() + b"\n" + (b"" if vocabulary is None else vocabulary.packed())


def check(kind: str, text: str) -> bytes:
    """A question whether a grammar can be held."""
    return b"\n".join([json.dumps({"check": kind}).encode(), text.encode()])


Item = tuple[int, tuple[str, str, str] | None, Sequence[int]]
"""Of a matcher: its number, its grammar (kind, text and scope; None: it is known), the tokens by which it goes on."""


def ask(items: Sequence[Item], end: Sequence[int]) -> bytes:
    """A question for masks. ``end``: numbers of matchers that are to be forgotten."""
    texts = [b"" if grammar is None else grammar[1].encode() for _, grammar, _ in items]
    heads = [
        (number, None if grammar is None else (grammar[0], len(text), grammar[2]), list(tokens))
        for (number, grammar, tokens), text in zip(items, texts, strict=True)
    ]
    return b"\n".join([json.dumps({"ask": heads, "end": list(end)}).encode(), b"".join(texts)])


def main() -> None:
    """Answer questions until the input ends. The argument is the process that starts this one."""
    begin(_MAX_MEMORY_BYTES)
    reader, writer = sys.stdin.buffer, sys.stdout.buffer
    head, _, rest = (read_frame(reader) or b"{}").partition(b"\n")
    seconds = json.loads(head).get("seconds", 1.0)
    matching = Matching(Matchers(Vocabulary.unpacked(rest)), seconds) if rest else None
    write_frame(writer, GOOD)
    while (frame := read_frame(reader)) is not None:
        allow_cpu(seconds)
        head, _, texts = frame.partition(b"\n")
        question = json.loads(head)
        if matching is None:
            write_frame(writer, _checked(question["check"], texts.decode()))
        else:
            write_frame(writer, matching.answer(question["ask"], question["end"], texts))


def _checked(kind: str, text: str) -> bytes:
    try:
        compiled(kind, text)
    except GrammarError as error:
        return BAD + str(error).encode(errors="replace")
    return GOOD


class Matching:
    """The matchers of a helper, by number. ``seconds``: of the processor, for each of a question."""

    def __init__(self, matchers: Matchers, seconds: float) -> None:
        self._matchers, self._seconds = matchers, seconds
        self._known: dict[int, Matcher] = {}

    def answer(self, asked: list[Any], end: list[int], texts: bytes) -> bytes:
        """Answer a question of `ask`."""
        for number in end:
            self._known.pop(number, None)
        states, masks, at = list[str | None](), list[bytes](), 0
        for number, grammar, tokens in asked:
            allow_cpu(self._seconds)
            if grammar is not None:
                kind, size, scope = grammar
                grammar, at = (kind, texts[at : at + size].decode(), scope), at + size
            state, mask = self._tried(number, grammar, tokens)
            states.append(state)
            masks.append(mask)
        return json.dumps(states).encode() + b"\n" + b"".join(masks)

    def _tried(self, *item: Any) -> tuple[str | None, bytes]:
        try:
            return self._next(*item)
        except GrammarError as error:
            return str(error) or "the grammar failed", b""

    def _next(self, number: int, grammar: tuple[str, str, str] | None, tokens: list[int]) -> tuple[str | None, bytes]:
        if grammar is not None:
            self._known[number] = self._matchers.new(*grammar)
        matcher = self._known[number]
        if tokens:
            matcher.consume(tokens)
        mask = matcher.mask()
        if matcher.stopped:
            return STOPPED, b""
        return (None, mask) if any(mask) else ("the model has no token that the grammar allows here", b"")


if __name__ == "__main__":
    main()
