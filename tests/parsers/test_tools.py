"""Tests of the conversion of unquoted values to JSON by the types in a function's schema."""

import json
import warnings
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.parsers.tools import Tools, json_value, quoted


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "integer"}, {"integer"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"type": "float"}, {"number"}),
        (
            {"anyOf": [{"type": "string"}, {"oneOf": [{"type": "null"}, {"type": "array"}]}]},
            {"string", "null", "array"},
        ),
        ({"enum": ["a", 1, None]}, {"string", "integer", "number", "null"}),
        ({"$ref": "#/$defs/x"}, set()),
        ({}, set()),
        ("nonsense", set()),
        ({"type": {"a": 1}}, set()),
        ({"anyOf": "x"}, set()),
    ],
)
def test_types_of_a_parameter(schema: Any, types: set[str]) -> None:
    tools = Tools([{"function": {"name": "f", "parameters": {"properties": {"p": schema}}}}])
    assert tools.types("f", "p") == types
    assert tools.types("f", "q") == tools.types("g", "p") == frozenset()


@pytest.mark.parametrize("tool", [{}, {"function": 3}, {"function": {"name": 3}}, {"function": {"parameters": {}}}])
def test_tools_of_another_shape_are_unknown(tool: dict[str, Any]) -> None:
    assert list(Tools([tool]).names) == []
    assert Tools([tool]).know("anything")


def test_functions_are_known_by_name() -> None:
    tools = Tools([{"type": "function", "function": {"name": "f", "parameters": None}}, {"name": "g"}])
    assert [tools.know(name) for name in "fgh"] == [True, True, False]


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("3", "integer", 3),
        (" 3 ", "integer", 3),
        ("3", "number", 3),
        ("3.5", "integer", "3.5"),
        ("three", "integer", "three"),
        ("true", "integer", "true"),
        ("True", "boolean", True),
        ("null", "integer", None),
        ("None", "", None),
        ("null", "string integer", "null"),
        ("null", "string null", None),
        ("5", "string integer", 5),
        ("x", "string integer", "x"),
        ('{"a": [1]}', "object", {"a": [1]}),
        ("{'a': (1, None)}", "object", {"a": [1, None]}),
        ("[1]", "object", "[1]"),
        ('{\\"a\\": [\\"b\\\\n\\"]}', "object", {"a": ["b\n"]}),
        ('{\\"a\\"}', "object", '{\\"a\\"}'),
        ("{1: 2}", "object", "{1: 2}"),
        ("[1, 2]", "", [1, 2]),
        ('"x"', "", '"x"'),
        ("1e999", "number", float("inf")),
        ("NaN", "number", "NaN"),
        ("[" * 5000, "array", "[" * 5000),
        ("9" * 5000, "integer", "9" * 5000),
        ("'\\d'", "array", "'\\d'"),
        ("", "object", ""),
    ],
)
def test_values(text: str, types: str, value: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert json.loads(json_value(text, frozenset(types.split()))) == value


@given(st.lists(st.text(max_size=5), max_size=5))
def test_a_string_comes_out_part_by_part(parts: list[str]) -> None:
    assert json.loads(f'"{"".join(map(quoted, parts))}"') == "".join(parts)


def test_schemas_that_refer_to_one_another_are_asked_once() -> None:
    """References are resolved once, although each schema refers to the next one many times."""
    definitions: dict[str, Any] = {str(i): {"anyOf": [{"$ref": f"#/$defs/{i + 1}"}] * 50} for i in range(7)}
    definitions["1"]["anyOf"].append({"const": 1})
    parameters = {"properties": {"a": {"$ref": "#/$defs/0"}}, "$defs": {**definitions, "7": {"type": "null"}}}
    tools = Tools([{"name": "f", "parameters": parameters}])
    assert tools.types("f", "a") == {"integer", "number"}
