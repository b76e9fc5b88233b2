"""Tests that ``tools`` and ``tool_choice`` become a constraint, or an error that names the invalid field."""

import json
from typing import Any

import pytest

from jaxinfer.parsers.registry import TOOL_FORMS, Parsers
from jaxinfer.sampling_params import RequestError, SamplingParams
from jaxinfer.serve.frontend.chat.tool_choice import Choice, choice_of, held
from jaxinfer.structured.grammar import compiled
from tests.structured.walks import takes, vocabulary

HERMES, TEXTS = Parsers("hermes"), vocabulary()


def tool(name: str, **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


TOOLS = [tool("f", parameters={"properties": {"a": {"type": "null"}}, "required": ["a"]}), tool("g")]
STRICT = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}, TOOLS[1]]


NOTHING = {"type": "integer", "minimum": 5, "maximum": 2}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [tool(name) for name in names]}}


@pytest.mark.parametrize(
    ("given", "choice"),
    [
        (None, Choice("auto")),
        ("auto", Choice("auto")),
        ("none", Choice("none")),
        ("required", Choice("required")),
        (tool("f"), Choice("named", ["f"])),
        (allowed("auto", "f", "g"), Choice("auto", ["f", "g"])),
        (allowed("required", "f"), Choice("required", ["f"])),
    ],
)
def test_choices(given: Any, choice: Choice) -> None:
    assert choice_of(given) == choice


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("any", "tool_choice='any' must be none, auto, required"),
        (7, "tool_choice=7 must be none, auto, required"),
        ({"type": "custom"}, "tool_choice={'type': 'custom'} must be none"),
        ({"type": "function"}, "tool_choice.function.name=None must be a string that is not empty"),
        ({"type": "function", "name": "f"}, "tool_choice.name='f' is no field of it: they are type, function"),
        ({"type": "allowed_tools"}, "tool_choice.allowed_tools=None must be an object"),
        (allowed("none", "f"), "tool_choice.allowed_tools.mode='none' must be auto or required"),
        (allowed("auto"), "tool_choice.allowed_tools.tools=[] must be a list that is not empty"),
        (allowed("auto", ""), "tool_choice.allowed_tools.tools[0].function.name='' must be"),
    ],
)
def test_what_is_no_choice_is_refused(given: Any, said: str) -> None:
    with pytest.raises(RequestError) as refused:
        choice_of(given)
    assert str(refused.value).startswith(said)
    assert refused.value.field == "tool_choice"


@pytest.mark.parametrize(
    ("tools", "choice", "parsers", "said"),
    [
        (None, "required", HERMES, "tool_choice='required' needs tools, and there are none"),
        (TOOLS, "required", Parsers(), "tool_choice='required' is not served: no parser of this model's tool calls"),
        (TOOLS, tool("h"), HERMES, "tool_choice='h' is no function of tools"),
        (TOOLS, allowed("auto", "f", "h"), HERMES, "tool_choice='h' is no function of tools"),
        ([tool("f", parameters=[])], "required", HERMES, "tools[0].function.parameters=[] must be an object"),
        ([tool("f", strict="yes")], "auto", HERMES, "tools[0].function.strict='yes' must be true or false"),
        (
            [tool("f", parameters={"type": "string"})],
            "required",
            HERMES,
            "tools[0].function.parameters.type='string' must be object",
        ),
        ([{"type": "web_search"}], "required", HERMES, "tools[0]={'type': 'web_search'} must be of type function"),
        ([tool("f g")], "required", HERMES, "tools[0].function.name='f g' cannot be called in the form"),
        ([tool("f")] * 2000, "required", HERMES, "tools must hold at most 1024, not 2000"),
    ],
)
def test_what_cannot_be_held_is_refused(tools: Any, choice: Any, parsers: Parsers, said: str) -> None:
    with pytest.raises(RequestError) as refused:
        held({}, tools, choice, True, parsers)
    assert str(refused.value).startswith(said)


@pytest.mark.parametrize(
    ("tools", "choice", "parsers"),
    [
        (None, None, HERMES),
        (TOOLS, None, HERMES),  # no tool is strict
        (TOOLS, "auto", HERMES),
        ([{"name": "f"}, {"type": "web_search"}], "auto", HERMES),  # left to the chat template
        (STRICT, "none", HERMES),
        (STRICT, "auto", Parsers()),  # no tool parser: answers are text
    ],
)
def test_nothing_is_constrained_where_nothing_is_asked(tools: Any, choice: Any, parsers: Parsers) -> None:
    for fields in ({"n": 2}, {"n": 2, "structured_outputs": {"regex": "a"}} if parsers.tool_calls is None else {}):
        assert held(fields, tools, choice, True, parsers) == fields


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


F, G, WRONG = call("f", '{"a": null}'), call("g", "{}"), call("f", "{}")


