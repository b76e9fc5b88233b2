"""Request body of the Responses API, and its input items.

Tables define which fields are served and how the remaining fields are treated (`jaxinfer.serve.http.fields`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, WithJsonSchema

from jaxinfer.sampling_params import PARAMETERS
from jaxinfer.serve.api.errors import Kind, ServeError, short
from jaxinfer.serve.api.ignored import ignore
from jaxinfer.serve.frontend.chat.terms import Effort
from jaxinfer.serve.http.fields import Body
from jaxinfer.serve.http.requests import ACCOUNTING, HOSTED, NOTHING, Integer, Objects, with_sampling

LOGPROBS = "message.output_text.logprobs"
INCLUDED: Mapping[str, None] = dict.fromkeys(
    (
        *("code_interpreter_call.outputs", "computer_call_output.output.image_url", "file_search_call.results"),
        *("message.input_image.image_url", "reasoning.encrypted_content"),
        *("web_search_call.action.sources", "web_search_call.results"),
    )
)
"""Values of ``include`` besides `LOGPROBS`; none of them adds anything: reasoning is always sent as text."""
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
    """Reasoning options. Summaries are not generated: the reasoning text itself is returned."""

    without_effect: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "summary": (None, "auto"),
        "generate_summary": (None, "auto"),
        "context": (None, "auto"),
        "mode": (None, "standard"),
    }

    effort: Effort | None = None


class TextOptions(Body):
    """Format of the output text."""

    without_effect: ClassVar[Mapping[str, tuple[Any, ...]]] = {"verbosity": (None, "medium")}

    format: Annotated[Any, WithJsonSchema({"anyOf": [_FORMAT, {"type": "null"}]})] = None


class ResponsesStreamOptions(Body):
    """Stream options, all without effect."""

    without_effect: ClassVar[Mapping[str, tuple[Any, ...]]] = {"include_obfuscation": (None, False)}


def _included(names: list[str] | None) -> list[str]:
    """Return the served values of ``include``.

    Raises:
        ServeError: INVALID: a value is unknown.
    """
    for rank, name in enumerate(names or ()):
        if name != LOGPROBS and not (name in INCLUDED and ignore(f"include={name}")):
            known = f"must be one of {', '.join((LOGPROBS, *INCLUDED))}"
            raise ServeError(Kind.INVALID, f"include[{rank}]={short(name)} {known}", f"include[{rank}]")
    return [name for name in names or () if name == LOGPROBS]


_SAMPLING = tuple(row.name for row in PARAMETERS.values() if "responses" in row.also_in)


class ResponsesRequest(with_sampling(Body, _SAMPLING)):  # type: ignore[misc]
    """Create a response (``POST /v1/responses``). Responses are not stored: requests must include all earlier items."""

    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "background": (None, False),
        "conversation": NOTHING,
        "moderation": NOTHING,
        "previous_response_id": NOTHING,
        "prompt": NOTHING,
    }
    without_effect: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **ACCOUNTING,
        "client_metadata": NOTHING,
        "context_management": (None, []),
        "max_tool_calls": NOTHING,
        "truncation": (None, "disabled"),
    }
    renamed: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("response_format", "guided_json", "structured_outputs", "format"), "text.format"),
        **dict.fromkeys(("max_tokens", "max_completion_tokens"), "max_output_tokens"),
        **dict.fromkeys(("reasoning_effort", "effort"), "reasoning.effort"),
        "messages": "input",
        "system": "instructions",
        "verbosity": "text.verbosity",
    }

    model: str | None = None
    input: Annotated[Any, WithJsonSchema(_INPUT)]
    instructions: str | None = None
    tools: Objects | None = None
    tool_choice: Annotated[Any, WithJsonSchema(_CHOICE)] = None
    parallel_tool_calls: Annotated[bool | None, Field(description="false: return only the first tool call.")] = None
    max_output_tokens: Integer = None
    include: Annotated[list[str] | None, AfterValidator(_included)] = None
    top_logprobs: Integer = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    metadata: Texts | None = None
    request_id: Annotated[
        str | None, Field(description="Request id (default: the header X-Request-Id, or generated).")
    ] = None
    priority: int | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


PASSED = (
    *("model", "parallel_tool_calls", "stream", "request_id", "priority", "cache_salt", "chat_template_kwargs"),
    *_SAMPLING,
)
"""Fields with the same name in a chat request."""


class Item(Body):
    """An input item. Clients send output items back unchanged, hence the labels."""

    labels: ClassVar[frozenset[str]] = frozenset({"id", "status", "created_by"})


class InputText(Body):
    """Text of a message or of a tool result."""

    type: Literal["input_text"]
    text: str


class InputImage(Body):
    """An image of a message or of a tool result."""

    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {"file_id": NOTHING}

    type: Literal["input_image"]
    image_url: str
    detail: Any = None


class OutputText(Body):
    """Text generated by the model."""

    labels: ClassVar[frozenset[str]] = frozenset({"annotations", "logprobs", "parsed"})

    type: Literal["output_text"]
    text: str


class Refusal(Body):
    """Refusal text generated by the model."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class ReasoningText(Body):
    """Reasoning text."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class MessageItem(Item):
    """A message item; its role determines the allowed content."""

    labels: ClassVar[frozenset[str]] = Item.labels | {"phase"}

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Any


class ReasoningItem(Item):
    """Reasoning of an earlier response. Reasoning encrypted by another server cannot be read and is ignored."""

    without_effect: ClassVar[Mapping[str, tuple[Any, ...]]] = {"encrypted_content": NOTHING}

    type: Literal["reasoning"]
    content: Any = None
    summary: Any = None


class CallItem(Item):
    """A function call made by the model. ``arguments``: JSON, unless the model generated invalid JSON."""

    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {"caller": NOTHING, "namespace": NOTHING}
    labels: ClassVar[frozenset[str]] = Item.labels | {"parsed_arguments"}

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class CallOutputItem(Item):
    """Result of a function call."""

    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {"caller": NOTHING, "namespace": NOTHING}
    labels: ClassVar[frozenset[str]] = Item.labels | {"name"}

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Any


class CustomCallItem(Item):
    """A custom tool call with text input."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str


class ShellCallItem(Item):
    """A shell command issued by the model."""

    type: Literal["local_shell_call"]
    call_id: str
    action: dict[str, Any]


class ShellOutputItem(Item):
    """Output of a shell command. ``id``: id of its call."""

    labels: ClassVar[frozenset[str]] = Item.labels - {"id"}

    type: Literal["local_shell_call_output"]
    id: str
    output: str


class FunctionTool(Body):
    """A function that the model may call."""

    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {"async": (None, False)}
    without_effect: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "allowed_callers": (None, ["direct"]),
        "defer_loading": (None, False),
        "output_schema": NOTHING,
    }

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


ITEMS: Mapping[str, type[Body] | None] = {
    "message": MessageItem,
    "reasoning": ReasoningItem,
    "function_call": CallItem,
    "function_call_output": CallOutputItem,
    "custom_tool_call": CustomCallItem,
    "custom_tool_call_output": CallOutputItem,
    "local_shell_call": ShellCallItem,
    "local_shell_call_output": ShellOutputItem,
    **dict.fromkeys(
        (
            *("code_interpreter_call", "computer_call", "computer_call_output", "file_search_call", "ghost_snapshot"),
            *("image_generation_call", "mcp_approval_request", "mcp_approval_response", "mcp_call", "mcp_list_tools"),
            *("tool_search_call", "tool_search_output", "web_search_call"),
        )
    ),
}
TOOLS: Mapping[str, type[Body] | None] = {"function": FunctionTool, **HOSTED}
