"""Readers of region contents: text, numbers, JSON and its dialects, tags, lines, Python calls."""

from __future__ import annotations

import ast
import dataclasses
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxinfer.parsers.pattern import PatternError, can_be_empty, read_pattern
from jaxinfer.parsers.response_template.errors import refuse, require
from jaxinfer.parsers.response_template.program import Program, compiled
from jaxinfer.parsers.response_template.search import Match, find_all
from jaxinfer.parsers.tools import MOST_PYTHON, parsed

TEXT = "text"
_MOST_DEPTH = 4
_MOST_DELIMITERS = 8
# Strings are matched first, so that text like a key within a string is left alone.
_BARE_KEY = re.compile(r'"(?:\\.|[^"\\])*"|(?<=[{,])(\s*)(\w+)(\s*):', re.DOTALL)
_WORDS = {"true": True, "false": False, "null": None}


@dataclasses.dataclass(frozen=True)
class Contents:
    """A reader of region contents.

    Attributes:
        read: function of a region's text, and of the matches of ``tags`` in it. It raises ValueError, RecursionError or
            MemoryError if the text has another form.
        tags: pattern matched while the text streams in; None: no pattern.
        literals: delimiter texts of the reader.
    """

    read: Callable[[str, Sequence[Match]], Any]
    tags: Program | None = None
    literals: tuple[str, ...] = ()

    def whole(self, text: str) -> Any:
        return self.read(text, () if self.tags is None else find_all(self.tags, text))


def read_contents(key: str, name: object, arguments: object, depth: int = 0) -> Contents:
    """Return the reader of a name, with arguments as transformers defines them.

    Raises:
        ResponseTemplateError: there is no such reader, or it takes other arguments. The message begins with ``key``.
    """
    known = name if isinstance(name, str) and name in _READERS else None
    require(known is not None, f"{key}.content", name, f"must be one of {', '.join(_READERS)}")
    require(isinstance(arguments, Mapping), f"{key}.content_args", arguments, "must be an object")
    assert known is not None
    assert isinstance(arguments, Mapping)
    make, kinds = _READERS[known]
    for word, value in arguments.items():
        place = f"{key}.content_args.{word}"
        require(word in kinds, place, value, f"is not understood: {known} takes {', '.join(kinds) or 'no arguments'}")
        require(isinstance(value, kinds[word]), place, value, f"must be a {kinds[word].__name__}")
    require(depth <= _MOST_DEPTH, f"{key}.content", name, f"is more than {_MOST_DEPTH} readers within one another")
    return make(key, arguments, depth)


def _scalar(convert: Callable[[str], Any]) -> Callable[[str, Mapping[str, Any], int], Contents]:
    def make(key: str, arguments: Mapping[str, Any], depth: int) -> Contents:
        strip = arguments.get("strip", True)
        return Contents(lambda text, _: convert(text.strip() if strip else text))

    return make


def _is_true(text: str) -> bool:
    return text.lower() in ("true", "1")


def _json(key: str, arguments: Mapping[str, Any], depth: int) -> Contents:
    pairs = arguments.get("string_delims", [])
    good = len(pairs) <= _MOST_DELIMITERS and all(map(_is_pair, pairs))
    what = f"must be at most {_MOST_DELIMITERS} pairs of texts"
    require(good, f"{key}.content_args.string_delims", pairs, what)
    read = functools.partial(
        _read_json,
        pairs=pairs,
        bare=arguments.get("unquoted_keys", False),
        lax=arguments.get("allow_non_json", False),
    )
    return Contents(read, literals=tuple(each for pair in pairs for each in pair))


def _is_pair(found: object) -> bool:
    return isinstance(found, list) and len(found) == 2 and all(isinstance(each, str) and each for each in found)


def _read_json(text: str, _: Sequence[Match], pairs: Sequence[Sequence[str]], *, bare: bool, lax: bool) -> Any:
    """Parse JSON. ``bare``: keys may be unquoted; ``lax``: invalid JSON is returned as text."""
    quoted = _quoted(text, pairs)
    try:
        return json.loads(_with_keys(quoted) if bare else quoted)
    except json.JSONDecodeError:
        if lax:
            return text.strip()
        raise


def _quoted(text: str, pairs: Sequence[Sequence[str]]) -> str:
    """Return the text with delimited strings replaced by JSON strings."""
    for begin, end in pairs:
        done, at = [], 0
        while (first := text.find(begin, at)) >= 0 and (last := text.find(end, first + len(begin))) >= 0:
            done += [text[at:first], json.dumps(text[first + len(begin) : last], ensure_ascii=False)]
            at = last + len(end)
        text = "".join([*done, text[at:]])
    return text


def _with_keys(text: str) -> str:
    return _BARE_KEY.sub(lambda match: match[0] if match[2] is None else f'{match[1]}"{match[2]}"{match[3]}:', text)


