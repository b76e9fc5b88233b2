"""A request for a message, as the body of a chat."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from jaxinfer.serve.calls import ServeLimits
from jaxinfer.serve.fitting import thinking_switches
from jaxinfer.serve.frontend import Frontend
from jaxinfer.serve.http.anthropic.bodies import (
    ASSISTANT,
    CHOICES,
    PASSED,
    TEXT,
    THINKING,
    TOOLS,
    USER,
    CountTokensRequest,
    Message,
    TextBlock,
    Thinking,
    ThinkingBlock,
    Tool,
    ToolResultBlock,
    ToolUseBlock,
)
from jaxinfer.serve.http.events.inputs import (
    Turns,
    chat_body,
    check_count,
    in_the_words_of,
    item_of,
    off_loop,
    refuse,
    text_of,
    within,
)
from jaxinfer.serve.http.requests import Body, ChatCompletionRequest, checked

_NAMES = {
    "stop": "stop_sequences",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "thinking_token_budget": "thinking.budget_tokens",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format",
    "structured_outputs": "output_config.format",
}
_OMITTED = "omitted"
_CHOICE = {"auto": "auto", "any": "required", "none": "none"}


def in_its_words() -> contextlib.AbstractContextManager[None]:
    """A refusal inside names fields of a chat as requests for messages call them."""
    return in_the_words_of(_NAMES, "input_schema")


async def chat_of(body: CountTokensRequest, limits: ServeLimits, frontend: Frontend) -> ChatCompletionRequest:
    """The body of the chat that a request is.

    Raises:
        ServeError: INVALID, naming field and value.
    """
    check_count("messages", body.messages, limits.messages)
    messages, tools = await off_loop(lambda: (messages_of(body), _tools(body)), body.messages, body.tools, body.system)
    passed = {name: getattr(body, name, None) for name in PASSED}
    with in_its_words():
        return chat_body(messages=messages, tools=tools, **passed, **_renamed(body), **_thinking(body, frontend))


def messages_of(body: CountTokensRequest) -> list[dict[str, Any]]:
    """The messages of a chat: each result of a tool is one of its own; neighbours of one role are one.

    Raises:
        ServeError: INVALID, naming field and value.
    """
    turns = Turns()
    if body.system is not None:
        turns.say("system", text_of("system", body.system, TEXT))
    for rank, value in enumerate(body.messages):
        _add(turns, f"messages[{rank}]", value)
    if turns.role == "assistant":
        refuse(f"messages[{len(body.messages) - 1}].role", "assistant", "is not served: nothing begins an answer")
    return turns.messages


def _add(turns: Turns, path: str, value: Mapping[str, Any]) -> None:
    with within(path):
        message = checked(Message, value)
    path, content = f"{path}.content", message.content
    if message.role == "system":
        turns.say("system", text_of(path, content, TEXT))
    else:
        _add_blocks(turns, path, content, message.role)


def _add_blocks(turns: Turns, path: str, content: Any, role: str) -> None:
    kinds = ASSISTANT if role == "assistant" else USER
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list):
        refuse(path, content, f"must be text or a list of blocks: {', '.join(sorted(kinds))}")
    for rank, block in enumerate(blocks):
        _say(turns, role, f"{path}[{rank}]", item_of(f"{path}[{rank}]", block, kinds))


def _say(turns: Turns, role: str, path: str, block: Body) -> None:
    match block:
        case TextBlock(text=text) if role == "assistant":
            turns.answer(text)
        case TextBlock(text=text):
            turns.ask(text)
        case ThinkingBlock(thinking=thought):
            turns.think(thought)
        case ToolUseBlock(id=call_id, name=name, input=arguments):
            turns.call(call_id, name, arguments)
        case ToolResultBlock(tool_use_id=call_id, content=content):
            turns.say("tool", text_of(f"{path}.content", content, TEXT), tool_call_id=call_id)


def _renamed(body: CountTokensRequest) -> dict[str, Any]:
    """Fields that a chat has by other names, or in another shape."""
    form = body.output_config and body.output_config.format
    return {
        "stop": getattr(body, "stop_sequences", None),
        "response_format": _format(form),
        **_choice(body.tool_choice),
    }


def _tools(body: CountTokensRequest) -> list[dict[str, Any]] | None:
    return None if body.tools is None else [_tool(rank, tool) for rank, tool in enumerate(body.tools)]


def _tool(rank: int, value: Mapping[str, Any]) -> dict[str, Any]:
    whole = value if value.get("type") is not None else {**value, "type": "custom"}
    tool = item_of(f"tools[{rank}]", whole, TOOLS)
    assert isinstance(tool, Tool)
    fields = {"description": tool.description, "parameters": tool.input_schema, "strict": tool.strict}
    named = {"name": tool.name, **{name: value for name, value in fields.items() if value is not None}}
    return {"type": "function", "function": named}


def _choice(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    choice: Any = item_of("tool_choice", value, CHOICES)
    named = {"type": "function", "function": {"name": getattr(choice, "name", "")}}
    parallel = False if choice.disable_parallel_tool_use else None
    return {"tool_choice": _CHOICE.get(choice.type, named), "parallel_tool_calls": parallel}


def _format(given: Any) -> Any:
    """As a chat has it, where a schema has a name."""
    if not isinstance(given, dict) or given.get("type") != "json_schema":
        return given
    schema = {name: value for name, value in given.items() if name != "type"}
    return {"type": "json_schema", "json_schema": {"name": "output", **schema}}


def _thinking(body: CountTokensRequest, frontend: Frontend) -> dict[str, Any]:
    """The fields of a chat by which a template is told whether to think, and how much.

    Raises:
        ServeError: INVALID: the template cannot be told.
    """
    effort = None if body.output_config is None else body.output_config.effort
    fields: dict[str, Any] = {"reasoning_effort": effort, "chat_template_kwargs": body.chat_template_kwargs}
    if body.thinking is None:
        return fields
    thinking = item_of("thinking", body.thinking, THINKING)
    assert isinstance(thinking, Thinking)
    fields |= {"include_reasoning": False if thinking.display == _OMITTED else None}
    fields |= {"thinking_token_budget": thinking.budget_tokens}
    if thinking.type == "enabled":
        return fields | _switched_on(fields["chat_template_kwargs"], frontend)
    return fields | (_switched_off(frontend) if thinking.type == "disabled" else {})


def _switched_on(variables: Any, frontend: Frontend) -> dict[str, Any]:
    switches = thinking_switches(_sources(frontend))
    if not switches and frontend.parsers.reasoning is None:
        refuse("thinking.type", "enabled", "is not served: the model is not known to think")
    return {"chat_template_kwargs": {**dict.fromkeys(switches, True), **(variables or {})}}


def _switched_off(frontend: Frontend) -> dict[str, Any]:
    """Nothing, where nothing thinks."""
    sources = _sources(frontend)
    if thinking_switches(sources) or any("reasoning_effort" in source for source in sources):
        return {"reasoning_effort": "none"}
    if frontend.parsers.reasoning is not None:
        refuse("thinking.type", "disabled", "is not served: the model's chat template cannot keep it from thinking")
    return {}


def _sources(frontend: Frontend) -> list[str]:
    return [] if frontend.template is None else list(frontend.template.sources.values())
