"""Tests that constraints become grammars, and that unsupported parts are rejected by name."""

import json

import pytest

from jaxinfer.structured.grammar import compiled
from jaxinfer.structured.matcher import Matcher, Matchers, Vocabulary
from jaxinfer.structured.schemas import GrammarError

BYTES = Vocabulary([bytes([byte]) for byte in range(256)] + [b"</s>"], frozenset({256}), (256,), 257)


@pytest.fixture(scope="module")
def matchers() -> Matchers:
    return Matchers(BYTES)


def allows(matcher: Matcher, token: int) -> bool:
    return bool(matcher.mask()[token // 8] >> (token % 8) & 1)


def takes(matchers: Matchers, kind: str, text: str, output: str) -> bool:
    """Return whether the grammar accepts an output: each byte is allowed, and the end after them."""
    matcher = matchers.new(kind, text)
    for byte in output.encode():
        if not allows(matcher, byte):
            return False
        matcher.consume([byte])
    return allows(matcher, 256)


POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "y": {"type": ["string", "null"]}},
    "required": ["x"],
    "additionalProperties": False,
}
TREE = {"$ref": "#/$defs/t", "$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}}


@pytest.mark.parametrize(
    ("kind", "text", "output", "taken"),
    [
        ("json", json.dumps(POINT), '{"x":7}', True),
        ("json", json.dumps(POINT), '{"x":7,"y":null}', True),
        ("json", json.dumps(POINT), '{"x":700}', False),
        ("json", json.dumps(POINT), '{"y":"a"}', False),
        ("json", json.dumps(POINT), '{"x": 7}', False),  # no spaces are allowed
        ("json", json.dumps(TREE), "[[],[[]]]", True),
        ("json_object", "", '{"a":[1,{"b":null}]}', True),
        ("json_object", "", "[1]", False),
        ("regex", r"\d{3}-[é/]+", "123-é/é", True),
        ("regex", "a+", "b", False),
        ("choice", json.dumps(["a.c", 'q"\\\n', "狐"]), 'q"\\\n', True),
        ("choice", json.dumps(["a.c", 'q"\\\n', "狐"]), "狐", True),
        ("choice", json.dumps(["a.c", 'q"\\\n', "狐"]), "abc", False),
        ("grammar", 'start: "x" B ("," B)*\nB: /[0-9]+/', "x12,3", True),
        ("grammar", 'root ::= "yes" | "no" [0-9]+', "no12", True),
        ("grammar", 'root ::= "yes" | "no" [0-9]+', "no", False),
    ],
)
def test_an_output_is_of_the_grammar(matchers, kind, text, output, taken):
    assert takes(matchers, kind, text, output) is taken


@pytest.mark.parametrize(
    ("kind", "text", "named"),
    [
        ("json", '{"not": {"type": "null"}}', "not"),
        ("json", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("json", '{"type": "array", "contains": {}}', "contains"),
        ("json", '{"type": "object", "propertyNames": {"pattern": "a"}}', "propertyNames"),
        ("json", '{"dependencies": {"a": ["b"]}}', "dependencies"),
        ("json", '{"properties": {"a": {"items": {"not": {}}}}}', "not"),
        ("json", '{"oneOf": [{"type": "integer"}, {"type": "number"}]}', "oneOf"),
        ("json", '{"type": "string", "pattern": "(?=a)b"}', "look-around"),
        ("json", '{"type": "integer", "minimum": 5, "maximum": 2}', "minimum"),
        ("json", '{"$ref": "https://example.org/s.json"}', "example.org"),
        ("regex", "(a", "unclosed group"),
        ("regex", "(?=a)", "look-around"),
        ("grammar", "start: B", "B"),
        ("grammar", "root ::= foo", "foo"),
        ("grammar", 'root ::= "a', "end of input"),
    ],
)
def test_what_cannot_be_held_is_refused_by_name(kind, text, named):
    with pytest.raises(GrammarError) as refused:
        compiled(kind, text)
    assert named in str(refused.value)
    assert "%llguidance" not in str(refused.value)
    assert len(str(refused.value)) < 600


@pytest.mark.parametrize("options", [{"lenient": True}, {"coerce_one_of": True, "lenient": True}])
def test_a_client_cannot_weaken_its_schema(options):
    one_of = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
    for schema in ({"not": {"type": "null"}}, one_of):
        with pytest.raises(GrammarError):
            compiled("json", json.dumps({**schema, "x-guidance": options}))


def test_a_client_cannot_set_the_whitespace(matchers):
    schema = {"type": "array", "x-guidance": {"whitespace_flexible": True, "whitespace_pattern": " "}}
    assert takes(matchers, "json", json.dumps(schema), "[1,2]")
    assert not takes(matchers, "json", json.dumps(schema), "[1, 2]")


@pytest.mark.parametrize(
    "text", ['%llguidance {}\nstart: "a"', 'start: %json {"x-guidance": {"lenient": true}, "not": {}}']
)
def test_options_in_a_grammar_are_refused(text):
    with pytest.raises(GrammarError, match="is not served"):
        compiled("grammar", text)


def test_any_tokens_that_spell_what_must_follow_are_allowed():
    """All tokens that spell forced text are allowed, so that the model and not the library chooses them."""
    tokens = [*BYTES.tokens[:256], b"</s>", b'{"', b'{"x']
    matcher = Matchers(Vocabulary(tokens, frozenset({256}), (256,), 300)).new("json", json.dumps(POINT))
    assert all(allows(matcher, token) for token in (ord("{"), 257, 258))
    assert matcher.forced() == b'{"x":'
