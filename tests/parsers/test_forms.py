"""Tests of call formats: functions that a format cannot call are named. Accepted texts: see tests/structured."""

from typing import Any

import pytest

from jaxinfer.parsers.forms import FormError, Function
from jaxinfer.parsers.registry import TOOL_FORMS


def function(name: str = "f", **schema: Any) -> Function:
    return Function("tools[2].function", name, {"type": "object", **schema})


def of(**parameter: Any) -> Function:
    return function(properties={"a": parameter})


@pytest.mark.parametrize("name", sorted(TOOL_FORMS))
@pytest.mark.parametrize("wrong", ['a"b', "a b", "<a>", "", "é" * 300])
def test_names_that_a_parser_would_not_read(name: str, wrong: str) -> None:
    with pytest.raises(FormError) as refused:
        TOOL_FORMS[name]([function(), function(wrong)], parallel=True)
    assert refused.value.place.startswith("tools[2].function.name=")


@pytest.mark.parametrize(("name", "wrong"), [("pythonic", "a-b"), ("pythonic", "1a"), ("kimi_k2", "a/b")])
def test_names_that_one_form_cannot_write(name: str, wrong: str) -> None:
    TOOL_FORMS["hermes"]([function(wrong)], parallel=True)
    with pytest.raises(FormError, match="cannot be called in the form of this model's calls"):
        TOOL_FORMS[name]([function(wrong)], parallel=True)


TWICE = {str(i): {"anyOf": [{"$ref": f"#/$defs/{i + 1}"}] * 4} for i in range(15)} | {"15": {"type": "null"}}
WRONG: list[tuple[str, Function, str]] = [
    ("qwen3_coder", function(anyOf=[{}]), "cannot be held: anyOf is about all arguments"),
    ("glm45", function(minProperties=1), "cannot be held: minProperties is about all arguments"),
    ("pythonic", function(patternProperties={}), "cannot be held: patternProperties is about all arguments"),
    ("glm45", function(required=["b"], properties={"a": {}}), "cannot be held: 'b' is required, but no property"),
    ("qwen3_coder", function(additionalProperties={"type": "null"}), "additionalProperties, where there are no"),
    ("qwen3_coder", function(properties={"a>b": {}}), "has a parameter 'a>b', which this model's calls cannot write"),
    ("pythonic", function(properties={"class": {}}), "has 'class', which is no name in Python"),
    ("pythonic", function(properties={"a b": {}}), "has 'a b', which is no name in Python"),
    ("glm45", of(enum=["x</arg_value>"]), "has 'x</arg_value>', and a marker of the model's calls in it"),
    ("qwen3_coder", of(type="string", pattern="a", minLength=2), "cannot be held: pattern beside a length"),
    ("qwen3_coder", of(type="string", pattern="^a|b"), "cannot be held: pattern='^a|b': | beside ^ or $"),
    ("pythonic", of(oneOf=[{}]), "cannot be held in Python's literals: oneOf stands without a type"),
    ("pythonic", of(type="array", uniqueItems=True), "cannot be held in Python's literals: uniqueItems is not served"),
    ("pythonic", of(type="thing"), "type='thing' is none of JSON's types"),
    ("pythonic", of(**{"$ref": "#/$defs/no"}), "is no schema that anything is of"),
    ("pythonic", of(type="object", properties={"b": {}}, required=["c"]), "required names what is no property"),
    ("pythonic", function(properties={"a": {"$ref": "#/properties/a"}}), "$ref schemas within schemas are too deep"),
    ("pythonic", function(properties={"a": {"$ref": "#/$defs/0"}}, **{"$defs": TWICE}), "too deep, or too many"),
    ("pythonic", function(properties={f"p{i}": {} for i in range(200)}), "are more than 128"),
    ("pythonic", of(type="object", properties={f"p{i}": {} for i in range(200)}), "properties are more than 128"),
]


@pytest.mark.parametrize(("name", "wrong", "said"), WRONG)
def test_schemas_that_a_form_cannot_hold(name: str, wrong: Function, said: str) -> None:
    with pytest.raises(FormError) as refused:
        TOOL_FORMS[name]([wrong], parallel=True)
    assert said in str(refused.value)
    assert refused.value.place.startswith("tools[2].function.parameters")


@pytest.mark.parametrize("name", sorted(TOOL_FORMS))
def test_annotations_change_nothing(name: str) -> None:
    parameters = {
        "a": {"type": "boolean"},
        "b": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"enum": [1]}}]},
    }
    TOOL_FORMS[name]([function(properties=parameters, title="F", description="d")], parallel=True)
    noted = {key: {**each, "title": "T", "description": "d", "default": None} for key, each in parameters.items()}
    TOOL_FORMS[name]([function(properties=noted)], parallel=True)
