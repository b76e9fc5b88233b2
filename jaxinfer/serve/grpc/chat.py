"""Conversion of the message `Chat` of protos/jaxinfer/v1/inference.proto for the front end and the parsers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf import struct_pb2

from jaxinfer.parsers.registry import Parsers
from jaxinfer.protos.v1 import inference_pb2 as pb
from jaxinfer.serve.api.errors import Kind, ServeError, invalid
from jaxinfer.serve.api.requests import Conversation
from jaxinfer.serve.frontend.chat.messages import for_template, message_at, tool_call
from jaxinfer.serve.frontend.chat.terms import AUTO, EFFORTS, NONE, REQUIRED, ChatTerms
from jaxinfer.text.contents import GivenImage

_TERMS = ("tools", "tool_choice", "parallel_tool_calls", "include_reasoning", "reasoning_effort")
NAMES: Mapping[str, str] = {name: f"chat.{name}" for name in ("messages", "template", *_TERMS)}
"""Names in a request of fields of the front end and of `ChatTerms`."""

_MODES = {pb.TOOL_MODE_AUTO: AUTO, pb.TOOL_MODE_NONE: NONE, pb.TOOL_MODE_REQUIRED: REQUIRED}
_BOUNDS = ("min_pixels", "max_pixels")
_EXACT = 2**53  # integers up to this value are exact in a Struct


def optional(message: Any, field: str) -> Any:
    """Return the value of a field, None if it is not set."""
    return getattr(message, field) if message.HasField(field) else None


def conversation_of(chat: pb.Chat) -> Conversation:
    """Return the conversation from which the prompt is rendered.

    Raises:
        ServeError: INVALID, naming the field: it is set twice, or its value is invalid.
    """
    tools = [_object(tool, f"chat.tools[{i}]") for i, tool in enumerate(chat.tools)] or None
    return Conversation(
        messages=[_chat_message(message, f"chat.messages[{i}]") for i, message in enumerate(chat.messages)],
        tools=terms_of(chat, tools).shown_tools,
        add_generation_prompt=chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True,
        variables=_object(chat.template_variables, "chat.template_variables"),
        template=optional(chat, "template"),
        reasoning_effort=_effort(chat),
    )


def terms_of(chat: pb.Chat, tools: Sequence[Mapping[str, Any]] | None) -> ChatTerms:
    """Return the fields that describe the answer.

    Args:
        tools: of the conversation.

    Raises:
        ServeError: INVALID: the tool choice is invalid.
    """
    choice = _choice(chat.tool_choice) if chat.HasField("tool_choice") else None
    return ChatTerms(tools, choice, optional(chat, "parallel_tool_calls"), optional(chat, "include_reasoning"))


def parsers_of(chat: pb.Chat, terms: ChatTerms, known: Parsers) -> Parsers:
    """Return the model's parsers that read the answer: none unless the request sets ``parse``.

    Raises:
        ServeError: INVALID, naming field and value: the request sets a field that needs a missing parser.
    """
    if chat.parse:
        return terms.parsers(known)
    unread = "needs parse=true: the answer is not read"
    if terms.choice.must or terms.choice.names is not None:
        raise invalid("tool_choice", terms.tool_choice, unread)
    for name in ("parallel_tool_calls", "include_reasoning"):
        if getattr(terms, name) is False:
            raise invalid(name, False, unread)
    return Parsers()


def _choice(choice: pb.ToolChoice) -> str | dict[str, Any]:
    """Return a tool choice in OpenAI's format."""
    match choice.WhichOneof("choice"):
        case "mode":
            return _mode(choice.mode, "chat.tool_choice.mode")
        case "function":
            return _function(choice.function)
        case "allowed":
            tools = [_function(name) for name in choice.allowed.functions]
            mode = _mode(choice.allowed.mode, "chat.tool_choice.allowed.mode")
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}
    reason = "chat.tool_choice is not set: give one of mode, function, allowed"
    raise ServeError(Kind.INVALID, reason, field="chat.tool_choice")


def _function(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def _mode(mode: pb.ToolMode, field: str) -> str:
    if mode not in _MODES:
        raise invalid(field, int(mode), f"must be one of {', '.join(map(pb.ToolMode.Name, _MODES))}")
    return _MODES[mode]


def _effort(chat: pb.Chat) -> str | None:
    effort: str | None = optional(chat, "reasoning_effort")
    if effort is not None and effort not in EFFORTS:
        raise invalid("chat.reasoning_effort", effort, f"must be one of {', '.join(EFFORTS)}")
    return effort


def _chat_message(message: pb.ChatMessage, path: str) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": message.role}
    for name in ("content", "tool_call_id", "reasoning"):
        if message.HasField(name):
            plain[name] = getattr(message, name)
    if message.parts:
        if "content" in plain:
            raise ServeError(Kind.INVALID, f"{path}.parts and {path}.content exclude each other", f"{path}.parts")
        plain["content"] = [_part(part, f"{path}.parts[{rank}]") for rank, part in enumerate(message.parts)]
    if message.tool_calls:
        plain["tool_calls"] = [tool_call(call.id, call.name, call.arguments) for call in message.tool_calls]
    fields = _object(message.fields, f"{path}.fields")
    if twice := plain.keys() & fields.keys():
        raise ServeError(Kind.INVALID, f"{path}.fields: {min(twice)} is set by its own field", field=f"{path}.fields")
    return message_at(path, {**for_template(plain), **fields})


def _part(part: pb.Content, path: str) -> dict[str, Any] | GivenImage:
    match part.WhichOneof("part"):
        case "text":
            return {"type": "text", "text": part.text}
        case "image":
            return _image(part.image, path)
        case "video":
            options = {name: optional(part.video, name) for name in (*_BOUNDS, "fps") if part.video.HasField(name)}
            return GivenImage(path, "video", "video.frames", list(part.video.frames), options, video=True)
    raise ServeError(Kind.INVALID, f"{path} is not set: give one of text, image, video", path)


def _image(image: pb.Image, path: str) -> GivenImage:
    name = image.WhichOneof("source")
    if name is None:
        raise ServeError(Kind.INVALID, f"{path}.image.source is not set: give one of data, url", f"{path}.image")
    options = {option: getattr(image, option) for option in _BOUNDS if image.HasField(option)}
    return GivenImage(path, "image", f"image.{name}", getattr(image, name), options)


def _object(struct: struct_pb2.Struct, path: str) -> dict[str, Any]:
    return {name: _json(value, path) for name, value in struct.fields.items()}


def _json(value: struct_pb2.Value, path: str) -> Any:
    """Convert a Struct value to JSON data; whole numbers become int, since templates render 3 and 3.0 differently."""
    match value.WhichOneof("kind"):
        case "number_value":
            number = value.number_value
            if not math.isfinite(number):
                raise ServeError(Kind.INVALID, f"{path}: {number} is no JSON number", field=path)
            return int(number) if number.is_integer() and abs(number) <= _EXACT else number
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
        case "struct_value":
            return _object(value.struct_value, path)
        case "list_value":
            return [_json(item, path) for item in value.list_value.values]
        case _:
            return None
