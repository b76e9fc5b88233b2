"""Tools of a request as needed by parsers: function names, and parameter types."""

from __future__ import annotations

import ast
import collections
import json
import math
import re
import urllib.parse
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

from jaxinfer.parsers.json_text import whole_text

STRING = "string"
MOST_PYTHON = 1 << 14
"""Maximum characters of parsed Python, strings not counted: a few hundredths of a second."""
_MOST_DEPTH = 8
_MOST_AFFIXES = 5
_AROUND_NAME = " \t\r\n\"'`<>()"
_PREFIX, _COUNTER = re.compile(r"(?:functions?|tools?|default_api)[\s._:/]*"), re.compile(r"[\s._:#-]*[0-9]{1,9}$")
_GROUPED = re.compile(r"[+-]?\d[\d.]*_[\w.+-]*")
"""Python numbers with grouped digits; names and dates look the same."""
_WORDS = {
    "str": STRING,
    "text": STRING,
    "enum": STRING,
    "int": "integer",
    "float": "number",
    "double": "number",
    "bool": "boolean",
    "dict": "object",
    "list": "array",
    "tuple": "array",
}
"""JSON Schema types by non-standard names that clients use."""
_KINDS: Mapping[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}


class Tools:
    """Tools in OpenAI's format. Tools of another shape are ignored.

    Args:
        tools: the request's tools.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]] | None = None) -> None:
        self._parameters = dict(found for tool in tools or () if (found := _function(tool)) is not None)
        spellings = collections.Counter(filter(None, map(_spelling, self._parameters)))
        self._spelt = {_spelling(name): name for name in self._parameters if spellings[_spelling(name)] == 1}
        self._types: dict[tuple[str, str], frozenset[str]] = {}

    @property
    def names(self) -> Sequence[str]:
        return list(self._parameters)

    def named(self, head: str) -> str | None:
        """Return the function that the head of a call names, in any spelling: ``functions.f:0``, ``F``.

        None: there is none.
        """
        text = head.strip(_AROUND_NAME)
        for _ in range(_MOST_AFFIXES):
            bare = _COUNTER.sub("", text)
            for each in (text, bare):
                found = each if each in self._parameters else self._spelt.get(_spelling(each))
                if found is not None:
                    return found
            shorter = _PREFIX.sub("", text, count=1)
            text = bare if shorter == text else shorter
        return None

    def know(self, name: str) -> bool:
        """Return whether ``name`` names a function; True for all names if there are no tools."""
        return not self._parameters or self.named(name) is not None

    def parameters(self, name: str) -> Collection[str]:
        """Return the parameter names of a function; empty: any, or none."""
        properties = self._parameters.get(name, {}).get("properties")
        return properties if isinstance(properties, Mapping) else ()

    def with_parameter(self, parameter: str) -> str | None:
        """Return the only function that has this parameter; None: none, or several."""
        found = [name for name in self._parameters if parameter in self.parameters(name)]
        return found[0] if len(found) == 1 else None

    def types(self, name: str, parameter: str) -> frozenset[str]:
        """Return the JSON Schema types of a function's parameter; empty: any, or unknown."""
        root = self._parameters.get(name, {})
        properties = root.get("properties")
        schema = properties.get(parameter) if isinstance(properties, Mapping) else None
        if schema is None:
            return frozenset()
        if (name, parameter) not in self._types:  # a schema may be large, and is queried often
            self._types[name, parameter] = frozenset(_types(schema, root, _MOST_DEPTH, set()))
        return self._types[name, parameter]


def json_value(text: str, types: frozenset[str]) -> str:
    """Return JSON of an unquoted value, parsed as one of these types (none: any), else as a string.

    Python literals are accepted (True, None, single quotes), and JSON with escaped quotes.
    """
    bare = text.strip()
    if bare.lower() in ("null", "none") and ("null" in types or STRING not in types):
        return "null"
    if bare.lower() in ("true", "false") and ("boolean" in types or not types):
        return bare.lower()
    if (found := _json(bare)) and _is_of(found[0], types):
        return json_text(found[0]) or bare  # numbers beyond Python's limits are still valid JSON
    is_python = len(bare) <= MOST_PYTHON and not _GROUPED.fullmatch(bare)
    found = _escaped(bare) or (_literal(parsed(bare)) if is_python else ())
    return (json_text(found[0]) if found and _is_of(found[0], types) else None) or json_text(text) or '""'


