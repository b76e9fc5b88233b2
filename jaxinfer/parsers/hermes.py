"""Calls as JSON objects: Hermes' and Qwen's in tags, Llama 3's bare, Mistral's behind a token."""

from __future__ import annotations

import json
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
    optional,
    regex,
    row,
    several,
    tag,
    unmarked,
)
from jaxinfer.parsers.source import Markers, Source, Wait
from jaxinfer.parsers.tools import Tools
from jaxinfer.parsers.values import MAX_NAME, NAME, CallObject, Value

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_TAGS = Markers(_OPEN, _CLOSE)
_PYTHON_TAG = "<|python_tag|>"
_LLAMA = Markers(_PYTHON_TAG, "{")
_CALLS, _ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_MISTRAL = Markers(_CALLS)
_AFTER_NAME = Markers(_ID, _ARGS, _CALLS, "{")
_AFTER_ID = Markers(_ARGS)


def hermes(source: Source, emitter: Emitter, tools: Tools) -> Wait[None]:
    """``<tool_call>{"name": ..., "arguments": ...}</tool_call>``. What is no call stays text, its tag included."""
    while marker := (yield from source.until(_TAGS, emitter.content)):
        if marker == _CLOSE:
            emitter.closing(marker)
            continue
        source.copy(marker)
        found = yield from _tagged(source, emitter)
        while found:
            source.copy()
            yield from source.skip_space()
            found = (yield from source.starts(",")) and (yield from _tagged(source, emitter))
        emitter.content(source.copied())


def _tagged(source: Source, emitter: Emitter) -> Wait[bool]:
    """Read a call: some models put several into a tag, with commas between."""
    yield from source.skip_space()
    return (yield from source.starts("{")) and (yield from CallObject(source, emitter, stop=_CLOSE, bare=True).read())


def llama3_json(source: Source, emitter: Emitter, tools: Tools) -> Wait[None]:
    """``{"name": ..., "parameters": ...}``, anywhere, several with ";" between; Llama 3.1 puts its tag in front.

    Since nothing marks them, objects are calls only if their function is one of the request's.
    """
    while marker := (yield from source.until(_LLAMA, emitter.content)):
        if marker == _PYTHON_TAG:
            continue
        source.copy(marker)
        found = yield from CallObject(source, emitter, tools.know).read()
        text = source.copied()
        if found:
            yield from source.skip_space()
            yield from source.starts(";")
            continue
        emitter.content(text)
        if '"' in text and not text.endswith("}"):  # an object of another kind: what is in it is none either
            yield from Value(source, emitter.content).nested(depth=1)


def mistral(source: Source, emitter: Emitter, tools: Tools) -> Wait[None]:
    """``[TOOL_CALLS][{"name": ..., "arguments": ...}, ...]``, and since its tokenizer of version 11
    ``[TOOL_CALLS]name{...}`` or ``[TOOL_CALLS]name[ARGS]{...}``, once for each call."""
    while marker := (yield from source.until(_MISTRAL, emitter.content)):
        source.copy(marker)
        yield from source.skip_space()
        while (yield from source.starts(_CALLS)):  # some write it twice
            yield from source.skip_space()
        found = yield from _mistral_calls(source, emitter)
        text = source.copied()
        if not found:
            emitter.content(text)


def _mistral_calls(source: Source, emitter: Emitter) -> Wait[bool]:
    if (yield from source.starts("[")):
        return (yield from _listed(source, emitter))
    if (yield from source.starts("{")):  # an object without its list
        return (yield from CallObject(source, emitter, stop=_CALLS).read())
    return (yield from _named(source, emitter))


def _listed(source: Source, emitter: Emitter) -> Wait[bool]:
    while True:
        yield from source.skip_space()
        if (yield from source.starts("]")):
            return True
        if not (yield from source.starts("{")) or not (yield from CallObject(source, emitter, stop=_CALLS).read()):
            return False
        source.copy()
        yield from source.skip_space()
        yield from source.starts(",")


def _named(source: Source, emitter: Emitter) -> Wait[bool]:
    name, marker = yield from source.gather(_AFTER_NAME, MAX_NAME)
    name_id = None
    if marker == _ID:
        name_id, marker = yield from source.gather(_AFTER_ID, MAX_NAME)
    if marker not in (_ARGS, "{") or not NAME.fullmatch(name.strip()):
        return False
    emitter.start(name.strip(), name_id)
    yield from _named_arguments(source, emitter, marker)
    return True


def _named_arguments(source: Source, emitter: Emitter, marker: str) -> Wait[None]:
    """Read an object whose bracket may be the marker that came last."""
    value = Value(source, emitter.arguments, _CALLS)
    if marker == "{":
        emitter.arguments(marker)
        yield from value.nested(depth=1)
    elif (yield from source.peek(1)):
        yield from source.skip_space()
        yield from value.read()
    if (yield from source.peek(1)):
        emitter.end()


# ---- their forms, see `jaxinfer.parsers.forms.Form`


def hermes_form(functions: Sequence[Function], *, parallel: bool) -> Form:
    check_names(functions)
    tags = [tag(_OPEN, row(SPACE, _object(each, "arguments"), SPACE), _CLOSE) for each in functions]
    return marked(several(either(tags), parallel=parallel), tags, [_OPEN], parallel=parallel)


def llama3_json_form(functions: Sequence[Function], *, parallel: bool) -> Form:
    """Nothing marks a call: an answer that begins with a brace is one, or several."""
    check_names(functions)
    call = either(_object(each, "parameters") for each in functions)
    calls = row(optional(const(_PYTHON_TAG)), several(call, parallel=parallel, between=regex("; ?")))
    return unmarked(calls, "{")


def mistral_form(functions: Sequence[Function], *, parallel: bool) -> Form:
    """The list of older tokenizers, or a name and arguments: the model knows which."""
    check_names(functions)
    call = several(either(_object(each, "arguments") for each in functions), parallel=parallel, between=regex(", ?"))
    name_id = optional(const(_ID), regex("[a-zA-Z0-9]{9}"))
    named = [row(const(each.name), optional(name_id, const(_ARGS)), arguments(each)) for each in functions]
    listed = row(regex(r" ?\["), call, const("]"))
    one = either(tag(_CALLS, each, "") for each in named)
    calls = either([tag(_CALLS, listed, ""), several(one, parallel=parallel, between=const(""))])
    return marked(calls, [tag(_CALLS, each, "") for each in (listed, *named)], [_CALLS], parallel=parallel)


def _object(function: Function, word: str) -> Node:
    name = json.dumps(function.name, ensure_ascii=False)
    head = "".join(each if each.isalnum() else f"\\{each}" for each in name)
    return row(regex(rf'\{{"name": ?{head}, ?"{word}": ?'), arguments(function), const("}"))
