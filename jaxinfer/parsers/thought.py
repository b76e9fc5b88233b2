"""Reasoning between tags, in front of the answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from jaxinfer.parsers.events import Emitter
from jaxinfer.parsers.source import Markers, Sink, Source, Wait

type Sign = Callable[[Source], Wait[bool]]
"""Whether what follows a marker is a call. Reads a bounded text, but for space."""
NO_SIGNS: Mapping[str, Sign] = {}


@dataclasses.dataclass(frozen=True)
class Thought:
    """A format.

    Attributes:
        begin, end: its tags.
        begun: an answer begins within it, unless its prompt has closed it.
        closed: ends of prompts, besides ``end``, behind which there is none.
        anywhere: text may stand in front of it. Else only a tag that comes first is one: models write about tags, too.
    """

    begin: str
    end: str
    begun: bool = False
    anywhere: bool = False
    closed: tuple[str, ...] = ()

    def is_open(self, prompt: str) -> bool:
        """Whether an answer to a prompt with this end begins within the thought."""
        last = prompt.rstrip()
        return last.endswith(self.begin) or (self.begun and not last.endswith((self.end, *self.closed)))

    def read(self, source: Source, emitter: Emitter, prompt: str, calls: Mapping[str, Sign] = NO_SIGNS) -> Wait[None]:
        """Read an answer to a prompt with this end. ``calls``: markers of calls, which end a thought, too, where what
        follows them is a call."""
        thinks = called = False
        if self.is_open(prompt):
            yield from source.skip_space()
            yield from source.starts(self.begin)
            thinks = True
        elif (yield from self._begins(source, emitter)):
            thinks = True
        if thinks:
            called = yield from self._inside(source, emitter, calls)
        if called:  # the thought's end, if it comes at all, is no text
            while (yield from source.until(Markers(self.end), emitter.content)):
                pass
        yield from source.rest(emitter.content)

    def _begins(self, source: Source, emitter: Emitter) -> Wait[bool]:
        if self.anywhere:
            tags = Markers(self.begin, self.end)
            while (marker := (yield from source.until(tags, emitter.content))) == self.end:
                pass  # of no thought: a token that is never text
            return marker is not None
        source.copy()
        yield from source.skip_space()
        found = yield from source.starts(self.begin)
        text = source.copied()
        if not found and (yield from source.starts(self.end)):  # of a thought that the prompt has closed
            yield from source.skip_space()
        elif not found:
            emitter.content(text)
        return found

    def _inside(self, source: Source, emitter: Emitter, calls: Mapping[str, Sign]) -> Wait[bool]:
        """Read the thought, and the space around it, which is its template's. Whether a call ends it."""
        yield from source.skip_space()
        sink, tags = _Stripped(emitter.reasoning), Markers(self.end, *calls)
        while marker := (yield from source.until(tags, sink)):
            if marker == self.end:
                yield from source.skip_space()
                break
            if (yield from source.look(calls[marker](source))):
                emitter.content(marker)
                return True
            sink(marker)
        return False


class _Stripped:
    """Sink that leaves out space at the end."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._space: list[str] = []

    def __call__(self, text: str) -> None:
        shown = text.rstrip()
        if shown:
            self._sink("".join(self._space) + shown)
            self._space = []
        self._space.append(text[len(shown) :])
