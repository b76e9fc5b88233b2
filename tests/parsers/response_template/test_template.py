"""Tests of response templates: errors by key and value, and derived properties of valid ones."""

import copy
from typing import Any

import pytest

from jaxinfer.parsers.response_template.errors import ResponseTemplateError
from jaxinfer.parsers.response_template.template import Kind, read_template, shaped
from tests.parsers.response_template.recorded import TEMPLATES

CALLS = {"open": "<c>", "close": "</c>", "content": "json", "repeats": True}


def template(**more: Any) -> dict[str, Any]:
    return {"start_anchor": "A:", "fields": {"content": {}, "tool_calls": CALLS}, **more}


def field(name: str, **more: Any) -> dict[str, Any]:
    return {"start_anchor": "A:", "fields": {name: more}}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ([], "response_template = [] must be an object"),
        ("x", "response_template = 'x' must be an object"),
        (template(more=1), "response_template.more = 1 is not understood: known are version, defaults, fields, start"),
        (template(version=2), "response_template.version = 2 must be 1"),
        (template(defaults=3), "response_template.defaults = 3 must be an object"),
        (template(defaults={"x": ""}), "response_template.defaults.x = '' is not understood: known are role"),
        (template(defaults={"content": "x"}), "response_template.defaults.content = 'x' must be empty"),
        (template(fields={}), "response_template.fields = {} must be an object with fields"),
        (template(fields=[1]), "response_template.fields = [1] must be an object with fields"),
        (template(fields={str(i): {} for i in range(17)}), "must be at most 16"),
        ({"fields": {"content": {}}}, "response_template.start_anchor = None must be there, or start_anchor_pattern"),
        (
            template(start_anchor_pattern="x"),
            "response_template.start_anchor = 'A:' and start_anchor_pattern cannot be",
        ),
        (template(start_anchor=[]), "response_template.start_anchor = [] must be a text, or a list of texts"),
        (template(start_anchor=["a", ""]), "response_template.start_anchor = ['a', ''] must be a text, or a list of"),
        (template(start_anchor="x" * 70_000), "bytes; at most 65536 are read"),
        (template(start_anchor="x" * 600), "is too large: its program has more than 512 steps"),
        (
            field("citations"),
            "response_template.fields.citations = {} is not understood: fields may be content, reasoning",
        ),
        ({"start_anchor": "A", "fields": {"content": 3}}, "response_template.fields.content = 3 must be an object"),
        (
            field("content", opens="x"),
            "response_template.fields.content.opens = 'x' is not understood: known are open, ",
        ),
        (field("content", repeats=1), "response_template.fields.content.repeats = 1 must be true or false"),
        (field("content", optional="no"), "response_template.fields.content.optional = 'no' must be true or false"),
        (
            field("content", open_pattern="a*"),
            "response_template.fields.content.open_pattern = 'a*' fits where there is",
        ),
        (
            field("content", close_pattern="^"),
            "response_template.fields.content.close_pattern = '^' fits where there is",
        ),
        (field("content", open_pattern=3), "response_template.fields.content.open_pattern = 3 must be a regular expr"),
        (field("content", close_pattern="a(?=b)"), "response_template.fields.content.close_pattern = 'a(?=b)' has (?="),
        (
            field("content", content="json"),
            "response_template.fields.content.content = 'json' must be text in this field",
        ),
        (
            field("content", transform="{content}"),
            "response_template.fields.content.transform = '{content}' is for tool",
        ),
        (field("thinking", join=3, repeats=True), "response_template.fields.thinking.join = 3 must be a text"),
        (field("thinking", join=" "), "response_template.fields.thinking.join = ' ' needs repeats"),
        (field("thinking", open_pattern="(?P<a>x)"), "open_pattern = '(?P<a>x)' names parts, which only a transform"),
        (field("tool_calls", **CALLS, join=""), "response_template.fields.tool_calls.join = '' is for text alone"),
        (field("tool_calls", transform_each=True), "response_template.fields.tool_calls.transform_each = True needs a"),
        (
            field("tool_calls", open_pattern="(?P<a>x)"),
            "response_template.fields.tool_calls.transform = None must be there",
        ),
        (
            field("tool_calls", transform={"a": ["x {content}"]}),
            ".transform = 'x {content}' mixes a placeholder with text",
        ),
        (field("tool_calls", transform=["{name}"]), ".transform = '{name}' names none of content"),
        (
            template(fields={"content": {}, "thinking": {}}),
            "['content', 'thinking'] have nothing that begins them; one may",
        ),
    ],
)
def test_what_is_not_understood_is_named(raw: Any, message: str) -> None:
    with pytest.raises(ResponseTemplateError) as error:
        read_template(raw)
    assert message in str(error.value)


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_in_use_are_understood(name: str) -> None:
    raw = copy.deepcopy(TEMPLATES[name])
    assert {each.name for each in read_template({"version": 1, **raw}).fields} <= set(raw["fields"])
    assert raw == TEMPLATES[name]


@pytest.mark.parametrize("end", ["$", r"\Z"])
def test_the_texts_end_ends_every_region(end: str) -> None:
    implicit = read_template(field("content", close_pattern=end)).implicit
    assert implicit is not None
    assert implicit.close is None


def test_text_outside_of_regions_is_content_where_no_field_says_what_content_is() -> None:
    implicit = read_template(field("tool_calls", **CALLS)).implicit
    assert implicit is not None
    assert implicit.kind == Kind.CONTENT
    assert read_template(field("content", open="<c>")).implicit is None


def test_the_last_anchor_begins_the_answer() -> None:
    read = read_template(template(start_anchor=["A:", "B"]))
    assert [read.begun(prompt) for prompt in ("A:x", "A:x B y", "xA:", "x")] == ["x", " y", "", ""]


def test_markers_are_the_special_tokens_in_it() -> None:
    calls = {**CALLS, "content_args": {"string_delims": [['<|"|>', "<q>"]]}, "open": "<|call|>f"}
    special = ["<|call|>", '<|"|>', "</c>", "A:", "<|x|>"]
    assert read_template(template(fields={"tool_calls": calls}), special).markers == {"<|call|>", '<|"|>', "</c>"}


def test_shapes() -> None:
    scope = {"content": {"a": {"b": [1]}}, "name": "f"}
    assert shaped({"x": ["{content.a.b}", "{name}", 3, "y"]}, scope) == {"x": [[1], "f", 3, "y"]}
    for wrong in ("{content.c}", "{content.a.b.c}", "{other}"):
        with pytest.raises(ValueError, match="nothing is at"):
            shaped(wrong, scope)
