"""Tests of the response template parser against transformers' own, and for all partitions of the text."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.parsers.events import Arguments, CallEnd, CallStart, Content, Message, Reasoning, ToolCall, message_of
from jaxinfer.parsers.registry import Parsers, chosen
from jaxinfer.parsers.response_template.regions import TemplateParser
from jaxinfer.parsers.response_template.template import ResponseTemplate, read_template
from jaxinfer.parsers.tools import Tools
from tests.parsers.response_template.recorded import CASES, READ, TEMPLATES, Case
from tests.parsers.test_registry import assert_begins, partitions, said

each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@each_case
def test_an_answer_is_what_transformers_makes_of_it(case: Case) -> None:
    message = case.message()
    calls = [(call.name, said(call.arguments)) for call in message.calls]
    assert (message.content, message.reasoning, calls) == (case.content, case.reasoning, case.calls)


@each_case
def test_parts_of_every_size_add_up(case: Case) -> None:
    whole = case.message()
    for size in (1, 2, 3, 5, 8, 21):
        assert case.message(range(size, len(case.text), size)) == whole, size


@each_case
def test_what_has_come_out_begins_the_whole(case: Case) -> None:
    events, whole = case.parse(range(1, len(case.text))), case.message()
    for count in range(len(events)):
        assert_begins(message_of(events[:count]), whole)


@settings(max_examples=300)
@given(st.data(), st.sampled_from(CASES))
def test_any_parts_add_up(data: st.DataObject, case: Case) -> None:
    assert case.message(data.draw(partitions(len(case.text)))) == case.message()


PIECES = {
    "qwen2": [
        '<tool_call>{"name": "f"',
        ', "arguments": {"a": 1}}',
        "</tool_call>",
        "<think>",
        "</think>",
        " <|im_end|>",
    ],
    "qwen3_5": ["<tool_call>\n<function=f", ">", "<parameter=a>", "1", "</parameter>", "</function></tool_call>", "\n"],
    "gemma4": [
        "<|tool_call>call:f",
        "{a:1",
        ',b:<|"|>x',
        '<|"|>}',
        "<tool_call|>",
        "<|channel>thought\n",
        "<channel|>",
    ],
    "cohere": [
        "<|START_ACTION|>",
        '[{"tool_name": "f", "parameters": {}}',
        "]",
        "<|END_ACTION|>",
        "<|START_RESPONSE|>",
    ],
    "gpt_oss": ["<|channel|>commentary to=functions.f", "<|message|>", "{}", "<|call|>", "<|channel|>final", "<|end|>"],
    "ernie": ["<think>", "</think>", "<response>\n", "\n", "</response>", "<tool_call>", "null", "</tool_call>"],
    "inkling": [
        "<|message_model|>",
        "<|content_text|>",
        "<|content_invoke_tool_json|>",
        '{"name": "f"}',
        "<|end_message|>",
    ],
}


@settings(max_examples=300)
@given(st.data(), st.sampled_from(sorted(PIECES)))
def test_whatever_the_model_writes_any_split_is_the_same_and_nothing_raises(data: st.DataObject, name: str) -> None:
    pieces = [*PIECES[name], "Hi", " ", "\n", "<", "<|", "\x00", "한"]
    text = "".join(data.draw(st.lists(st.sampled_from(pieces), max_size=16)))
    prompt = data.draw(st.sampled_from(["", f"{anchor(name)}<think>\n", f"x{anchor(name)}"]))
    case = Case("", name, prompt, (), text, "", "", ())
    assert case.message(data.draw(partitions(len(text)))) == case.message()


def anchor(name: str) -> str:
    found = TEMPLATES[name]["start_anchor"]
    return found if isinstance(found, str) else found[0]


def parser(name: str = "qwen2", prompt: str = "", tools: Any = ()) -> TemplateParser:
    return TemplateParser(READ[name], Tools(tools), prompt, str)


def whole(parser: TemplateParser, text: str, *, cut: bool = False) -> Message:
    return message_of([*parser.feed(text), *parser.finish(cut=cut)])


def test_text_comes_at_once_and_calls_when_they_end() -> None:
    one = parser()
    assert one.feed("Hello") == [Content("Hello")]
    assert one.feed(", you <") == [Content(", you")]
    assert one.feed("b> ") == [Content(" <b>")]
    assert one.feed('<tool_call>{"name": "f", "arguments": {"a": 1}}') == []
    assert one.feed("</tool_call>") == [CallStart(0, "0", "f"), Arguments(0, '{"a": 1}'), CallEnd(0)]
    assert one.feed("<think>Hm") == [Reasoning("Hm")]
    assert one.finish() == []


@pytest.mark.parametrize(
    "region",
    [
        '{"name": "f", "arguments": {"a": 1}',
        '{"name": "two words", "arguments": {}}',
        '{"arguments": {}}',
        "[1]",
        "3",
        '{"name": "f", "arguments": {"a": NaN}}',
        "[" * 100_000,
    ],
)
def test_what_is_no_call_stays_text_with_its_markers(region: str) -> None:
    text = f"A <tool_call>{region}</tool_call> B"
    assert whole(parser(), text) == Message(f"A <tool_call>{region}</tool_call>\nB")


def test_a_call_that_is_cut_stays_text() -> None:
    assert whole(parser(), '<tool_call>{"name": "f"', cut=True) == Message('<tool_call>{"name": "f"')


def test_calls_without_arguments_have_an_object() -> None:
    assert whole(parser(), '<tool_call>{"name": "f"}</tool_call>').calls == [ToolCall("0", "f", "{}")]


def test_the_prompt_has_begun_the_answer() -> None:
    turn = "<|im_start|>assistant\n"
    assert whole(parser(prompt=f"<think>{turn}<think>\n"), "Hm. </think>\n\nYes.") == Message("Yes.", "Hm.")
    assert whole(parser(prompt=f"{turn}<think>\n\n</think>\n\n"), "\nYes.") == Message("Yes.")
    assert whole(parser(prompt=f"{turn}Well, "), "yes.") == Message("yes.")
    called = whole(parser(prompt=f'{turn}<tool_call>{{"name": "f", '), '"arguments": {"a": 1}}</tool_call>')
    assert called.calls == [ToolCall("0", "f", '{"a": 1}')]
    assert whole(parser(prompt=f"{turn}<tool_call>{{"), "x}</tool_call>") == Message("x}</tool_call>")


def test_values_are_of_the_types_of_the_function() -> None:
    properties = {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {"type": ["object", "null"]}}
    tools = [{"function": {"name": "f", "parameters": {"properties": properties}}}]
    values = {"a": "7", "b": "7", "c": "None", "d": "7"}
    tags = "".join(f"<parameter={name}>{value}</parameter>" for name, value in values.items())
    text = f"<tool_call><function=f>{tags}</function></tool_call>"
    (call,) = whole(parser("qwen3_5", tools=tools), text).calls
    assert json.loads(call.arguments) == {"a": 7, "b": "7", "c": None, "d": "7"}


def test_a_delimiter_has_at_most_a_thousand_characters() -> None:
    space = " " * 2000
    assert whole(parser(), f"a{space}b").content == f"a{space}b"
    one = parser()
    assert one.feed(f"a{space}") == [Content("a")]
    text = f"<|channel|>commentary to=functions.f{'x' * 3000}<|message|>{{}}<|call|>"
    assert whole(parser("gpt_oss"), text).calls == []


def test_what_waits_is_bounded() -> None:
    one = parser("inkling")
    for _ in range(4000):
        one.feed("word ")
        assert len(one._scanner._text) <= 1024 + 5


CARRIED = "{{ a template of no known family }}"


def test_auto_takes_what_the_tokenizer_carries_where_no_family_is_known() -> None:
    carried = READ["qwen2"]
    both = Parsers("response_template", "response_template", carried)
    assert chosen("auto", "auto", CARRIED, carried) == both
    assert chosen("response_template", "auto", "<tool_call>", carried) == both
    assert chosen("auto", "auto", "<tool_call> </think>", carried) == Parsers("hermes", "qwen3")
    assert chosen("auto", "qwen3", CARRIED, carried) == Parsers("response_template", "qwen3", carried)
    assert chosen("off", "auto", CARRIED, carried) == Parsers()
    assert chosen("auto", "auto", CARRIED) == Parsers()


def made(parsers: Parsers, tools: Tools | None, prompt: str, text: str) -> Message:
    one = parsers.make(tools, prompt=prompt, new_id=str)
    assert one is not None
    return message_of([*one.feed(text), *one.finish()])


def test_reasoning_is_parsed_without_tools_too() -> None:
    parsers = chosen("auto", "auto", CARRIED, READ["qwen2"])
    assert made(parsers, None, "", "<think>Hm.</think>Yes.") == Message("Yes.", "Hm.")


def test_another_parser_may_read_the_thought() -> None:
    parsers, text = chosen("auto", "qwen3", CARRIED, READ["qwen2"]), 'Hm.</think><tool_call>{"name": "f"}</tool_call>'
    message = made(parsers, Tools(), "<|im_start|>assistant\n<think>\n", text)
    assert message == Message("", "Hm.", [ToolCall("0", "f", "{}")])
    assert parsers.make(None) is not None
    assert chosen("auto", "off", CARRIED, READ["qwen2"]).make(None) is None


def test_special_tokens_that_are_part_of_it_are_shown() -> None:
    special = ["<tool_call>", "<|im_end|>", "<|im_start|>", "<|secret|>"]
    carried = read_template(TEMPLATES["qwen2"], special)
    assert chosen("auto", "auto", CARRIED, carried).markers == {"<tool_call>", "<|im_end|>"}
    assert isinstance(carried, ResponseTemplate)
