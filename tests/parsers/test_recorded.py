"""Cases of vLLM's and SGLang's parser tests, unsplit and for all partitions."""

import itertools
import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.parsers.events import Event, Message, message_of
from jaxinfer.parsers.registry import REASONING_PARSERS, TOOL_PARSERS, Parsers
from jaxinfer.parsers.tools import Tools
from tests.parsers.recorded import DATA, FILES, RECORDED, Recorded
from tests.parsers.test_registry import assert_begins, partitions, said

each_case = pytest.mark.parametrize("case", RECORDED, ids=lambda case: case.name)


def parse(case: Recorded, cuts: Sequence[int]) -> list[list[Event]]:
    """Return the events of each chunk, and of the end."""
    tools = Tools(case.tools) if case.parsers.tool_calls is not None else None
    parser = case.parsers.make(tools, prompt=case.prompt, new_id=lambda index: f"id{index}")
    assert parser is not None
    parts = [parser.feed(case.text[a:b]) for a, b in itertools.pairwise([0, *cuts, len(case.text)])]
    return [*parts, parser.finish()]


def total(parts: list[list[Event]]) -> Message:
    return message_of([event for events in parts for event in events])


def characters(case: Recorded) -> Sequence[int]:
    return range(1, len(case.text))


@each_case
def test_the_whole_is_what_the_case_says(case: Recorded) -> None:
    message = total(parse(case, []))
    calls = [(call.name, said(call.arguments)) for call in message.calls]
    assert (message.content, message.reasoning, calls) == (case.content, case.reasoning, case.calls)


@each_case
def test_parts_of_every_size_add_up(case: Recorded) -> None:
    whole = total(parse(case, []))
    for size in (1, 2, 3, 5, 8, 21):
        assert total(parse(case, range(size, len(case.text), size))) == whole, size


@settings(max_examples=400)
@given(st.data(), st.sampled_from(RECORDED))
def test_any_parts_add_up(data: st.DataObject, case: Recorded) -> None:
    assert total(parse(case, data.draw(partitions(len(case.text))))) == total(parse(case, []))


@each_case
def test_what_has_come_out_begins_the_whole(case: Recorded) -> None:
    """After each character, content, reasoning and arguments are prefixes of the final ones."""
    parts, whole = parse(case, characters(case)), total(parse(case, []))
    for count in range(len(parts)):
        assert_begins(total(parts[:count]), whole)


CALLING = [case for case in RECORDED if case.parsers.tool_calls is not None]


@pytest.mark.parametrize("case", CALLING, ids=lambda case: case.name)
def test_no_marker_is_shown(case: Recorded) -> None:
    """Content and names have no marker, also for malformed calls."""
    message = total(parse(case, characters(case)))
    shown = [message.content, *(call.name for call in message.calls)]
    assert not any(marker in text for marker in Parsers(case.parsers.tool_calls).markers for text in shown)


@pytest.mark.parametrize("case", CALLING, ids=lambda case: case.name)
def test_arguments_are_json(case: Recorded) -> None:
    for call in total(parse(case, [])).calls:
        json.loads(call.arguments)


def test_every_parser_has_cases() -> None:
    used = {case.parsers.tool_calls for case in RECORDED} | {case.parsers.reasoning for case in RECORDED}
    assert {*TOOL_PARSERS, *REASONING_PARSERS} <= used


def test_files_say_where_they_come_from_and_stay_small() -> None:
    for path in FILES:
        file = json.loads(path.read_text(encoding="utf-8"))
        assert file["licence"] == "Apache-2.0"
        assert {case["source"] for case in file["cases"]} == set(range(len(file["sources"])))
    assert sum(path.stat().st_size for path in DATA.iterdir()) < 300_000
