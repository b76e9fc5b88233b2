"""Conversion of chat messages and tool choices, in OpenAI's format or as records of answers, to protobuf messages."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from jaxinfer.client.fields import extend, guarded, set_field, set_struct
from jaxinfer.protos.v1 import inference_pb2 as pb

ChatMessage = Mapping[str, Any]
_MODES = {"auto": pb.TOOL_MODE_AUTO, "none": pb.TOOL_MODE_NONE, "required": pb.TOOL_MODE_REQUIRED}
_TYPED = ("content", "tool_call_id", "reasoning")
_IMAGES = ("image", "image_url")
_OPTIONS = ("min_pixels", "max_pixels")
_VIDEO = "video"
_LOW = 512 * 512  # pixels of OpenAI's detail "low"


@dataclasses.dataclass
class ToolCall:
    """A tool call. ``arguments``: JSON, as far as the model writes JSON."""

    id: str
    name: str
    arguments: str = ""


def set_message(item: pb.ChatMessage, message: ChatMessage) -> None:
    """Set a message in OpenAI's format; fields without a protobuf field are passed to the template unchanged.

    Raises:
        ValueError: a value that the message cannot carry; the sentence names it.
        OSError: the file of an image cannot be read.
    """
    fields = dict(message)
    set_field(item, "role", fields.pop("role", ""))
    for name in _TYPED:
        if isinstance(fields.get(name), str):
            set_field(item, name, fields.pop(name))
    if _has_images(fields.get("content")):
        for part in fields.pop("content"):
            _set_part(item.parts.add(), part)
    calls = _calls(fields.get("tool_calls"))
    if calls:
        del fields["tool_calls"]
        for call in calls:
            guarded("tool_calls", call, _add_call, item, call)
    if fields:
        set_struct("messages", item.fields, fields)


def _has_images(content: Any) -> bool:
    parts = content if isinstance(content, (list, tuple)) else ()
    return any(isinstance(part, Mapping) and part.get("type") in (*_IMAGES, _VIDEO) for part in parts)


def _set_part(item: pb.Content, part: Any) -> None:
    """Set a text part, a video (``{"type": "video", "video": [frame, ...], "fps": 2}``), or an image: OpenAI's
    ``image_url``, or ``{"type": "image", "image": ...}`` with the bytes, the path or the URL of a file."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == _VIDEO:
        _set_video(item.video, part)
        return
    if kind not in _IMAGES:
        set_field(item, "text", part.get("text") if kind == "text" else None)
        return
    image = part.get(kind)
    options = image if isinstance(image, Mapping) else part
    source = image.get("url") if isinstance(image, Mapping) else image
    if isinstance(source, str) and source.startswith(("data:", "http://", "https://")):
        set_field(item.image, "url", source)
    elif kind == "image" and isinstance(source, (str, os.PathLike)):
        item.image.data = pathlib.Path(source).read_bytes()
    else:
        set_field(item.image, "data", source)
    for name, value in (("max_pixels", _LOW if options.get("detail") == "low" else None), *options.items()):
        if name in _OPTIONS and value is not None:
            set_field(item.image, name, value)


def _set_video(item: pb.Video, part: Mapping[str, Any]) -> None:
    frames: Any = part.get(_VIDEO)
    listed = frames if isinstance(frames, (list, tuple)) else ()
    read = [pathlib.Path(each).read_bytes() if isinstance(each, (str, os.PathLike)) else each for each in listed]
    extend(_VIDEO, item.frames, read if listed else frames)
    for name in ("fps", *_OPTIONS):
        if part.get(name) is not None:
            set_field(item, name, part[name])


def _add_call(item: pb.ChatMessage, call: ToolCall) -> None:
    item.tool_calls.add(id=call.id, name=call.name, arguments=call.arguments)


def set_choice(message: pb.ToolChoice, choice: Any) -> None:
    """Set a tool choice: "auto", "none", "required", or OpenAI's object that names functions.

    Raises:
        ValueError: the choice has another form.
    """
    if isinstance(choice, str) and choice in _MODES:
        message.mode = _MODES[choice]
    elif (name := _name(choice)) is not None:
        message.function = name
    elif (allowed := _allowed(choice)) is not None:
        message.allowed.CopyFrom(allowed)
    else:
        kinds = "'auto', 'none', 'required', or an object of the type 'function' or 'allowed_tools'"
        raise ValueError(f"tool_choice={choice!r:.100} must be {kinds}")


def _calls(calls: Any) -> list[ToolCall]:
    """Return calls with arguments as text; empty if any item has another form."""
    found = [_call(each) for each in calls] if isinstance(calls, list | tuple) else []
    return [each for each in found if each is not None] if None not in found else []


def _call(call: Any) -> ToolCall | None:
    if isinstance(call, ToolCall):
        return call
    function = _function(call, {"id", "type", "function"}, {"name", "arguments"})
    values = (*function.values(), call.get("id")) if function is not None else (None,)
    if function is None or not all(isinstance(value, str) for value in values):
        return None
    return ToolCall(call["id"], function["name"], function["arguments"])


def _name(choice: Any) -> str | None:
    function = _function(choice, {"type", "function"}, {"name"})
    return function["name"] if function is not None and isinstance(function["name"], str) else None


def _function(value: Any, names: set[str], within: set[str]) -> Mapping[str, Any] | None:
    """Return the function of an object with exactly these keys; None for any other object."""
    if not isinstance(value, Mapping) or value.keys() != names or value["type"] != "function":
        return None
    function = value["function"]
    return function if isinstance(function, Mapping) and function.keys() == within else None


def _allowed(choice: Any) -> pb.AllowedTools | None:
    allowed = choice.get("allowed_tools") if isinstance(choice, Mapping) else None
    if not isinstance(allowed, Mapping) or allowed.keys() != {"mode", "tools"}:
        return None
    mode, tools = allowed["mode"], allowed["tools"]
    names = [_name(tool) for tool in tools] if isinstance(tools, list) else [None]
    known = [name for name in names if name is not None]
    if len(known) < len(names) or not isinstance(mode, str) or mode not in _MODES:
        return None
    return pb.AllowedTools(mode=_MODES[mode], functions=known)
