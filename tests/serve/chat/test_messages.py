"""Messages on their way back to the model."""

import json
from typing import Any

import pytest

from jaxinfer.serve.chat.messages import MOST_VALUES, for_template, tool_call
from jaxinfer.serve.errors import ServeError


def told(arguments: Any) -> Any:
    message = for_template("messages[3]", {"role": "assistant", "tool_calls": [tool_call("a", "f", arguments)]})
    return message["tool_calls"][0]["function"]["arguments"]


@pytest.mark.parametrize("value", [{"a": [1, None, "é🦊"]}, [], 1.5, None, "text"])
def test_arguments_come_as_what_they_say(value: Any) -> None:
    assert told(json.dumps(value)) == value


def test_arguments_that_are_an_object_stay_one_and_the_message_is_a_copy() -> None:
    given = {"role": "assistant", "tool_calls": [tool_call("a", "f", {"a": 1}), "x", {"function": 1}]}
    made = for_template("messages[0]", given)
    assert made == given
    assert made is not given


def test_a_thought_has_the_older_name_too_and_keeps_the_one_that_is_given() -> None:
    assert for_template("", {"reasoning": "a"}) == {"reasoning": "a", "reasoning_content": "a"}
    given = {"reasoning": "a", "reasoning_content": "b"}
    assert for_template("", given) == given
    assert for_template("", {"reasoning": None}) == {"reasoning": None}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ('{"a": 1, "a": 2}', "twice"),
        ("[" * 99 + "]" * 99, "nested deeper"),
        ("[" + "0," * MOST_VALUES + "0]", f"holds more than {MOST_VALUES} values"),
    ],
)
def test_arguments_that_nobody_can_read_are_refused_by_place(text: str, reason: str) -> None:
    with pytest.raises(ServeError, match=reason) as refused:
        told(text)
    assert refused.value.field == "messages[3].tool_calls[0].function.arguments"


def test_a_long_text_in_arguments_is_one_value() -> None:
    text = "[,{" * MOST_VALUES
    assert told(json.dumps({"file": text})) == {"file": text}
