"""Tests of every parser: the result does not depend on splits, arguments only grow, and no marker is shown."""

import itertools
import json
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.parsers.events import Arguments, CallEnd, CallStart, Content, Event, Message, message_of
from jaxinfer.parsers.registry import REASONING_PARSERS, TOOL_PARSERS, Parsers, chosen, detect
from jaxinfer.parsers.tools import Tools
from tests.parsers.corpus import CASES, TOOLS, Case

CASE = st.sampled_from(CASES)
ALL = [Parsers(name) for name in TOOL_PARSERS] + [Parsers(None, name) for name in REASONING_PARSERS]


def parse(case: Case, cuts: list[int]) -> list[Event]:
    parser = case.parsers.make(Tools(TOOLS), prompt=case.prompt, new_id=lambda index: f"id{index}")
    assert parser is not None
    edges = [0, *cuts, len(case.text)]
    events = [each for a, b in itertools.pairwise(edges) for each in parser.feed(case.text[a:b])]
    return events + parser.finish()


def said(arguments: str) -> object:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.parsers.tool_calls}-{case.text[:24]!r}")
def test_whole_answers(case: Case) -> None:
    message = message_of(parse(case, []))
    calls = tuple((call.name, said(call.arguments)) for call in message.calls)
    assert (message.content, message.reasoning, calls) == (case.content, case.reasoning, case.calls)


def partitions(length: int) -> st.SearchStrategy[list[int]]:
    """Return split positions from several distributions: few cuts, many cuts, and one after every character."""
    if length < 2:
        return st.just([])
    few = st.sets(st.integers(1, length - 1), max_size=4).map(sorted)
    many = st.lists(st.booleans(), min_size=length - 1, max_size=length - 1)
    return few | many.map(lambda cut: [i + 1 for i, yes in enumerate(cut) if yes]) | st.just(list(range(1, length)))


@given(st.data())
def test_any_split_gives_the_whole_answer(data: st.DataObject) -> None:
    case = data.draw(CASE)
    assert message_of(parse(case, data.draw(partitions(len(case.text))))) == message_of(parse(case, []))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.parsers.tool_calls}-{case.text[:24]!r}")
def test_every_split_in_two(case: Case) -> None:
    whole = message_of(parse(case, []))
    assert all(message_of(parse(case, [cut])) == whole for cut in range(1, len(case.text)))
    assert message_of(parse(case, list(range(1, len(case.text))))) == whole


PIECES = [
    *sorted({marker for parsers in ALL for marker in parsers.markers}),
    *('{"name": "add", "arguments": {"a": 1}}', '{"a": "', "\\", '"', "'", "\n", " "),
    *("{", "}", "[", "]", "(", ")", "<", ">", ",", ":", "add", "now(", "a=1", "functions.add:0", "to="),
    *("<function=", "<parameter=", "</parameter>", "</function>"),
    *("```json\n", "assistant", "final", "analysis", "null", '"name"', "[add(a=1)]", "\ud800", "\x00", "한"),
]


@given(st.data(), st.sampled_from(ALL), st.lists(st.sampled_from(PIECES), max_size=24).map("".join))
def test_whatever_the_model_writes_any_split_is_the_same_and_nothing_raises(
    data: st.DataObject, parsers: Parsers, text: str
) -> None:
    case = Case(parsers, text, prompt=data.draw(st.sampled_from(["", "<think>\n"])))
    whole = message_of(parse(case, []))
    assert message_of(parse(case, data.draw(partitions(len(text))))) == whole


@given(st.data(), st.sampled_from(ALL), st.lists(st.sampled_from(PIECES), max_size=24).map("".join))
def test_calls_come_in_order_and_arguments_belong_to_the_open_one(
    data: st.DataObject, parsers: Parsers, text: str
) -> None:
    opened = ended = -1
    for event in parse(Case(parsers, text), data.draw(partitions(len(text)))):
        match event:
            case CallStart(index):
                assert index == opened + 1 == ended + 1
                opened = index
            case Arguments(index, more):
                assert index == opened == ended + 1
                assert more
            case CallEnd(index):
                assert index == opened == ended + 1
                ended = index
    assert opened == ended


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.parsers.tool_calls}-{case.text[:24]!r}")
def test_what_has_come_out_is_a_beginning_of_the_whole(case: Case) -> None:
    """Events are never revised, also for an answer that is cut there."""
    events, whole = parse(case, list(range(1, len(case.text)))), message_of(parse(case, []))
    for count in range(len(events)):
        assert_begins(message_of(events[:count]), whole)


def assert_begins(part: Message, whole: Message) -> None:
    assert whole.content.startswith(part.content)
    assert whole.reasoning.startswith(part.reasoning)
    for mine, its in zip(part.calls, whole.calls, strict=False):
        assert (mine.id, mine.name) == (its.id, its.name)
        assert its.arguments.startswith(mine.arguments)


WELL_FORMED = [case for case in CASES if case.calls and case.content.find("[") < 0]


@given(st.data(), st.sampled_from(WELL_FORMED))
def test_no_part_of_a_marker_is_shown(data: st.DataObject, case: Case) -> None:
    """No part of a marker of a well-formed call is shown at any time."""
    events = parse(case, data.draw(partitions(len(case.text))))
    shown = "".join(event.text for event in events if isinstance(event, Content))
    assert case.content.startswith(shown)
    assert not any(marker in shown for marker in case.parsers.markers)


