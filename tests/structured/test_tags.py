"""Tests of structural tags: accepted texts and special tokens, and errors that name the invalid field."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.sampling_params import RequestError, SamplingParams
from jaxinfer.structured.grammar import compiled, require_compiled
from jaxinfer.structured.matcher import Vocabulary
from jaxinfer.structured.schemas import GrammarError
from jaxinfer.structured.tree import Const, Either, Regex, Repeat, Row, read
from tests.structured.walks import takes, vocabulary

TEXTS, TOKENS = vocabulary(), vocabulary("<call>", "</call>", "<|x|>")
OBJECT: dict[str, Any] = {"type": "json_schema", "json_schema": {"type": "object"}}
ANY: dict[str, Any] = {"type": "any_text"}


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def regex(pattern: str) -> dict[str, Any]:
    return {"type": "regex", "pattern": pattern}


def row(*elements: Any) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def either(*elements: Any) -> dict[str, Any]:
    return {"type": "or", "elements": list(elements)}


def tag(begin: str, content: Any, end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


CALLS = [tag("<call>f", OBJECT, "</call>"), tag("<call>g", regex("[0-9]+"), "\n</call>")]

SPACED = ["<end>", " <end>", "<call>f{}</call> <call>g1\n</call> <end>", "<call>f{}</call><end>"]


def triggered(**more: Any) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": ["<call>"], "tags": CALLS, **more}


def separated(**more: Any) -> dict[str, Any]:
    return {"type": "tags_with_separator", "tags": [tag("(", regex("a+"), ")")], "separator": ", ", **more}


def text_of(node: Any) -> str:
    return json.dumps({"type": "structural_tag", "format": node})


FORMATS: list[tuple[Any, list[str], list[str]]] = [
    (const("ab"), ["ab"], ["a", "abb", ""]),
    (OBJECT, ["{}", '{"a":1}', '{"a": 1, "b": []}'], ["[]", '{"a":  1}', "{} "]),
    ({"type": "json_schema", "json_schema": True}, ["[]", "1"], ["x"]),
    (ANY, ["", "a<c>é\n"], []),
    ({"type": "any_text", "excludes": ["ab", "狐"]}, ["", "ba"], ["xaby", "狐"]),
    (regex("[a-c]+/"), ["ab/"], ["d/", "ab"]),
    ({**regex("[a-c]+"), "excludes": ["ab"]}, ["ba"], ["cab"]),
    ({"type": "grammar", "grammar": 'root ::= "x" [0-9]+'}, ["x12"], ["x"]),
    ({"type": "grammar", "grammar": 'start: "x" start | "y"'}, ["xxy"], ["x"]),
    (row(const("a"), regex("[a-z]+"), const("abc"), OBJECT), ["azabc{}", "aabcabc{}"], ["aabc{}", "az{}"]),
    (row(const("a"), ANY), ["a", "abc"], ["", "b"]),
    (either(const("aa"), row(const("ab"), ANY), OBJECT), ["aa", "ab", "abc", "{}"], ["a", "aab"]),
    (either(row(const("a"), OBJECT), const("ab")), ["a{}", "ab"], ["a"]),
    (row(regex(" ?"), either(row(const("<f>"), OBJECT), const("<f>x"))), ["<f>{}", " <f>x"], ["  <f>x", "<f>y"]),
    (row({"type": "star", "content": row(regex(" ?"), either(*CALLS))}, regex(" ?"), const("<end>")), SPACED, ["<end"]),
    ({"type": "optional", "content": row(const("q"), ANY)}, ["", "q", "qz"], ["z"]),
    ({"type": "plus", "content": regex("[ab]")}, ["a", "abab"], ["", "c"]),
    ({"type": "star", "content": tag("(", ANY, ")")}, ["", "()", "(a)(()"], ["(", "()a"]),
    ({"type": "repeat", "min": 2, "max": 3, "content": tag("(", ANY, ")")}, ["()()", "()()(a)"], ["()", "()()()()"]),
    ({"type": "repeat", "min": 1, "max": -1, "content": OBJECT}, ["{}", "{}{}{}"], [""]),
    (tag("<call>", ANY, "</call>"), ["<call></call>", "<call>a</b</call>"], ["<call>a", "<call></call>b"]),
    (tag("", ANY, ["!", "?"]), ["a!", "?"], ["a", "a!b"]),
    (row(tag("", ANY, ["!", "?"]), const("x")), ["a!x"], ["a!", "a!!x"]),
    (tag("<", row(const("a"), ANY), "<|x|>"), ["<ab<|x|>", "<a<|x|>"], ["<<|x|>", "<ab"]),
    (tag("B", {"type": "optional", "content": row(const("q"), ANY)}, "<|x|>"), ["B<|x|>", "Bqz<|x|>"], ["Bz<|x|>"]),
    (
        triggered(),
        ["", "abc", "<call>f{}</call>", "a<call>g1\n</call>b<call>f{}</call>c"],
        ["<call>", "a<call>h", "<call>f[]</call>", "<call>g</call>"],
    ),
    (
        triggered(at_least_one=True),
        ["<call>f{}</call>", "<call>f{}</call>a<call>g1\n</call>"],
        ["", "a<call>f{}</call>"],
    ),
    (triggered(stop_after_first=True), ["", "a", "a<call>f{}</call>"], ["a<call>f{}</call>b"]),
    (triggered(at_least_one=True, stop_after_first=True), ["<call>f{}</call>"], ["", "a", "<call>f{}</call>b"]),
    (triggered(excludes=["no"]), ["n", "on<call>f{}</call>"], ["no", "<call>f{}</call>no"]),
    (tag("A", triggered(), "\nZ"), ["A\nZ", "Ab\nc\nZ", "A<call>f{}</call>q\nZ"], ["A", "A\nZb", "A<call>\nZ"]),
    (row(triggered(at_least_one=True, stop_after_first=True), const("!")), ["<call>f{}</call>!"], ["<call>f{}</call>"]),
    (separated(), ["", "(a)", "(a), (aa)"], ["(a), ", "(a)(a)"]),
    (separated(at_least_one=True), ["(a)"], [""]),
    (separated(stop_after_first=True), ["", "(a)"], ["(a), (a)"]),
    (separated(at_least_one=True, stop_after_first=True), ["(a)"], ["", "(a), (a)"]),
]


@pytest.mark.parametrize("words", [TEXTS, TOKENS], ids=["texts", "tokens"])
@pytest.mark.parametrize(("node", "right", "wrong"), FORMATS, ids=lambda value: json.dumps(value)[:60])
def test_an_output_is_of_the_tag(words: Vocabulary, node: Any, right: list[str], wrong: list[str]) -> None:
    for text in right:
        assert takes(words, "structural_tag", text_of(node), text), text
    for text in wrong:
        assert not takes(words, "structural_tag", text_of(node), text), text


def test_the_older_form_is_triggered_tags() -> None:
    older = {"structures": [{"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}], "triggers": ["<f"]}
    for tagged in (older, {"type": "structural_tag", **older}):
        assert takes(TEXTS, "structural_tag", json.dumps(tagged), "a<f>{}</f>b")
        assert not takes(TEXTS, "structural_tag", json.dumps(tagged), "a<f>[]</f>b")
    assert read(json.dumps({**older, "at_least_one": True})).at_least_one  # type: ignore[union-attr]


def test_a_trigger_may_begin_a_special_token() -> None:
    node = {"type": "triggered_tags", "triggers": ["<ca"], "tags": CALLS[:1]}
    for words in (TEXTS, TOKENS):
        assert takes(words, "structural_tag", text_of(node), "a<call>f{}</call>")


@given(
    st.recursive(
        st.text("ab", max_size=2).map(const) | st.sampled_from(["a*", "b+", "[ab]"]).map(regex),
        lambda inner: (
            st.lists(inner, min_size=1, max_size=3).map(lambda each: row(*each))
            | st.lists(inner, min_size=1, max_size=3).map(lambda each: either(*each))
            | inner.map(lambda each: {"type": "optional", "content": each})
            | inner.map(lambda each: {"type": "repeat", "min": 1, "max": 2, "content": each})
        ),
        max_leaves=6,
    ),
    st.text("abc", max_size=6),
)
def test_regular_tags_take_what_their_regular_expression_does(node: Any, text: str) -> None:
    """Regular tags with overlapping parts accept the same texts as Python's regular expressions."""

    def spelt(found: Any) -> str:
        match found:
            case Const(value):
                return re.escape(value)
            case Regex(pattern):
                return f"(?:{pattern})"
            case Row(elements):
                return "".join(map(spelt, elements))
            case Either(elements):
                return f"(?:{'|'.join(map(spelt, elements))})"
            case Repeat(content, least, most):
                return f"(?:{spelt(content)}){{{least},{most}}}"
        raise TypeError(found)

    tagged = text_of(node)
    assert takes(TEXTS, "structural_tag", tagged, text) == bool(re.fullmatch(spelt(read(tagged)), text))


