"""Tests of JSON values: their end, and calls in them, against Python's own parser."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.parsers.events import Emitter, Message, message_of
from jaxinfer.parsers.source import Source
from jaxinfer.parsers.tools import Tools
from jaxinfer.parsers.values import CallObject
from tests.parsers.test_source import run

F = Tools([{"function": {"name": "f"}}])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def split(data: st.DataObject, text: str) -> list[str]:
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(text) - 1)), max_size=8)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@given(
    st.data(), JSON.filter(lambda value: not isinstance(value, str) and value is not None), st.permutations(range(4))
)
def test_a_call_has_its_name_and_its_arguments_in_any_order(data: st.DataObject, value: Any, order: list[int]) -> None:
    members = ['"name": "f"', f'"arguments" : {json.dumps(value)}', '"id": "x"', '"type":"function"']
    text, source, emitter = ", ".join(members[i] for i in order) + "}", Source(), Emitter(str)
    assert run(split(data, text), CallObject(source, emitter, F).read(), source)
    (call,) = message_of(emitter.drain()).calls
    assert (call.name, json.loads(call.arguments)) == ("f", value)


@pytest.mark.parametrize(
    "text",
    [
        "}",
        '"name": "f"}',
        '"arguments": {}}',
        '"more": 1, "name": "f", "arguments": {}}',
        '"name": "two words", "arguments": {}}',
        '"name": 3, "arguments": {}}',
        '"name" "f"}',
        '"arguments": {"a": 1',
        '"name": "g", "arguments": {}}',
    ],
)
def test_what_is_no_call_emits_nothing(text: str) -> None:
    source, emitter = Source(), Emitter(str)
    assert not run([text], CallObject(source, emitter, F, marked=False).read(), source)
    assert message_of(emitter.drain()) == Message()
