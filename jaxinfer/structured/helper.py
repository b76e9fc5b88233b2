"""Grammar helper process: `python -m jaxinfer.structured.helper`, started by `masks.Masks` and by servers.

Grammars come with requests, and some take seconds and gigabytes to compile, or for one mask. A helper bounds the
memory, and the CPU time of each frame, and its parent kills it when it takes too long.

The first frame is JSON: the CPU ``seconds`` that each matcher or check of a frame may take, and the number of tokens to
look ``ahead`` where the grammar forces a text; after a newline follows a `Vocabulary` (empty: grammars are only
checked). The reply to `ask` is a line of JSON, an `answers.Answer` for each matcher, and after it the masks that are
not in it; the reply to `check` is `GOOD`, or `BAD`, the path of the invalid field and, after a newline, a sentence.

Grammar texts follow the JSON unquoted: quoting a long one would hold the caller's GIL for some hundredths of a second.
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
    has_low_priority,
    in_threads,
    lower_priority,
    read_frame,
    write_frame,
)

if TYPE_CHECKING:  # a helper imports it in a thread with idle priority
    from jaxinfer.structured.matcher import Vocabulary

MODULE = "jaxinfer.structured.helper"
_MAX_MEMORY_BYTES = 4 << 30


def setup(seconds: float, vocabulary: Vocabulary | None = None, ahead: int = 0) -> bytes:
    """Return the first frame."""
    head = json.dumps({"seconds": seconds, "ahead": ahead}).encode()
    return head + b"\n" + (b"" if vocabulary is None else vocabulary.packed())


def check(kind: str, text: str) -> bytes:
    """Return a request to check whether a grammar can be enforced."""
    return b"\n".join([json.dumps({"check": kind}).encode(), text.encode()])


Item = tuple[int, tuple[str, str, str] | None, Sequence[int]]
"""Request for a matcher: its number, its grammar (kind, text and scope; None: known) and the tokens to consume."""


def ask(items: Sequence[Item], end: Sequence[int], *, quick: bool = False) -> bytes:
    """Return a request for masks.

    Args:
        end: numbers of matchers to drop.
        quick: another helper compiled the new grammars quickly: this one keeps its priority.
    """
    texts = [b"" if grammar is None else grammar[1].encode() for _, grammar, _ in items]
    heads = [
        (number, None if grammar is None else (grammar[0], len(text), grammar[2]), list(tokens))
        for (number, grammar, tokens), text in zip(items, texts, strict=True)
    ]
    return b"\n".join([json.dumps({"ask": heads, "end": list(end), "quick": quick}).encode(), b"".join(texts)])


def main() -> None:
    """Reply to requests until the input ends. The argument is the pid of the parent."""
    begin(_MAX_MEMORY_BYTES)
    in_threads(_Serving(sys.stdin.buffer, sys.stdout.buffer).serve)


class _Serving:
    """Server loop of a helper, with idle priority while it starts, checks or compiles a grammar, or on request."""

    def __init__(self, reader: IO[bytes], writer: IO[bytes]) -> None:
        self._reader, self._writer = reader, writer
        self._seconds = 1.0
        self._answer: Callable[[bytes, bytes], bytes] | None = None

    def serve(self) -> bool:
        """Reply until the input ends, or this thread gets idle priority; return whether there is more input."""
        if self._answer is None:
            lower_priority()
            self._start()
            write_frame(self._writer, GOOD)
        while not has_low_priority():
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
