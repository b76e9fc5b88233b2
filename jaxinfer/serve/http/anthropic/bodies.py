"""Bodies of requests for messages, and the blocks of their contents.

Which fields are served, and what becomes of the others, is told by tables (`jaxinfer.serve.http.fields`).
``cache_control`` has no effect: prefixes are cached without being marked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, WithJsonSchema

from jaxinfer.serve.http.fields import Body
from jaxinfer.serve.http.requests import HOSTED, NOTHING, Boolean, Integer, Number, Objects, Strings

_MARKED = frozenset({"cache_control"})
_TEXT: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}
_OBJECT: dict[str, Any] = {"anyOf": [{"type": "object"}, {"type": "null"}]}


class OutputConfig(Body):
    """How much to think, and the form of the answer's text."""

    without_effect: ClassVar[Mapping[str, tuple[Any, ...]]] = {"task_budget": NOTHING}

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: Annotated[Any, WithJsonSchema(_OBJECT)] = None


class Metadata(Body):
    """About the request."""

    without_effect: ClassVar[Mapping[str, tuple[Any, ...]]] = {"user_id": NOTHING}


class CountTokensRequest(Body):
    """``POST /v1/messages/count_tokens``."""

    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "container": NOTHING,
        "diagnostics": NOTHING,
        "inference_geo": NOTHING,
        "mcp_servers": (None, []),
        "service_tier": (None, "auto", "standard_only"),
    }
    without_effect: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "betas": (None, []),
        "cache_control": NOTHING,
        "context_management": NOTHING,
        "speed": (None, "standard"),
    }
    renamed: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("stop", "stops"), "stop_sequences"),
        **dict.fromkeys(("max_output_tokens", "max_completion_tokens"), "max_tokens"),
        **dict.fromkeys(("reasoning_effort", "effort", "reasoning"), "output_config.effort"),
        **dict.fromkeys(
            ("response_format", "output_format", "guided_json", "structured_outputs"), "output_config.format"
        ),
        "instructions": "system",
        "input": "messages",
        "user": "metadata.user_id",
    }

    model: str | None = None
    messages: Annotated[Objects, Field(min_length=1)]
    system: Annotated[Any, WithJsonSchema(_TEXT)] = None
    tools: Objects | None = None
    tool_choice: Annotated[Any, WithJsonSchema(_OBJECT)] = None
    thinking: Annotated[Any, WithJsonSchema(_OBJECT)] = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(CountTokensRequest):
    """``POST /v1/messages``."""

    max_tokens: Annotated[int, Field(strict=True)]
    stop_sequences: Strings = None
    temperature: Number = None
    top_p: Number = None
    top_k: Integer = None
    stream: bool | None = None
    metadata: Metadata | None = None
    request_id: Annotated[str | None, Field(description="Default: the header X-Request-Id, or the server's own.")] = (
        None
    )
    min_p: Number = None
    repetition_penalty: Number = None
    seed: Integer = None
    ignore_eos: Boolean = None
    priority: int | None = None
    cache_salt: str | None = None


PASSED = (
    "model",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "stream",
    "request_id",
    "min_p",
    "repetition_penalty",
    "seed",
    "ignore_eos",
    "priority",
    "cache_salt",
)
"""Fields that a chat has by the same names."""


class Message(Body):
    """A message of the conversation; which blocks its content may hold depends on the role. Answers come back whole."""

    labels: ClassVar[frozenset[str]] = frozenset(
        {
            "container",
            "context_management",
            "id",
            "model",
            "stop_details",
            "stop_reason",
            "stop_sequence",
            "type",
            "usage",
        }
    )

    role: Literal["user", "assistant", "system"]
    content: Any


class TextBlock(Body):
    """Text."""

    labels: ClassVar[frozenset[str]] = _MARKED | {"citations", "parsed_output"}

    type: Literal["text"]
    text: str


class ThinkingBlock(Body):
    """A thought that was answered before."""

    labels: ClassVar[frozenset[str]] = frozenset({"signature"})

    type: Literal["thinking"]
    thinking: str


class ToolUseBlock(Body):
    """A call that the model has made."""

    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "caller": (None, {"type": "direct"}),
        "toolset_name": NOTHING,
    }
    labels: ClassVar[frozenset[str]] = _MARKED

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Body):
    """What a call has returned. ``is_error`` is a label: what went wrong is in the content, which the model sees."""

    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {"toolset_name": NOTHING}
    labels: ClassVar[frozenset[str]] = _MARKED | {"is_error"}

    type: Literal["tool_result"]
    tool_use_id: str
    content: Any = None


class Tool(Body):
    """A function that the model may call."""

    without_effect: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "allowed_callers": (None, ["direct"]),
        "defer_loading": (None, False),
        "input_examples": (None, []),
    }
    labels: ClassVar[frozenset[str]] = _MARKED | {"eager_input_streaming"}

    type: Literal["custom"] = "custom"
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class ToolChoice(Body):
    """Whether the model must call."""

    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = None


class NamedToolChoice(Body):
    """The model must call this tool."""

    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """Whether the model is to think: at all, or as it decides itself. ``budget_tokens``: the thought is closed then."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


TEXT: Mapping[str, type[Body]] = {"text": TextBlock}
RESULT: Mapping[str, type[Body] | None] = {**TEXT, "tool_reference": None}
USER: Mapping[str, type[Body] | None] = {**TEXT, "tool_result": ToolResultBlock}
_ELSEWHERE = ("bash_code_execution", "code_execution", "mcp", "text_editor_code_execution", "tool_search")
ASSISTANT: Mapping[str, type[Body] | None] = {
    **TEXT,
    "thinking": ThinkingBlock,
    "tool_use": ToolUseBlock,
    **dict.fromkeys(("redacted_thinking", "server_tool_use", "mcp_tool_use")),
    **dict.fromkeys(f"{name}_tool_result" for name in (*_ELSEWHERE, "advisor", "web_fetch", "web_search")),
}
"""Of the assistant. Thoughts that others have encrypted, and calls of their tools, are left out."""
TOOLS: Mapping[str, type[Body] | None] = {**HOSTED, "custom": Tool}
CHOICES: Mapping[str, type[Body]] = {**dict.fromkeys(("auto", "any", "none"), ToolChoice), "tool": NamedToolChoice}
THINKING: Mapping[str, type[Body]] = dict.fromkeys(("enabled", "disabled", "adaptive"), Thinking)
