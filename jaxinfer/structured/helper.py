"""A process that holds matchers: `python -m jaxinfer.structured.helper`, started by `masks.Masks` and by servers.

Grammars come with requests, and some take seconds and gigabytes to compile, or for one mask. Here they may: the memory,
and the processor's time for each frame, are bounded, and whoever started it kills it when it takes too long.

The first frame is JSON, the ``seconds`` of the processor that each matcher or check of a frame may take, how many
tokens to look ``ahead`` where one text alone can follow and, behind a line, a `Vocabulary` (nothing: grammars are only
checked). A question of `ask` is answered by a line of JSON, an `Answer` for each matcher, and behind it the masks that
are not in it; one of `check` by `GOOD`, or by `BAD` and why.

Texts of grammars stand behind the JSON as they are: to quote a long one would hold the interpreter of whoever asks for
some hundredths of a second.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxinfer.helper_process import BAD, GOOD, allow_cpu, begin, read_frame, write_frame
from jaxinfer.structured.grammar import GrammarError, compiled
from jaxinfer.structured.matcher import Matcher, Matchers, Vocabulary, is_empty

MODULE = "jaxinfer.structured.helper"
STOPPED = "stopped"
_MAX_MEMORY_BYTES = 4 << 30
_FEW = 64
"""Bytes of a mask whose tokens are told as such: a text that must follow has few, and a mask may have kilobytes."""


class Answer(NamedTuple):
    """What a matcher says.

    Attributes:
        state: None: it goes on; ``stopped``; or why it cannot.
        tokens: that must follow, as models would say it.
        masks: the next one and those behind each of the tokens: their ids, or None for one that is behind the line.
    """

    state: str | None
    tokens: list[int]
    masks: list[list[int] | None]


def setup(seconds: float, vocabulary: Vocabulary | None = None, ahead: int = 0) -> bytes:
    """The first frame."""
    head = json.dumps({"seconds": seconds, "ahead": ahead}).encode()
    return head + b"\n" + (b"" if vocabulary is None else vocabulary.packed())


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
    first = json.loads(head)
    seconds = first.get("seconds", 1.0)
    matching = Matching(Matchers(Vocabulary.unpacked(rest)), seconds, first.get("ahead", 0)) if rest else None
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
    """The matchers of a helper, by number.

    Args:
        seconds: of the processor, for each of a question.
        ahead: tokens to look ahead.
    """

    def __init__(self, matchers: Matchers, seconds: float, ahead: int = 0) -> None:
        self._matchers, self._seconds, self._ahead = matchers, seconds, ahead
        self._known: dict[int, Matcher] = {}

    def answer(self, asked: list[Any], end: list[int], texts: bytes) -> bytes:
        """Answer a question of `ask`."""
        for number in end:
            self._known.pop(number, None)
        answers, whole, at = list[Answer](), list[bytes](), 0
        for number, grammar, tokens in asked:
            allow_cpu(self._seconds)
            if grammar is not None:
                kind, size, scope = grammar
                grammar, at = (kind, texts[at : at + size].decode(), scope), at + size
            answer, masks = self._tried(number, grammar, tokens)
            answers.append(answer)
            whole += masks
        return json.dumps(answers).encode() + b"\n" + b"".join(whole)

    def _tried(self, *item: Any) -> tuple[Answer, list[bytes]]:
        try:
            return self._next(*item)
        except GrammarError as error:
            return _failed(str(error) or "the grammar failed"), []

    def _next(self, number: int, grammar: tuple[str, str, str] | None, tokens: list[int]) -> tuple[Answer, list[bytes]]:
        """The answer of a matcher, and the masks that are not in it."""
        if grammar is not None:
            self._known[number] = self._matchers.new(*grammar)
        matcher = self._known[number]
        if tokens:
            matcher.consume(tokens)
        mask = matcher.mask()
        if matcher.stopped:
            return _failed(STOPPED), []
        if is_empty(mask):
            return _failed("the model has no token that the grammar allows here"), []
        tokens, masks = matcher.ahead(self._ahead) if self._ahead else ([], [])
        told = [_few(each) for each in (mask, *masks)]
        return Answer(None, tokens, told), _left(told, (mask, *masks))


def _failed(state: str) -> Answer:
    return Answer(state, [], [])


def _few(mask: bytes) -> list[int] | None:
    """The ids of a mask, if they are few."""
    if len(mask) - mask.count(0) > _FEW:
        return None
    places = np.flatnonzero(np.frombuffer(mask, np.uint8)).tolist()
    return [8 * place + bit for place in places for bit in range(8) if mask[place] >> bit & 1]


def _left(told: Iterable[list[int] | None], masks: Iterable[bytes]) -> list[bytes]:
    return [mask for ids, mask in zip(told, masks, strict=True) if ids is None]


if __name__ == "__main__":
    main()
