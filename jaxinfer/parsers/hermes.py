"""Tool calls as JSON objects: in tags (Hermes, Qwen), without markers (Llama 3), or after a token (Mistral)."""

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
from jaxinfer.parsers.json_text import JsonReader
from jaxinfer.parsers.source import Markers, Source, Wait, ignore
from jaxinfer.parsers.tools import Tools
from jaxinfer.parsers.values import BEHIND_CALLS, LANGUAGE, MAX_NAME, NAME, CallObject, call_objects, open_fence

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_TAGS, _AGAIN = Markers(_OPEN, _CLOSE), Markers(_OPEN)
_PYTHON_TAG, _FENCE = "<|python_tag|>", "```"
_LLAMA = Markers(_PYTHON_TAG, _FENCE, "[", "{")
_BRACKETS, _BRACE = Markers("[", "{"), Markers("{")
_CALLS, _ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_MISTRAL = Markers(_CALLS, _ID, _ARGS)
_OBJECTS = ("{", '"{')  # also as a JSON string
_AFTER_NAME = Markers(_ID, _ARGS, _CALLS, *_OBJECTS)
_AFTER_ID = Markers(_ARGS, *_OBJECTS)


def hermes(source: Source, emitter: Emitter, tools: Tools) -> Wait[None]:
    """Parse ``<tool_call>{"name": ..., "arguments": ...}</tool_call>``. Other text stays content, without its tags."""
    while marker := (yield from source.until(_TAGS, emitter.content)):
        if marker == _OPEN:
            yield from tagged_objects(source, emitter, tools)
        else:
            emitter.gap()


def tagged_objects(source: Source, emitter: Emitter, tools: Tools) -> Wait[None]:
    """Read the contents of a tag: some models put several calls into one."""
    yield from call_objects(source, emitter, tools, (_CLOSE,), _AGAIN)


def llama3_json(source: Source, emitter: Emitter, tools: Tools) -> Wait[None]:
    """Parse ``{"name": ..., "parameters": ...}`` anywhere, in a list or several with ";" or "," between; Llama 3.1 puts
    its tag first.

    Since no marker identifies calls, an object is a call only if it names a function of the request.
    """
    while marker := (yield from source.until(_LLAMA, emitter.content)):
        if marker == _PYTHON_TAG:
            emitter.gap()
            continue
        source.copy(marker)
        if marker == _FENCE:
            yield from source.skip(LANGUAGE)
            yield from source.skip_space()
            marker = yield from source.which(_BRACKETS)
        if marker == "[":
            yield from source.skip_space()
            marker = yield from source.which(_BRACE)
        if marker == "{" and (yield from CallObject(source, emitter, tools, marked=False).read()):
            source.copied()
            yield from source.skip(BEHIND_CALLS)
        else:
            yield from _other(source, emitter, source.copied(), inside=marker == "{")


def _other(source: Source, emitter: Emitter, text: str, *, inside: bool) -> Wait[None]:
    """Read on after text that is not a call: an object of another kind cannot contain a call."""
    emitter.content(text)
    if inside and '"' in text and not text.endswith("}"):
        source.echo(emitter.content)
        yield from JsonReader(source, ignore).read_on()
        source.copied()


def mistral(source: Source, emitter: Emitter, tools: Tools) -> Wait[None]:
    """Parse ``[TOOL_CALLS][{"name": ..., "arguments": ...}, ...]``, and since version 11 of the tokenizer
    ``[TOOL_CALLS]name{...}`` or ``[TOOL_CALLS]name[ARGS]{...}``, once for each call."""
    while marker := (yield from source.until(_MISTRAL, emitter.content)):
        if marker != _CALLS or (yield from source.look(_next_is(source, _CALLS))):  # some models write it twice
            emitter.gap()
        elif (yield from source.look(_next_is(source, "[", "{", _FENCE))):
            yield from call_objects(source, emitter, tools, (_CALLS,))
        else:
            yield from _named(source, emitter, tools)


def _next_is(source: Source, *texts: str) -> Wait[bool]:
    yield from source.skip_space()
    for text in texts:
        if (yield from source.starts(text)):
            return True
    return False


def _named(source: Source, emitter: Emitter, tools: Tools) -> Wait[None]:
    source.copy()
    name, marker = yield from source.gather(_AFTER_NAME, MAX_NAME)
    name_id = None
    if marker == _ID:
        name_id, marker = yield from source.gather(_AFTER_ID, MAX_NAME)
    text, known = source.copied(), tools.named(name)
    if marker == _CALLS:
        text = text.removesuffix(marker)
        source.unread(marker)
    if marker not in (_ARGS, *_OBJECTS) or not (known or NAME.fullmatch(name.strip())):
        emitter.content(text)
        return
    if marker != _ARGS:
        source.unread(marker)
    emitter.start(known or name.strip(), name_id)
    yield from open_fence(source)
    yield from JsonReader(source, emitter.arguments, (_CALLS,)).read()
    if (yield from source.peek(1)):
        emitter.end()


# ---- forms, see `jaxinfer.parsers.forms.Form`


def hermes_form(functions: Sequence[Function], *, parallel: bool) -> Form:
    check_names(functions)
    tags = [tag(_OPEN, row(SPACE, _object(each, "arguments"), SPACE), _CLOSE) for each in functions]
    return marked(several(either(tags), parallel=parallel), tags, [_OPEN], parallel=parallel)


def llama3_json_form(functions: Sequence[Function], *, parallel: bool) -> Form:
    """Return the form of unmarked calls: an answer that begins with a brace is one or several calls."""
    check_names(functions)
    call = either(_object(each, "parameters") for each in functions)
    calls = row(optional(const(_PYTHON_TAG)), several(call, parallel=parallel, between=regex("; ?")))
    return unmarked(calls, "{")


def mistral_form(functions: Sequence[Function], *, parallel: bool) -> Form:
    """Return a form with both variants, list (older tokenizers) and name with arguments: the model knows its own."""
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
