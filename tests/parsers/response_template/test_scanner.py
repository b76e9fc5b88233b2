"""Tests of the scanner: the next of several delimiters, and the text that is certainly not part of a delimiter."""

from typing import Any

import pytest

from jaxinfer.parsers.response_template.scanner import Found, Scanner
from jaxinfer.parsers.response_template.template import Field, read_template

CALLS: dict[str, Any] = {"open": "<a", "close": "</a>", "content": "json"}


def scanner(calls: dict[str, Any], content: dict[str, Any]) -> Scanner:
    template = read_template({"start_anchor": "A", "fields": {"tool_calls": {**CALLS, **calls}, "content": content}})
    watched: list[tuple[Field, bool]] = [(field, True) for field in template.fields]
    assert template.implicit is not None
    return Scanner([*watched, (template.implicit, False)])


def found(one: Scanner, text: str, *, ended: bool = True) -> Found | None:
    one.add(text)
    if ended:
        one.end()
    return one.find()


@pytest.mark.parametrize(
    ("calls", "content", "text", "field", "place"),
    [
        ({}, {"close": "b"}, "x<ab", "tool_calls", (1, 3)),
        ({}, {"close": "b"}, "xb<a", "content", (1, 2)),
        ({}, {"close": "<ab"}, "x<ab", "content", (1, 4)),  # the longer delimiter
        ({}, {"close": "<a"}, "x<a", "tool_calls", (1, 3)),  # a start has precedence over an end
        ({"open_pattern": r"\s*<a", "open": None}, {"close": "\n"}, " \n<a", "tool_calls", (0, 4)),
        ({"open_pattern": r"\s*<a", "open": None}, {"close": "\n"}, " \n<b", "content", (1, 2)),
    ],
)
def test_the_first_and_of_those_at_one_place_the_longest(
    calls: dict[str, Any], content: dict[str, Any], text: str, field: str, place: tuple[int, int]
) -> None:
    given = {key: value for key, value in {**CALLS, **calls}.items() if value is not None}
    template = read_template({"start_anchor": "A", "fields": {"tool_calls": given, "content": content}})
    assert template.implicit is not None
    for parts in ([text], list(text)):
        one = Scanner([(template.fields[0], True), (template.implicit, False)])
        for part in parts[:-1]:
            one.add(part)
            one.find()
        delimiter = found(one, parts[-1])
        assert delimiter is not None
        assert (delimiter.field.name, (delimiter.start, delimiter.end)) == (field, place)
        assert delimiter.text == text[slice(*place)]


def test_what_may_be_a_delimiter_waits() -> None:
    one = scanner({}, {"close": "<ab"})
    assert found(one, "xy<a", ended=False) is None  # it may become the longer delimiter
    assert one.take() == (0, "xy")
    assert found(one, "c", ended=False) is not None
    assert one.take() == (2, "")


def test_other_delimiters_are_looked_for_behind_one() -> None:
    one = scanner({}, {"close": "b"})
    first = found(one, "<a</a>b", ended=False)
    assert first is not None
    one.watch([(first.field, False)], first.end)
    second = found(one, "")
    assert second is not None
    assert (second.start, second.text, one.take()) == (2, "</a>", (2, ""))
