"""JSON in a model's text: where a value ends, and calls that are objects with a name and arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from jaxinfer.parsers.events import Emitter
from jaxinfer.parsers.source import Sink, Source, Wait, ignore

MAX_NAME = 256
"""Characters of a function's name; OpenAI allows 64."""
NAME = re.compile(r"[\w.:/-]{1,256}")

_STRUCTURE = re.compile(r'["{}\[\]<]')
_IN_STRING = re.compile(r'["\\]')
_IN_STRING_OR_TAG = re.compile(r'["\\<]')
_AFTER_SCALAR = re.compile(r"[,}\]\s<]")
_ARGUMENTS = frozenset({"arguments", "parameters"})
_LABELS = frozenset({"id", "type"})


class Value:
    """Reader of one JSON value, by its brackets and quotes alone: what is wrong within stays as it is.

    Args:
        stop: a marker that ends it early, and stays unread.
        firm: also within a string: it is a token of its own, not text.
    """

    def __init__(self, source: Source, sink: Sink, stop: str = "", *, firm: bool = False) -> None:
        self._source, self._sink, self._stop = source, sink, stop
        self._in_string = _IN_STRING_OR_TAG if firm else _IN_STRING

    def read(self) -> Wait[bool]:
        """Whether it is whole."""
        first = yield from self._source.peek(1)
        if first in ("{", "["):
            return (yield from self.nested())
        if first == '"':
            return (yield from self._string())
        return (yield from self._source.scan(_AFTER_SCALAR, self._sink)) != ""

    def nested(self, depth: int = 0) -> Wait[bool]:
        """Read up to the bracket that closes the outermost of ``depth`` open ones."""
        while character := (yield from self._source.scan(_STRUCTURE, self._sink)):
            if character == '"':
                if not (yield from self._string()):
                    return False
            elif self._stop.startswith(character) and (yield from self._source.ahead(self._stop)):
                return False
            else:
                self._sink(self._source.take(1))
                depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(character, 0)
                if depth <= 0 and character != "<":
                    return True
        return False

    def _string(self) -> Wait[bool]:
        self._sink(self._source.take(1))
        while character := (yield from self._source.scan(self._in_string, self._sink)):
            if character == "<" and (yield from self._source.ahead(self._stop)):
                return False
            pair = yield from self._source.peek(2 if character == "\\" else 1)
            self._sink(self._source.take(len(pair)))
            if character == '"':
                return True
        return False


class CallObject:
    """Reader of ``{"name": ..., "arguments": {...}}``, with "parameters" as another word, in any order.

    Args:
        knows: whether a name is one of a function.
        stop: see `Value`.
        bare: whether a name alone is a call, too. Only what marks a call tells one from any object with a name.
    """

    def __init__(
        self,
        source: Source,
        emitter: Emitter,
        knows: Callable[[str], bool] = lambda name: True,
        stop: str = "",
        *,
        bare: bool = False,
    ) -> None:
        self._source, self._emitter, self._knows, self._stop, self._bare = source, emitter, knows, stop, bare
        self._name: str | None = None
        self._early: list[str] | None = None
        self._started = False

    def read(self) -> Wait[bool]:
        """Read what follows the opening brace. False: it is no call, and nothing has been emitted."""
        closed = False
        while not closed and (yield from self._member()):
            yield from self._source.skip_space()
            closed = yield from self._source.starts("}")
            if not closed and not (yield from self._source.starts(",")):
                break
        if closed and self._bare and not self._started:
            self._start(self._name)
        if self._started:
            self._emitter.end()
        return self._started

    def _member(self) -> Wait[bool]:
        yield from self._source.skip_space()
        key = yield from self._text()
        yield from self._source.skip_space()
        if key is None or not (yield from self._source.starts(":")):
            return False
        yield from self._source.skip_space()
        if key == "name" and self._name is None:
            return (yield from self._read_name())
        if key in _ARGUMENTS and not self._started and self._early is None:
            return (yield from self._read_arguments())
        return key in _LABELS and (yield from Value(self._source, ignore, self._stop).read())

    def _text(self) -> Wait[str | None]:
        """A JSON string; None: there is none."""
        if not (yield from self._source.ahead('"')):
            return None
        parts: list[str] = []
        whole = yield from Value(self._source, parts.append).read()
        return _decoded("".join(parts)) if whole else None

    def _read_name(self) -> Wait[bool]:
        name = yield from self._text()
        if name is None or not NAME.fullmatch(name) or not self._knows(name):
            return False
        self._name = name
        if self._early is not None:
            self._start(name)
            self._emitter.arguments("".join(self._early))
        return True

    def _read_arguments(self) -> Wait[bool]:
        sink: Sink = self._emitter.arguments
        if self._name is None:
            self._early = []
            sink = self._early.append
        if (yield from self._source.ahead("{")):
            self._start(self._name)
            return (yield from Value(self._source, sink, self._stop).read())
        parts: list[str] = []
        whole = yield from Value(self._source, parts.append, self._stop).read()
        if whole:
            self._start(self._name)
            sink(_unwrapped("".join(parts)))
        return whole

    def _start(self, name: str | None) -> None:
        if name is not None:
            self._started = True
            self._emitter.start(name)


def _decoded(text: str) -> str | None:
    try:
        value = json.loads(text, strict=False)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def _unwrapped(text: str) -> str:
    """Arguments that are an object in a string, as that object; null as an empty one; all else as it is."""
    if text == "null":
        return "{}"
    inner = _decoded(text) if text.startswith('"') else None
    try:
        return inner if inner is not None and isinstance(json.loads(inner), dict) else text
    except (ValueError, RecursionError):
        return text
