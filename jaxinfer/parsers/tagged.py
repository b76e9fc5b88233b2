"""Calls whose arguments are tagged one by one, without JSON: Qwen3-Coder's and GLM's."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from jaxinfer.parsers.events import Emitter
from jaxinfer.parsers.forms import (
    SPACE,
    Form,
    FormError,
    Function,
    Node,
    any_text,
    check_names,
    check_parts,
    const,
    either,
    marked,
    optional,
    regex,
    row,
    schema_of,
    several,
    star,
    tag,
)
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


# ---- their forms, see `jaxinfer.parsers.forms.Form`

_LINE = regex("\n?")
_ANCHORED = re.compile(r"(?<!\\)(?:\\\\)*\$$")
_KEY_NAME = re.compile(r"[^<>\s](?:[^<>\n]{0,254}[^<>\s])?")


def qwen3_coder_form(functions: Sequence[Function], *, parallel: bool) -> Form:
    _check(functions)
    bodies = [(f"{_FUNCTION}{each.name}>", row(*_qwen_parts(each), _LINE)) for each in functions]
    wrapped = [
        tag(_OPEN, row(SPACE, const(begin), body, const(_FUNCTION_END), SPACE), _CLOSE) for begin, body in bodies
    ]
    bare = [tag(begin, body, _FUNCTION_END) for begin, body in bodies]
    calls = several(either(wrapped), parallel=parallel)
    return marked(calls, [*wrapped, *bare], [_OPEN, _FUNCTION], parallel=parallel)


def _qwen_parts(function: Function) -> Iterable[Node]:
    def part(key: str | Node, value: Callable[[str, str], Node]) -> Node:
        inner = value("\n", f"\n{_PARAMETER_END}")
        return row(_LINE, const(_PARAMETER), const(key) if isinstance(key, str) else key, const(">"), inner)

    return _parts(function, part, _ENDS)


def glm45_form(functions: Sequence[Function], *, parallel: bool) -> Form:
    _check(functions)
    tags = [tag(_OPEN, row(const(each.name), *_glm_parts(each), _LINE), _CLOSE) for each in functions]
    return marked(several(either(tags), parallel=parallel), tags, [_OPEN], parallel=parallel)


def _glm_parts(function: Function) -> Iterable[Node]:
    def part(key: str | Node, value: Callable[[str, str], Node]) -> Node:
        name = const(key) if isinstance(key, str) else key
        return row(_LINE, const(_KEY), name, const(_KEY_END), _LINE, value(_VALUE, _GLM_VALUE_END))

    return _parts(function, part, (_GLM_VALUE_END,))


type _Part = Callable[[str | Node, Callable[[str, str], Node]], Node]


def _parts(function: Function, part: _Part, ends: Sequence[str]) -> Iterable[Node]:
    """The parameters in their order, those that are not required where the model wants them.

    Args:
        part: writes one, of its name and of what writes its value between two texts.
        ends: texts that no value may have in it.
    """
    if function.open:
        yield star(part(regex("[A-Za-z_][A-Za-z0-9_-]{0,63}"), lambda begin, end: tag(begin, any_text(*ends), end)))
    for name in function.parameters:
        value = _Value(function, name, ends)
        yield part(name, value.between) if function.needs(name) else optional(part(name, value.between))


class _Value:
    """Writer of a parameter's value without quotes: of a string free text, of all else JSON."""

    def __init__(self, function: Function, name: str, ends: Sequence[str]) -> None:
        self._function, self._ends = function, ends
        self._place = f"parameters.properties.{name}"
        schema = function.parameters[name]
        self._schema = schema if isinstance(schema, Mapping) else {}
        types = Tools([{"name": function.name, "parameters": function.schema}]).types(function.name, name)
        self._free = STRING in types or not types
        self._only = types == {STRING}

    def between(self, begin: str, end: str) -> Node:
        if not self._free:
            schema = {**self._function.definitions, **self._schema}
            return row(const(begin), schema_of(schema, f"{self._function.place}.{self._place}"), const(end))
        return tag(begin, self._text(), end)

    def _text(self) -> Node:
        values = [self._schema["const"]] if "const" in self._schema else self._schema.get("enum")
        if isinstance(values, list) and values:
            return either(const(self._written(each)) for each in values)
        bounds = {word for word in ("minLength", "maxLength", "pattern") if word in self._schema}
        if not bounds or not self._only:
            return any_text(*self._ends)
        if "pattern" in bounds and len(bounds) > 1:
            raise FormError(self._function, self._place, "cannot be held: pattern beside a length")
        return {**regex(self._pattern()), "excludes": list(self._ends)}

    def _pattern(self) -> str:
        """Of the whole text. Schemas' patterns match anywhere in it."""
        if "pattern" not in self._schema:
            return f"(?s:.){{{self._schema.get('minLength', 0)},{self._schema.get('maxLength', '')}}}"
        pattern = str(self._schema["pattern"])
        before, after = "" if pattern.startswith("^") else "(?s:.*)", "" if _ANCHORED.search(pattern) else "(?s:.*)"
        inner = pattern.removeprefix("^")
        inner = inner if after else inner.removesuffix("$")
        if "|" in pattern and not (before and after):
            raise FormError(self._function, self._place, f"cannot be held: pattern={pattern!r:.100}: | beside ^ or $")
        return f"{before}(?:{inner}){after}"

    def _written(self, value: object) -> str:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if any(end in text for end in self._ends):
            raise FormError(self._function, self._place, f"has {text!r:.100}, and a marker of the model's calls in it")
        return text


def _check(functions: Sequence[Function]) -> None:
    """Check that the parsers read the names of functions and parameters, and that the schemas tell of these.

    Raises:
        FormError: one does not.
    """
    check_names(functions)
    for function in functions:
        check_parts(function)
        for name in function.parameters:
            if not _KEY_NAME.fullmatch(name):
                reason = f"has a parameter {name!r:.100}, which this model's calls cannot write"
                raise FormError(function, "parameters.properties", reason)
