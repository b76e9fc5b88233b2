"""Parser events, and the message that they add up to."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence

from jaxinfer.parsers.source import Markers


@dataclasses.dataclass(frozen=True, slots=True)
class Content:
    """Content delta of the answer."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Reasoning:
    """Reasoning delta before the answer."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class CallStart:
    """Start of a tool call. ``index``: index of the call in its answer, from 0."""

    index: int
    id: str
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class Arguments:
    """Arguments delta of a call: JSON, as far as the model writes JSON."""

    index: int
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class CallEnd:
    """End of a call: its arguments are complete, or the text has ended within them."""

    index: int


Event = Content | Reasoning | CallStart | Arguments | CallEnd


@dataclasses.dataclass
class ToolCall:
    """A tool call. ``arguments``: as in `Arguments`."""

    id: str
    name: str
    arguments: str = ""


@dataclasses.dataclass
class Message:
    """Message assembled from the events of an answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = dataclasses.field(default_factory=list)


def message_of(events: Sequence[Event]) -> Message:
    """Assemble a message from events, in time linear in their text."""
    arguments = collections.defaultdict[int, list[str]](list)
    for event in events:
        if isinstance(event, Arguments):
            arguments[event.index].append(event.text)
    starts = [event for event in events if isinstance(event, CallStart)]
    return Message(
        "".join(event.text for event in events if isinstance(event, Content)),
        "".join(event.text for event in events if isinstance(event, Reasoning)),
        [ToolCall(each.id, each.name, "".join(arguments[each.index])) for each in starts],
    )


class Emitter:
    """Event collector that merges adjacent events of one kind.

    Whitespace before a call, with nothing else between it and the beginning or the previous call, is not content:
    models put it between their markers.

    Args:
        new_id: makes the id of a call from its index, if the model gives none.
        hidden: markers that are never content.

    Attributes:
        calls: number of calls that have begun.
    """

    def __init__(self, new_id: Callable[[int], str], hidden: Sequence[str] = ()) -> None:
        self.calls = 0
        self._hidden: Markers | None = Markers(*hidden) if hidden else None
        self._held = ""
        self._new_id = new_id
        self._events: list[Event] = []
        self._kind: type[Content] | type[Reasoning] | type[Arguments] = Content
        self._parts: list[str] = []
        self._bare = True
        self._space: list[str] = []
        self._open = self._written = False

    def hide(self, markers: Markers) -> None:
        """Hide these markers from now on."""
        self._hidden = markers

    def content(self, text: str) -> None:
        if self._hidden is not None:
            text = self._hidden.pattern.sub("", self._held + text)
            begun = self._hidden.begun(text, 0)  # a marker may be nested within another
            text, self._held = text[: len(text) - begun], text[len(text) - begun :]
        self._show(text)

    def _show(self, text: str) -> None:
        if self._bare:
            self._space.append(text)
            if not text or text.isspace():
                return
            text, self._bare, self._space = "".join(self._space), False, []
        self._add(Content, text)

    def gap(self) -> None:
        """Handle a marker that is not shown: whitespace before it, after a call, is dropped."""
        if self.calls:
            self._space = []

    def reasoning(self, text: str) -> None:
        self._add(Reasoning, text)

    def start(self, name: str, name_id: str | None = None) -> None:
        """Begin a call; the previous one has ended."""
        self._let_go()
        self._flush()
        self._space, self._bare, self._open, self._written = [], True, True, False
        self._events.append(CallStart(self.calls, name_id or self._new_id(self.calls), name))
        self.calls += 1

    def arguments(self, text: str) -> None:
        self._written = self._written or bool(text)
        self._add(Arguments, text)

    def end(self, *, cut: bool = False) -> None:
        """End the call, if one is open. A call without arguments gets an empty object, unless it was ``cut`` short."""
        if not self._open:
            return
        if not self._written and not cut:
            self.arguments("{}")
        self._flush()
        self._open = False
        self._events.append(CallEnd(self.calls - 1))

    def close(self, *, cut: bool) -> None:
        """End the answer; an answer of whitespace only is content, except next to calls."""
        self._let_go()
        self.end(cut=cut)
        if self._space and not self.calls:
            self._add(Content, "".join(self._space))
        self._space = []

    def _let_go(self) -> None:
        held, self._held = self._held, ""
        if held:
            self._show(held)

    def drain(self) -> list[Event]:
        """Return the events since the last call."""
        self._flush()
        events, self._events = self._events, []
        return events

    def _add(self, kind: type[Content] | type[Reasoning] | type[Arguments], text: str) -> None:
        if kind is not self._kind:
            self._flush()
            self._kind = kind
        if text:
            self._parts.append(text)

    def _flush(self) -> None:
        if self._parts:
            text, self._parts = "".join(self._parts), []
            kind = self._kind
            self._events.append(Arguments(self.calls - 1, text) if issubclass(kind, Arguments) else kind(text))
