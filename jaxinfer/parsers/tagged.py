"""Tool calls with one tag per argument, without JSON (Qwen3-Coder, GLM)."""

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
from jaxinfer.parsers.source import Markers, Sink, Source, Wait, ignore
from jaxinfer.parsers.tools import STRING, Tools, json_value, quoted
from jaxinfer.parsers.values import MAX_NAME, NAME, call_objects, object_follows, open_fence

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_QWEN_TEXT = Markers(_OPEN, _CLOSE, _FUNCTION)
_QWEN_TAGS = (_OPEN, _CLOSE, _FUNCTION, _FUNCTION_END, _PARAMETER, _PARAMETER_END)
_QWEN = Markers(*_QWEN_TAGS)
_ENDS = (_PARAMETER_END, _PARAMETER, _FUNCTION_END, _CLOSE)
_QWEN_VALUE = Markers(*_QWEN_TAGS, *(f"\n{tag}" for tag in _QWEN_TAGS))
_CLOSERS = (_PARAMETER_END, _FUNCTION_END, _CLOSE)
_FILLER = re.compile(r"[\s=\"'>]*")
_NAME_END = Markers(">", "\n", "<")
_AROUND_KEY = " \t\r\n\"'"

_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _GLM_VALUE_END = "<arg_value>", "</arg_value>"
_GLM_TAGS = (_OPEN, _CLOSE, _KEY, _KEY_END, _VALUE, _GLM_VALUE_END)
_GLM = Markers(*_GLM_TAGS)
_GLM_VALUES = Markers(*_GLM_TAGS, *(f"\n{tag}" for tag in (_KEY, _CLOSE, _OPEN)))
_BEFORE_VALUE = Markers(_KEY_END, _VALUE)
_GLM_HEAD = Markers(*_GLM_TAGS, "\n")
_AGAIN = Markers(_OPEN)


class _Object:
    """Writer of a call's arguments as JSON, from texts typed by the schema of the function. Strings are streamed. If a
    parameter occurs twice, the first one counts.

    Args:
        tags: tags of the format, which occur in string values only.
        loose: parameters of unknown type are parsed as JSON if they are JSON; else they are strings.
    """

    def __init__(self, emitter: Emitter, tools: Tools, name: str, tags: Markers, *, loose: bool) -> None:
        self._emitter, self._tools, self._name, self._loose = emitter, tools, name, loose
        self._tags = tags.pattern
        self._keys: set[str] = set()
        self._types: frozenset[str] = frozenset()
        self._text: list[str] | None = None
        self._emit: Sink = emitter.arguments

    def has(self, parameter: str) -> bool:
        """Return whether the function has this parameter, or its parameters are unknown."""
        known = self._tools.parameters(self._name)
        return parameter in known or not known

    def __bool__(self) -> bool:
        """Whether there is an argument."""
        return bool(self._keys)

    def key(self, parameter: str) -> None:
        """Begin a parameter."""
        self._emit = ignore if parameter in self._keys else self._emitter.arguments
        self._emit(f'{", " if self._keys else "{"}"{quoted(parameter)}": ')
        self._keys.add(parameter)
        self._types = self._tools.types(self._name, parameter)
        as_string = self._types == {STRING} or not (self._types or self._loose)
        self._text = None if as_string else []
        if as_string:
            self._emit('"')

    def value(self, text: str) -> None:
        """Append text to the parameter's value."""
        if self._text is None:
            self._emit(quoted(text))
        else:
            self._text.append(text)

    def value_end(self) -> None:
        self._emit('"' if self._text is None else self._typed("".join(self._text)))

    def _typed(self, text: str) -> str:
        written = json_value(text, self._types)
        if written.startswith('"') and STRING not in self._types:
            between = next((part for part in self._tags.split(text) if part.strip()), text)
            return json_value(between, self._types)
        return written

    def end(self) -> None:
        if self._keys:
            self._emitter.arguments("}")
        self._emitter.end()


