"""Calls between special tokens: DeepSeek's and Kimi's."""

from __future__ import annotations

import re

from jaxinfer.parsers.events import Emitter
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
