"""Chat choices whose text is read by a parser: content, reasoning and tool calls in OpenAI's shape."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from jaxinfer.parsers.events import Arguments, CallEnd, CallStart, Content, Event, Reasoning, message_of
from jaxinfer.parsers.parser import Parser
from jaxinfer.serve.http.choices import ChatChoice, Wanted, Words
from jaxinfer.text.output import OutputDelta
from jaxinfer.types import FinishReason

TOOL_CALLS = "tool_calls"
"""OpenAI's name of the calls of a message, and the finish reason of one that has some."""


@dataclasses.dataclass(frozen=True)
class Shown:
    """What of the parsed parts a message shows.

    Attributes:
        reasoning: the names of its reasoning; none: it is left out.
        parallel: calls behind the first, too.
    """

    reasoning: Sequence[str]
    parallel: bool = True


class MessageChoice(ChatChoice):
    """Choice of ``/v1/chat/completions`` that a parser reads: ``parser`` is its own."""

    def __init__(self, index: int, words: Words, wanted: Wanted, parser: Parser, shown: Shown) -> None:
        super().__init__(index, words, wanted)
        self._parser, self._shown = parser, shown
        self._events: list[Event] = []
        self._called = False

    def chunks(self, delta: OutputDelta) -> Sequence[str]:
        fields = self._fields(self._read(delta))
        found = []
        if fields or delta.prompt_logprobs is not None or (delta.token_ids and not self._plain):
            more = dataclasses.replace(delta, finish_reason=None, stop_reason=None, acceptance=None)
            found.append(json.dumps(self._shape(more, "delta", fields, None)))
        if delta.finish_reason is not None:
            last = dataclasses.replace(delta, text="", token_ids=[], logprobs=(), prompt_logprobs=None)
            found.append(json.dumps(self._shape(last, "delta", {}, self._reason(delta))))
        return found

    def take(self, delta: OutputDelta) -> None:
        self._parts.add(delta)
        self._events += self._read(delta)

    def whole(self) -> dict[str, Any]:
        delta, found = self._parts.delta(self._index), message_of(self._events)
        silent = bool(found.calls or found.reasoning) and not found.content
        message: dict[str, Any] = {"role": "assistant", "content": None if silent else found.content, "refusal": None}
        message |= dict.fromkeys(self._shown.reasoning, found.reasoning or None)
        if found.calls:
            message[TOOL_CALLS] = [_call(call.id, call.name, call.arguments) for call in found.calls]
        return self._shape(delta, "message", message, self._reason(delta))

    def _read(self, delta: OutputDelta) -> list[Event]:
        """The events of a delta that are shown."""
        events = self._parser.feed(delta.text)
        if delta.finish_reason is not None:
            events += self._parser.finish(cut=delta.finish_reason != FinishReason.STOP)
        shown = [event for event in events if is_shown(event, self._shown)]
        self._called = self._called or any(isinstance(event, CallStart) for event in shown)
        return shown

    def _fields(self, events: Sequence[Event]) -> dict[str, Any]:
        """A chunk's part of the message. Events in one chunk come from one delta, which may hold much."""
        part = message_of([event for event in events if isinstance(event, Content | Reasoning)])
        found = dict.fromkeys(self._shown.reasoning, part.reasoning) if part.reasoning else {}
        if part.content:
            found["content"] = part.content
        calls = _call_deltas(events)
        return {**found, TOOL_CALLS: calls} if calls else found

    def _reason(self, delta: OutputDelta) -> str | None:
        called = self._called and delta.finish_reason == FinishReason.STOP
        return TOOL_CALLS if called else delta.finish_reason


def is_shown(event: Event, shown: Shown) -> bool:
    """Whether an event is of a part that is shown."""
    match event:
        case Reasoning():
            return bool(shown.reasoning)
        case CallStart(index) | Arguments(index) | CallEnd(index):
            return shown.parallel or index == 0
        case Content():
            return True


def _call_deltas(events: Sequence[Event]) -> list[dict[str, Any]]:
    """OpenAI's deltas: the first of a call has its id, its type and its name."""
    calls: dict[int, dict[str, Any]] = {}
    for event in events:
        if isinstance(event, CallStart):
            calls[event.index] = {"index": event.index, **_call(event.id, event.name, "")}
        elif isinstance(event, Arguments):
            call = calls.setdefault(event.index, {"index": event.index, "function": {"arguments": ""}})
            call["function"]["arguments"] += event.text
    return list(calls.values())


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