@pytest.mark.parametrize(
    ("tools", "choice", "fields", "right", "wrong"),
    [
        (TOOLS, "required", {}, [F, G, f"\n\n{F}\n{G}"], ["", "a", WRONG, call("g", '{"b": 1}')]),
        (TOOLS, tool("f"), {}, [F], ["a", G, f"{F}\n{F}"]),
        (TOOLS, allowed("required", "g"), {}, [G, f"{G}\n{G}"], [F, ""]),
        (TOOLS, allowed("auto", "f"), {}, ["", "a", F, WRONG], [G]),  # only the tool names are constrained
        (STRICT, None, {}, ["", "a", f"a{F}b", call("g", '{"b": 1}')], [WRONG, call("h", "{}")]),
        (TOOLS, None, {"regex": "[ab]+"}, ["ab", F, WRONG], ["c", "abc"]),
        (STRICT, None, {"regex": "[ab]+"}, ["ab", F], ["c", WRONG]),
        (TOOLS, None, {"json": {"type": "array"}}, ["[1]", G], ["{}", ""]),
        (TOOLS, None, {"json_object": True}, ["{}", G], ["[]", ""]),
        (TOOLS, None, {"choice": ["x", "y"]}, ["x", "\ny", G], ["z"]),
        (TOOLS, None, {"grammar": 'root ::= "x"+'}, ["xx", G], ["y"]),
        (
            TOOLS,
            None,
            {"structural_tag": {"type": "structural_tag", "format": {"type": "const_string", "value": "x"}}},
            ["x", G],
            ["y"],
        ),
        (TOOLS, "required", {"regex": "[ab]+"}, [G], ["ab"]),
    ],
)
def test_outputs_under_a_choice(tools: Any, choice: Any, fields: Any, right: list[str], wrong: list[str]) -> None:
    sampling = {"structured_outputs": fields} if fields else {}
    params = SamplingParams(**held(sampling, tools, choice, True, HERMES))
    assert params.grammar is not None
    kind, grammar = params.grammar
    for text in right:
        assert takes(TEXTS, kind, grammar, text), text
    for text in wrong:
        assert not takes(TEXTS, kind, grammar, text), text


def test_parallel_calls() -> None:
    for parallel in (True, False):
        constraint = held({}, TOOLS, "required", parallel, HERMES)["structured_outputs"]["structural_tag"]
        assert takes(TEXTS, "structural_tag", json.dumps(constraint), f"{F}\n{G}") is parallel
        assert takes(TEXTS, "structural_tag", json.dumps(constraint), F)


@pytest.mark.parametrize("name", sorted(TOOL_FORMS))
def test_a_schema_is_named_in_each_form(name: str) -> None:
    wrong = tool("h", parameters={"properties": {"a": NOTHING}, "required": ["a"]})
    made = held({}, [*TOOLS, wrong], "required", True, Parsers(name))["structured_outputs"]["structural_tag"]
    with pytest.raises(ValueError) as refused:  # noqa: PT011 the location in the error matters
        compiled("structural_tag", json.dumps(made))
    assert getattr(refused.value, "place").startswith("tools[2].function.parameters")  # noqa: B009


def test_schemas_that_would_fill_the_memory_are_refused_at_once() -> None:
    """The server rejects nested object parameters in Python's call syntax that would exhaust memory."""
    deep: dict[str, Any] = {"type": "null"}
    for _ in range(4):
        deep = {"type": "object", "properties": {f"p{number}": deep for number in range(5)}}
    large = {"type": "object", "properties": {f"p{number}": {"type": "null"} for number in range(100)}}
    wide = {"properties": {f"p{number}": large for number in range(15)}}
    for parameters in ({"properties": {"a": deep}}, wide):
        with pytest.raises(RequestError, match=r"their schemas are too much|too deep, or too many"):
            held({}, [tool("f", parameters=parameters)], "required", True, Parsers("pythonic"))


def test_an_older_tag_beside_tools_is_refused() -> None:
    older = {"structures": [{"begin": "a", "schema": {}, "end": "b"}], "triggers": ["a"]}
    with pytest.raises(RequestError, match=r"structured_outputs\.structural_tag must have a format, beside tools"):
        held({"structured_outputs": {"structural_tag": older}}, TOOLS, "auto", True, HERMES)


def test_an_answer_of_gpt_oss_is_held_behind_its_thoughts():
    parsers, asked = Parsers(None, "openai_gptoss"), {"structured_outputs": {"choice": ["yes", "no"]}}
    fields = held(asked, None, None, True, parsers)
    grammar = SamplingParams(**fields).grammar
    assert grammar is not None
    words = vocabulary(*sorted(parsers.markers))
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    for text, right in (
        (f"{thought}<|channel|>final<|message|>yes", True),
        (f"{thought}{thought}<|channel|>final<|message|>no", True),
        ("<|channel|>final<|message|>no", True),
        (f"{thought}<|channel|>final<|message|>perhaps", False),
        ("yes", False),
    ):
        assert takes(words, *grammar, text) == right, text
    held_from_first = {"structured_outputs": {"choice": ["yes"], "enable_in_reasoning": True}}
    assert held(held_from_first, None, None, True, parsers) == held_from_first
    assert held({}, None, None, True, parsers) == {}
