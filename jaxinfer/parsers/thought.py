"""Reasoning between tags before the answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from jaxinfer.parsers.events import Emitter
from jaxinfer.parsers.source import Markers, Sink, Source, Wait

type Sign = Callable[[Source], Wait[bool]]
"""Predicate: whether a call follows a marker. Reads a bounded text, except for whitespace."""
NO_SIGNS: Mapping[str, Sign] = {}


@dataclasses.dataclass(frozen=True)
class Thought:
    """A reasoning format.

    Attributes:
        begin, end: its tags.
        begun: an answer begins within reasoning, unless the prompt has closed it.
        closed: prompt suffixes besides ``end`` after which there is no reasoning.
        anywhere: text may precede the reasoning. Otherwise only a tag at the beginning counts: models write about tags.
    """

    begin: str
    end: str
    begun: bool = False
    anywhere: bool = False
    closed: tuple[str, ...] = ()

    def is_open(self, prompt: str) -> bool:
        """Return whether an answer to a prompt with this suffix begins within reasoning."""
        last = prompt.rstrip()
        return last.endswith(self.begin) or (self.begun and not last.endswith((self.end, *self.closed)))

    def read(self, source: Source, emitter: Emitter, prompt: str, calls: Mapping[str, Sign] = NO_SIGNS) -> Wait[None]:
        """Read an answer to a prompt with this suffix. ``calls``: call markers, which also end the reasoning if a call
        follows them."""
        thinks = called = False
        if self.is_open(prompt):
            yield from source.skip_space()
            yield from source.starts(self.begin)
            thinks = True
        elif (yield from self._begins(source, emitter)):
            thinks = True
        if thinks:
            called = yield from self._inside(source, emitter, calls)
        if called:  # a later end tag is not text
            while (yield from source.until(Markers(self.end), emitter.content)):
                pass
        yield from source.rest(emitter.content)

    def _begins(self, source: Source, emitter: Emitter) -> Wait[bool]:
        if self.anywhere:
            tags = Markers(self.begin, self.end)
            while (marker := (yield from source.until(tags, emitter.content))) == self.end:
                pass  # without reasoning: a token that is never text
            return marker is not None
        source.copy()
        yield from source.skip_space()
        found = yield from source.starts(self.begin)
        text = source.copied()
        if not found and (yield from source.starts(self.end)):  # of reasoning that the prompt has closed
            yield from source.skip_space()
        elif not found:
            emitter.content(text)
        return found

    def _inside(self, source: Source, emitter: Emitter, calls: Mapping[str, Sign]) -> Wait[bool]:
        """Read the reasoning, without the template's whitespace around it. Return whether a call ends it."""
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
    """Sink that drops trailing whitespace."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._space: list[str] = []

    def __call__(self, text: str) -> None:
        shown = text.rstrip()
        if shown:
            self._sink("".join(self._space) + shown)
            self._space = []
        self._space.append(text[len(shown) :])
