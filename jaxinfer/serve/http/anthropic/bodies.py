"""Bodies of requests for messages, and the blocks of their contents.

Fields that are not served are told apart as in `jaxinfer.serve.http.requests`. ``cache_control`` is a label: prefixes
are cached without being marked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, WithJsonSchema

from jaxinfer.serve.http.requests import Body, Boolean, Integer, Number, Objects, Strings

_NOTHING = (None,)
_MARKED = frozenset({"cache_control"})
_TEXT: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}
_OBJECT: dict[str, Any] = {"anyOf": [{"type": "object"}, {"type": "null"}]}


class OutputConfig(Body):
    """How much to think, and the form of the answer's text."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: Annotated[Any, WithJsonSchema(_OBJECT)] = None


class Metadata(Body):
    """About the request. ``user_id`` is a label."""

    user_id: str | None = None


class CountTokensRequest(Body):
    """``POST /v1/messages/count_tokens``."""

    ignored: ClassVar[frozenset[str]] = _MARKED

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

    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "container": _NOTHING,
        "context_management": _NOTHING,
        "diagnostics": _NOTHING,
        "inference_geo": _NOTHING,
        "mcp_servers": (None, []),
        "service_tier": (None, "auto", "standard_only"),
        "speed": (None, "standard"),
    }

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
    """A message of the conversation; which blocks its content may hold depends on the role."""

    role: Literal["user", "assistant", "system"]
    content: Any


class TextBlock(Body):
    """Text."""

    ignored: ClassVar[frozenset[str]] = _MARKED | {"citations", "parsed_output"}

    type: Literal["text"]
    text: str


class ThinkingBlock(Body):
    """A thought that was answered before."""

    ignored: ClassVar[frozenset[str]] = frozenset({"signature"})

    type: Literal["thinking"]
    thinking: str


class ToolUseBlock(Body):
    """A call that the model has made."""

    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "caller": (None, {"type": "direct"}),
        "toolset_name": _NOTHING,
    }
    ignored: ClassVar[frozenset[str]] = _MARKED

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Body):
    """What a call has returned. ``is_error`` is a label: what went wrong is in the content, which the model sees."""

    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {"toolset_name": _NOTHING}
    ignored: ClassVar[frozenset[str]] = _MARKED | {"is_error"}

    type: Literal["tool_result"]
    tool_use_id: str
    content: Any = None


class Tool(Body):
    """A function that the model may call."""

    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "allowed_callers": (None, ["direct"]),
        "defer_loading": (None, False),
        "input_examples": (None, []),
    }
    ignored: ClassVar[frozenset[str]] = _MARKED | {"eager_input_streaming"}

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
USER: Mapping[str, type[Body]] = {**TEXT, "tool_result": ToolResultBlock}
ASSISTANT: Mapping[str, type[Body]] = {**TEXT, "thinking": ThinkingBlock, "tool_use": ToolUseBlock}
TOOLS: Mapping[str, type[Body]] = {"custom": Tool}
CHOICES: Mapping[str, type[Body]] = {**dict.fromkeys(("auto", "any", "none"), ToolChoice), "tool": NamedToolChoice}
THINKING: Mapping[str, type[Body]] = dict.fromkeys(("enabled", "disabled", "adaptive"), Thinking)