class _TaggedValue:
    """Reader of unquoted values up to the tags that end them, decided by the text after each tag.

    A tag followed by the rest of the call certainly ends a value. A tag followed by other text may be text itself: it
    is kept back until a tag certainly ends the value (then it was text), or until the next call or the end (then it was
    a tag).

    Args:
        tags: tags of the format.
        ends: whether a tag that was read ends the value; None: uncertain.
        begins: whether a call begins after a tag.
    """

    def __init__(
        self,
        source: Source,
        tags: Markers,
        ends: Callable[[str], Wait[bool | None]],
        begins: Callable[[str], Wait[bool]],
    ) -> None:
        self._source, self._tags, self._ends, self._begins = source, tags, ends, begins
        self._decided = 0  # tags kept back before this position were not text

    def read(self, sink: Sink) -> Wait[str | None]:
        """Read a value. Returns the tag that ends it; None: the text ends first."""
        kept: list[str] = []
        while marker := (yield from self._source.until(self._tags, kept.append if kept else sink)):
            ends = yield from self._source.look(self._ends(marker))
            if ends or (ends is None and self._source.position <= self._decided):
                for text in kept:
                    sink(text)
                return marker
            if kept and (yield from self._source.look(self._begins(marker))):
                return self._cut([*kept, marker])
            if ends is None or kept:
                kept.append(marker)
            else:
                sink(marker)
        return self._cut(kept) if kept else None

    def _cut(self, kept: list[str]) -> str:
        """End the value at the first tag that was kept back."""
        self._decided = self._source.position
        self._source.unread("".join(kept[1:]))
        return kept[0]


class _Calls:
    """Base of the readers of both formats.

    Args:
        loose: see `_Object`.
    """

    tags: Markers
    value_tags: Markers

    def __init__(self, source: Source, emitter: Emitter, tools: Tools, *, loose: bool) -> None:
        self._source, self._emitter, self._tools = source, emitter, tools
        self._arguments = _Object(emitter, tools, "", self.tags, loose=loose)
        self._loose = loose
        self._value = _TaggedValue(source, self.value_tags, self._ends, self._begins)

    def _ends(self, marker: str) -> Wait[bool | None]:
        raise NotImplementedError

    def _begins(self, marker: str) -> Wait[bool]:
        raise NotImplementedError

    def _start(self, name: str) -> None:
        self._emitter.start(name)
        self._arguments = _Object(self._emitter, self._tools, name, self.tags, loose=self._loose)

    def _read_value(self) -> Wait[str | None]:
        """Read the value of the current parameter. Returns the tag that comes next."""
        marker = yield from self._value.read(self._arguments.value)
        if marker is not None or not self._source.cut:
            self._arguments.value_end()
        return None if marker is None else marker.removeprefix("\n")

    def _over(self) -> Wait[bool | None]:
        """Return whether the call is over: the next call or the end follows. None: other text follows."""
        if (yield from self._source.ended()):
            return True
        marker = yield from self._source.which(self.tags)
        return (bool(marker) and (yield from self._begins(marker))) or None

    def _end(self, text: str, marker: str | None) -> None:
        """End the call at a tag, or at the end of the text, which other text may precede."""
        if marker is None and self._source.cut:
            return
        self._arguments.end()
        if marker is None:
            self._emitter.content(text)
        elif marker in (_OPEN, _FUNCTION):
            self._source.unread(marker)

    def _objects(self) -> Wait[bool]:
        """Read calls in JSON, if there are any."""
        is_json = yield from self._source.look(_is_json(self._source))
        if is_json:
            yield from call_objects(self._source, self._emitter, self._tools, (_CLOSE,), _AGAIN)
        return is_json


def _is_json(source: Source) -> Wait[bool]:
    yield from open_fence(source)
    return (yield from source.peek(1)) in ("{", "[")


