"""Parsed outputs: content, reasoning and tool calls, for all APIs. No jax."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

from jaxinfer.parsers.events import Arguments, CallEnd, CallStart, Content, Event, Reasoning
from jaxinfer.parsers.parser import Parser
from jaxinfer.parsers.registry import Parsers
from jaxinfer.parsers.tools import Tools
from jaxinfer.serve.frontend.chat.continued import continuing
from jaxinfer.serve.frontend.chat.terms import ChatTerms
from jaxinfer.serve.frontend.chat.token_texts import TokenTexts
from jaxinfer.serve.frontend.generation import Generation
from jaxinfer.text.output import OutputDelta
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.types import FinishReason

TOOL_CALLS = "tool_calls"
"""OpenAI's field of the calls of a message, and the finish reason of a message with calls."""


@dataclasses.dataclass(frozen=True)
class EventFilter:
    """A filter of parser events for the client.

    Attributes:
        reasoning: whether reasoning is included.
        parallel: whether calls after the first are included.
    """

    reasoning: bool = True
    parallel: bool = True

    @classmethod
    def of(cls, terms: ChatTerms) -> EventFilter:
        return cls(terms.include_reasoning is not False, terms.parallel_tool_calls is not False)

    def shows(self, event: Event) -> bool:
        match event:
            case Reasoning():
                return self.reasoning
            case CallStart(index) | Arguments(index) | CallEnd(index):
                return self.parallel or index == 0
            case Content():
                return True


class ParsedOutput:
    """An output with its own parser. Each delta must be read once, in order.

    Attributes:
        reasoning_tokens: number of reasoning tokens, included in the response or not, without markers.
    """

    def __init__(self, parser: Parser, shown: EventFilter, tokens: TokenTexts) -> None:
        self._parser, self._shown, self._tokens = parser, shown, tokens
        self._called = False
        self.reasoning_tokens = 0

    def read(self, delta: OutputDelta) -> list[Event]:
        """Return the events of a delta that the client gets."""
        events = [event for text in self._tokens.texts(delta) for event in self._counted(self._parser.feed(text))]
        if delta.finish_reason is not None:
            events += self._counted(self._parser.finish(cut=delta.finish_reason != FinishReason.STOP))
        shown = [event for event in events if self._shown.shows(event)]
        self._called = self._called or any(isinstance(event, CallStart) for event in shown)
        return shown

    def _counted(self, events: list[Event]) -> list[Event]:
        for event in events:
            if not isinstance(event, CallStart | CallEnd):
                said = self._tokens.taken(event.text)
                self.reasoning_tokens += len(said) if isinstance(event, Reasoning) else 0
        return events

    def reason(self, delta: OutputDelta) -> str | None:
        """Return the finish reason of a delta: `TOOL_CALLS` if the model made calls and stopped by itself."""
        called = self._called and delta.finish_reason == FinishReason.STOP
        return TOOL_CALLS if called else delta.finish_reason


def outputs_of(
    generation: Generation,
    terms: ChatTerms,
    parsers: Parsers,
    tokenizer: Tokenizer | None,
    spell: Callable[[int], bytes],
    *,
    skips_special: bool = True,
) -> list[ParsedOutput | None]:
    """Return a parsed output for each output of a generation; None: there is nothing to parse, the text is the content.

    Args:
        parsers: result of `ChatTerms.parsers`.
        spell: returns the bytes of a token.
        skips_special: whether the text excludes special tokens, except the parsers' markers.
    """
    made = new_parsers(generation, terms, parsers, tokenizer)
    shown, hidden = EventFilter.of(terms), hidden_tokens(parsers, tokenizer) if skips_special else frozenset[int]()
    return [None if parser is None else ParsedOutput(parser, shown, TokenTexts(spell, hidden)) for parser in made]


def hidden_tokens(parsers: Parsers, tokenizer: Tokenizer | None) -> frozenset[int]:
    """Return the special tokens that the text read by these parsers excludes."""
    return frozenset() if tokenizer is None else frozenset(tokenizer.showing(parsers.markers).special_ids)


def new_parsers(
    generation: Generation, terms: ChatTerms, parsers: Parsers, tokenizer: Tokenizer | None
) -> list[Parser | None]:
    """Return the parsers of the outputs, see `outputs_of`."""
    begun = terms.begun
    last = generation.prompt_token_ids[-parsers.prompt_tokens - len((begun or "").encode(errors="replace")) :]
    prompt = "" if tokenizer is None else tokenizer.decode(last, skip_special_tokens=False)
    tools = Tools(terms.tools) if parsers.tool_calls is not None else None
    make = functools.partial(parsers.make, tools, prompt=prompt)
    if begun is not None:
        make = functools.partial(continuing, parsers, tools, prompt, begun)
    return [make() for _ in range(generation.n)]


@dataclasses.dataclass
class CallDelta:
    """The delta of one tool call. ``id`` and ``name`` are in its first delta, and None in later ones."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


def call_deltas(events: Sequence[Event]) -> list[CallDelta]:
    """Return the tool call deltas of events, one for each call."""
    calls: dict[int, CallDelta] = {}
    for event in events:
        if isinstance(event, CallStart):
            calls[event.index] = CallDelta(event.index, event.id, event.name)
        elif isinstance(event, Arguments):
            calls.setdefault(event.index, CallDelta(event.index)).arguments += event.text
    return list(calls.values())
