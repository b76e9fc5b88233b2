"""Tests of region readers against the documented behaviour of transformers."""

from typing import Any

import pytest

from jaxinfer.parsers.response_template.contents import read_contents
from jaxinfer.parsers.response_template.errors import ResponseTemplateError

TAG = r"<(?P<key>\w+)>\s*(?P<value>.*?)\s*</"


@pytest.mark.parametrize(
    ("name", "arguments", "text", "value"),
    [
        ("text", {}, " a\n", "a"),
        ("text", {"strip": False}, " a\n", " a\n"),
        ("int", {}, " 7 ", 7),
        ("float", {}, "0.5", 0.5),
        ("bool", {}, "True", True),
        ("bool", {}, "no", False),
        ("json", {}, ' {"a": [1]} ', {"a": [1]}),
        ("json", {"unquoted_keys": True}, '{a: 1, "b": "c, d: 2", e : {f:3}}', {"a": 1, "b": "c, d: 2", "e": {"f": 3}}),
        ("json", {"string_delims": [["<q>", "</q>"]]}, '{"a": <q>"x</q>, "b": <q></q>}', {"a": '"x', "b": ""}),
        (
            "json",
            {"string_delims": [['<|"|>', '<|"|>']], "unquoted_keys": True},
            '{a:<|"|>b: "c"<|"|>,d:<|"|>x<|"|>}',
            {"a": 'b: "c"', "d": "x"},
        ),
        ("json", {"allow_non_json": True}, " x ", "x"),
        ("xml-inline", {"tag_pattern": TAG}, "<a>1</a> <b> x\ny </b><a>2</a>", {"a": "2", "b": "x\ny"}),
        (
            "xml-inline",
            {"tag_pattern": TAG, "merge_duplicates": True},
            "<a>1</<b>3</<a>2</",
            {"a": ["1", "2"], "b": "3"},
        ),
        (
            "xml-inline",
            {"tag_pattern": TAG, "value_parser": {"name": "json", "args": {"allow_non_json": True}}},
            "<a>[1]</<b>x</",
            {"a": [1], "b": "x"},
        ),
        ("xml-inline", {"tag_pattern": "<(?P<key>a+)>"}, "<aa>", {"aa": ""}),
        ("kv-lines", {}, "a: 1\n\nb\n c : x:y ", {"a": "1", "c": "x:y"}),
        ("kv-lines", {"line_sep": ";", "kv_sep": "=", "strip": False}, "a=1; b=2", {"a": "1", " b": "2"}),
        ("kv-lines", {"value_parser": {"name": "int"}}, "a: 1", {"a": 1}),
        (
            "python-call-list",
            {},
            ' [f(a=1, b="x", c=[True, null, {"d": false}]), g.h()] ',
            [
                {"name": "f", "arguments": {"a": 1, "b": "x", "c": [True, None, {"d": False}]}},
                {"name": "g.h", "arguments": {}},
            ],
        ),
    ],
)
def test_values(name: str, arguments: dict[str, Any], text: str, value: Any) -> None:
    assert read_contents("key", name, arguments).whole(text) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("int", "x"),
        ("float", ""),
        ("json", "{a: 1}"),
        ("json", "[" * 100_000),
        ("python-call-list", "f()"),
        ("python-call-list", "[f(1)]"),
        ("python-call-list", "[f(**a)]"),
        ("python-call-list", "[f(a=g())]"),
        ("python-call-list", "[1]"),
        ("python-call-list", f"[f(a={'1' * 20_000})]"),
        ("python-call-list", "["),
    ],
)
def test_text_of_another_form(name: str, text: str) -> None:
    with pytest.raises((ValueError, RecursionError)):
        read_contents("key", name, {}).whole(text)


def nested(depth: int) -> dict[str, Any]:
    inner: dict[str, Any] = {"name": "kv-lines"}
    return {"name": "kv-lines", "args": {"value_parser": nested(depth - 1) if depth else inner}}


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("yaml", {}, "key.content = 'yaml' must be one of text, int, float, bool, json, xml-inline, kv-lines, python"),
        (3, {}, "key.content = 3 must be one of"),
        ("json", [], r"key.content_args = \[\] must be an object"),
        ("json", {"strict": True}, "key.content_args.strict = True is not understood: json takes string_delims, "),
        ("int", {"base": 8}, "key.content_args.base = 8 is not understood: int takes no arguments"),
        ("text", {"strip": "yes"}, "key.content_args.strip = 'yes' must be a bool"),
        ("json", {"string_delims": [["a"]]}, r"key.content_args.string_delims = \[\['a'\]\] must be at most 8 pairs"),
        ("xml-inline", {}, "key.content_args.tag_pattern = None must be a regular expression"),
        (
            "xml-inline",
            {"tag_pattern": "(?P<key>a)(?P<b>c)"},
            r"key.content_args.tag_pattern = .* must name key and value",
        ),
        ("xml-inline", {"tag_pattern": r"<(?P<key>a)>\1"}, "key.content_args.tag_pattern = .* has a back reference"),
        ("xml-inline", {"tag_pattern": "(?P<key>a*)"}, "key.content_args.tag_pattern = .* fits where there is nothing"),
        ("kv-lines", {"kv_sep": ""}, "key.content_args.kv_sep = '' must not be empty"),
        ("kv-lines", {"value_parser": {"name": "x"}}, "key.content_args.value_parser.content = 'x' must be one of"),
        ("kv-lines", {"value_parser": {"nam": "x"}}, "key.content_args.value_parser.nam = 'x' is not understood"),
        ("kv-lines", nested(5)["args"], "is more than 4 readers within one another"),
    ],
)
def test_what_is_not_understood_is_named(name: Any, arguments: Any, message: str) -> None:
    with pytest.raises(ResponseTemplateError, match=message):
        read_contents("key", name, arguments)
