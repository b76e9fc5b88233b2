"""Tests of tool call grammars against the parsers of the same families, which must read each allowed text."""

import json
import keyword
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.parsers.events import Message, message_of
from jaxinfer.parsers.forms import Form, Function, Node, schema_of
from jaxinfer.parsers.registry import TOOL_FORMS, TOOL_PARSERS, Parsers
from jaxinfer.parsers.tools import Tools
from tests.structured.walks import encoded, takes, vocabulary, walk

NAMES = sorted(TOOL_FORMS)
TAGGED = ("qwen3_coder", "glm45", "glm47")
MARKERLESS = ("llama3_json", "llama4_pythonic", "pythonic")
CLOSERS = ("\n</parameter>", "</arg_value>", "</tool_call>", "</function>")
HARMONY = ("<|end|>",)
IDENTIFIERS = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True).filter(lambda name: not keyword.iskeyword(name))
LEAVES = st.sampled_from(
    [
        {"type": "string"},
        {"type": "string", "minLength": 1, "maxLength": 5},
        {"type": "string", "pattern": "^[a-c]+x$"},
        {"enum": ["celsius", 'a "b" c']},
        {"const": "fixed"},
        {"type": "integer"},
        {"type": "integer", "minimum": -3, "maximum": 250},
        {"type": "number"},
        {"type": "number", "exclusiveMinimum": 0},
        {"type": "boolean"},
        {"type": ["string", "null"]},
        {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        {},
    ]
)
OBJECTS = st.sampled_from([{"$ref": "#/$defs/point"}, {"type": "object", "additionalProperties": {"type": "integer"}}])
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"enum": [1, 2.5, None, "z"]}},
    "required": ["x"],
}
DEFS = {"$defs": {"point": {**POINT, "additionalProperties": False}}}
NESTED = st.recursive(
    LEAVES | OBJECTS,
    lambda inner: (
        st.builds(lambda item: {"type": "array", "items": item, "minItems": 1, "maxItems": 3}, inner)
        | st.builds(
            lambda item: {"type": "object", "properties": {"a": item, "b": {}}, "additionalProperties": False}, inner
        )
    ),
    max_leaves=3,
)


@st.composite
def functions(draw: st.DrawFn, parameters: st.SearchStrategy[Any] = NESTED) -> list[Function]:
    """Return functions, some with parameters and some that take any arguments."""
    found = []
    for place, name in enumerate(draw(st.lists(IDENTIFIERS, min_size=1, max_size=3, unique=True))):
        properties = draw(st.dictionaries(IDENTIFIERS, parameters, max_size=4))
        required = [each for each in properties if draw(st.booleans())]
        schema = {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
            **DEFS,
        }
        any_object = {"type": "object"}
        found.append(Function(f"tools[{place}].function", name, draw(st.sampled_from([schema, schema, any_object]))))
    return found


def drawn(name: str, *, special: bool) -> st.SearchStrategy[list[Function]]:
    """Return functions for one family. If markers are text, JSON in tags may spell them and cannot escape them;
    parameters are then texts and numbers."""
    return functions(LEAVES) if name in TAGGED and not special else functions()


def parsers_of(name: str) -> Parsers:
    return Parsers(name, "openai_gptoss" if name == "openai" else None)


def form_of(name: str, those: list[Function], *, parallel: bool = True) -> Form:
    return TOOL_FORMS[name](those, parallel=parallel)


def tag_of(node: Node) -> str:
    return json.dumps({"type": "structural_tag", "format": node})


def parsed(name: str, those: list[Function], text: str) -> Message:
    tools = [{"type": "function", "function": {"name": each.name, "parameters": each.schema}} for each in those]
    parser = parsers_of(name).make(Tools(tools))
    assert parser is not None
    return message_of([*parser.feed(text), *parser.finish()])


def words_of(name: str, *, special: bool) -> Any:
    """Return a vocabulary with the family's markers as special tokens or as text; Harmony's are always tokens."""
    closers = [each.strip() for each in CLOSERS if name in TAGGED]
    return vocabulary(*(sorted({*parsers_of(name).markers, *closers}) if special or name == "openai" else ()))


def closers_of(name: str) -> tuple[str, ...]:
    return HARMONY if name == "openai" else CLOSERS


def assert_valid(those: list[Function], message: Message) -> None:
    schemas = {each.name: each.schema for each in those}
    for call in message.calls:
        jsonschema.validate(json.loads(call.arguments), schemas[call.name])


