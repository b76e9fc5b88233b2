"""Tests of shared conversions from API bodies to a chat: turns, items, and errors that name the client's fields."""

import pytest

from jaxinfer.serve.api.errors import Kind, ServeError
from jaxinfer.serve.http.events.inputs import Turns, item_of, renamed_to, text_of
from jaxinfer.serve.http.responses.bodies import InputText

NAMES = {"messages": "input", "response_format": "text.format", "response_format.json_schema": "text.format"}
KINDS = {"input_text": InputText}


@pytest.mark.parametrize(
    ("field", "message", "told", "said"),
    [
        ("messages", "messages must be at most 3, not 4", "input", "input must be at most 3, not 4"),
        ("messages[2].role", "messages[2].role=None must", "input[2].role", "input[2].role=None must"),
        ("response_format", "response_format.type='x' must", "text.format", "text.format.type='x' must"),
        ("response_format", "response_format.json_schema.name='' must", "text.format", "text.format.name='' must"),
        ("tools[3].function.parameters", "tools[3].function.parameters: no", "tools[3].schema", "tools[3].schema: no"),
        ("tools[3].function.name", "tools[3].function.name='' must", "tools[3].name", "tools[3].name='' must"),
        ("tools", "tools: the template", "tools", "tools: the template"),
        ("messages_more", "messages_more=1", "messages_more", "messages_more=1"),
        ("n", "the engine says no", "n", "the engine says no"),
        (None, "the body is not JSON", None, "the body is not JSON"),
    ],
)
def test_refusals_are_in_the_words_of_the_door(field: str | None, message: str, told: str | None, said: str) -> None:
    with pytest.raises(ServeError) as refused, renamed_to(NAMES, "schema"):
        raise ServeError(Kind.INVALID, message, field)
    assert (refused.value.field, refused.value.message) == (told, said)


@pytest.mark.parametrize(
    ("value", "field", "said"),
    [
        ("Hi", "at.type", "at.type=None is not served: it may be input_text"),
        ({"text": "Hi"}, "at.type", "at.type=None"),
        ({"type": ["input_text"]}, "at.type", "at.type=['input_text']"),
        ({"type": "input_image"}, "at.type", "at.type='input_image' is not served"),
        ({"type": "input_text"}, "at.text", "at.text is missing"),
        ({"type": "input_text", "text": 3}, "at.text", "at.text=3"),
        ({"type": "input_text", "text": "Hi", "colour": 1}, "at.colour", "at.colour is not a field"),
    ],
)
def test_items_that_are_none(value: object, field: str, said: str) -> None:
    with pytest.raises(ServeError) as refused:
        item_of("at", value, KINDS)
    assert refused.value.field == field
    assert refused.value.message.startswith(said)


def test_texts() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert (text_of("at", "Hi", KINDS), text_of("at", parts, KINDS), text_of("at", [], KINDS)) == ("Hi", "a\nb", "")
    assert text_of("at", None, KINDS) == ""
    for value, field in ((3, "at"), ({}, "at"), ([*parts, "c"], "at[2].type")):
        with pytest.raises(ServeError) as refused:
            text_of("at", value, KINDS)
        assert refused.value.field == field


def test_what_the_assistant_does_in_one_turn_is_one_message() -> None:
    turns = Turns()
    turns.say("system", "Be brief.")
    turns.ask("a")
    turns.ask("b")
    turns.think("Hm.")
    turns.call("1", "f", {"x": 1})
    turns.answer("Let me")
    turns.answer(" see.")
    turns.say("tool", "2", tool_call_id="1")
    turns.ask("c")
    turns.answer("d")
    turns.answer("e")
    turns.think("f")
    turns.think("g")
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    first = {"content": "Let me see.", "reasoning_content": "Hm.", "tool_calls": [call]}
    assert turns.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", **first},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d\ne", "reasoning_content": "f\ng"},
    ]


def test_calls_alone_have_no_content() -> None:
    turns = Turns()
    turns.call("1", "f", {})
    assert turns.messages[0]["content"] is None
