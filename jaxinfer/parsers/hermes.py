"""Calls as JSON objects: Hermes' and Qwen's in tags, Llama 3's bare, Mistral's behind a token."""

from __future__ import annotations

from jaxinfer.parsers.events import Emitter
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
    return (yield from source.starts("{")) and (yield from CallObject(source, emitter, stop=_CLOSE).read())


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
