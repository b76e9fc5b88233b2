"""Calls between special tokens: DeepSeek's and Kimi's."""

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
from jaxinfer.parsers.source import Markers, Source, Wait
from jaxinfer.parsers.tools import Tools
from jaxinfer.parsers.values import MAX_NAME, NAME, Value

_SECTION, _SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEPARATOR, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_DEEPSEEK = Markers(_SECTION, _SECTION_END, _CALL, _SEPARATOR, _CALL_END)
_AFTER_WORD = Markers(_SEPARATOR, _CALL_END, _SECTION_END)
_AFTER_LINE = Markers("\n")

_KIMI_SECTIONS = (
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_section_begin|>",
    "<|tool_call_section_end|>",
)
_KIMI_CALL, _KIMI_ARGUMENTS, _KIMI_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_KIMI = Markers(*_KIMI_SECTIONS, _KIMI_CALL, _KIMI_ARGUMENTS, _KIMI_END)
_AFTER_ID = Markers(_KIMI_ARGUMENTS, _KIMI_CALL, _KIMI_END, *_KIMI_SECTIONS)
_KIMI_NAME = re.compile(r"[\w.-]{1,240}")
_KIMI_ID = re.compile(r"(?:functions\.)?([\w.-]+):\d+")


def deepseek(source: Source, emitter: Emitter, tools: Tools) -> Wait[None]:
    """Of V3 and R1 ``function<sep>name`` with arguments in a fenced block, of V3.1 ``name<sep>{...}``."""
    while marker := (yield from source.until(_DEEPSEEK, emitter.content)):
        if marker != _CALL:
            emitter.gap()
            continue
        source.copy(marker)
        name = yield from _deepseek_name(source)
        text = source.copied()
        if name is None:
            emitter.content(text)
            continue
        emitter.start(name)
        yield from _arguments(source, emitter, _CALL_END)


def _deepseek_name(source: Source) -> Wait[str | None]:
    word, marker = yield from source.gather(_AFTER_WORD, MAX_NAME)
    if marker != _SEPARATOR:
        return None
    if (yield from source.peek(1)) in ("{", "") or (yield from source.ahead(_CALL_END)):
        name = word
    else:
        name, _ = yield from source.gather(_AFTER_LINE, MAX_NAME)
        yield from source.skip_space()
        if (yield from source.starts("```")):
            yield from source.starts("json")
    return name.strip() if NAME.fullmatch(name.strip()) else None


def kimi_k2(source: Source, emitter: Emitter, tools: Tools) -> Wait[None]:
    """``<call>functions.name:0<arguments>{...}<end>``: the id is the model's, and names the function."""
    while marker := (yield from source.until(_KIMI, emitter.content)):
        if marker != _KIMI_CALL:
            emitter.gap()
            continue
        source.copy(marker)
        name_id, after = yield from source.gather(_AFTER_ID, MAX_NAME)
        text, name = source.copied(), _kimi_name(name_id.strip(), tools)
        if name is None or after != _KIMI_ARGUMENTS:
            emitter.content(text)
            continue
        emitter.start(name, name_id.strip())
        yield from _arguments(source, emitter, _KIMI_END)


def _kimi_name(name_id: str, tools: Tools) -> str | None:
    """Of an id ``functions.name:0``, or of a bare number where there is but one function."""
    if name_id.isdecimal() and len(tools.names) == 1:
        return tools.names[0]
    match = _KIMI_ID.fullmatch(name_id)
    return match[1] if match else None


def _arguments(source: Source, emitter: Emitter, end: str) -> Wait[None]:
    """A JSON value, and the space or the fence that closes it."""
    yield from source.skip_space()
    if not (yield from source.ahead(end)):
        yield from Value(source, emitter.arguments, end, firm=True).read()
        yield from source.skip_space()
        yield from source.starts("```")
    if (yield from source.peek(1)):
        emitter.end()


# ---- their forms, see `jaxinfer.parsers.forms.Form`


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
    """Calls in a section. Its markers may be missing: in text a call's own begins one, too."""
    begin, call, end = markers
    section = tag(begin, row(SPACE, several(either(calls), parallel=parallel), SPACE), end)
    return marked(section, [section, *calls], [begin, call], parallel=parallel)