def _tags(key: str, arguments: Mapping[str, Any], depth: int) -> Contents:
    tag = f"{key}.content_args.tag_pattern"
    program = read_program(tag, arguments.get("tag_pattern"))
    require({"key"} <= set(program.names) <= {"key", "value"}, tag, arguments["tag_pattern"], "must name key and value")
    merges = arguments.get("merge_duplicates", False)
    return Contents(functools.partial(_read_tags, inner=_inner(key, arguments, depth), merges=merges), program)


def _read_tags(text: str, matches: Sequence[Match], inner: Callable[[str], Any], *, merges: bool) -> Any:
    """Return values by key. ``merges``: several values of one key become a list."""
    found: dict[str, list[Any]] = {}
    for match in matches:
        name = text[slice(*match.kept["key"])]
        found.setdefault(name, []).append(inner(text[slice(*match.kept.get("value", (0, 0)))]))
    return {name: values if merges and len(values) > 1 else values[-1] for name, values in found.items()}


def _lines(key: str, arguments: Mapping[str, Any], depth: int) -> Contents:
    line_end, between = arguments.get("line_sep", "\n"), arguments.get("kv_sep", ":")
    for word, value in (("line_sep", line_end), ("kv_sep", between)):
        require(value != "", f"{key}.content_args.{word}", value, "must not be empty")
    inner, strip = _inner(key, arguments, depth), arguments.get("strip", True)
    return Contents(functools.partial(_read_lines, separators=(line_end, between), inner=inner, strip=strip))


def _read_lines(
    text: str, _: Sequence[Match], separators: tuple[str, str], inner: Callable[[str], Any], *, strip: bool
) -> Any:
    """Return values by key. ``separators``: of lines, and of a key and its value."""
    found, (line_end, between) = {}, separators
    for line in text.split(line_end):
        name, has, value = line.partition(between)
        if has:
            found[name.strip() if strip else name] = inner(value.strip() if strip else value)
    return found


def _inner(key: str, arguments: Mapping[str, Any], depth: int) -> Callable[[str], Any]:
    """Return the reader of nested values; default: text."""
    parser = arguments.get("value_parser")
    if parser is None:
        return str
    place = f"{key}.content_args.value_parser"
    for word, value in parser.items():
        require(word in ("name", "args"), f"{place}.{word}", value, "is not understood")
    return read_contents(place, parser.get("name", TEXT), parser.get("args", {}), depth + 1).whole


def _python(key: str, arguments: Mapping[str, Any], depth: int) -> Contents:
    return Contents(lambda text, _: _calls(text))


def _calls(text: str) -> list[dict[str, Any]]:
    if len(text) > MOST_PYTHON:
        raise ValueError(f"Python of more than {MOST_PYTHON} characters")
    tree = parsed(text.strip())
    if not isinstance(tree, ast.List):
        raise ValueError("no list")
    return [_call(each) for each in tree.elts]


def _call(node: ast.expr) -> dict[str, Any]:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call with arguments by name")
    found = {keyword.arg: ast.literal_eval(_Words().visit(keyword.value)) for keyword in node.keywords}
    if None in found or len(found) < len(node.keywords):
        raise ValueError("arguments without a name, or of the same")
    return {"name": ast.unparse(node.func), "arguments": found}


class _Words(ast.NodeTransformer):
    """Replaces JSON words by Python constants."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_WORDS[node.id]) if node.id in _WORDS else node


_READERS: Mapping[str, tuple[Callable[[str, Mapping[str, Any], int], Contents], Mapping[str, type]]] = {
    TEXT: (_scalar(str), {"strip": bool}),
    "int": (_scalar(int), {}),
    "float": (_scalar(float), {}),
    "bool": (_scalar(_is_true), {}),
    "json": (_json, {"string_delims": list, "unquoted_keys": bool, "allow_non_json": bool}),
    "xml-inline": (_tags, {"tag_pattern": str, "value_parser": dict, "merge_duplicates": bool}),
    "kv-lines": (_lines, {"line_sep": str, "kv_sep": str, "strip": bool, "value_parser": dict}),
    "python-call-list": (_python, {}),
}
"""Readers by name: constructor, and types of its arguments."""


def read_program(key: str, pattern: object, *, anywhere: bool = True) -> Program:
    """Compile a pattern that never matches the empty string or, if not ``anywhere``, only at the beginning of the text.

    Raises:
        ResponseTemplateError: the pattern is invalid, or matches the empty string. The message begins with ``key``.
    """
    if not isinstance(pattern, str):
        refuse(key, pattern, "must be a regular expression")
    try:
        node = read_pattern(pattern)
        require(not can_be_empty(node, at_begin=anywhere), key, pattern, "fits where there is nothing")
        return compiled(node)
    except PatternError as error:
        refuse(key, pattern, str(error))
