"""OpenAI's Harmony format of gpt-oss: messages on channels, some of them addressed to functions."""

from __future__ import annotations

import re
from collections.abc import Sequence

from jaxinfer.parsers.events import Emitter
from jaxinfer.parsers.forms import (
    Form,
    Function,
    Node,
    any_text,
    arguments,
    check_names,
    const,
    either,
    optional,
    row,
    several,
    star,
    tag,
)
from jaxinfer.parsers.json_text import JsonReader
from jaxinfer.parsers.source import Markers, Sink, Source, Wait, ignore
from jaxinfer.parsers.tools import Tools
from jaxinfer.parsers.values import NAME, open_fence

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_HEAD = Markers(_START, _CHANNEL, _MESSAGE, *_ENDS)
_HEAD_END = Markers(_MESSAGE, *_ENDS)
_BODY_END = Markers(_START, _CHANNEL, *_ENDS)
_MAX_HEAD = 1024
_RECIPIENT = re.compile(r"\bto\s*=\s*([^\s<{]+)")
_ON = re.compile(r"<\|channel\|>\s*(\w+)")
_FILLER = re.compile(r"\s*(?:assistant|analysis|commentary|final)\s*")
_MAX_FILLER = 32
_NAME_OF_CHANNEL = re.compile(r"\s*(?:analysis|commentary|final)?\s*")
_FUNCTIONS = "functions."
_TO = " to="


class _Paragraphs:
    """Sink that puts a line break between texts."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._any = self._next = False

    def begin(self) -> None:
        self._next = self._any

    def __call__(self, text: str) -> None:
        if self._next:
            self._sink("\n")
        self._any, self._next = True, False
        self._sink(text)


def harmony(source: Source, emitter: Emitter, tools: Tools) -> Wait[None]:
    """Parse Harmony messages. ``<|channel|>analysis<|message|>...<|end|>`` is reasoning, ``final`` and ``commentary``
    messages to the user are content, and a message ``to=functions.f`` calls f."""
    sinks = _Paragraphs(emitter.reasoning), _Paragraphs(emitter.content)
    marker = _TO if (yield from source.starts(_TO)) else (yield from source.until(_HEAD, emitter.content))
    while marker is not None:
        head = yield from _head(source, emitter, marker, sinks[1])
        if head is None:
            marker = yield from _between(source, emitter)
        else:
            marker = yield from _body(source, emitter, head, sinks, tools)


def _between(source: Source, emitter: Emitter) -> Wait[str | None]:
    """Read up to the next head. Models sometimes put a word of the head before its marker: it is not content."""
    text, marker = yield from source.gather(_HEAD, _MAX_FILLER)
    if marker not in (_START, _CHANNEL) or not _FILLER.fullmatch(text):
        emitter.content(text)
    return marker or (yield from source.until(_HEAD, emitter.content))


def _head(source: Source, emitter: Emitter, marker: str, content: _Paragraphs) -> Wait[str | None]:
    """Read the head of a message after ``marker``. None: it is not a head, or the text ends in it.

    If the marker between head and message is missing, the text after the channel is content.
    """
    if marker not in (_START, _CHANNEL, _MESSAGE, _TO):  # the end of a message without a head
        return None
    if marker == _MESSAGE:
        return marker
    head, end = yield from source.gather(_HEAD_END, _MAX_HEAD)
    if end == _MESSAGE:
        return marker + head
    if end is not None and "{" in head and _RECIPIENT.search(head):  # the marker before the message is missing
        head, brace, body = head.partition("{")
        source.unread(brace + body + end)
        return marker + head
    if end is not None:
        content.begin()
        content(_NAME_OF_CHANNEL.sub("", head.rpartition(_CHANNEL)[2], count=1))
    elif len(head) == _MAX_HEAD:
        emitter.content(marker + head)
    return None


def _body(
    source: Source, emitter: Emitter, head: str, sinks: tuple[_Paragraphs, _Paragraphs], tools: Tools
) -> Wait[str | None]:
    """Read a message. Returns the marker that ends it, if that begins the next head."""
    to, on = _RECIPIENT.search(head), _ON.search(head)
    name = _function(to[1], tools) if to else None
    sink: Sink = ignore
    if name is not None:
        emitter.start(name)
        yield from open_fence(source)
        yield from JsonReader(source, emitter.arguments, _BODY_END.texts).read()
    else:
        sink = paragraphs = sinks[0 if (on and on[1] == "analysis") or to else 1]
        paragraphs.begin()
    marker = yield from source.until(_BODY_END, sink)
    if marker is not None:
        emitter.end()
    return marker


def _function(recipient: str, tools: Tools) -> str | None:
    """Return the function's name; other recipients are built-in tools of the model, which are not available here."""
    name = recipient.removeprefix(_FUNCTIONS)
    unknown = name if recipient.startswith(_FUNCTIONS) and NAME.fullmatch(name) else None
    return tools.named(recipient) or unknown


# ---- form, see `jaxinfer.parsers.forms.Form`

_END, _ASSISTANT = "<|end|>", const(f"{_START}assistant")
_TEXT = any_text(_START, _CHANNEL, _END, "<|call|>", "<|return|>")
_FINAL = f"{_CHANNEL}final{_MESSAGE}"


def harmony_form(functions: Sequence[Function], *, parallel: bool) -> Form:
    """Return the form of a whole answer, with reasoning and user messages before a call. An end token ends a call."""
    check_names(functions)
    call = either(map(_to_function, functions))
    calls = several(call, parallel=parallel, between=row(const(_END), _ASSISTANT))

    def beside(answer: Node) -> Node:
        return row(_thoughts(), either([calls, row(const(_FINAL), answer)]))

    return Form(row(_thoughts(), calls), beside(_TEXT), beside)


def harmony_answer(answer: Node) -> Node:
    """Return the format ``answer`` preceded by reasoning."""
    return row(_thoughts(), const(_FINAL), answer)


def _thoughts() -> Node:
    before = [tag(f"{_CHANNEL}{on}{_MESSAGE}", _TEXT, _END) for on in ("analysis", "commentary")]
    return star(either(before), _ASSISTANT)


def _to_function(function: Function) -> Node:
    to = f" to={_FUNCTIONS}{function.name}"
    kind = either([const(" <|constrain|>json"), const(" json"), const("<|constrain|>json")])
    head = either(
        [
            row(const(f"{_CHANNEL}commentary{to}"), optional(kind)),
            row(const(f"{to}{_CHANNEL}commentary"), optional(kind)),
        ]
    )
    return row(head, const(_MESSAGE), arguments(function))