REFUSED: list[tuple[Any, str]] = [
    ({"format": const("a")}, "type=None must be structural_tag"),
    ({"type": "structural_tag"}, "format.type=None is not served: the formats are const_string, json_schema"),
    ({"type": "structural_tag", "format": const("a"), "x": 1}, "x=1 is not served"),
    ({"structures": [], "triggers": ["a"]}, "structures=[] must be a list that is not empty"),
    (
        {"structures": [{"begin": "a", "end": "b"}], "triggers": ["a"]},
        "structures[0].schema=None must be a JSON Schema",
    ),
    ({"structures": [{"begin": "b", "schema": {}, "end": ""}], "triggers": ["a"]}, "triggers=['a'] must hold one that"),
]
REFUSED_FORMATS: list[tuple[Any, str]] = [
    ({"type": "token", "token": 1}, "format.type='token' is not served"),
    ({"type": "const_string"}, "format.value=None must be a string"),
    ({**const("a"), "x": 1}, "format.x=1 is not served: the fields are type, value"),
    (row(), "format.elements=[] must be a list that is not empty"),
    (row(const("a"), 1), "format.elements[1]=1 must be an object"),
    (row(ANY, const("a")), "format.elements[0] must end by itself"),
    ({"type": "star", "content": ANY}, "format.content must end by itself"),
    ({"type": "plus", "content": either(ANY, const("a"))}, "format.content must end by itself"),
    (separated(tags=[tag("a", ANY, "")]), "format.tags[0] must end by itself"),
    (triggered(triggers=["x"]), "format.triggers=['x'] must hold one that begins the tag '<call>f'"),
    (triggered(triggers=["<call>", "<ca"]), "must hold one that begins the tag '<call>f'"),
    (triggered(triggers=[""]), "format.triggers=[''] must be texts that are not empty"),
    (triggered(at_least_one=1), "format.at_least_one=1 must be true or false"),
    (tag("a", ANY, ["b", ""]), "format.end=['b', ''] must hold no empty string"),
    ({"type": "repeat", "min": -1, "max": 1, "content": ANY}, "format.min=-1 must be at least 0"),
    ({"type": "repeat", "min": 2, "max": 1, "content": ANY}, "format.max=1 must be -1, or at least 1 and min"),
    ({"type": "repeat", "min": 2, "content": ANY}, "format.max=None must be an integer"),
    ({**OBJECT, "style": "qwen_xml"}, "format.style='qwen_xml' is not served"),
    ({"type": "grammar", "grammar": "%llguidance {}\nstart: /a/"}, "%llguidance is not served"),
    (regex("(a"), "unclosed group"),
]


