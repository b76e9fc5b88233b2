"""Conversion of Responses API requests to chat bodies."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from jaxinfer.serve.api.requests import ServeLimits
from jaxinfer.serve.frontend.chat.messages import arguments_of
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
    text_of,
)
from jaxinfer.serve.http.fields import Body, left_out
from jaxinfer.serve.http.requests import ChatCompletionRequest
from jaxinfer.serve.http.responses.bodies import (
    ITEMS,
    LOGPROBS,
    PASSED,
    TOOLS,
    CallItem,
    CallOutputItem,
    CustomCallItem,
    FunctionTool,
    InputImage,
    InputText,
    MessageItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    Refusal,
    ResponsesRequest,
    ShellCallItem,
    ShellOutputItem,
)
from jaxinfer.text.contents import GivenImage, detail_options

_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "structured_outputs": "text.format",
}
_INPUT: Mapping[str, type[Body]] = {"input_text": InputText, "input_image": InputImage}
_OUTPUT: Mapping[str, type[Body]] = {"output_text": OutputText, "refusal": Refusal}
_THOUGHT: Mapping[str, type[Body]] = {"reasoning_text": ReasoningText}
_SUMMARY: Mapping[str, type[Body]] = {"summary_text": ReasoningText}


def rename_input_fields() -> contextlib.AbstractContextManager[None]:
    """Rename chat fields in errors raised inside to the field names of the Responses API."""
    return renamed_to(_NAMES, "parameters")


async def chat_of(body: ResponsesRequest, limits: ServeLimits) -> ChatCompletionRequest:
    """Convert a request to a chat body.

    Raises:
        ServeError: INVALID, naming field and value.
    """
    check_count("input", body.input if isinstance(body.input, list) else [], limits.messages)
    messages, tools = await off_loop(lambda: (messages_of(body), _tools(body)), body.input, body.tools)
    passed = {name: getattr(body, name) for name in PASSED}
    with rename_input_fields():
        return chat_body(messages=messages, tools=tools, **passed, **_renamed(body), **_logprobs(body))


def messages_of(body: ResponsesRequest) -> list[dict[str, Any]]:
    """Convert input items to chat messages; consecutive assistant items form one message.

    Raises:
        ServeError: INVALID, naming field and value.
    """
    turns = Turns()
    if body.instructions is not None:
        turns.say("system", body.instructions)
    if isinstance(body.input, str):
        turns.say("user", body.input)
    elif isinstance(body.input, list) and body.input:
        for rank, item in enumerate(body.input):
            _add(turns, f"input[{rank}]", item)
    else:
        refuse("input", body.input, "must be text, or a list of items that is not empty")
    return turns.messages


def _add(turns: Turns, path: str, value: Any) -> None:
    if isinstance(value, dict) and "type" not in value and "role" in value:
        value = {**value, "type": "message"}
    match item_of(path, value, ITEMS):
        case MessageItem() as item:
            _say(turns, f"{path}.content", item)
        case ReasoningItem() as item:
            if thought := _thought(path, item):
                turns.think(thought)
        case CallItem(call_id=call_id, name=name, arguments=arguments):
            turns.call(call_id, name, arguments_of(arguments))
        case CustomCallItem(call_id=call_id, name=name, input=text):
            turns.call(call_id, name, {"input": text})
        case ShellCallItem(call_id=call_id, action=action):
            turns.call(call_id, "local_shell", action)
        case ShellOutputItem(id=call_id, output=output):
            turns.say("tool", output, tool_call_id=call_id)
        case CallOutputItem(call_id=call_id, output=output):
            turns.say("tool", *pieces_of(f"{path}.output", output, _INPUT, _image), tool_call_id=call_id)


def _say(turns: Turns, path: str, item: MessageItem) -> None:
    if item.role == "assistant":
        turns.answer(text_of(path, item.content, _OUTPUT))
    else:
        turns.say(item.role, *pieces_of(path, item.content, _INPUT, _image))


def _image(path: str, part: Body | None) -> GivenImage | None:
    if not isinstance(part, InputImage):
        return None
    options = detail_options(f"{path}.detail", part.detail)
    return GivenImage(path, part.type, "image_url", part.image_url, options)


def _thought(path: str, item: ReasoningItem) -> str:
    """Return the reasoning text of an item, or its summary if there is no text."""
    if item.content:
        return text_of(f"{path}.content", item.content, _THOUGHT)
    return text_of(f"{path}.summary", item.summary or [], _SUMMARY)


def _renamed(body: ResponsesRequest) -> dict[str, Any]:
    """Return the fields that have other names or another format in a chat."""
    return {
        "tool_choice": _choice(body.tool_choice),
        "max_tokens": body.max_output_tokens,
        "reasoning_effort": body.reasoning and body.reasoning.effort,
        "response_format": _format(body.text and body.text.format),
    }


def _tools(body: ResponsesRequest) -> list[dict[str, Any]] | None:
    return items_of("tools", body.tools, TOOLS, _tool)


def _tool(tool: FunctionTool) -> dict[str, Any]:
    fields = ((name, getattr(tool, name)) for name in ("name", "description", "parameters", "strict"))
    return {"type": "function", "function": {name: value for name, value in fields if value is not None}}


def _choice(choice: Any) -> Any:
    """Convert a tool choice to chat format, which nests the function name one level deeper."""
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "function":
        return _named(choice)
    if kind == "allowed_tools":
        tools = choice.get("tools")
        listed = enumerate(tools if isinstance(tools, list) else ())
        shown = [tool for rank, tool in listed if not _is_left_out(f"tool_choice.tools[{rank}]", tool)]
        named = list(map(_named, shown)) if isinstance(tools, list) else tools
        allowed = {name: value for name, value in choice.items() if name != "type"}
        return {"type": kind, kind: {**allowed, "tools": named}}
    return choice


def _is_left_out(path: str, tool: Any) -> bool:
    return isinstance(tool, dict) and left_out(path, tool.get("type"), TOOLS)


def _named(tool: Any) -> Any:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        return tool
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _format(given: Any) -> Any:
    if not isinstance(given, dict) or given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {name: value for name, value in given.items() if name != "type"}}


def _logprobs(body: ResponsesRequest) -> dict[str, Any]:
    if body.top_logprobs == -1:
        refuse("top_logprobs", -1, "is served by chat completions and gRPC alone")
    if LOGPROBS in (body.include or ()):
        return {"logprobs": True, "top_logprobs": body.top_logprobs}
    if body.top_logprobs not in (None, 0):
        refuse("top_logprobs", body.top_logprobs, f"needs include={[LOGPROBS]}")
    return {}