def test_each_parser_has_a_form() -> None:
    assert TOOL_FORMS.keys() == TOOL_PARSERS.keys()


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=12)
@given(data=st.data(), seed=st.integers(0, 2**32), parallel=st.booleans(), special=st.booleans())
def test_whatever_the_masks_allow_is_read_back_as_valid_calls(
    name: str, data: st.DataObject, seed: int, parallel: bool, special: bool
) -> None:
    those = data.draw(drawn(name, special=special))
    words = words_of(name, special=special)
    text = walk(words, tag_of(form_of(name, those, parallel=parallel).calls), seed, closers_of(name))
    message = parsed(name, those, text)
    assert len(message.calls) >= 1 if parallel else len(message.calls) == 1
    assert name == "openai" or not message.content.strip()
    assert_valid(those, message)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=6)
@given(data=st.data(), seed=st.integers(0, 2**32), special=st.booleans())
def test_calls_in_free_text_are_valid_too(name: str, data: st.DataObject, seed: int, special: bool) -> None:
    those = data.draw(drawn(name, special=special))
    text = walk(words_of(name, special=special), tag_of(form_of(name, those).text), seed, closers_of(name))
    assert_valid(those, parsed(name, those, text))


ANSWER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=6)
@given(those=functions(), seed=st.integers(0, 2**32))
def test_an_answer_is_calls_or_of_the_schema(name: str, those: list[Function], seed: int) -> None:
    form = form_of(name, those)
    tag = tag_of(form.beside(schema_of(ANSWER, "a")))
    message = parsed(name, those, walk(words_of(name, special=True), tag, seed, closers_of(name)))
    assert_valid(those, message)
    if not message.calls:
        jsonschema.validate(json.loads(message.content.splitlines()[-1]), ANSWER)


# ---- calls in the families' formats