def json_text(value: Any) -> str | None:
    """Return JSON of a value; None if it has none."""
    try:
        return whole_text(json.dumps(_finite(value), ensure_ascii=False))
    except (TypeError, ValueError, RecursionError):
        return None


def quoted(text: str) -> str:
    """Return ``text`` escaped as within a JSON string; escaped chunks may be concatenated."""
    return json.dumps(whole_text(text), ensure_ascii=False)[1:-1]


def parsed(expression: str) -> ast.expr | None:
    """Return the syntax tree of a Python expression; None if it is not one."""
    try:
        with warnings.catch_warnings():  # about unknown escapes
            warnings.simplefilter("ignore")
            return _JsonWords().visit(ast.parse(expression, mode="eval")).body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None


class _JsonWords(ast.NodeTransformer):
    """Replaces JSON words by Python constants."""

    _values: Mapping[str, bool | None] = {"true": True, "false": False, "null": None}

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.copy_location(ast.Constant(self._values[node.id]), node) if node.id in self._values else node


def literal_json(node: ast.expr) -> str | None:
    """Return JSON of a Python literal; None if it is not a literal, or has no JSON."""
    found = _literal(node)
    return json_text(found[0]) if found else None


def _spelling(name: str) -> str:
    return "".join(each for each in name if each.isalnum()).casefold()


def _function(tool: object) -> tuple[str, Mapping[str, Any]] | None:
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str):
        return None
    parameters = function.get("parameters")
    return name, parameters if isinstance(parameters, Mapping) else {}


def referred(reference: object, root: Mapping[str, Any]) -> object:
    """Resolve a ``$ref`` within a schema (RFC 6901, as a fragment); None if its target does not exist."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found: object = root
    for part in urllib.parse.unquote(reference[1:]).split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list):
            found = found[int(part)] if part.isdecimal() and int(part) < len(found) else None
        else:
            found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _types(schema: object, root: Mapping[str, Any], depth: int, seen: set[int]) -> set[str]:
    """Return the types that ``schema`` names, also by its values, its alternatives, or its references within ``root``.

    Args:
        seen: ids of visited schemas: schemas may refer to one another many times.
    """
    if not isinstance(schema, Mapping) or depth == 0 or id(schema) in seen:
        return set()
    seen.add(id(schema))
    null = {"null"} if schema.get("nullable") is True else set[str]()
    found = schema.get("type")
    if found is not None:
        words = found if isinstance(found, list) else [found]
        return null | {_WORDS.get(each, each) for each in words if isinstance(each, str)}
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        kinds = {kind for value in values for kind, types in _KINDS.items() if type(value) in types}
        return null | kinds | {STRING for value in values if isinstance(value, str)}
    listed = [each for word in ("anyOf", "oneOf", "allOf") if isinstance(each := schema.get(word), list)]
    others = [*(one for each in listed for one in each), referred(schema.get("$ref"), root)]
    return null | {kind for each in others for kind in _types(each, root, depth - 1, seen)}


def _json(text: str) -> tuple[Any, ...]:
    try:
        return (json.loads(text, parse_constant=_no_json),)
    except (ValueError, RecursionError):
        return ()


def _escaped(text: str) -> tuple[Any, ...]:
    """Return the value of JSON that is escaped as within a JSON string."""
    inner = _json(f'"{text}"') if '\\"' in text else ()
    return _json(inner[0]) if inner and isinstance(inner[0], str) else ()


def _no_json(word: str) -> NoReturn:
    raise ValueError(word)


def _literal(node: ast.expr | None) -> tuple[Any, ...]:
    try:
        return () if node is None else (ast.literal_eval(node),)
    except (ValueError, TypeError, MemoryError, RecursionError):
        return ()


def _is_of(value: Any, types: frozenset[str]) -> bool:
    """Return whether a value is of one of the types. A str never is, because models write strings without quotes."""
    if not types:
        return not isinstance(value, str) and any(type(value) in kinds for kinds in _KINDS.values())
    return any(type(value) in _KINDS.get(kind, ()) for kind in types)


def _finite(value: Any) -> Any:
    """Reject values that `json.dumps` would write as invalid JSON: infinite numbers, and keys that are not strings."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError
    if isinstance(value, dict) and not all(isinstance(key, str) for key in value):
        raise ValueError
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value
