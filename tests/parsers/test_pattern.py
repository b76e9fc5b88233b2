"""Tests of patterns: parsing, rejections, and derived properties."""

import pytest

from jaxinfer.parsers.pattern import PatternError, can_be_empty, literals, names, read_pattern, runs
from jaxinfer.parsers.response_template.program import MOST_INSTRUCTIONS, compiled


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("a(?=b)", r"has \(\?= near character 2, which is not supported"),
        ("(?<!a)b", r"has \(\?<"),
        ("(?i:a)", r"has \(\?i"),
        ("(?i)a", r"has \(\?i"),
        (r"(?P<a>x)\1", "has a back reference"),
        ("(?P<a>x)(?P=a)", r"has \(\?P"),
        (r"a\b", r"has \\b"),
        (r"a\Z", r"has \\Z"),
        ("a$", r"has the text's end \(\$\)"),
        ("a*+", "has a possessive repetition"),
        ("(?>a)", r"has \(\?>"),
        ("(a*)*", "has a repetition of what may be nothing"),
        ("(?:^)+", "has a repetition of what may be nothing"),
        ("a{300}", "has more than 256 repetitions"),
        ("(" * 40 + "a" + ")" * 40, "has more than 32 groups"),
        ("[[a]b]", "is no regular expression"),
        ("(a", "is no regular expression: missing"),
        ("a**", "is no regular expression: multiple repeat"),
        ("a" * 2001, "has 2001 characters; 2000 are supported"),
    ],
)
def test_what_is_not_understood_is_named(pattern: str, reason: str) -> None:
    with pytest.raises(PatternError, match=f"^{reason}"):
        read_pattern(pattern)


@pytest.mark.parametrize("pattern", ["a(?=b)", "(?!a)b", r"a\b", "a$", "(a*)*", "a{300}"])
def test_more_is_supported_where_texts_are_matched_as_a_whole(pattern: str) -> None:
    read_pattern(pattern, whole=True)
    with pytest.raises(PatternError):
        read_pattern(pattern)


@pytest.mark.parametrize("pattern", ["(?:a{200}){200}", "(?:ab|c){256}"])
def test_programs_are_bounded(pattern: str) -> None:
    with pytest.raises(PatternError, match=f"more than {MOST_INSTRUCTIONS} steps"):
        compiled(pattern)


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        (
            r"<\|channel\|>commentary to=functions\.(?P<name>\w+).*?<\|message\|>",
            ["<|channel|>commentary to=functions.", "<|message|>"],
        ),
        (r"\s*(?:<a>|\n<b>)x?", ["<a>", "\n<b>", "x"]),
        (r"[<]a", ["a"]),
        ("^", []),
    ],
)
def test_literal_runs(pattern: str, found: list[str]) -> None:
    assert runs(read_pattern(pattern)) == found


@pytest.mark.parametrize(
    ("pattern", "is_empty", "at_begin"),
    [("a*", True, True), ("(?:^|a)", False, True), ("a|b?", True, True), ("(?P<a>a+)", False, False), ("", True, True)],
)
def test_what_may_be_nothing(pattern: str, is_empty: bool, at_begin: bool) -> None:
    node = read_pattern(pattern)
    assert (can_be_empty(node), can_be_empty(node, at_begin=True)) == (is_empty, at_begin)


def test_names_and_literals() -> None:
    assert names(read_pattern("(?P<a>x|(?P<b>y))*?z".replace("*?", "+"))) == {"a", "b"}
    assert runs(literals("<a", "<ab", "<a")) == ["<ab", "<a"]
