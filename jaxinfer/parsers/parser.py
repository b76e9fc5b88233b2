"""Parser interface: text in, events out; the result does not depend on how a stream is split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from jaxinfer.parsers.events import Content, Emitter, Event
from jaxinfer.parsers.source import Source, Wait

Program = Callable[[Source, Emitter], Wait[None]]
"""Parser coroutine of a format: it reads a source to its end and emits events."""


@runtime_checkable
class Parser(Protocol):
    """Incremental parser of one answer. Neither method raises, for any model output."""

    def feed(self, text: str) -> list[Event]:
        """Return the events of more text, which may be split anywhere."""
        ...

    def finish(self, *, cut: bool = False) -> list[Event]:
        """Return the events of the end; no text may follow. ``cut``: the answer ended before the model ended it."""
        ...


class ProgramParser:
    """Parser that runs a `Program`.

    Args:
        new_id, hidden: see `Emitter`.
    """

    def __init__(self, program: Program, new_id: Callable[[int], str], hidden: Sequence[str] = ()) -> None:
        self._source, self._emitter = Source(), Emitter(new_id, hidden)
        self._running = program(self._source, self._emitter)

    def feed(self, text: str) -> list[Event]:
        self._source.add(text)
        next(self._running, None)
        return self._emitter.drain()

    def finish(self, *, cut: bool = False) -> list[Event]:
        self._source.end(cut=cut)
        next(self._running, None)
        self._emitter.close(cut=cut)
        return self._emitter.drain()


class Chain:
    """Two parsers in sequence: the second parses the content events of the first, such as calls after reasoning."""

    def __init__(self, first: Parser, second: Parser) -> None:
        self._first, self._second = first, second

    def feed(self, text: str) -> list[Event]:
        return self._passed(self._first.feed(text))

    def finish(self, *, cut: bool = False) -> list[Event]:
        return self._passed(self._first.finish(cut=cut)) + self._second.finish(cut=cut)

    def _passed(self, events: list[Event]) -> list[Event]:
        found: list[Event] = []
        for event in events:
            found += self._second.feed(event.text) if isinstance(event, Content) else [event]
        return found
