"""The body of a request for a response, and the items of its input.

Fields that are not served are told apart as in `jaxinfer.serve.http.requests`: refused by name where they ask for
something, accepted where they ask for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, WithJsonSchema

from jaxinfer.serve.chat.terms import Effort
from jaxinfer.serve.http.requests import Body, Boolean, Integer, Number, Objects

_NOTHING = (None,)
LOGPROBS = "message.output_text.logprobs"
"""What ``include`` may ask for; and encrypted thoughts, of which there are none: they come as they are."""
_INPUT: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}
_FORMAT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "type": {"enum": ["text", "json_object", "json_schema"]},
        "name": {"type": "string"},
        "schema": {"type": "object"},
        "strict": {"type": "boolean"},
        "description": {"type": "string"},
    },
    "required": ["type"],
}
_CHOICE: dict[str, Any] = {"anyOf": [{"enum": ["none", "auto", "required", None]}, {"type": "object"}]}
Texts = Annotated[dict[str, str], Field(max_length=16)]


class ReasoningOptions(Body):
    """How much to think. A summary is never made: what there is is the thought itself."""

    effort: Effort | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class TextOptions(Body):
    """The form of the answer's text."""

    format: Annotated[Any, WithJsonSchema({"anyOf": [_FORMAT, {"type": "null"}]})] = None
    verbosity: Literal["medium"] | None = None


class ResponsesStreamOptions(Body):
    """Options of a stream, of which none has an effect."""

    include_obfuscation: bool | None = None


class ResponsesRequest(Body):
    """``POST /v1/responses``. Nothing is stored: the next request brings the items again."""

    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "background": (None, False),
        "context_management": (None, []),
        "conversation": _NOTHING,
        "max_tool_calls": _NOTHING,
        "moderation": _NOTHING,
        "previous_response_id": _NOTHING,
        "prompt": _NOTHING,
        "service_tier": (None, "auto", "default"),
        "store": (None, False),
        "truncation": (None, "disabled"),
    }
    ignored: ClassVar[frozenset[str]] = frozenset(
        {"prompt_cache_key", "prompt_cache_retention", "safety_identifier", "user"}
    )

    model: str | None = None
    input: Annotated[Any, WithJsonSchema(_INPUT)]
    instructions: str | None = None
    tools: Objects | None = None
    tool_choice: Annotated[Any, WithJsonSchema(_CHOICE)] = None
    parallel_tool_calls: Annotated[bool | None, Field(description="false: no call behind the first is shown.")] = None
    max_output_tokens: Integer = None
    temperature: Number = None
    top_p: Number = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    top_logprobs: Integer = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    metadata: Texts | None = None
    request_id: Annotated[str | None, Field(description="Default: the header X-Request-Id, or the server's own.")] = (
        None
    )
    top_k: Integer = None
    min_p: Number = None
    repetition_penalty: Number = None
    seed: Integer = None
    ignore_eos: Boolean = None
    thinking_token_budget: Integer = None
    priority: int | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


PASSED = (
    "model",
    "parallel_tool_calls",
    "temperature",
    "top_p",
    "stream",
    "request_id",
    "top_k",
    "min_p",
    "repetition_penalty",
    "seed",
    "ignore_eos",
    "thinking_token_budget",
    "priority",
    "cache_salt",
    "chat_template_kwargs",
)
"""Fields that a chat has by the same names."""


class Item(Body):
    """An item of the input. ``id`` and ``status`` are labels: items that were answered come back as they are."""

    ignored: ClassVar[frozenset[str]] = frozenset({"id", "status"})


class InputText(Body):
    """Text of a message, or of what a tool has returned."""

    type: Literal["input_text"]
    text: str


class OutputText(Body):
    """Text that the model has said."""

    ignored: ClassVar[frozenset[str]] = frozenset({"annotations", "logprobs"})

    type: Literal["output_text"]
    text: str


class ReasoningText(Body):
    """A thought."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class MessageItem(Item):
    """A message; what the content may hold depends on the role."""

    ignored: ClassVar[frozenset[str]] = frozenset({"id", "status", "phase"})

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Any


class ReasoningItem(Item):
    """A thought that was answered before."""

    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {"encrypted_content": _NOTHING}

    type: Literal["reasoning"]
    content: Any = None
    summary: Any = None


class CallItem(Item):
    """A call that the model has made. ``arguments``: JSON."""

    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {"caller": _NOTHING, "namespace": _NOTHING}

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class CallOutputItem(Item):
    """What a call has returned."""

    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {"caller": _NOTHING, "namespace": _NOTHING}
    ignored: ClassVar[frozenset[str]] = frozenset({"id", "status", "name"})

    type: Literal["function_call_output"]
    call_id: str
    output: Any


class FunctionTool(Body):
    """A function that the model may call."""

    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "allowed_callers": (None, ["direct"]),
        "async": (None, False),
        "defer_loading": (None, False),
        "output_schema": _NOTHING,
    }

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


ITEMS: Mapping[str, type[Body]] = {
    "message": MessageItem,
    "reasoning": ReasoningItem,
    "function_call": CallItem,
    "function_call_output": CallOutputItem,
}
