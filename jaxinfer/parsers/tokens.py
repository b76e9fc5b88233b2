"""Tool calls between special tokens (DeepSeek, Kimi)."""

from __future__ import annotations

import re
from collections.abc import Sequence

from jaxinfer.parsers.events import Emitter
from jaxinfer.parsers.forms import (
    SPACE,
    Form,
    Function,
    Node,
    arguments,
    check_names,
    const,
    either,
    marked,
    regex,
    row,
    several,
    tag,
)
from jaxinfer.parsers.json_text import JsonReader
from jaxinfer.parsers.source import Markers, Source, Wait
from jaxinfer.parsers.tools import Tools
from jaxinfer.parsers.values import BEHIND_CALLS, MAX_NAME, NAME, open_fence

_OBJECTS = ("{", '"{')  # also as a JSON string
_SECTION, _SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEPARATOR, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_DEEPSEEK = Markers(_SECTION, _SECTION_END, _CALL, _SEPARATOR, _CALL_END)
_DEEPSEEK_HEAD = Markers(_SEPARATOR, _CALL_END, _SECTION_END, _CALL, _SECTION, *_OBJECTS, "```", "\n")
_FUNCTION = "function"

_KIMI_SECTIONS = (
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_section_begin|>",
    "<|tool_call_section_end|>",
)
_KIMI_CALL, _KIMI_ARGUMENTS, _KIMI_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_KIMI = Markers(*_KIMI_SECTIONS, _KIMI_CALL, _KIMI_ARGUMENTS, _KIMI_END)
_KIMI_BEGINS = (_KIMI_SECTIONS[0], _KIMI_SECTIONS[2])
_AFTER_ID = Markers(_KIMI_ARGUMENTS, _KIMI_CALL, _KIMI_END, *_KIMI_SECTIONS, *_OBJECTS)
_KIMI_NAME = re.compile(r"[\w.-]{1,240}")
_KIMI_ID = re.compile(r"(?:functions\.)?([\w.-]+):\d+")


def deepseek(source: Source, emitter: Emitter, tools: Tools) -> Wait[None]:
    """Parse ``function<sep>name`` with arguments in a fenced block (V3, R1), or ``name<sep>{...}`` (V3.1)."""
    while marker := (yield from source.until(_DEEPSEEK, emitter.content)):
        emitter.gap()
        if marker in (_CALL, _SECTION):
            source.copy()
            name = yield from _deepseek_name(source, tools, marked=marker == _CALL)
            text = source.copied()
            yield from _call(source, emitter, name, text, (_CALL_END, _SECTION_END, _CALL, _SECTION))


def _deepseek_name(source: Source, tools: Tools, *, marked: bool) -> Wait[str | None]:
    """Read a head: the word "function" and the name, in any order of separators, line breaks and fences."""
    separated = False
    while True:
        text, marker = yield from source.gather(_DEEPSEEK_HEAD, MAX_NAME)
        word = text.strip()
        name = tools.named(word) or tools.named(word.removeprefix(_FUNCTION))
        separated = separated or marker == _SEPARATOR
        if marker is not None and marker not in (_SEPARATOR, "\n"):
            source.unread(marker)
        if name is not None:
            break
        if word not in ("", _FUNCTION):
            return word if separated and marked and NAME.fullmatch(word) else None
        if marker not in (_SEPARATOR, "\n"):
            return None
    yield from source.skip_space()
    yield from source.starts(_SEPARATOR)
    return name


def kimi_k2(source: Source, emitter: Emitter, tools: Tools) -> Wait[None]:
    """Parse ``<call>functions.name:0<arguments>{...}<end>``: the model generates the id, which names the function."""
    while marker := (yield from source.until(_KIMI, emitter.content)):
        emitter.gap()
        if marker == _KIMI_CALL or marker in _KIMI_BEGINS:
            head, after = yield from source.gather(_AFTER_ID, MAX_NAME)
            name = _kimi_name(head.strip(), tools) if after in (_KIMI_ARGUMENTS, *_OBJECTS) else None
            if after is not None and after != _KIMI_ARGUMENTS:
                source.unread(after)
            name_id = head.strip() if _KIMI_ID.fullmatch(head.strip()) else f"functions.{name}:{emitter.calls}"
            yield from _call(source, emitter, name, head, (_KIMI_END, _KIMI_CALL, *_KIMI_SECTIONS), name_id)


def _kimi_name(name_id: str, tools: Tools) -> str | None:
    """Return the function name of an id ``functions.name:0``, or of a bare number if there is only one function."""
    if name_id.isdecimal() and len(tools.names) == 1:
        return tools.names[0]
    match = _KIMI_ID.fullmatch(name_id)
    return tools.named(name_id) or (match[1] if match else None)


def _call(
    source: Source, emitter: Emitter, name: str | None, head: str, stops: Sequence[str], name_id: str | None = None
) -> Wait[None]:
    """Read arguments after a head that names a function: a JSON value, optionally in a fenced block. Without a name the
    head is content."""
    if name is None:
        emitter.content(head)
        return
    emitter.start(name, name_id)
    yield from open_fence(source)
    yield from JsonReader(source, emitter.arguments, stops).read()
    yield from source.skip(BEHIND_CALLS)
    if (yield from source.peek(1)):
        emitter.end()


# ---- forms, see `jaxinfer.parsers.forms.Form`


def deepseek_v3_form(functions: Sequence[Function], *, parallel: bool) -> Form:
    check_names(functions)
    calls = [
        tag(_CALL, row(const(f"function{_SEPARATOR}{each.name}\n```json\n"), _fenced(each)), _CALL_END)
        for each in functions
    ]
    return _sections(calls, (_SECTION, _CALL, _SECTION_END), parallel=parallel)


def deepseek_v31_form(functions: Sequence[Function], *, parallel: bool) -> Form:
    check_names(functions)
    calls = [tag(_CALL, row(const(each.name + _SEPARATOR), arguments(each)), _CALL_END) for each in functions]
    return _sections(calls, (_SECTION, _CALL, _SECTION_END), parallel=parallel)


def kimi_k2_form(functions: Sequence[Function], *, parallel: bool) -> Form:
    check_names(functions, _KIMI_NAME)
    calls = [tag(_KIMI_CALL, _kimi_call(each), _KIMI_END) for each in functions]
    return _sections(calls, (_KIMI_SECTIONS[0], _KIMI_CALL, _KIMI_SECTIONS[1]), parallel=parallel)


def _fenced(function: Function) -> Node:
    return row(arguments(function), const("\n```"))


def _kimi_call(function: Function) -> Node:
    name = row(const(f"functions.{function.name}"), regex(":[0-9]{1,3} ?"))
    return row(name, const(_KIMI_ARGUMENTS), regex(" ?"), arguments(function), regex(" ?"))


def _sections(calls: Sequence[Node], markers: tuple[str, str, str], *, parallel: bool) -> Form:
    """Return the form of calls in a section. Its markers are optional: in free text a call marker begins one, too."""
    begin, call, end = markers
    section = tag(begin, row(SPACE, several(either(calls), parallel=parallel), SPACE), end)
    return marked(section, [section, *calls], [begin, call], parallel=parallel)
