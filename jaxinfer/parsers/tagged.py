"""Calls whose arguments are tagged one by one, without JSON: Qwen3-Coder's and GLM's."""

from __future__ import annotations

import json

from jaxinfer.parsers.events import Emitter
from jaxinfer.parsers.source import Markers, Source, Wait, ignore
from jaxinfer.parsers.tools import STRING, Tools, json_value, quoted
from jaxinfer.parsers.values import MAX_NAME, NAME

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_QWEN = Markers(_OPEN, _CLOSE, _FUNCTION)
_ANGLE = Markers(">")
_WITHIN = Markers(_PARAMETER, _FUNCTION_END, _CLOSE)
# A model may forget to close a parameter: then the next one, or the function's end, closes it.
_ENDS = (_PARAMETER_END, _PARAMETER, _FUNCTION_END, _CLOSE)
_VALUE_END = Markers(*_ENDS, *(f"\n{end}" for end in _ENDS))

_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _GLM_VALUE_END = "<arg_value>", "</arg_value>"
_GLM = Markers(_OPEN, _CLOSE)
_AFTER_GLM_NAME = Markers(_KEY, _CLOSE, "\n")
_GLM_WITHIN = Markers(_KEY, _CLOSE)
_AFTER_KEY = Markers(_KEY_END, _VALUE, _CLOSE)
_BEFORE_VALUE = Markers(_VALUE, _CLOSE)
_AFTER_VALUE = Markers(_GLM_VALUE_END)


class _Object:
    """Writer of a call's arguments, of texts whose types the function's schema tells. Strings come out as they come in.

    Args:
        loose: parameters without a known type are read as JSON where they are JSON; else they are strings.
    """

    def __init__(self, emitter: Emitter, tools: Tools, name: str, *, loose: bool) -> None:
        self._emitter, self._tools, self._name, self._loose = emitter, tools, name, loose
        self._first = True
        self._types: frozenset[str] = frozenset()
        self._text: list[str] | None = None

    def key(self, parameter: str) -> None:
        """Begin a parameter."""
        self._emitter.arguments(f"{'{' if self._first else ', '}{json.dumps(parameter, ensure_ascii=False)}: ")
        self._first = False
        self._types = self._tools.types(self._name, parameter)
        as_string = self._types == {STRING} or not (self._types or self._loose)
        self._text = None if as_string else []
        if as_string:
            self._emitter.arguments('"')

    def value(self, text: str) -> None:
        """More of the parameter's text."""
        if self._text is None:
            self._emitter.arguments(quoted(text))
        else:
            self._text.append(text)

    def value_end(self) -> None:
        written = '"' if self._text is None else json_value("".join(self._text), self._types)
        self._emitter.arguments(written)

    def end(self) -> None:
        if not self._first:
            self._emitter.arguments("}")
        self._emitter.end()


def qwen3_coder(source: Source, emitter: Emitter, tools: Tools) -> Wait[None]:
    """``<tool_call><function=f><parameter=p>...</parameter></function></tool_call>``; the outer tag may be missing."""
    while marker := (yield from source.until(_QWEN, emitter.content)):
        if marker == _CLOSE:
            emitter.closing(marker)
            continue
        source.copy(marker)
        name = yield from _qwen_name(source, opened=marker == _FUNCTION)
        text = source.copied()
        if name is None:
            emitter.content(text)
        else:
            emitter.start(name)
            yield from _parameters(source, _Object(emitter, tools, name, loose=False))


def _qwen_name(source: Source, *, opened: bool) -> Wait[str | None]:
    yield from source.skip_space()
    if not opened and not (yield from source.starts(_FUNCTION)):
        return None
    name, angle = yield from source.gather(_ANGLE, MAX_NAME)
    return name if angle is not None and NAME.fullmatch(name) else None


def _parameters(source: Source, arguments: _Object) -> Wait[None]:
    marker = yield from source.until(_WITHIN, ignore)
    while marker == _PARAMETER:
        marker = yield from _parameter(source, arguments)
    yield from _close(source, arguments, marker)


def _parameter(source: Source, arguments: _Object) -> Wait[str | None]:
    """Read one, behind the tag that begins it. Returns the tag that comes next."""
    key, angle = yield from source.gather(_ANGLE, MAX_NAME)
    if angle is None:
        return None
    arguments.key(key)
    yield from source.starts("\n")
    end = yield from source.until(_VALUE_END, arguments.value)
    if end is None:
        return None
    arguments.value_end()
    end = end.removeprefix("\n")
    return (yield from source.until(_WITHIN, ignore)) if end == _PARAMETER_END else end


def _close(source: Source, arguments: _Object, marker: str | None) -> Wait[None]:
    """End the arguments, unless the text has ended within them."""
    if marker is not None or (yield from source.peek(1)):
        arguments.end()


def glm45(source: Source, emitter: Emitter, tools: Tools) -> Wait[None]:
    """``<tool_call>f<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>``, with or without line breaks."""
    while marker := (yield from source.until(_GLM, emitter.content)):
        if marker == _CLOSE:
            emitter.closing(marker)
            continue
        source.copy(marker)
        yield from source.skip_space()
        name, after = yield from source.gather(_AFTER_GLM_NAME, MAX_NAME)
        text, name = source.copied(), name.strip()
        if after is None or not NAME.fullmatch(name):
            emitter.content(text)
        else:
            emitter.start(name)
            yield from _pairs(source, _Object(emitter, tools, name, loose=True), after)


def _pairs(source: Source, arguments: _Object, marker: str | None) -> Wait[None]:
    if marker == "\n":
        marker = yield from source.until(_GLM_WITHIN, ignore)
    while marker == _KEY:
        key, marker = yield from source.gather(_AFTER_KEY, MAX_NAME)
        if marker == _KEY_END:
            marker = yield from source.until(_BEFORE_VALUE, ignore)
        if marker == _VALUE:
            arguments.key(key.strip())
            if (yield from source.until(_AFTER_VALUE, arguments.value)) is None:
                return
            arguments.value_end()
            marker = yield from source.until(_GLM_WITHIN, ignore)
    yield from _close(source, arguments, marker)
