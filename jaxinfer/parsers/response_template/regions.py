"""Parser for a response template: splits an answer into regions. Text is streamed, calls are emitted when they end."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxinfer.parsers.events import Emitter, Event
from jaxinfer.parsers.response_template.scanner import Found, Scanner
from jaxinfer.parsers.response_template.search import Finder
from jaxinfer.parsers.response_template.template import Field, Kind, ResponseTemplate, shaped
from jaxinfer.parsers.source import Sink
from jaxinfer.parsers.tools import STRING, Tools, json_text, json_value
from jaxinfer.parsers.values import NAME

_WRONG = (ValueError, TypeError, RecursionError, MemoryError)


class TemplateParser:
    """Parser of one answer.

    Args:
        prompt: its end: a template may have written the beginning of the answer, which is parsed, but not shown.
        new_id: see `Emitter`.
    """

    def __init__(self, template: ResponseTemplate, tools: Tools, prompt: str, new_id: Callable[[int], str]) -> None:
        self._template, self._tools, self._emitter = template, tools, Emitter(new_id)
        self._texts = {field.name: self._text_of(field) for field in (*template.fields, template.implicit) if field}
        self._scanner = Scanner(self._watched(template.implicit))
        self._region: Region = self._begin(template.implicit, "", {})
        begun = template.begun(prompt)
        self._first = len(begun)  # position of the answer in the scanner's text
        self._read(begun)

    def feed(self, text: str) -> list[Event]:
        self._read(text)
        return self._emitter.drain()

    def finish(self, *, cut: bool = False) -> list[Event]:
        self._scanner.end()
        self._read("")
        self._region.end("", {})
        self._emitter.close(cut=cut)
        return self._emitter.drain()

    def _read(self, text: str) -> None:
        self._scanner.add(text)
        while (found := self._scanner.find()) is not None:
            self._pass_on()
            self._next(found)
        self._pass_on()

    def _pass_on(self) -> None:
        """Pass text that certainly belongs to the region to it."""
        at, text = self._scanner.take()
        hidden = max(0, min(len(text), self._first - at))
        if hidden:
            self._region.add(text[:hidden], shown=False)
        if hidden < len(text):
            self._region.add(text[hidden:], shown=True)

    def _next(self, found: Found) -> None:
        """End a region at its end delimiter, or at the delimiter that begins the next."""
        template, begins = self._template, found.field.open is found.program
        marker = found.text[max(0, self._first - found.start) :]
        self._region.end("" if begins else marker, {} if begins else found.kept)
        field = found.field if begins else template.implicit
        self._region = self._begin(field, marker if begins else "", found.kept if begins else {})
        self._scanner.watch(self._watched(field), found.end)

    def _watched(self, field: Field | None) -> Sequence[tuple[Field, bool]]:
        """Return the delimiters to watch in a region: its end and, if no region is open, the beginnings of all."""
        ends = [(field, False)] if field is not None and field.close is not None else []
        return (
            ends if field is not self._template.implicit else [*((each, True) for each in self._template.fields), *ends]
        )

    def _begin(self, field: Field | None, marker: str, kept: Mapping[str, str]) -> Region:
        if field is None:
            return Region()
        if field.kind != Kind.CALLS:
            self._texts[field.name].begin()
            return TextRegion(self._texts[field.name])
        return CallsRegion(field, self._emitter, self._tools, marker, kept)

    def _text_of(self, field: Field) -> Text:
        emitter = self._emitter
        sink = emitter.content if field.kind == Kind.CONTENT else emitter.reasoning
        return Text(sink, strip=field.strip, join="\n" if field.join is None else field.join)


class Region:
    """A region of an answer; this base class drops its text."""

    def add(self, text: str, *, shown: bool) -> None:
        """Append text. Not ``shown``: the text is in the prompt."""

    def end(self, marker: str, kept: Mapping[str, str]) -> None:
        """End the region at a marker, whose named groups are ``kept``."""


class Text:
    """Sink of all texts of a field, joined.

    Args:
        join: separator of the texts.
    """

    def __init__(self, sink: Sink, *, strip: bool, join: str) -> None:
        self._sink, self._strip, self._join = sink, strip, join
        self._any = self._inside = False
        self._space = ""

    def begin(self) -> None:
        """Begin another text."""
        self._inside, self._space = False, ""

    def add(self, text: str, *, shown: bool) -> None:
        if self._strip and not self._inside:
            text = text.lstrip()
        if not text:
            return
        joined = self._join if self._any and not self._inside else ""
        self._inside = True
        if shown:
            self._show(text, joined)

    def _show(self, text: str, joined: str) -> None:
        """Emit text; trailing whitespace waits for more text."""
        bare = text.rstrip() if self._strip else text
        if bare:
            self._sink(joined + self._space + bare)
            self._any, self._space = True, ""
        self._space += text[len(bare) :]


class TextRegion(Region):
    """Region of text, streamed."""

    def __init__(self, text: Text) -> None:
        self._text = text

    def add(self, text: str, *, shown: bool) -> None:
        self._text.add(text, shown=shown)


class CallsRegion(Region):
    """Region of calls, parsed when it has ended. Text that is not a call stays content, including its markers."""

    def __init__(self, field: Field, emitter: Emitter, tools: Tools, marker: str, kept: Mapping[str, str]) -> None:
        self._field, self._emitter, self._tools = field, emitter, tools
        self._marker, self._kept = marker, kept
        self._parts: list[str] = []
        self._hidden = 0
        self._finder = Finder(field.contents.tags) if field.contents.tags is not None else None

    def add(self, text: str, *, shown: bool) -> None:
        self._parts.append(text)
        self._hidden += 0 if shown else len(text)
        if self._finder is not None:
            self._finder.add(text)

    def end(self, marker: str, kept: Mapping[str, str]) -> None:
        body = "".join(self._parts)
        try:
            calls = self._calls(body, {**self._kept, **kept})
        except _WRONG:
            self._emitter.content(f"{self._marker}{body[self._hidden :]}{marker}")
            return
        for name, arguments in calls:
            self._emitter.start(name)
            self._emitter.arguments(arguments)
            self._emitter.end()

    def _calls(self, body: str, kept: Mapping[str, str]) -> Sequence[tuple[str, str]]:
        """Return names and arguments.

        Raises:
            ValueError, and others of ``_WRONG``: the text has another form.
        """
        field, matches = self._field, self._finder.end()[1] if self._finder is not None else ()
        value = field.contents.read(body, matches)
        if field.each:
            value = [shaped(field.transform, {**kept, **item}) for item in value]
        elif field.transform is not None:
            value = shaped(field.transform, {**kept, "content": value})
        return [_call(item, self._tools) for item in (value if isinstance(value, list) else [value])]


def _call(item: Any, tools: Tools) -> tuple[str, str]:
    function = item.get("function", item) if isinstance(item, Mapping) else None
    if not isinstance(function, Mapping):
        raise ValueError("no call")
    name, arguments = function.get("name"), function.get("arguments", function.get("parameters"))
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError("no call")
    return name, _arguments(name, {} if arguments is None else arguments, tools)


def _arguments(name: str, arguments: Any, tools: Tools) -> str:
    """Return arguments as JSON; text values of other types are converted as the function's schema declares."""
    if isinstance(arguments, str):
        return arguments
    if isinstance(arguments, Mapping):
        arguments = {key: _typed(value, tools.types(name, key)) for key, value in arguments.items()}
    text = json_text(arguments)
    if text is None:
        raise ValueError("no JSON")
    return text


def _typed(value: Any, types: frozenset[str]) -> Any:
    if isinstance(value, list) and "array" not in types:  # several tags of one name
        return [_typed(each, types) if isinstance(each, str) else each for each in value]
    as_text = not isinstance(value, str) or types <= {STRING}
    return value if as_text else json.loads(json_value(value, types))
