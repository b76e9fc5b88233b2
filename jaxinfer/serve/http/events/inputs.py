"""Conversion of item-based request bodies (Messages, Responses) to chat bodies; errors use the API's field names."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from jaxinfer.config.aliases import advice
from jaxinfer.serve.api.errors import Kind, ServeError, short
from jaxinfer.serve.api.ignored import renaming
from jaxinfer.serve.frontend.chat.messages import by_place
from jaxinfer.serve.http.fields import Body, checked, left_out, undated
from jaxinfer.serve.http.requests import ChatCompletionRequest
from jaxinfer.text import contents
from jaxinfer.text.contents import GivenImage

_FEW = 256
_FUNCTION, _PARAMETERS = (re.compile(rf"^(tools\[\d+\])\.{name}\b") for name in ("function", "parameters"))
_PATH = re.compile(r"[\w.\[\]]*")


Kinds = Mapping[str, type[Body] | None]
"""Body class of each item ``type``; None: items of this type are left out of the prompt."""


def item_of(path: str, value: Any, kinds: Kinds) -> Body | None:
    """Parse an item by its ``type``. Return None if items of this type are left out, and note it as ignored.

    Args:
        path: path of the item, for error messages.

    Raises:
        ServeError: INVALID, naming field and value.
    """
    kind = value.get("type") if isinstance(value, dict) else None
    if left_out(path, kind, kinds):
        return None
    if not isinstance(kind, str) or (known := kinds.get(kind)) is None:
        refuse(f"{path}.type", kind, f"is not served: it may be {served(kinds)}{_meant(kind, kinds)}")
    return checked(known, value, path)


def served(kinds: Kinds) -> str:
    """Return the types that are served, for an error message."""
    return ", ".join(sorted(name for name, body in kinds.items() if body is not None))


def _meant(kind: Any, kinds: Kinds) -> str:
    near = advice(undated(kind), kinds) if isinstance(kind, str) else ""
    return f": {near}" if near else ""


def items_of[T](field: str, values: Sequence[Any] | None, kinds: Kinds, made: Callable[[Any], T]) -> list[T] | None:
    """Convert the items of a list with ``made``, skipping those that are left out."""
    if values is None:
        return None
    items = (item_of(f"{field}[{rank}]", value, kinds) for rank, value in enumerate(values))
    return [made(item) for item in items if item is not None]


def text_of(path: str, content: Any, kinds: Kinds) -> str:
    """Return the text of a content whose parts have these kinds, see `jaxinfer.text.contents.text_of`.

    Raises:
        ServeError: INVALID, naming field and value: a part is not text.
    """
    with by_place():
        return contents.text_of(path, content, lambda at, part: getattr(item_of(at, part, kinds), "text", ""), kinds)


Piece = str | GivenImage
"""A text or an image of a content."""
ImageOf = Callable[[str, Any], GivenImage | None]
"""Returns the image of the item at a path; None: the item is no image."""


def pieces_of(path: str, content: Any, kinds: Kinds, image: ImageOf) -> list[Piece]:
    """Return the texts and images of a content whose parts have these kinds; texts side by side are joined by newlines.

    Raises:
        ServeError: INVALID, naming field and value: a part is neither text nor an image.
    """
    if not isinstance(content, list):
        return [text_of(path, content, kinds)]
    found: list[Piece] = []
    with by_place():
        for rank, part in enumerate(content):
            item = item_of(at := f"{path}[{rank}]", part, kinds)
            text: str = getattr(item, "text", None) or ""
            add_piece(found, image(at, item) or text)
    return found


def add_piece(content: list[Piece], piece: Piece) -> None:
    """Add a text or an image to a content; a newline comes between two texts."""
    apart = isinstance(piece, str) and content and isinstance(content[-1], str)
    content += ["\n", piece] if apart else [piece]


class Turns:
    """Builder of chat messages from items; reasoning, text and tool calls of one assistant turn form one message.

    Texts are joined at the end, in linear time.
    """

    def __init__(self) -> None:
        self._made: list[dict[str, Any]] = []
        self._open = ""  # role of the message that may be extended

    @property
    def messages(self) -> list[dict[str, Any]]:
        """All messages. Empty content becomes None in a message with tool calls, else ""."""
        return [_joined(message) for message in self._made]

    @property
    def role(self) -> str:
        """Role of the last message; "" before the first."""
        return self._made[-1]["role"] if self._made else ""

    def say(self, role: str, *content: Piece, **fields: Any) -> None:
        """Add a complete message."""
        self._open = ""
        self._made.append({"role": role, "content": list(content), **fields})

    def ask(self, piece: Piece) -> None:
        """Add user text or an image; consecutive ones form one message."""
        add_piece(self._turn("user")["content"], piece)

    def think(self, text: str) -> None:
        self._turn("assistant").setdefault("reasoning_content", []).append(text)

    def answer(self, text: str) -> None:
        """Add assistant text; text after tool calls is joined without a newline, as it was generated."""
        turn = self._turn("assistant")
        turn["content"] += ["\n", text] if turn["content"] and "tool_calls" not in turn else [text]

    def call(self, call_id: str, name: str, arguments: Any) -> None:
        function = {"name": name, "arguments": arguments}
        called = {"id": call_id, "type": "function", "function": function}
        self._turn("assistant").setdefault("tool_calls", []).append(called)

    def _turn(self, role: str) -> dict[str, Any]:
        if self._open != role:
            self.say(role)
            self._open = role
        return self._made[-1]


def _joined(message: Mapping[str, Any]) -> dict[str, Any]:
    thoughts = message.get("reasoning_content")
    joined = {} if thoughts is None else {"reasoning_content": "\n".join(thoughts)}
    pieces = message["content"]
    if not all(isinstance(piece, str) for piece in pieces):
        return {**message, "content": list(_parts(pieces)), **joined}
    content = "".join(pieces)
    return {**message, "content": content or (None if "tool_calls" in message else ""), **joined}


def _parts(pieces: Sequence[Piece]) -> Iterator[Any]:
    """Yield parts of a chat message, with the texts between two images as one."""
    for image, group in itertools.groupby(pieces, lambda piece: isinstance(piece, GivenImage)):
        if image:
            yield from group
        else:
            yield {"type": "text", "text": "".join(map(str, group))}


def chat_body(**fields: Any) -> ChatCompletionRequest:
    """Return a chat body; fields that are None are not set.

    Raises:
        ServeError: INVALID, with the chat API's field names: see `renamed_to`.
    """
    return checked(ChatCompletionRequest, {name: value for name, value in fields.items() if value is not None})


@contextlib.contextmanager
def renamed_to(names: Mapping[str, str], parameters: str) -> Iterator[None]:
    """Rename chat fields in errors raised inside to the field names of another API.

    Args:
        names: names in that API of fields that are named differently.
        parameters: its name for the schema of a tool, which has no enclosing ``function`` object there.
    """

    def name(path: str) -> str:
        for known in sorted(names, key=len, reverse=True):
            if re.match(rf"{re.escape(known)}(?=[.\[]|$)", path):
                return names[known] + path.removeprefix(known)
        return _PARAMETERS.sub(rf"\1.{parameters}", _FUNCTION.sub(r"\1", path))

    with _renamed(name), renaming(name):
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


async def off_loop[T](function: Callable[[], T], *lists: Any) -> T:
    """Return ``function()``, run in a thread if the lists among ``lists`` have many items and content parts."""
    items = [item for each in lists if isinstance(each, list) for item in each]
    contents = (item.get("content") for item in items if isinstance(item, dict))
    parts = sum(len(content) for content in contents if isinstance(content, list))
    return function() if len(items) + parts <= _FEW else await asyncio.to_thread(function)


def check_count(field: str, items: Sequence[Any], most: int) -> None:
    """Raise `ServeError` INVALID if there are more items than a conversation may have messages (``most``)."""
    if len(items) > most:
        raise ServeError(Kind.INVALID, f"{field} must be at most {most}, not {len(items)}", field)


def refuse(field: str, value: Any, reason: str) -> NoReturn:
    """Raise `ServeError` INVALID, naming field and value."""
    raise ServeError(Kind.INVALID, f"{field}={short(value)} {reason}", field)
