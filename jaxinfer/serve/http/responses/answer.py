"""Responses API output: items, and the events that stream them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfer.serve.api.errors import Kind, ServeError
from jaxinfer.serve.http.answers import ServerSentEvents
from jaxinfer.serve.http.choices import TokenSpeller, position_json, version_fields
from jaxinfer.serve.http.completions import Chat
from jaxinfer.serve.http.events.parts import CALL, REASONING, TEXT, Closed, More, Opened, Part, Step
from jaxinfer.serve.http.events.stream import event, reader_of
from jaxinfer.serve.http.responses.bodies import ResponsesRequest
from jaxinfer.text.output import OutputDelta
from jaxinfer.types import FinishReason, PositionLogprobs

_PREFIX = {REASONING: "rs", TEXT: "msg", CALL: "fc"}
_CODES = {Kind.INVALID: "invalid_prompt", Kind.QUEUE_FULL: "rate_limit_exceeded"}
_SAME = {
    "object": "response",
    "error": None,
    "background": False,
    "store": False,
    "previous_response_id": None,
    "truncation": "disabled",
    "service_tier": "default",
}
"""Fields with the same value in every response."""
_IN_PROGRESS, _COMPLETED, _INCOMPLETE = "in_progress", "completed", "incomplete"


class ResponseWriter:
    """Serializer of the response to a request; see `jaxinfer.serve.http.events.stream.Writer`."""

    waiting = ServerSentEvents.waiting

    def __init__(self, body: ResponsesRequest, chat: Chat) -> None:
        self._chat = chat
        self._head = _head(body, chat)
        self._reader = reader_of(chat)
        self._items = _Items(chat.name, chat.frontend)
        self._sequence = 0

    def opening(self) -> str:
        response = self._response(_IN_PROGRESS)
        return "".join(self._event(f"response.{name}", response=response) for name in ("created", _IN_PROGRESS))

    def events(self, delta: OutputDelta) -> str:
        steps = self._reader.read(delta)
        found = [self._event(name, **data) for step in steps for name, data in self._items.events(step)]
        if delta.finish_reason is not None:
            status = self._status()
            found.append(self._event(f"response.{status}", response=self._response(status)))
        return "".join(found)

    def failed(self, error: ServeError) -> str:
        told = {"code": _CODES.get(error.kind, "server_error"), "message": error.message}
        return self._event("response.failed", response=self._response("failed") | {"error": told})

    def take(self, delta: OutputDelta) -> None:
        self._reader.read(delta)

    def whole(self) -> dict[str, Any]:
        return self._response(self._status())

    def _status(self) -> str:
        return _COMPLETED if self._reader.finish_reason == FinishReason.STOP else _INCOMPLETE

    def _response(self, status: str) -> dict[str, Any]:
        """Return the response object with the output so far."""
        done = status != _IN_PROGRESS
        return self._head | {
            "status": status,
            "completed_at": int(time.time()) if status == _COMPLETED else None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == _INCOMPLETE else None,
            "output": [self._items.whole(part) for part in self._reader.parts],
            "usage": self._usage() if done else None,
            **(version_fields(self._reader.weight_versions) if done else {}),
        }

    def _usage(self) -> dict[str, Any]:
        usage = self._chat.generation.usage
        return {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
            "output_tokens": usage.completion,
            "output_tokens_details": {"reasoning_tokens": self._reader.reasoning_tokens},
            "total_tokens": usage.prompt + usage.completion,
        }

    def _event(self, name: str, /, **data: Any) -> str:
        number, self._sequence = self._sequence, self._sequence + 1
        return event(name, {"sequence_number": number, **data})


class _Items:
    """Converts parts to output items; reasoning and message items have one content part each.

    Args:
        name: request id, from which item ids are derived.
    """

    def __init__(self, name: str, words: TokenSpeller) -> None:
        self._name, self._words = name, words

    def whole(self, part: Part) -> dict[str, Any]:
        """Return the item of a closed part."""
        return self._item(part, _INCOMPLETE if part.cut else _COMPLETED, part.text, [self._content(part)])

    def events(self, step: Step) -> list[tuple[str, dict[str, Any]]]:
        """Return names and data of the events for a step."""
        match step:
            case Opened(part):
                return self._opened(part)
            case More(part, _, logprobs):
                return [self._about(part, "delta", delta=step.text, **self._told(part, logprobs))]
            case Closed(part):
                return self._closed(part)

    def _opened(self, part: Part) -> list[tuple[str, dict[str, Any]]]:
        item = self._item(part, _IN_PROGRESS, "", [])
        found = [("response.output_item.added", {"output_index": part.index, "item": item})]
        if part.kind != CALL:
            empty = Part(part.kind, part.index)
            found.append(("response.content_part.added", self._place(part) | {"part": self._content(empty)}))
        return found

    def _closed(self, part: Part) -> list[tuple[str, dict[str, Any]]]:
        item = ("response.output_item.done", {"output_index": part.index, "item": self.whole(part)})
        if part.kind == CALL:
            return [self._about(part, "done", arguments=part.text, name=part.name), item]
        done = self._about(part, "done", text=part.text, **self._told(part, part.logprobs))
        return [done, ("response.content_part.done", self._place(part) | {"part": self._content(part)}), item]

    def _about(self, part: Part, what: str, /, **data: Any) -> tuple[str, dict[str, Any]]:
        names = {REASONING: "reasoning_text", TEXT: "output_text", CALL: "function_call_arguments"}
        return f"response.{names[part.kind]}.{what}", self._place(part) | data

    def _place(self, part: Part) -> dict[str, Any]:
        where = {"item_id": self._id(part), "output_index": part.index}
        return where if part.kind == CALL else where | {"content_index": 0}

    def _item(self, part: Part, status: str, text: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self._id(part), "status": status}
        if part.kind == CALL:
            return head | {"type": "function_call", "call_id": part.id, "name": part.name, "arguments": text}
        if part.kind == REASONING:
            return head | {"type": "reasoning", "summary": [], "content": content, "encrypted_content": None}
        return head | {"type": "message", "role": "assistant", "content": content}

    def _content(self, part: Part) -> dict[str, Any]:
        if part.kind == REASONING:
            return {"type": "reasoning_text", "text": part.text}
        told = self._told(part, part.logprobs)
        return {"type": "output_text", "text": part.text, "annotations": [], **told}

    def _told(self, part: Part, logprobs: Sequence[PositionLogprobs]) -> dict[str, Any]:
        """Return the log probabilities of a text part; an empty list if they were not requested."""
        if part.kind != TEXT:
            return {}
        return {"logprobs": [position_json(each, self._words) for each in logprobs]}

    def _id(self, part: Part) -> str:
        return f"{_PREFIX[part.kind]}_{self._name}_{part.index}"


def _head(body: ResponsesRequest, chat: Chat) -> dict[str, Any]:
    """Return the response fields that repeat the request."""
    return {
        **_SAME,
        **_terms(body, chat.frontend.card.defaults),
        "id": f"resp_{chat.name}",
        "created_at": int(time.time()),
        "model": chat.model,
        "instructions": body.instructions,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
    }


def _terms(body: ResponsesRequest, defaults: Mapping[str, Any]) -> dict[str, Any]:
    form = None if body.text is None else body.text.format
    return {
        "max_output_tokens": body.max_output_tokens,
        "tools": body.tools or [],
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "temperature": _number(body.temperature, defaults, "temperature"),
        "top_p": _number(body.top_p, defaults, "top_p"),
        "top_logprobs": body.top_logprobs or 0,
        "text": {"format": {"type": "text"} if form is None else form},
    }


def _number(given: Any, defaults: Mapping[str, Any], name: str) -> Any:
    """Return the effective value: the default of the checkpoint if the request sets none."""
    return defaults.get(name, 1.0) if given is None else given
