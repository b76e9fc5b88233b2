"""Chat choices parsed into content, reasoning and tool calls, in OpenAI's format."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from jaxinfer.parsers.events import Content, Event, Reasoning, message_of
from jaxinfer.serve.frontend.chat.messages import tool_call
from jaxinfer.serve.frontend.chat.outputs import TOOL_CALLS, CallDelta, ParsedOutput, call_deltas
from jaxinfer.serve.http.choices import ChatChoice, Wanted, Words
from jaxinfer.text.output import OutputDelta


class MessageChoice(ChatChoice):
    """Choice of ``/v1/chat/completions`` read by a parser (``output``); ``names``: fields that hold the reasoning."""

    def __init__(self, index: int, words: Words, wanted: Wanted, output: ParsedOutput, names: Sequence[str]) -> None:
        super().__init__(index, words, wanted)
        self._output, self._names = output, names
        self._events: list[Event] = []

    @property
    def reasoning_tokens(self) -> int | None:
        return self._output.reasoning_tokens

    def chunks(self, delta: OutputDelta) -> Sequence[str]:
        fields = self._fields(self._output.read(delta))
        found = []
        if fields or delta.prompt_logprobs is not None or (delta.token_ids and not self._plain):
            more = dataclasses.replace(delta, finish_reason=None, stop_reason=None, acceptance=None)
            found.append(json.dumps(self._shape(more, "delta", fields, None)))
        if delta.finish_reason is not None:
            last = dataclasses.replace(delta, text="", token_ids=[], logprobs=(), prompt_logprobs=None)
            found.append(json.dumps(self._shape(last, "delta", {}, self._output.reason(delta))))
        return found

    def take(self, delta: OutputDelta) -> None:
        self._parts.add(delta)
        self._events += self._output.read(delta)

    def whole(self) -> dict[str, Any]:
        delta, found = self._parts.delta(self._index), message_of(self._events)
        silent = bool(found.calls or found.reasoning) and not found.content
        message: dict[str, Any] = {"role": "assistant", "content": None if silent else found.content, "refusal": None}
        message |= dict.fromkeys(self._names, found.reasoning or None)
        if found.calls:
            message[TOOL_CALLS] = [tool_call(call.id, call.name, call.arguments) for call in found.calls]
        return self._shape(delta, "message", message, self._output.reason(delta))

    def _fields(self, events: Sequence[Event]) -> dict[str, Any]:
        """Return the message fields of a chunk. All events of a chunk come from one delta, which may be large."""
        part = message_of([event for event in events if isinstance(event, Content | Reasoning)])
        found = dict.fromkeys(self._names, part.reasoning) if part.reasoning else {}
        if part.content:
            found["content"] = part.content
        calls = [_call_delta(call) for call in call_deltas(events)]
        return {**found, TOOL_CALLS: calls} if calls else found


def _call_delta(call: CallDelta) -> dict[str, Any]:
    """Return OpenAI's tool call delta; the first delta of a call has its id, type and name."""
    if call.id is None or call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {"index": call.index, **tool_call(call.id, call.name, call.arguments)}