@pytest.mark.parametrize(
    ("given_tag", "said"),
    [*REFUSED, *(({"type": "structural_tag", "format": each}, said) for each, said in REFUSED_FORMATS)],
)
def test_what_is_no_tag_is_refused_naming_the_part(given_tag: Any, said: str) -> None:
    with pytest.raises(GrammarError) as refused:
        compiled("structural_tag", json.dumps(given_tag))
    assert said in str(refused.value)


def test_a_schema_that_cannot_be_held_is_named() -> None:
    wrong: dict[str, Any] = {"type": "json_schema", "json_schema": {"not": {}}}
    for node, place in (
        (row(OBJECT, wrong), "structured_outputs.structural_tag.format.elements[1].json_schema"),
        (row(OBJECT, {**wrong, "name": "tools[3].function.parameters"}), "tools[3].function.parameters"),
    ):
        with pytest.raises(RequestError) as refused:
            require_compiled(SamplingParams(structured_outputs={"structural_tag": text_of(node)}))
        assert refused.value.place == place
        assert "not" in str(refused.value)


def test_a_keyword_that_would_be_passed_over_is_refused() -> None:
    with pytest.raises(GrammarError, match="uniqueItems"):
        compiled(
            "structural_tag", text_of({"type": "json_schema", "json_schema": {"type": "array", "uniqueItems": True}})
        )


def test_free_text_has_no_special_tokens() -> None:
    assert takes(TEXTS, "structural_tag", text_of(ANY), "a<call>b")
    assert not takes(TOKENS, "structural_tag", text_of(ANY), "a<call>b")


def test_an_end_token_is_no_part_of_a_tag() -> None:
    assert "</s>" not in vocabulary("<call>").names
    assert takes(TOKENS, "structural_tag", text_of(const("a")), "a")
