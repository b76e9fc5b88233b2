"""Tests of messages that are passed back to the model."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.serve.frontend.chat.messages import (
    INVALID,
    MOST_DEPTH,
    MOST_VALUES,
    arguments_of,
    for_template,
    tool_call,
)


def told(arguments: Any) -> Any:
    message = for_template({"role": "assistant", "tool_calls": [tool_call("a", "f", arguments)]})
    return message["tool_calls"][0]["function"]["arguments"]


@pytest.mark.parametrize("value", [{"a": [1, None, "é🦊"]}, {}])
def test_arguments_come_as_what_they_say(value: Any) -> None:
    assert told(json.dumps(value)) == value


@pytest.mark.parametrize("text", ["", " \n", "null"])
def test_a_call_without_arguments_has_an_empty_object(text: str) -> None:
    assert told(text) == {}


def test_arguments_that_are_an_object_stay_one_and_the_message_is_a_copy() -> None:
    given = {"role": "assistant", "tool_calls": [tool_call("a", "f", {"a": 1}), "x", {"function": 1}]}
    made = for_template(given)
    assert made == given
    assert made is not given


def test_a_thought_has_the_older_name_too_and_keeps_the_one_that_is_given() -> None:
    assert for_template({"reasoning": "a"}) == {"reasoning": "a", "reasoning_content": "a"}
    given = {"reasoning": "a", "reasoning_content": "b"}
    assert for_template(given) == given
    assert for_template({"reasoning": None}) == {"reasoning": None}


DEEP = f'{{"a": {"[" * MOST_DEPTH}{"]" * MOST_DEPTH}}}'
MANY = f'{{"a": [{"0," * MOST_VALUES}0]}}'
CUT = ("{", '{"city": "Ro', '{"city": "Rome"')
NO_OBJECTS = ("[]", "1.5", '"text"', "Rome", '{"a": NaN}', '{"a": 1, "a": 2}', '{"a": "\\ud83d"}', DEEP, MANY)


@pytest.mark.parametrize("text", [*CUT, *NO_OBJECTS])
def test_arguments_that_are_no_object_are_one_with_their_text(text: str) -> None:
    assert told(text) == {INVALID: text}


@given(st.text(max_size=20) | st.recursive(st.none() | st.text(max_size=3), st.lists).map(json.dumps))
def test_templates_get_an_object_whatever_a_model_has_written(text: str) -> None:
    found = told(text)
    assert isinstance(found, dict)
    assert arguments_of(json.dumps(found)) == found  # as another API returns it


def test_a_long_text_in_arguments_is_one_value() -> None:
    text = "[,{" * MOST_VALUES
    assert told(json.dumps({"file": text})) == {"file": text}
