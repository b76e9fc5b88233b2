"""Bodies in items become bodies of chats: items checked one by one, in the words of their door."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from jaxinfer.serve.errors import Kind, ServeError
from jaxinfer.serve.http.errors import short
from jaxinfer.serve.http.requests import Body, ChatCompletionRequest, checked

_FEW = 256
_FUNCTION, _PARAMETERS = (re.compile(rf"^(tools\[\d+\])\.{name}\b") for name in ("function", "parameters"))
_PATH = re.compile(r"[\w.\[\]]*")


def item_of(path: str, value: Any, kinds: Mapping[str, type[Body]]) -> Body:
    """An item by its ``type``.

    Args:
        path: where it is, for a refusal.

    Raises:
        ServeError: INVALID, naming field and value.
    """
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in kinds:
        refuse(f"{path}.type", kind, f"is not served: it may be {', '.join(sorted(kinds))}")
    with within(path):
        return checked(kinds[kind], value)


def text_of(path: str, content: Any, kinds: Mapping[str, type[Body]]) -> str:
    """A text, or the texts of a list of parts, one under the other.

    Raises:
        ServeError: INVALID, naming field and value: there is something that is no text.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        refuse(path, content, f"must be text or a list of parts: {', '.join(sorted(kinds))}")
    parts = (item_of(f"{path}[{rank}]", part, kinds) for rank, part in enumerate(content))
    return "\n".join(getattr(part, "text", "") for part in parts)


class Turns:
    """Messages of a chat, made of smaller things: what the assistant thinks, says and calls in one turn is one message.

    Attributes:
        messages: of the chat.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._turn: dict[str, Any] | None = None

    def say(self, role: str, text: str, **fields: Any) -> None:
        """A whole message of somebody else."""
        self._turn = None
        self.messages.append({"role": role, "content": text, **fields})

    def ask(self, text: str) -> None:
        """More of the user, in one message with what is just before it."""
        if self._turn is None and self.messages and self.messages[-1]["role"] == "user":
            self.messages[-1]["content"] += f"\n{text}"
        else:
            self.say("user", text)

    def think(self, text: str) -> None:
        turn = self._assistant()
        before = turn.get("reasoning_content")
        turn["reasoning_content"] = text if before is None else f"{before}\n{text}"

    def answer(self, text: str) -> None:
        """Text of the assistant; around calls it stands without a line end, as it was made."""
        turn = self._assistant()
        glue = "\n" if turn["content"] and "tool_calls" not in turn else ""
        turn["content"] = f"{turn['content'] or ''}{glue}{text}"

    def call(self, call_id: str, name: str, arguments: Any) -> None:
        turn = self._assistant()
        turn["content"] = turn["content"] or None
        function = {"name": name, "arguments": arguments}
        turn.setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})

    def _assistant(self) -> dict[str, Any]:
        if self._turn is None:
            self._turn = {"role": "assistant", "content": ""}
            self.messages.append(self._turn)
        return self._turn


def chat_body(**fields: Any) -> ChatCompletionRequest:
    """The body of a chat; fields that are None are not set.

    Raises:
        ServeError: INVALID, in the chat's words: see `in_the_words_of`.
    """
    return checked(ChatCompletionRequest, {name: value for name, value in fields.items() if value is not None})


@contextlib.contextmanager
def within(path: str) -> Iterator[None]:
    """A refusal inside is about something of ``path``."""
    with _renamed(lambda field: f"{path}.{field}"):
        yield


@contextlib.contextmanager
def in_the_words_of(names: Mapping[str, str], parameters: str) -> Iterator[None]:
    """A refusal inside names fields of a chat as another door calls them.

    Args:
        names: of fields that have another name there.
        parameters: what it calls the schema of a tool, which has no ``function`` around it there.
    """

    def name(path: str) -> str:
        for known in sorted(names, key=len, reverse=True):
            if re.match(rf"{re.escape(known)}(?=[.\[]|$)", path):
                return names[known] + path.removeprefix(known)
        return _PARAMETERS.sub(rf"\1.{parameters}", _FUNCTION.sub(r"\1", path))

    with _renamed(name):
        yield


@contextlib.contextmanager
def _renamed(name: Callable[[str], str]) -> Iterator[None]:
    try:
        yield
    except ServeError as error:
        if error.field is not None:
            if error.message.startswith(error.field):
                rest = error.message.removeprefix(error.field)
                further = _PATH.match(rest)
                deeper = further[0] if further is not None else ""
                error.message = name(error.field + deeper) + rest.removeprefix(deeper)
            error.field = name(error.field)
        raise


async def off_loop[*A, T](items: Sequence[Any], function: Callable[[*A], T], *args: *A) -> T:
    """``function(*args)``, by a thread if there are more than a few items, or parts of them, to look at."""
    contents = (each.get("content") for each in items if isinstance(each, dict))
    parts = sum(len(content) for content in contents if isinstance(content, list))
    return function(*args) if len(items) + parts <= _FEW else await asyncio.to_thread(function, *args)


def check_count(field: str, items: Sequence[Any], most: int) -> None:
    """Raises `ServeError` INVALID for more items than a conversation may have messages (``most``)."""
    if len(items) > most:
        raise ServeError(Kind.INVALID, f"{field} must be at most {most}, not {len(items)}", field)


def refuse(field: str, value: Any, reason: str) -> NoReturn:
    """Raises `ServeError` INVALID, which names field and value."""
    raise ServeError(Kind.INVALID, f"{field}={short(value)} {reason}", field)
