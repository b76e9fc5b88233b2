"""Tests that ``response_format`` becomes ``structured_outputs``, or an error that names the invalid field."""

from typing import Any

import pytest

from jaxinfer.serve.api.errors import ServeError
from jaxinfer.serve.http.fields import checked
from jaxinfer.serve.http.requests import ChatCompletionRequest, CompletionRequest, constraint_of

SCHEMA = {"type": "object", "properties": {"a": {"type": "null"}}}

TAG = {"type": "structural_tag", "format": {"type": "const_string", "value": "a"}}
OLDER_TAG = {"type": "structural_tag", "structures": [{"begin": "a", "schema": {}, "end": "b"}], "triggers": ["a"]}


def schema(**fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", **fields}}


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (None, {}),
        ({"type": "text"}, {}),
        ({"type": "json_object"}, {"structured_outputs": {"json_object": True}}),
        ({"type": "json_object", "schema": SCHEMA}, {"structured_outputs": {"json": SCHEMA}}),
        (schema(schema=SCHEMA), {"structured_outputs": {"json": SCHEMA}}),
        (schema(schema=SCHEMA, strict=True, description="b"), {"structured_outputs": {"json": SCHEMA}}),
        (schema(strict=None), {"structured_outputs": {"json_object": True}}),
        (TAG, {"structured_outputs": {"structural_tag": TAG}}),
        (OLDER_TAG, {"structured_outputs": {"structural_tag": OLDER_TAG}}),
    ],
)
def test_a_format_is_a_constraint(given, found):
    assert constraint_of(given, None) == found
    for kind, prompt in (
        (CompletionRequest, {"prompt": "a"}),
        (ChatCompletionRequest, {"messages": [{"role": "user", "content": "a"}]}),
    ):
        body = checked(kind, {**prompt, "response_format": given})
        assert {name: value for name, value in body.sampling(9).items() if name == "structured_outputs"} == found


def test_both_fields_may_be_there_where_one_asks_for_nothing():
    assert constraint_of({"type": "text"}, {"regex": "a"}) == {}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({}, "response_format.type=None must be one of text, json_object, json_schema, structural_tag"),
        ({"type": []}, "response_format.type=[] must be one of"),
        ({"type": "json_object", "schema": 3}, "response_format.schema=3 must be an object"),
        (
            {"type": "regex", "pattern": "a"},
            "response_format.type='regex' must be one of text, json_object, json_schema, ",
        ),
        ({"type": "text", "schema": {}}, "response_format.schema={} is no field of type text"),
        ({"type": "text", "json_schema": {}}, "response_format.json_schema={} is no field of type text"),
        ({**TAG, "tags": []}, "response_format.tags=[] is no field of type structural_tag"),
        ({"type": "json_schema"}, "response_format.json_schema=None must be an object"),
        ({"type": "json_schema", "json_schema": {"schema": {}}}, "response_format.json_schema.name=None must be"),
        (schema(strict="yes"), "response_format.json_schema.strict='yes' must be true or false"),
        (schema(schema="{}"), "response_format.json_schema.schema='{}' must be an object"),
        (schema(grammar="a"), "response_format.json_schema.grammar='a' is no field of it"),
    ],
)
def test_what_is_no_format_is_refused(given, sentence):
    with pytest.raises(ServeError) as refused:
        constraint_of(given, None)
    assert refused.value.message.startswith(sentence)
    assert refused.value.field == "response_format"
