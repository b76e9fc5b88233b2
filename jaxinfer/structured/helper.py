"""A process that holds matchers: `python -m jaxinfer.structured.helper`, started by `masks.Masks` and by servers.

Grammars come with requests, and some take seconds and gigabytes to compile, or for one mask. Here they may: the memory,
and the processor's time for each frame, are bounded, and whoever started it kills it when it takes too long.

The first frame is JSON, the ``seconds`` of the processor that each matcher or check of a frame may take, how many
tokens to look ``ahead`` where one text alone can follow and, behind a line, a `Vocabulary` (nothing: grammars are only
checked). A question of `ask` is answered by a line of JSON, an `answers.Answer` for each matcher, and behind it the
masks that are not in it; one of `check` by `GOOD`, or by `BAD`, the place that it is about and, behind a line, a
sentence.

Texts of grammars stand behind the JSON as they are: to quote a long one would hold the interpreter of whoever asks for
some hundredths of a second.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import IO, TYPE_CHECKING

from jaxinfer.helper_process import (
    GOOD,
    allow_cpu,
    begin,
    in_threads,
    read_frame,
    stand_back,
    stands_back,
    write_frame,
)

if TYPE_CHECKING:  # a helper imports it in a thread that stands back
    from jaxinfer.structured.matcher import Vocabulary

MODULE = "jaxinfer.structured.helper"
_MAX_MEMORY_BYTES = 4 << 30


def setup(seconds: float, vocabulary: Vocabulary | None = None, ahead: int = 0) -> bytes:
    """The first frame."""
    head = json.dumps({"seconds": seconds, "ahead": ahead}).encode()
    return head + b"\n" + (b"" if vocabulary is None else vocabulary.packed())


def check(kind: str, text: str) -> bytes:
    """A question whether a grammar can be held."""
    return b"\n".join([json.dumps({"check": kind}).encode(), text.encode()])


Item = tuple[int, tuple[str, str, str] | None, Sequence[int]]
"""Of a matcher: its number, its grammar (kind, text and scope; None: it is known), the tokens by which it goes on."""


def ask(items: Sequence[Item], end: Sequence[int], *, quick: bool = False) -> bytes:
    """A question for masks.

    Args:
        end: numbers of matchers that are to be forgotten.
        quick: new grammars were compiled quickly by another helper: this one keeps its priority.
    """
    texts = [b"" if grammar is None else grammar[1].encode() for _, grammar, _ in items]
    heads = [
        (number, None if grammar is None else (grammar[0], len(text), grammar[2]), list(tokens))
        for (number, grammar, tokens), text in zip(items, texts, strict=True)
    ]
    return b"\n".join([json.dumps({"ask": heads, "end": list(end), "quick": quick}).encode(), b"".join(texts)])


def main() -> None:
    """Answer questions until the input ends. The argument is the process that starts this one."""
    begin(_MAX_MEMORY_BYTES)
    in_threads(_Serving(sys.stdin.buffer, sys.stdout.buffer).serve)


class _Serving:
    """What a helper does. It stands back while it starts, checks or learns a grammar, or is told to."""

    def __init__(self, reader: IO[bytes], writer: IO[bytes]) -> None:
        self._reader, self._writer = reader, writer
        self._seconds = 1.0
        self._answer: Callable[[bytes, bytes], bytes] | None = None

    def serve(self) -> bool:
        """Answer until the input ends, or this thread stands back; whether there is more to do."""
        if self._answer is None:
            stand_back()
            self._start()
            write_frame(self._writer, GOOD)
        while not stands_back():
            if (frame := read_frame(self._reader)) is None:
                return False
            allow_cpu(self._seconds)
            head, _, texts = frame.partition(b"\n")
            assert self._answer is not None
            write_frame(self._writer, self._answer(head, texts))
        return True

    def _start(self) -> None:
        from jaxinfer.structured.matching import Matching, checked

        head, _, vocabulary = (read_frame(self._reader) or b"{}").partition(b"\n")
        first = json.loads(head)
        self._seconds = first.get("seconds", self._seconds)
        if vocabulary:
            self._answer = Matching(vocabulary, self._seconds, first.get("ahead", 0)).answer
        else:
            self._answer = checked


if __name__ == "__main__":
    main()
