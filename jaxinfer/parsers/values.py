"""Tool calls that are JSON objects with a name and arguments."""

from __future__ import annotations

import re
from collections.abc import Sequence

from jaxinfer.parsers.events import Emitter
from jaxinfer.parsers.json_text import JsonReader
from jaxinfer.parsers.source import Markers, Sink, Source, Wait, ignore
from jaxinfer.parsers.tools import Tools

MAX_NAME = 256
"""Maximum characters of a function name; OpenAI allows 64."""
NAME = re.compile(r"[\w.:/-]{1,256}")

_ARGUMENTS = frozenset({"arguments", "parameters", "args", "input"})
_NAMES = frozenset({"name", "function", "tool", "tool_name", "function_name"})
_LABELS = frozenset({"id", "type", "index"})
_KEYS = _NAMES | _ARGUMENTS | _LABELS
_LONGEST_KEY = max(map(len, _KEYS))
LANGUAGE = re.compile(r"[a-zA-Z_]*")
BEHIND_CALLS = re.compile(r"[ \t\r\n}\])`,;]*")


def object_follows(source: Source) -> Wait[bool]:
    """Return whether an object follows that looks like a call; most others differ at their first character."""
    yield from open_fence(source)
    if (yield from source.starts("[")):
        yield from source.skip_space()
    if not (yield from source.starts("{")):
        return False
    yield from source.skip_space()
    if (yield from source.peek(1)) in ("'", '"'):
        source.take(1)
    key = ""
    while len(key) < _LONGEST_KEY and (letter := (yield from source.peek(1))) and (letter.isalpha() or letter == "_"):
        key += source.take(1)
    return key in _KEYS


def open_fence(source: Source) -> Wait[None]:
    """Read whitespace, and the beginning of a fenced block."""
    yield from source.skip_space()
    if (yield from source.starts("```")):
        yield from source.skip(LANGUAGE)
        yield from source.skip_space()


def close_fence(source: Source) -> Wait[bool]:
    """Read whitespace, and the end of a fenced block."""
    yield from source.skip_space()
    return (yield from source.starts("```"))


def call_objects(
    source: Source, emitter: Emitter, tools: Tools, stops: Sequence[str] = (), again: Markers | None = None
) -> Wait[None]:
    """Read marked calls: an object, or several in a list or separated by commas, also in a fenced block. All other text
    is content.

    Args:
        stops, again: see `JsonReader`.
    """
    source.copy()
    yield from open_fence(source)
    if (yield from source.starts("[")):
        yield from source.skip_space()
    count = emitter.calls
    while (yield from source.starts("{")):
        if not (yield from CallObject(source, emitter, tools, stops, again).read()):
            emitter.content(source.copied())
            return
        source.copied()
        yield from source.skip(BEHIND_CALLS)
        source.copy()
    text = source.copied()
    emitter.content(text[len(text.rstrip()) :] if emitter.calls > count else text)


class CallObject:
    """Reader of ``{"name": ..., "arguments": {...}}``, also with synonyms and extra members, in any order, or nested as
    by OpenAI (``{"type": "function", "function": {...}}``).

    Args:
        stops, again: see `JsonReader`.
        marked: a marker identifies the call. Otherwise only an object with a known name and arguments is a call.
    """

    def __init__(
        self,
        source: Source,
        emitter: Emitter,
        tools: Tools,
        stops: Sequence[str] = (),
        again: Markers | None = None,
        *,
        marked: bool = True,
    ) -> None:
        self._source, self._emitter, self._tools, self._marked = source, emitter, tools, marked
        self._stops, self._again = stops, again
        self._name: str | None = None
        self._early: list[str] | None = None
        self._depth, self._started, self._more = 1, False, False

    def read(self) -> Wait[bool]:
        """Read the object after its opening brace. False: it is not a call, and no event was emitted."""
        while self._depth and (yield from self._member()):
            while self._depth:
                yield from self._source.skip_space()
                if not (yield from self._source.starts("}")):
                    yield from self._source.starts(",")
                    break
                self._depth -= 1
        if not self._started and self._marked and not self._more and (yield from self._over()):
            self._start(self._name)
        if self._started:
            self._emitter.end()
        return self._started

    def _over(self) -> Wait[bool]:
        """Return whether a call with a name only ends here."""
        if not self._depth:
            return True
        for stop in self._stops:
            if (yield from self._source.ahead(stop)):
                return True
        return not self._source.cut and not (yield from self._source.peek(1))

    def _reader(self, sink: Sink = ignore) -> JsonReader:
        return JsonReader(self._source, sink, self._stops, self._again)

    def _member(self) -> Wait[bool]:
        yield from self._source.skip_space()
        if (yield from self._source.peek(1)) in ("}", ""):
            return (yield from self._source.peek(1)) != ""
        key = yield from self._reader().key()
        yield from self._source.skip_space()
        if key is None or not (yield from self._source.starts(":")):
            return False
        yield from self._source.skip_space()
        if key in _NAMES and self._name is None:
            return (yield from self._read_name(key))
        if key in _ARGUMENTS and not self._started and self._early is None:
            return (yield from self._read_arguments())
        self._more = self._more or key not in _LABELS
        if not self._marked and key not in _LABELS and self._name is None:
            return False
        return (yield from self._reader().read())

    def _read_name(self, key: str) -> Wait[bool]:
        if key == "function" and (yield from self._source.starts("{")):
            self._depth += 1
            return True
        quoted = (yield from self._source.peek(1)) in ("'", '"')
        text = yield from self._reader().key()
        name = self._tools.named(text or "")
        if name is None and quoted and (self._marked or not self._tools.names) and NAME.fullmatch(text or ""):
            name = text
        if name is None:
            return False
        self._name = name
        if self._early is not None:
            self._start(name)
            self._emitter.arguments("".join(self._early))
        return True

    def _read_arguments(self) -> Wait[bool]:
        if self._name is None:
            self._early = []
            return (yield from self._reader(self._early.append).read())
        self._start(self._name)
        return (yield from self._reader(self._emitter.arguments).read())

    def _start(self, name: str | None) -> None:
        if name is not None:
            self._started = True
            self._emitter.start(name)
