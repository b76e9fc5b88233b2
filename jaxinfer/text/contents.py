"""Normalisation of chat messages for templates: every API converts their content to text here.

Served models read text only, so a content part of another kind (an image, audio, a file) is rejected with its path.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn

from jaxinfer.sampling_params import RequestError
from jaxinfer.text.chat_template import ChatTemplate

_KINDS = ("text", "refusal")  # content part types, each with its text in a field of that name
_ASKS_FOR_NONE = re.compile(r"content\W{0,3}\s+is\s+(?:not\s+)?none")


def asks_for_none(sources: Sequence[str]) -> bool:
    """Return whether a template tests for a message with calls and no content; other templates would write "None"."""
    return any(map(_ASKS_FOR_NONE.search, sources))


def message_of(path: str, message: Any, none: bool = True) -> dict[str, Any]:
    """Return the message with text as its content, and without null fields. A refusal becomes content of the assistant.

    Args:
        path: path of the message in its request, for errors.
        none: keep null content next to calls; otherwise it becomes an empty text, as it does without calls.

    Raises:
        RequestError: the message has no role, or content that is not text; names path and value.
    """
    if not isinstance(message, Mapping):
        _refuse(path, message, "must be an object")
    if not isinstance(message.get("role"), str):
        _refuse(f"{path}.role", message.get("role"), "must be a string")
    made = {name: value for name, value in message.items() if value is not None}
    if made.get("tool_calls") == []:  # templates only test whether the field is present
        del made["tool_calls"]
    if "content" in message or made["role"] in ("assistant", "tool"):
        said = [text_of(f"{path}.{name}", made.pop(name, None)) for name in ("content", "refusal")]
        keeps = message.get("content") is None and none and "tool_calls" in made and not any(said)
        made["content"] = None if keeps else "\n".join(filter(None, said))
    return made


def messages_of(path: str, messages: Any, template: ChatTemplate) -> list[dict[str, Any]]:
    """Return a conversation normalised for the template, see `message_of`.

    Raises:
        RequestError: a message is invalid; names path and value.
    """
    if not isinstance(messages, list | tuple):
        _refuse(path, messages, "must be a list of messages")
    none = asks_for_none(list(template.sources.values()))
    return [message_of(f"{path}[{rank}]", message, none) for rank, message in enumerate(messages)]


def text_part(path: str, part: Any) -> str:
    """Return the text of a content part in OpenAI's format.

    Raises:
        RequestError: it is a part of another kind.
    """
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in _KINDS:
        _refuse(f"{path}.type", kind, "is not served: parts of a message are text")
    if not isinstance(part.get(kind), str):
        _refuse(f"{path}.{kind}", part.get(kind), "must be a string")
    text: str = part[kind]
    return text


def text_of(
    path: str, content: Any, part: Callable[[str, Any], str] = text_part, kinds: Collection[str] = ("text",)
) -> str:
    """Return the text of a content: a string, the texts of a list of parts joined by newlines, or "" for null.

    Args:
        part: reads the part at a path.
        kinds: part types that ``part`` reads.

    Raises:
        RequestError: it is none of these; or as raised by ``part``.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list | tuple):
        _refuse(path, content, f"must be text or a list of parts: {', '.join(sorted(kinds))}")
    return "\n".join(part(f"{path}[{rank}]", each) for rank, each in enumerate(content))


def _refuse(path: str, value: Any, reason: str) -> NoReturn:
    raise RequestError(path, f"={reprlib.repr(value)[:200]} {reason}")
