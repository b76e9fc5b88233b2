"""Reasoning between tags, in front of the answer."""

from __future__ import annotations

import dataclasses

from jaxinfer.parsers.events import Emitter
from jaxinfer.parsers.source import Markers, Sink, Source, Wait


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

    def read(self, source: Source, emitter: Emitter, prompt: str, calls: tuple[str, ...] = ()) -> Wait[None]:
        """Read an answer to a prompt with this end. ``calls``: beginnings of calls, which end a thought, too."""
        if self.is_open(prompt):
            yield from source.skip_space()
            yield from source.starts(self.begin)
            yield from self._inside(source, emitter, calls)
        elif (yield from self._begins(source, emitter)):
            yield from self._inside(source, emitter, calls)
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
        if not found:
            emitter.content(text)
        return found

    def _inside(self, source: Source, emitter: Emitter, calls: tuple[str, ...]) -> Wait[None]:
        """The thought, and the space around it, which is its template's."""
        yield from source.skip_space()
        marker = yield from source.until(Markers(self.end, *calls), _Stripped(emitter.reasoning))
        if marker in calls:
            emitter.content(marker)
        else:
            yield from source.skip_space()


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
