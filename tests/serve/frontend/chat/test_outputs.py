"""Tests of parsed outputs: the events do not depend on how the text is split."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.parsers.events import Arguments, CallEnd, CallStart, Content, Event, Message, message_of
from jaxinfer.parsers.registry import Parsers
from jaxinfer.parsers.tools import Tools
from jaxinfer.serve.frontend.chat.outputs import CallDelta, EventFilter, ParsedOutput, call_deltas
from jaxinfer.serve.frontend.chat.terms import ChatTerms
from jaxinfer.serve.frontend.chat.token_texts import TokenTexts
from jaxinfer.text.output import OutputDelta

CALLS = "".join(f'<tool_call>{{"name": "f", "arguments": {{"a": {i}}}}}</tool_call>' for i in range(2))
ANSWER = f"<think>Hm.</think>So.{CALLS}"


def output(shown: EventFilter) -> ParsedOutput:
    parser = Parsers("hermes", "qwen3").make(Tools(), new_id=lambda index: f"id{index}")
    assert parser is not None
    return ParsedOutput(parser, shown, TokenTexts(lambda token: b"", frozenset()))


def read(found: ParsedOutput, parts: Sequence[str], reason: str) -> tuple[list[list[Event]], str | None]:
    deltas = [OutputDelta(0, part, []) for part in parts]
    deltas[-1].finish_reason = reason
    return [found.read(delta) for delta in deltas], found.reason(deltas[-1])


@given(st.lists(st.integers(0, len(ANSWER)), max_size=8), st.booleans(), st.booleans())
def test_parts_add_up_to_the_whole(cuts: list[int], reasoning: bool, parallel: bool) -> None:
    edges = [0, *sorted(cuts), len(ANSWER)]
    parts = [ANSWER[first:last] for first, last in itertools.pairwise(edges)]
    shown = EventFilter(reasoning, parallel)
    (whole,), reason = read(output(shown), [ANSWER], "stop")
    split, again = read(output(shown), parts, "stop")
    message = message_of(whole)
    assert message_of([event for events in split for event in events]) == message
    assert reason == again == "tool_calls"
    assert (message.reasoning, message.content) == ("Hm." if reasoning else "", "So.")
    assert [call.arguments for call in message.calls] == ['{"a": 0}', '{"a": 1}'][: 2 if parallel else 1]
    assert added(split) == message.calls


def added(split: list[list[Event]]) -> list[object]:
    """Return the tool calls that streaming deltas add up to."""
    calls = Message().calls
    for delta in itertools.chain.from_iterable(map(call_deltas, split)):
        if delta.id is not None:
            assert delta.index == len(calls)
            calls += message_of([CallStart(delta.index, delta.id, delta.name or "")]).calls
        calls[delta.index].arguments += delta.arguments
    return list(calls)


@pytest.mark.parametrize("reason", ["length", "abort"])
def test_what_did_not_end_by_itself_says_so(reason: str) -> None:
    assert read(output(EventFilter()), [ANSWER[:-20]], reason)[1] == reason


def test_without_a_call_it_has_stopped() -> None:
    assert read(output(EventFilter()), ["So."], "stop")[1] == "stop"


def test_one_delta_for_each_call() -> None:
    events: list[Event] = [
        CallStart(0, "a", "f"),
        Arguments(0, "{"),
        Arguments(0, "}"),
        CallEnd(0),
        CallStart(1, "b", "g"),
    ]
    assert call_deltas(events) == [CallDelta(0, "a", "f", "{}"), CallDelta(1, "b", "g", "")]
    assert call_deltas([Content("x"), Arguments(3, "}")]) == [CallDelta(3, None, None, "}")]


def test_what_is_shown_is_what_is_asked_for() -> None:
    assert (
        EventFilter.of(ChatTerms())
        == EventFilter.of(ChatTerms(parallel_tool_calls=True, include_reasoning=True))
        == EventFilter()
    )
    assert EventFilter.of(ChatTerms(parallel_tool_calls=False, include_reasoning=False)) == EventFilter(False, False)