WEATHER = Function(
    "tools[0].function",
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer", "maximum": 9},
            "options": {"type": "object"},
            "unit": {"enum": ["celsius", "fahrenheit"]},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
)
NOW = Function("tools[1].function", "now", {"type": "object", "properties": {}, "additionalProperties": False})
TOOLS = [WEATHER, NOW]
_ASSISTANT = "<|start|>assistant"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _qwen(name: str, arguments: dict[str, Any]) -> str:
    inner = "".join(f"<parameter={key}>\n{_text(value)}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def _glm(name: str, arguments: dict[str, Any]) -> str:
    pairs = [f"<arg_key>{key}</arg_key>\n<arg_value>{_text(value)}</arg_value>\n" for key, value in arguments.items()]
    return f"<tool_call>{name}\n{''.join(pairs)}</tool_call>"


def _v3(name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"


def _harmony(name: str, arguments: str) -> str:
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}"


def written(name: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """Return calls in the format of the family's chat template or model card."""
    texts = [(function, json.dumps(arguments, ensure_ascii=False)) for function, arguments in calls]
    match name:
        case "hermes":
            tags = [f'<tool_call>\n{{"name": "{f}", "arguments": {text}}}\n</tool_call>' for f, text in texts]
            return "\n".join(tags)
        case "qwen3_coder":
            return "\n".join(_qwen(*call) for call in calls)
        case "glm45" | "glm47":
            return "\n".join(_glm(*call) for call in calls)
        case "llama3_json":
            return "; ".join(f'{{"name": "{f}", "parameters": {text}}}' for f, text in texts)
        case "pythonic" | "llama4_pythonic":
            pairs = [(f, ", ".join(f"{key}={value!r}" for key, value in given.items())) for f, given in calls]
            return f"[{', '.join(f'{f}({inner})' for f, inner in pairs)}]"
        case "mistral":
            return "".join(f"[TOOL_CALLS]{f}[ARGS]{text}" for f, text in texts)
        case "deepseek_v3":
            return f"<｜tool▁calls▁begin｜>{chr(10).join(_v3(*each) for each in texts)}<｜tool▁calls▁end｜>"
        case "deepseek_v31":
            calls_v31 = [f"<｜tool▁call▁begin｜>{f}<｜tool▁sep｜>{text}<｜tool▁call▁end｜>" for f, text in texts]
            return f"<｜tool▁calls▁begin｜>{''.join(calls_v31)}<｜tool▁calls▁end｜>"
        case "kimi_k2":
            begin, middle = "<|tool_call_begin|>functions.", "<|tool_call_argument_begin|>"
            kimi = [f"{begin}{f}:{i}{middle}{text}<|tool_call_end|>" for i, (f, text) in enumerate(texts)]
            return f"<|tool_calls_section_begin|>{''.join(kimi)}<|tool_calls_section_end|>"
        case _:
            return f"<|end|>{_ASSISTANT}".join(_harmony(*each) for each in texts)


STRINGS = st.text(st.characters(min_codepoint=32, max_codepoint=126) | st.sampled_from("é狐\n"), max_size=12)
ARGUMENTS = st.fixed_dictionaries(
    {"city": STRINGS, "days": st.integers(-(10**9), 9)},
    optional={
        "options": st.dictionaries(IDENTIFIERS, st.integers() | STRINGS | st.lists(STRINGS, max_size=2), max_size=2)
    },
)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=12)
@given(given_arguments=ARGUMENTS, special=st.booleans())
def test_what_a_family_writes_is_taken_and_read(name: str, given_arguments: dict[str, Any], special: bool) -> None:
    ordered = {key: given_arguments[key] for key in WEATHER.parameters if key in given_arguments}
    calls = [("get_weather", ordered), ("now", {})]
    text, words = written(name, calls), words_of(name, special=special)
    assert takes(
        words, "structural_tag", tag_of(form_of(name, TOOLS).calls), f"\n\n{text}" if name != "openai" else text
    )
    found = parsed(name, TOOLS, text)
    assert [(call.name, json.loads(call.arguments)) for call in found.calls] == calls
    assert takes(words, "structural_tag", tag_of(form_of(name, TOOLS).beside(schema_of(ANSWER, "a"))), text)


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("get_weather", {"city": "Rome"}),  # days is required
    ("get_weather", {"city": "Rome", "days": 10}),
    ("get_weather", {"city": "Rome", "days": "many"}),
    ("get_weather", {"city": "Rome", "days": 1, "options": [1]}),
    ("get_weather", {"city": "Rome", "days": 1, "unit": "kelvin"}),
    ("get_weather", {"city": "Rome", "days": 1, "more": 1}),
    ("now", {"a": 1}),
    ("then", {}),
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("call", WRONG, ids=str)
def test_arguments_that_are_not_of_the_schema_are_not_taken(name: str, call: tuple[str, dict[str, Any]]) -> None:
    form, words = form_of(name, TOOLS), words_of(name, special=False)
    right = ("get_weather", {"city": "Rome", "days": 1, "unit": "celsius"})
    for node in (form.calls, form.text):
        assert takes(words, "structural_tag", tag_of(node), written(name, [right]))
        assert not takes(words, "structural_tag", tag_of(node), written(name, [call]))


@pytest.mark.parametrize("name", NAMES)
def test_one_call_is_one_call(name: str) -> None:
    form, words = form_of(name, TOOLS, parallel=False), words_of(name, special=True)
    for node in (form.calls, form.text, form.beside(schema_of(ANSWER, "a"))):
        assert takes(words, "structural_tag", tag_of(node), written(name, [("now", {})]))
        assert not takes(words, "structural_tag", tag_of(node), written(name, [("now", {}), ("now", {})]))


@pytest.mark.parametrize("name", NAMES)
def test_text_is_text_where_calls_are_free(name: str) -> None:
    form, words = form_of(name, TOOLS), words_of(name, special=False)
    text, call = "So, 1 < 2 [and] {more}.\n", written(name, [("now", {})])
    if name == "openai":
        text, call = f"<|channel|>final<|message|>{text}", f"<|channel|>analysis<|message|>Hm.<|end|>{_ASSISTANT}{call}"
    assert takes(words, "structural_tag", tag_of(form.text), text)
    assert not takes(words, "structural_tag", tag_of(form.calls), text)
    assert takes(words, "structural_tag", tag_of(form.text), call)
    if name not in (*MARKERLESS, "openai"):
        assert takes(words, "structural_tag", tag_of(form.text), f"{text}{call}")


def test_a_marker_that_is_a_token_is_no_text() -> None:
    tag, words = tag_of(form_of("hermes", TOOLS).calls), words_of("hermes", special=True)
    text = written("hermes", [("now", {})])
    assert takes(words, "structural_tag", tag, text)
    spelt = [*text.encode()]
    assert encoded(words, text) != spelt
    plain = words._replace(special=frozenset({256}), tokens=[*words.tokens[:257], b"", b""])
    assert takes(plain, "structural_tag", tag, text)  # without a token for the marker
