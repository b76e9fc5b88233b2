"""Grammar helper process: `python -m jaxinfer.structured.helper`, started by `masks.Masks`.

Grammars come with requests, and some take seconds and gigabytes to compile, or for one mask. A helper bounds the
memory, and the CPU time of each matcher of a frame, and its parent kills it when it takes too long.

Frames are msgpack: the first has what `setup` is given, each other one an `answers.Ask`,
and the reply an `answers.Answer` for each of its items.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import IO, TYPE_CHECKING

import msgspec

from jaxinfer.helper_process import (
    READY,
    allow_cpu,
    begin,
    has_low_priority,
    in_threads,
    limit_memory,
    lower_priority,
    read_frame,
    write_frame,
)

if TYPE_CHECKING:  # a helper imports it in a thread with idle priority
    from jaxinfer.structured.matcher import Vocabulary

MODULE = "jaxinfer.structured.helper"
_MAX_MEMORY_BYTES = 4 << 30


def setup(seconds: float, vocabulary: Vocabulary, ahead: int = 0) -> bytes:
    """Return the first frame.

    Args:
        seconds: CPU seconds of each matcher of a frame.
        ahead: tokens to look ahead where the grammar forces a text.
    """
    return msgspec.msgpack.encode((seconds, vocabulary, ahead))


def main() -> None:
    """Reply to requests until the input ends. The argument is the pid of the parent."""
    begin()
    limit_memory(_MAX_MEMORY_BYTES)
    in_threads(_Serving(sys.stdin.buffer, sys.stdout.buffer).serve)


class _Serving:
    """Server loop of a helper, with idle priority while it starts or compiles a grammar."""

    def __init__(self, reader: IO[bytes], writer: IO[bytes]) -> None:
        self._reader, self._writer = reader, writer
        self._seconds = 1.0
        self._answer: Callable[[bytes], bytes] | None = None

    def serve(self) -> bool:
        """Reply until the input ends, or this thread gets idle priority; return whether there is more input."""
        if self._answer is None:
            lower_priority()
            if (frame := read_frame(self._reader)) is None:
                return False
            self._answer = self._start(frame)
            write_frame(self._writer, READY)
        while not has_low_priority():
            if (frame := read_frame(self._reader)) is None:
                return False
            allow_cpu(self._seconds)
            write_frame(self._writer, self._answer(frame))
        return True

    def _start(self, frame: bytes) -> Callable[[bytes], bytes]:
        from jaxinfer.structured.matcher import Vocabulary
        from jaxinfer.structured.matching import Matching

        self._seconds, vocabulary, ahead = msgspec.msgpack.decode(frame, type=tuple[float, Vocabulary, int])
        return Matching(vocabulary, self._seconds, ahead).answer


if __name__ == "__main__":
    main()
