"""Parsing of outputs that continue the last assistant message (``continue_final_message``). No jax."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Sequence

from jaxinfer.parsers.events import Arguments, CallEnd, CallStart, Content, Event, Reasoning
from jaxinfer.parsers.parser import Parser
from jaxinfer.parsers.registry import GPT_OSS, OPENAI, RESPONSE_TEMPLATE, Parsers
from jaxinfer.parsers.tools import Tools

_HEAD = "<|start|>assistant"


def continuing(parsers: Parsers, tools: Tools | None, prompt: str, begun: str) -> Parser | None:
    """Return a parser of an output that continues a text; None: there is nothing to parse.

    Args:
        prompt: end of the prompt with special tokens: at least the text that the template rendered from ``begun``.
        begun: content of the last message.
    """
    if RESPONSE_TEMPLATE in (parsers.tool_calls, parsers.reasoning):  # this parser reads the prompt itself
        return parsers.make(tools, prompt=prompt)
    if parsers.reasoning == GPT_OSS or parsers.tool_calls == OPENAI:  # this one too, from the message header on
        return _behind(functools.partial(parsers.make, tools), prompt.rpartition(_HEAD)[2])
    shown = _common_end(prompt, begun) or _common_end(prompt, begun.rstrip())
    before, thought = prompt[: len(prompt) - len(shown)], parsers.thought
    if shown and thought is not None and not before.rstrip().endswith(thought.begin):
        before = thought.end  # only a tag in the continued text opens reasoning
    return _behind(functools.partial(parsers.make, tools, prompt=before), shown)


def _behind(make: Callable[[], Parser | None], begun: str) -> Parser | None:
    first, second = make(), make()
    return first if first is None or second is None or not begun else _Continued(first, second, begun)


def _common_end(a: str, b: str) -> str:
    return _common_start(a[::-1], b[::-1])[::-1]


def _common_start(a: str, b: str) -> str:
    count = sum(1 for _ in itertools.takewhile(operator.truth, map(operator.eq, a, b)))
    return a[:count]


class _Continued:
    """A parser that has read the continued text and does not emit it again. A tool call that the text begins is emitted
    from its start: the client has not received it as a call yet.

    Args:
        parser: parser of the whole output.
        other: a second parser, to find the text that the first one holds back as the possible start of a marker.
    """

    def __init__(self, parser: Parser, other: Parser, begun: str) -> None:
        self._parser = parser
        events = parser.feed(begun)
        self._ended = sum(isinstance(event, CallEnd) for event in events)
        self._open = [event for event in map(self._numbered, events) if not isinstance(event, Content | Reasoning)]
        said = _text(other.feed(begun) + other.finish(cut=True))
        space = begun[len(begun.rstrip()) :]
        self._held = said[len(_text(events)) :] or ("" if said.endswith(space) else space)

    def feed(self, text: str) -> list[Event]:
        return self._new(self._parser.feed(text))

    def finish(self, *, cut: bool = False) -> list[Event]:
        return self._new(self._parser.finish(cut=cut))

    def _new(self, events: Sequence[Event]) -> list[Event]:
        found, self._open = [event for event in self._open if event is not None], []
        return found + [event for event in map(self._rest, events) if event is not None]

    def _rest(self, event: Event) -> Event | None:
        """Return the event without the text that was held back."""
        if not isinstance(event, Content | Reasoning):
            self._held = ""
            return self._numbered(event)
        same = _common_start(self._held, event.text)
        if len(same) < min(len(self._held), len(event.text)):  # the text held back belonged to a marker
            same, self._held = "", ""
        self._held = self._held[len(same) :]
        return dataclasses.replace(event, text=event.text[len(same) :]) if len(event.text) > len(same) else None

    def _numbered(self, event: Event) -> Event | None:
        """Number a call relative to those that the continued text has not ended; None: the text ended it."""
        if not isinstance(event, CallStart | Arguments | CallEnd):
            return event
        return dataclasses.replace(event, index=event.index - self._ended) if event.index >= self._ended else None


def _text(events: Sequence[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Content | Reasoning))
