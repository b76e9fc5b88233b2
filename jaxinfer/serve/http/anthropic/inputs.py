"""Conversion of Messages API requests to chat bodies."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfer.serve.api.ignored import ignore
from jaxinfer.serve.api.requests import ServeLimits
from jaxinfer.serve.frontend.frontend import Frontend
from jaxinfer.serve.http.anthropic.bodies import (
    ASSISTANT,
    CHOICES,
    PASSED,
    RESULT,
    SOURCES,
    TEXT,
    THINKING,
    TOOLS,
    USER,
    CountTokensRequest,
    ImageBlock,
    ImageData,
    ImageLink,
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
    item_of,
    items_of,
    off_loop,
    pieces_of,
    refuse,
    renamed_to,
    served,
    text_of,
)
from jaxinfer.serve.http.fields import Body, checked
from jaxinfer.serve.http.requests import ChatCompletionRequest
from jaxinfer.serve.workers.normalize import thinking_switches
from jaxinfer.text.contents import GivenImage

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


def rename_message_fields() -> contextlib.AbstractContextManager[None]:
    """Rename chat fields in errors raised inside to the field names of the Messages API."""
    return renamed_to(_NAMES, "input_schema")


async def chat_of(body: CountTokensRequest, limits: ServeLimits, frontend: Frontend) -> ChatCompletionRequest:
    """Convert a request to a chat body.

    Raises:
        ServeError: INVALID, naming field and value.
    """
    check_count("messages", body.messages, limits.messages)
    messages, tools = await off_loop(lambda: (messages_of(body), _tools(body)), body.messages, body.tools, body.system)
    passed = {name: getattr(body, name, None) for name in PASSED}
    with rename_message_fields():
        renamed = _renamed(body) | _thinking(body, frontend)
        return chat_body(messages=messages, tools=tools, **passed, **_begun(body, messages), **renamed)


def _begun(body: CountTokensRequest, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the chat fields that continue the last message, if it is the assistant's."""
    last = messages[-1] if messages else {"role": ""}
    if last["role"] != "assistant":
        return {}
    if "tool_calls" in last:
        place, reason = f"messages[{len(body.messages) - 1}].content", "cannot be continued: its tool_result is missing"
        refuse(place, "tool_use", reason)
    return {"add_generation_prompt": False, "continue_final_message": True}


def messages_of(body: CountTokensRequest) -> list[dict[str, Any]]:
    """Convert to chat messages: each tool result becomes a message; consecutive messages of a role are joined.

    Raises:
        ServeError: INVALID, naming field and value.
    """
    turns = Turns()
    if body.system is not None:
        turns.say("system", text_of("system", body.system, TEXT))
    for rank, value in enumerate(body.messages):
        _add(turns, f"messages[{rank}]", value)
    return turns.messages


def _add(turns: Turns, path: str, value: Mapping[str, Any]) -> None:
    message = checked(Message, value, path)
    path, content = f"{path}.content", message.content
    if message.role == "system":
        turns.say("system", text_of(path, content, TEXT))
    else:
        _add_blocks(turns, path, content, message.role)


def _add_blocks(turns: Turns, path: str, content: Any, role: str) -> None:
    kinds = ASSISTANT if role == "assistant" else USER
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list):
        refuse(path, content, f"must be text or a list of blocks: {served(kinds)}")
    for rank, block in enumerate(blocks):
        _say(turns, role, f"{path}[{rank}]", item_of(f"{path}[{rank}]", block, kinds))


def _say(turns: Turns, role: str, path: str, block: Body | None) -> None:
    match block:
        case TextBlock(text=text) if role == "assistant":
            turns.answer(text)
        case TextBlock(text=text):
            turns.ask(text)
        case ImageBlock():
            turns.ask(_image(path, block))
        case ThinkingBlock(thinking=thought):
            turns.think(thought)
        case ToolUseBlock(id=call_id, name=name, input=arguments):
            turns.call(call_id, name, arguments)
        case ToolResultBlock(tool_use_id=call_id, content=content):
            turns.say("tool", *pieces_of(f"{path}.content", content, RESULT, _image_of), tool_call_id=call_id)


def _image_of(path: str, block: Body | None) -> GivenImage | None:
    return _image(path, block) if isinstance(block, ImageBlock) else None


def _image(path: str, block: ImageBlock) -> GivenImage:
    source = item_of(f"{path}.source", block.source, SOURCES)
    if isinstance(source, ImageLink):
        return GivenImage(path, block.type, "source.url", source.url)
    assert isinstance(source, ImageData)
    return GivenImage(path, block.type, "source.data", f"data:{source.media_type};base64,{source.data}")


def _renamed(body: CountTokensRequest) -> dict[str, Any]:
    """Return the fields that have other names or another format in a chat."""
    form = body.output_config and body.output_config.format
    return {
        "stop": getattr(body, "stop_sequences", None),
        "response_format": _format(form),
        **_choice(body.tool_choice),
    }


def _tools(body: CountTokensRequest) -> list[dict[str, Any]] | None:
    tools = body.tools and [tool if tool.get("type") is not None else {**tool, "type": "custom"} for tool in body.tools]
    return items_of("tools", tools, TOOLS, _tool)


def _tool(tool: Tool) -> dict[str, Any]:
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
    """Convert an output format to a chat's response_format, in which a schema has a name."""
    if not isinstance(given, dict) or given.get("type") != "json_schema":
        return given
    schema = {name: value for name, value in given.items() if name != "type"}
    return {"type": "json_schema", "json_schema": {"name": "output", **schema}}


def _thinking(body: CountTokensRequest, frontend: Frontend) -> dict[str, Any]:
    """Return the chat fields that switch reasoning on or off and set its effort. Settings that the model does not
    support have no effect."""
    effort = None if body.output_config is None else body.output_config.effort
    fields: dict[str, Any] = {"reasoning_effort": effort, "chat_template_kwargs": body.chat_template_kwargs}
    if body.thinking is None:
        return fields
    thinking = item_of("thinking", body.thinking, THINKING)
    assert isinstance(thinking, Thinking)
    fields |= {"include_reasoning": False if thinking.display == _OMITTED else None}
    budget, bounded = thinking.budget_tokens, frontend.ends_thoughts or (thinking.budget_tokens or 0) <= 0
    fields |= {"thinking_token_budget": budget if bounded or not ignore("thinking.budget_tokens") else None}
    if thinking.type == "enabled":
        return fields | _switched_on(fields["chat_template_kwargs"], frontend)
    return fields | (_switched_off(frontend) if thinking.type == "disabled" else {})


def _switched_on(variables: Any, frontend: Frontend) -> dict[str, Any]:
    switches = thinking_switches(_sources(frontend))
    if not switches and frontend.parsers.reasoning is None:
        _without_effect("enabled", "the model is not known to think")
    return {"chat_template_kwargs": {**dict.fromkeys(switches, True), **(variables or {})}}


def _switched_off(frontend: Frontend) -> dict[str, Any]:
    """Return the field that switches reasoning off, {} if the model has no reasoning."""
    sources = _sources(frontend)
    if thinking_switches(sources) or any("reasoning_effort" in source for source in sources):
        return {"reasoning_effort": "none"}
    if frontend.parsers.reasoning is not None:
        _without_effect("disabled", "the model's chat template cannot keep it from thinking")
    return {}


def _without_effect(kind: str, why: str) -> None:
    if not ignore("thinking.type"):
        refuse("thinking.type", kind, f"is not served: {why}")


def _sources(frontend: Frontend) -> list[str]:
    return [] if frontend.template is None else list(frontend.template.sources.values())
