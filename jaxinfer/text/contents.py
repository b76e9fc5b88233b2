"""Messages of conversations as chat templates take them: their content is text. Every door reads them here.

Models that are served read text alone, so a part of another kind (an image, audio, a file) is refused by its place.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn

from jaxinfer.sampling_params import RequestError
from jaxinfer.text.chat_template import ChatTemplate

_KINDS = ("text", "refusal")  # of parts, which are fields of theirs, too
_ASKS_FOR_NONE = re.compile(r"content\W{0,3}\s+is\s+(?:not\s+)?none")


def asks_for_none(sources: Sequence[str]) -> bool:
    """Whether a template of these sources asks if a message with calls has no content; others would write "None"."""
    return any(map(_ASKS_FOR_NONE.search, sources))


def message_of(path: str, message: Any, none: bool = True) -> dict[str, Any]:
    """The message with text as its content, and without fields that are null. A refusal is what the assistant has said.

    Args:
        path: of the message in its request, for refusals.
        none: beside calls, content that is null stays so; else it is an empty text, as it is without calls.

    Raises:
        RequestError: the message has no role, or content that is no text; names place and value.
    """
    if not isinstance(message, Mapping):
        _refuse(path, message, "must be an object")
    if not isinstance(message.get("role"), str):
        _refuse(f"{path}.role", message.get("role"), "must be a string")
    made = {name: value for name, value in message.items() if value is not None}
    if made.get("tool_calls") == []:  # templates ask whether there are some by the field alone
        del made["tool_calls"]
    if "content" in message or made["role"] in ("assistant", "tool"):
        said = [text_of(f"{path}.{name}", made.pop(name, None)) for name in ("content", "refusal")]
        keeps = message.get("content") is None and none and "tool_calls" in made and not any(said)
        made["content"] = None if keeps else "\n".join(filter(None, said))
    return made


def messages_of(path: str, messages: Any, template: ChatTemplate) -> list[dict[str, Any]]:
    """A conversation as the template takes it, see `message_of`.

    Raises:
        RequestError: a message cannot be read; names place and value.
    """
    if not isinstance(messages, list | tuple):
        _refuse(path, messages, "must be a list of messages")
    none = asks_for_none(list(template.sources.values()))
    return [message_of(f"{path}[{rank}]", message, none) for rank, message in enumerate(messages)]


def text_part(path: str, part: Any) -> str:
    """The text of a part in OpenAI's shape.

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
    """The text of a content: a text, the texts of a list of parts, one under the other, or of null the empty text.

    Args:
        part: reads the part at a path.
        kinds: of parts that ``part`` reads.

    Raises:
        RequestError: it is none of these; or what ``part`` raises.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list | tuple):
        _refuse(path, content, f"must be text or a list of parts: {', '.join(sorted(kinds))}")
    return "\n".join(part(f"{path}[{rank}]", each) for rank, each in enumerate(content))


def _refuse(path: str, value: Any, reason: str) -> NoReturn:
    raise RequestError(path, f"={reprlib.repr(value)[:200]} {reason}")