class _Qwen(_Calls):
    tags, value_tags = _QWEN, _QWEN_VALUE
    _line = False

    def read(self) -> Wait[None]:
        markers = _QWEN_TEXT
        while marker := (yield from self._source.until(markers, self._emitter.content)):
            if marker == _FUNCTION:
                yield from self._call("")
            elif marker == _OPEN:
                self._emitter.hide(_QWEN)
                markers = _QWEN
                if not (yield from self._objects()):
                    yield from self._call(marker)
            else:
                self._emitter.gap()

    def _call(self, opened: str) -> Wait[None]:
        self._source.copy("" if opened else _FUNCTION)
        if opened:
            yield from self._source.skip_space()
        name, marker = yield from self._head(opened)
        text = self._source.copied()
        if name is None:
            self._emitter.content(text)
        else:
            self._start(name)
            yield from self._parameters(marker)

    def _head(self, opened: str) -> Wait[tuple[str | None, str]]:
        """Read the function's name, and a parameter tag that replaces it."""
        if opened and (yield from self._source.starts(_PARAMETER)):
            key = yield from self._source.look(self._key())
            return self._tools.with_parameter(key or ""), _PARAMETER
        if opened:
            yield from self._source.starts("<function")
            yield from self._source.skip(_FILLER)
        text, end = yield from self._source.gather(_NAME_END, MAX_NAME)
        known, name = self._tools.named(text), text.strip(_AROUND_KEY)
        if end == "<":
            self._source.unread(end)
        is_name = known or (end == ">" and name == text and NAME.fullmatch(name))
        return (known or name if is_name else None), ""

    def _parameters(self, marker: str | None) -> Wait[None]:
        text: list[str] = []
        while marker not in (_FUNCTION_END, _CLOSE, _OPEN, None) and not (marker == _FUNCTION and self._arguments):
            if marker == _PARAMETER:
                marker = yield from self._parameter()
            else:
                text.clear()
                marker = yield from self._source.until(_QWEN, text.append)
        self._end("".join(text), marker)

    def _parameter(self) -> Wait[str | None]:
        key = yield from self._key()
        if key is None:
            return None
        self._arguments.key(key)
        self._line = yield from self._source.starts("\n")
        return (yield from self._read_value())

    def _key(self) -> Wait[str | None]:
        key, end = yield from self._source.gather(_NAME_END, MAX_NAME)
        if end == "<":
            self._source.unread(end)
        return None if end is None else key.strip(_AROUND_KEY)

    def _ends(self, marker: str) -> Wait[bool | None]:
        tag = marker.removeprefix("\n")
        if tag == _PARAMETER:
            return (marker != tag or not self._line) and (yield from self._is_parameter())
        if tag not in _CLOSERS:
            return False
        yield from self._source.skip_space()
        if tag == _PARAMETER_END and (yield from self._source.starts(_PARAMETER)):
            return (yield from self._is_parameter()) or None
        for closer in _CLOSERS[_CLOSERS.index(tag) + 1 :]:
            yield from self._source.starts(closer)
            yield from self._source.skip_space()
        return (yield from self._over())

    def _is_parameter(self) -> Wait[bool]:
        key = yield from self._key()
        return key is not None and self._arguments.has(key)

    def _begins(self, marker: str) -> Wait[bool]:
        tag = marker.removeprefix("\n")
        if tag == _OPEN:
            yield from self._source.skip_space()
            tag = _FUNCTION if (yield from self._source.starts(_FUNCTION)) else ""
        return tag == _FUNCTION and self._tools.named((yield from self._key()) or "") is not None


def qwen3_coder(source: Source, emitter: Emitter, tools: Tools) -> Wait[None]:
    """Parse ``<tool_call><function=f><parameter=p>...</parameter></function></tool_call>``, the outer tag optional."""
    yield from _Qwen(source, emitter, tools, loose=False).read()


def function_follows(source: Source) -> Wait[bool]:
    """Return whether a function tag follows, or a call in JSON."""
    yield from source.skip_space()
    return (yield from source.starts(_FUNCTION)) or (yield from object_follows(source))


