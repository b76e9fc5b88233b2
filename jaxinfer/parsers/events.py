"""Events that a parser makes of a model's text, and the message that they add up to."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence

from jaxinfer.parsers.source import Markers


@dataclasses.dataclass(frozen=True, slots=True)
class Content:
    """More of the answer's text."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Reasoning:
    """More of the thought before the answer."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins. ``index``: of the call in its answer, from 0."""

    index: int
    id: str
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class Arguments:
    """More of a call's arguments: JSON, as far as the model writes JSON."""

    index: int
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class CallEnd:
    """A call has all of its arguments, or the text has ended within them."""

    index: int


Event = Content | Reasoning | CallStart | Arguments | CallEnd


@dataclasses.dataclass
class ToolCall:
    """One call. ``arguments``: as in `Arguments`."""

    id: str
    name: str
    arguments: str = ""


@dataclasses.dataclass
class Message:
    """Sum of an answer's events."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = dataclasses.field(default_factory=list)


def message_of(events: Sequence[Event]) -> Message:
    """Add events up, in time linear in their text."""
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
    """Collects events. Neighbours of one kind become one.

    Space in front of a call, where nothing else stands between it and the beginning or the call before, is no content:
    models put it between their markers.

    Args:
        new_id: makes the id of the call of an index, where the model gives none.
        hidden: markers, which are never content.

    Attributes:
        calls: how many have begun.
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
            begun = self._hidden.begun(text, 0)  # a marker may stand within another one
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
        """A marker that is not shown: nor is the space in front of it, behind a call."""
        if self.calls:
            self._space = []

    def reasoning(self, text: str) -> None:
        self._add(Reasoning, text)

    def start(self, name: str, name_id: str | None = None) -> None:
        """Begin a call; the one before has ended."""
        self._let_go()
        self._flush()
        self._space, self._bare, self._open, self._written = [], True, True, False
        self._events.append(CallStart(self.calls, name_id or self._new_id(self.calls), name))
        self.calls += 1

    def arguments(self, text: str) -> None:
        self._written = self._written or bool(text)
        self._add(Arguments, text)

    def end(self, *, cut: bool = False) -> None:
        """End the call, if one is open. One without arguments has an empty object, unless it was ``cut`` short."""
        if not self._open:
            return
        if not self._written and not cut:
            self.arguments("{}")
        self._flush()
        self._open = False
        self._events.append(CallEnd(self.calls - 1))

    def close(self, *, cut: bool) -> None:
        """End the answer: space alone is an answer, but not beside calls."""
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
        """The events since the last time."""
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