@pytest.mark.parametrize("parsers", ALL)
def test_text_comes_at_once(parsers: Parsers) -> None:
    """Text that cannot be part of a marker is not held back."""
    parser = parsers.make(Tools(TOOLS), prompt="</think>")
    assert parser is not None
    assert message_of(parser.feed("Hello")) == Message("Hello")
    assert message_of(parser.feed(", you")) == Message(", you")


@pytest.mark.parametrize("name", ["hermes", "mistral", "kimi_k2", "deepseek_v31", "openai", "qwen3_coder", "glm45"])
def test_arguments_come_while_they_are_written(name: str) -> None:
    (case, *_) = [each for each in CASES if each.parsers.tool_calls == name and each.calls]
    events = parse(case, list(range(1, len(case.text))))
    assert sum(isinstance(event, Arguments) for event in events) > 12


@pytest.mark.parametrize("parsers", ALL)
@pytest.mark.parametrize("unit", ["a", "<", "{", "[", '"', "\\", '{"a":', "<think>", "<tool_call>", "<|channel|>"])
def test_what_is_looked_at_again_is_bounded(parsers: Parsers, unit: str) -> None:
    """A parser keeps at most the length of a marker of its text, however long the input."""
    parser = parsers.make(Tools(TOOLS), prompt="</think>")
    assert parser is not None
    for _ in range(3000 // len(unit)):
        parser.feed(unit)
        assert len(getattr(parser, "_source")._text) <= 64  # noqa: B009


@pytest.mark.parametrize(("value", "is_call"), [(f"'{'x, ' * 20_000}'", True), (f"[{'1, ' * 20_000}]", False)])
def test_python_is_parsed_up_to_a_size_strings_up_to_any(value: str, is_call: bool) -> None:
    message = message_of(parse(Case(Parsers("pythonic"), f"[add(a={value})]"), []))
    assert bool(message.calls) == is_call
    assert bool(message.content) != is_call


def test_a_call_that_max_tokens_cuts_keeps_what_there_is() -> None:
    parser = Parsers("kimi_k2").make(Tools(TOOLS))
    assert parser is not None
    events = parser.feed("<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>")
    assert message_of([*events, *parser.finish(cut=True)]).calls[0].arguments == ""


def test_a_call_within_a_thought_is_one_where_calls_are_looked_for() -> None:
    text = '<think>Hm. <tool_call>{"name": "now", "arguments": {}}</tool_call>'
    for tools, reasoning in ((Tools(TOOLS), "Hm."), (None, text.removeprefix("<think>"))):
        parser = Parsers("hermes", "qwen3").make(tools)
        assert parser is not None
        message = message_of([*parser.feed(text), *parser.finish()])
        assert (message.reasoning, len(message.calls)) == (reasoning, tools is not None)


def test_ids_have_the_form_that_templates_want() -> None:
    for name, text, letters in (
        ("mistral", "[TOOL_CALLS]now{}", set(string.ascii_letters + string.digits)),
        ("hermes", '<tool_call>{"name": "now", "arguments": {}}</tool_call>', set("call_0123456789abcdef")),
    ):
        parser = Parsers(name).make(Tools(TOOLS))
        assert parser is not None
        (call,) = message_of([*parser.feed(text), *parser.finish()]).calls
        assert set(call.id) <= letters
        assert len(call.id) == (9 if name == "mistral" else 37)


@pytest.mark.parametrize(
    ("template", "tool_calls", "reasoning"),
    [
        ("{{ messages }}", None, None),
        ('<tool_call>\n{"name": <function-name>}', "hermes", None),
        ("<tool_call> </think>", "hermes", "qwen3"),
        ("<tool_call>\n<function=example>\n<parameter=p>", "qwen3_coder", None),
        ("<tool_call>{f}<arg_key> </think>", "glm45", "glm45"),
        ("[TOOL_CALLS]", "mistral", None),
        ("[THINK][TOOL_CALLS]", "mistral", "mistral"),
        ("<｜Assistant｜><｜tool▁call▁begin｜>function```json </think>", "deepseek_v3", "deepseek_r1"),
        ("<｜Assistant｜><｜tool▁call▁begin｜><think></think>", "deepseek_v31", "deepseek_v3"),
        ("<|tool_calls_section_begin|>", "kimi_k2", None),
        ("<|start|><|channel|>final<|message|>", "openai", "openai_gptoss"),
        ('<|start_header_id|> {"name": function name, "parameters": dictionary}', "llama3_json", None),
        ("[func_name1(params_name1=params_value1)]", "pythonic", None),
    ],
)
def test_a_template_tells_its_parsers(template: str, tool_calls: str | None, reasoning: str | None) -> None:
    assert detect(template) == Parsers(tool_calls, reasoning)
    assert chosen("auto", "off", template) == Parsers(tool_calls, None)
    assert chosen("hermes", "auto", template) == Parsers("hermes", reasoning)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(KeyError, match="gpt5"):
        chosen("gpt5", "auto", "")


def test_no_parser_where_there_is_nothing_to_parse() -> None:
    assert Parsers().make(Tools(TOOLS)) is None
    assert Parsers("hermes").make(None) is None
    assert Parsers("hermes", "qwen3").make(None) is not None
