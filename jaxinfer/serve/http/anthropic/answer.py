"""Messages API responses: content blocks, and the events that stream them."""

from __future__ import annotations

from typing import Any

from jaxinfer.serve.api.errors import ServeError
from jaxinfer.serve.frontend.chat.messages import arguments_of
from jaxinfer.serve.http.anthropic.errors import error_body
from jaxinfer.serve.http.choices import version_fields
from jaxinfer.serve.http.completions import Chat
from jaxinfer.serve.http.events.parts import CALL, REASONING, Closed, More, Opened, Part, Step
from jaxinfer.serve.http.events.stream import event, reader_of
from jaxinfer.text.output import OutputDelta
from jaxinfer.types import FinishReason


class MessageWriter:
    """Serializer of the message that answers a chat; see `jaxinfer.serve.http.events.stream.Writer`.

    Args:
        max_tokens: of the request.
        request_id: sent in the error event of a stream.
    """

    waiting = event("ping", {}).encode()

    def __init__(self, chat: Chat, max_tokens: int, request_id: str) -> None:
        self._chat, self._max_tokens, self._request_id = chat, max_tokens, request_id
        self._reader = reader_of(chat)
        self._begun = False

    def opening(self) -> str:
        """Return "": the first event contains the number of cached prompt tokens, known only with the first token."""
        return ""

    def events(self, delta: OutputDelta) -> str:
        steps = self._reader.read(delta)
        found = [] if self._begun else self._start()
        found += [_event(step) for step in steps]
        if delta.finish_reason is not None:
            found += self._end()
        return "".join(found)

    def failed(self, error: ServeError) -> str:
        return event("error", error_body(error, self._request_id))

    def take(self, delta: OutputDelta) -> None:
        self._reader.read(delta)

    def whole(self) -> dict[str, Any]:
        blocks = [_block(part) | _said(part) for part in self._reader.parts]
        return self._message(blocks) | self._stop() | {"usage": self._usage()} | self._versions()

    def _start(self) -> list[str]:
        self._begun = True
        message = self._message([]) | {"stop_reason": None, "stop_sequence": None, "usage": self._usage()}
        return [event("message_start", {"message": message}), event("ping", {})]

    def _end(self) -> list[str]:
        told = {"delta": self._stop(), "usage": self._usage()} | self._versions()
        return [event("message_delta", told), event("message_stop", {})]

    def _message(self, blocks: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": f"msg_{self._chat.name}", "type": "message", "role": "assistant"}
        return head | {"model": self._chat.model, "content": blocks}

    def _stop(self) -> dict[str, Any]:
        reader = self._reader
        if reader.finish_reason == FinishReason.LENGTH:
            full = self._chat.generation.usage.completion >= self._max_tokens
            return {"stop_reason": "max_tokens" if full else "model_context_window_exceeded", "stop_sequence": None}
        if isinstance(reader.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": reader.stop_reason}
        return {"stop_reason": "tool_use" if reader.called else "end_turn", "stop_sequence": None}

    def _versions(self) -> dict[str, Any]:
        return version_fields(self._reader.weight_versions)

    def _usage(self) -> dict[str, Any]:
        """Return token counts; cached prompt tokens are not included in ``input_tokens``."""
        usage = self._chat.generation.usage
        return {
            "input_tokens": usage.prompt - usage.cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached,
            "output_tokens": usage.completion,
            "output_tokens_details": {"thinking_tokens": self._reader.reasoning_tokens},
        }


def _event(step: Step) -> str:
    match step:
        case Opened(part):
            return event("content_block_start", {"index": part.index, "content_block": _block(part)})
        case More(part):
            return event("content_block_delta", {"index": part.index, "delta": _delta(part, step.text)})
        case Closed(part):
            return event("content_block_stop", {"index": part.index})


def _block(part: Part) -> dict[str, Any]:
    """Return the content block at its start, without text."""
    if part.kind == CALL:
        return {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}
    if part.kind == REASONING:
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": "", "citations": None}


def _said(part: Part) -> dict[str, Any]:
    """Return the fields of a block that are streamed as deltas."""
    if part.kind == CALL:
        return {"input": arguments_of(part.text)}
    return {"thinking" if part.kind == REASONING else "text": part.text}


def _delta(part: Part, text: str) -> dict[str, Any]:
    if part.kind == CALL:
        return {"type": "input_json_delta", "partial_json": text}
    name = "thinking" if part.kind == REASONING else "text"
    return {"type": f"{name}_delta", name: text}
