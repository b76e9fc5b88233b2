"""A process that holds matchers: `python -m jaxinfer.structured.helper`, started by `masks.Masks` and by servers.

Grammars come with requests, and some take seconds and gigabytes to compile, or for one mask. Here they may: the memory,
and the processor's time for each frame, are bounded, and whoever started it kills it when it takes too long.

The first frame is JSON, the ``seconds`` of the processor that a frame may take and, behind a line, a `Vocabulary`
(nothing: grammars are only checked). A question is a list of `Question` and of numbers of matchers that end, as JSON;
its answer, behind a line of JSON that says for each whether it goes on (null), has ``stopped`` or has failed (a
sentence), the masks of those that go on. A question of `check` has `GOOD` for an answer, or `BAD`, the place that it is
about and, behind a line, a sentence.
"""

from __future__ import annotations

import json
import sys
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
    return json.dumps({"check": [kind, text]}).encode()


def main() -> None:
    """Answer questions until the input ends. The argument is the process that starts this one."""
    begin(_MAX_MEMORY_BYTES)
    reader, writer = sys.stdin.buffer, sys.stdout.buffer
    head, _, rest = (read_frame(reader) or b"{}").partition(b"\n")
    seconds = json.loads(head).get("seconds", 1.0)
    matching = Matching(Matchers(Vocabulary.unpacked(rest))) if rest else None
    write_frame(writer, GOOD)
    while (frame := read_frame(reader)) is not None:
        allow_cpu(seconds)
        question = json.loads(frame)
        if matching is None:
            write_frame(writer, _checked(*question["check"]))
        else:
            write_frame(writer, matching.answer(question["ask"], question["end"]))


def _checked(kind: str, text: str) -> bytes:
    try:
        compiled(kind, text)
    except GrammarError as error:
        return BAD + f"{error.place}\n{error}".encode(errors="replace")
    return GOOD


class Matching:
    """The matchers of a helper, by number."""

    def __init__(self, matchers: Matchers) -> None:
        self._matchers = matchers
        self._known: dict[int, Matcher] = {}

    def answer(self, ask: list[Any], end: list[int]) -> bytes:
        """Answer a question: ``ask`` holds, of each matcher, its number, its grammar (kind, text and scope; null: it
        is known) and the tokens by which it goes on."""
        for number in end:
            self._known.pop(number, None)
        states, masks = list[str | None](), list[bytes]()
        for number, grammar, tokens in ask:
            try:
                state, mask = self._next(number, grammar, tokens)
            except GrammarError as error:
                state, mask = str(error) or "the grammar failed", b""
            states.append(state)
            masks.append(mask)
        return json.dumps(states).encode() + b"\n" + b"".join(masks)

    def _next(self, number: int, grammar: list[str] | None, tokens: list[int]) -> tuple[str | None, bytes]:
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
