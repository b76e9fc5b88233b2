"""Request bodies of the Messages API, and the blocks of message contents.

Tables define which fields are served and how the remaining fields are treated (`jaxinfer.serve.http.fields`).
``cache_control`` has no effect: prefixes are always cached.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, WithJsonSchema

from jaxinfer.sampling_params import PARAMETERS
from jaxinfer.serve.http.fields import Body
from jaxinfer.serve.http.requests import HOSTED, NOTHING, Objects, Strings, with_sampling

_MARKED = frozenset({"cache_control"})
_TEXT: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}
_OBJECT: dict[str, Any] = {"anyOf": [{"type": "object"}, {"type": "null"}]}


class OutputConfig(Body):
    """Reasoning effort, and the format of the output text."""

    without_effect: ClassVar[Mapping[str, tuple[Any, ...]]] = {"task_budget": NOTHING}

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: Annotated[Any, WithJsonSchema(_OBJECT)] = None


class Metadata(Body):
    """Metadata of the request."""

    without_effect: ClassVar[Mapping[str, tuple[Any, ...]]] = {"user_id": NOTHING}


class CountTokensRequest(Body):
    """Count the tokens of a message request (``POST /v1/messages/count_tokens``)."""

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


_SAMPLING = tuple(row.name for row in PARAMETERS.values() if "messages" in row.also_in)


class MessagesRequest(with_sampling(CountTokensRequest, _SAMPLING)):  # type: ignore[misc]
    """Create a message (``POST /v1/messages``)."""

    max_tokens: Annotated[int, Field(strict=True)]
    stop_sequences: Strings = None
    stream: bool | None = None
    metadata: Metadata | None = None
    request_id: Annotated[
        str | None, Field(description="Request id (default: the header X-Request-Id, or generated).")
    ] = None
    priority: int | None = None
    cache_salt: str | None = None


PASSED = ("model", "max_tokens", "stream", "request_id", "priority", "cache_salt", *_SAMPLING)
"""Fields with the same name in a chat request."""


class Message(Body):
    """A message; its role determines the allowed blocks. Clients send complete answers back, hence the labels."""

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
            "weight_version",
            "weight_versions",
        }
    )

    role: Literal["user", "assistant", "system"]
    content: Any


class TextBlock(Body):
    """A text block."""

    labels: ClassVar[frozenset[str]] = _MARKED | {"citations", "parsed_output"}

    type: Literal["text"]
    text: str


class ImageBlock(Body):
    """An image block; ``source``: see `ImageData` and `ImageLink`."""

    labels: ClassVar[frozenset[str]] = _MARKED

    type: Literal["image"]
    source: dict[str, Any]


class ImageData(Body):
    """An image file in base64."""

    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str


class ImageLink(Body):
    """The URL of an image."""

    type: Literal["url"]
    url: str


class ThinkingBlock(Body):
    """A reasoning block of an earlier answer."""

    labels: ClassVar[frozenset[str]] = frozenset({"signature"})

    type: Literal["thinking"]
    thinking: str


class ToolUseBlock(Body):
    """A tool call made by the model."""

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
    """Result of a tool call. ``is_error`` is a label: the error is in the content, which the model sees."""

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
    """Whether the model must call a tool."""

    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = None


class NamedToolChoice(Body):
    """A tool that the model must call."""

    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """Reasoning mode: on, off, or adaptive. ``budget_tokens``: tokens after which the reasoning is closed."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


TEXT: Mapping[str, type[Body]] = {"text": TextBlock}
SOURCES: Mapping[str, type[Body]] = {"base64": ImageData, "url": ImageLink}
RESULT: Mapping[str, type[Body] | None] = {**TEXT, "image": ImageBlock, "tool_reference": None}
USER: Mapping[str, type[Body] | None] = {**TEXT, "image": ImageBlock, "tool_result": ToolResultBlock}
_ELSEWHERE = ("bash_code_execution", "code_execution", "mcp", "text_editor_code_execution", "tool_search")
ASSISTANT: Mapping[str, type[Body] | None] = {
    **TEXT,
    "thinking": ThinkingBlock,
    "tool_use": ToolUseBlock,
    **dict.fromkeys(("redacted_thinking", "server_tool_use", "mcp_tool_use")),
    **dict.fromkeys(f"{name}_tool_result" for name in (*_ELSEWHERE, "advisor", "web_fetch", "web_search")),
}
"""Blocks of the assistant. Encrypted reasoning and calls of server-side tools are left out of the prompt."""
TOOLS: Mapping[str, type[Body] | None] = {**HOSTED, "custom": Tool}
CHOICES: Mapping[str, type[Body]] = {**dict.fromkeys(("auto", "any", "none"), ToolChoice), "tool": NamedToolChoice}
THINKING: Mapping[str, type[Body]] = dict.fromkeys(("enabled", "disabled", "adaptive"), Thinking)