class _Glm(_Calls):
    tags, value_tags = _GLM, _GLM_VALUES

    def read(self) -> Wait[None]:
        while marker := (yield from self._source.until(_GLM, self._emitter.content)):
            if marker != _OPEN:
                self._emitter.gap()
            elif not (yield from self._objects()):
                yield from self._call()

    def _call(self) -> Wait[None]:
        self._source.copy()
        yield from self._source.skip_space()
        name, marker = yield from self._head()
        text = self._source.copied()
        if name is None:
            self._emitter.content(text)
        else:
            self._start(name)
            yield from self._pairs(marker)

    def _head(self) -> Wait[tuple[str | None, str | None]]:
        """Read the function's name and the tag after it."""
        text, marker = yield from self._source.gather(_GLM_HEAD, MAX_NAME)
        name = text.strip()
        if marker == "\n":
            yield from self._source.skip_space()
            marker = yield from self._source.which(_GLM)
        if marker == _KEY and not name:
            key, _ = yield from self._source.look(self._source.gather(_GLM, MAX_NAME))
            return self._tools.with_parameter(key.strip()), marker
        if marker == _KEY_END:  # the tag before the first key is missing
            name, key = next(
                ((each, name[len(each) :]) for each in self._tools.names if self._is_call(each, name)), (name, "")
            )
            self._source.unread(key + marker)
            marker = ""
        elif marker == _OPEN:
            self._source.unread(marker)
        known = self._tools.named(name)
        is_name = known or (marker in (_KEY, _CLOSE) and NAME.fullmatch(name))
        return (known or name if is_name and marker is not None else None), marker

    def _is_call(self, name: str, text: str) -> bool:
        return text.startswith(name) and text[len(name) :].strip() in self._tools.parameters(name)

    def _pairs(self, marker: str | None) -> Wait[None]:
        text: list[str] = []
        key = ""
        while marker is not None and marker not in (_CLOSE, _OPEN):
            if marker == _KEY:
                key, marker = yield from self._source.gather(_GLM, MAX_NAME)
                continue
            if marker in (_KEY_END, _VALUE):
                marker = yield from self._pair((key or "".join(text)).strip(), marker)
                key = ""
                text.clear()
                continue
            text.clear()
            marker = yield from self._source.until(_GLM, text.append)
        self._end("".join(text), marker)

    def _pair(self, key: str, marker: str) -> Wait[str | None]:
        """Read a value after the tag that ends its key, or that begins the value."""
        while marker == _KEY_END:
            yield from self._source.skip_space()
            following = yield from self._source.look(self._source.which(_GLM))
            if following in (_KEY, _CLOSE, _OPEN) or not (yield from self._source.peek(1)):
                return (yield from self._source.until(_GLM, ignore))  # the value is missing
            marker = yield from self._source.which(_BEFORE_VALUE)
        self._arguments.key(key)
        return (yield from self._read_value())

    def _ends(self, marker: str) -> Wait[bool | None]:
        tag = marker.removeprefix("\n")
        if tag == _KEY:
            return (yield from self._is_key())
        if tag == _CLOSE:
            return (yield from self._over())
        if tag != _GLM_VALUE_END:
            return False
        yield from self._source.skip_space()
        if (yield from self._source.starts(_KEY)):
            return True
        if not (yield from self._source.starts(_CLOSE)) and (yield from self._source.look(self._is_key())):
            return True
        return (yield from self._over())

    def _is_key(self) -> Wait[bool]:
        """Return whether a key and the end of its tag follow."""
        key, end = yield from self._source.gather(_GLM, MAX_NAME)
        return end in (_KEY_END, _VALUE) and self._arguments.has(key.strip())

    def _begins(self, marker: str) -> Wait[bool]:
        if marker.removeprefix("\n") != _OPEN:
            return False
        yield from self._source.skip_space()
        name, end = yield from self._source.gather(_GLM_HEAD, MAX_NAME)
        return end is not None and self._tools.named(name) is not None


def glm45(source: Source, emitter: Emitter, tools: Tools) -> Wait[None]:
    """Parse ``<tool_call>f<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>``, with or without line breaks."""
    yield from _Glm(source, emitter, tools, loose=True).read()


def pair_follows(source: Source) -> Wait[bool]:
    """Return whether a name and the tag of a key or of the call's end follow, or a call in JSON."""
    if (yield from source.look(object_follows(source))):
        return True
    name, end = yield from source.gather(_GLM, MAX_NAME)
    return end in (_KEY, _CLOSE) and NAME.fullmatch(name.strip()) is not None


# ---- forms, see `jaxinfer.parsers.forms.Form`

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
    """Yield the parameters in order; those not required are optional.

    Args:
        part: makes the format of a parameter from its name and from a function that makes its value between two texts.
        ends: texts that must not occur in a value.
    """
    if function.open:
        yield star(part(regex("[A-Za-z_][A-Za-z0-9_-]{0,63}"), lambda begin, end: tag(begin, any_text(*ends), end)))
    for name in function.parameters:
        value = _Value(function, name, ends)
        yield part(name, value.between) if function.needs(name) else optional(part(name, value.between))


class _Value:
    """Format of an unquoted parameter value: free text for strings, JSON for all other types."""

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
        """Return a pattern that matches the whole text; schema patterns are not anchored."""
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
    """Check that parsers accept the names of functions and parameters, and schemas constrain parameters individually.

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
