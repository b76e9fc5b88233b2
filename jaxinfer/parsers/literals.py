"""Structural tag formats for Python literals of a JSON Schema."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfer.parsers.forms import (
    ANNOTATIONS,
    FormError,
    Function,
    Node,
    const,
    either,
    optional,
    regex,
    row,
    schema_of,
    several,
)
from jaxinfer.parsers.tools import referred

_MOST_DEPTH = 16
_MOST_SCHEMAS, MOST_PARAMETERS = 2048, 128
"""Bounds on schemas (references are expanded) and on parameters (the possible successors of each are written out)."""
_ESCAPED, _PLAIN = r"\\[nrtbf\\'\"]", r"\\\x00-\x1f\x7f"
_STRING = either(regex(f"{quote}(?:[^{_PLAIN}{quote}]|{_ESCAPED})*{quote}") for quote in "\"'")
# Bounded: Python reads large exponents as infinity, which JSON lacks, and rejects numbers with too many digits.
_INTEGER = "-?(?:0|[1-9][0-9]{0,30})"
_LEAVES: Mapping[str, Node] = {
    "string": _STRING,
    "integer": regex(_INTEGER),
    "number": regex(rf"{_INTEGER}(?:\.[0-9]{{1,30}})?(?:[eE][+-]?[0-9]{{1,2}})?"),
    "boolean": either([const("True"), const("False")]),
    "null": const("None"),
}
_KNOWN: Mapping[str, frozenset[str]] = {
    "array": frozenset({"items", "minItems", "maxItems"}),
    "object": frozenset({"properties", "required", "additionalProperties"}),
}
_LEAF_WORDS = frozenset(
    {"minLength", "maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
    | {"multipleOf"}
)
_COMMA, _COLON = regex(", ?"), regex(": ?")
_ANY = """\
start: value
value: STRING | NUMBER | "True" | "False" | "None" | list | dict
list: "[" (value (COMMA value)*)? "]"
dict: "{" (STRING COLON value (COMMA STRING COLON value)*)? "}"
COMMA: /, ?/
COLON: /: ?/
NUMBER: /-?(0|[1-9][0-9]{0,30})(\\.[0-9]{1,30})?/
STRING: /"([^"\\\\\\x00-\\x1f\\x7f]|\\\\[nrtbf"'\\\\])*"|'([^'\\\\\\x00-\\x1f\\x7f]|\\\\[nrtbf"'\\\\])*'/
"""


class Literals:
    """Formats of Python literals for the parameters of a function.

    Raises:
        FormError: by every method: a schema cannot be expressed in Python literals; names the keyword.
    """

    def __init__(self, function: Function) -> None:
        self._function, self._count = function, 0

    def any(self) -> Node:
        return {"type": "grammar", "grammar": _ANY}

    def of(self, parameter: str) -> Node:
        """Return the format of a parameter's value."""
        return self._value(self._function.parameters[parameter], 0)

    def _value(self, schema: Any, depth: int) -> Node:
        self._count += 1
        if depth > _MOST_DEPTH or self._count > _MOST_SCHEMAS:
            self._refuse("$ref", "schemas within schemas are too deep, or too many")
        said = self._said({} if schema is True else schema)
        values = [said["const"]] if "const" in said else said.get("enum")
        if isinstance(values, list) and values:
            return either(const(text) for each in values for text in _written(each))
        for word, make in (("$ref", self._referred), ("anyOf", self._any_of), ("type", self._typed)):
            if word in said:
                return make(said, depth)
        if said:
            self._refuse(next(iter(said)), "stands without a type")
        return self.any()

    def _said(self, schema: Any) -> dict[str, Any]:
        """Return the schema without annotations."""
        if not isinstance(schema, Mapping):
            self._refuse(repr(schema)[:50], "is no schema that anything is of")
        return {word: value for word, value in schema.items() if word not in ANNOTATIONS}

    def _referred(self, said: Mapping[str, Any], depth: int) -> Node:
        self._only(said, frozenset({"$ref"}))
        return self._value(referred(said["$ref"], self._function.schema), depth + 1)

    def _any_of(self, said: Mapping[str, Any], depth: int) -> Node:
        self._only(said, frozenset({"anyOf"}))
        return either(self._value(each, depth + 1) for each in said["anyOf"])

    def _typed(self, said: Mapping[str, Any], depth: int) -> Node:
        types = said["type"] if isinstance(said["type"], list) else [said["type"]]
        return either(self._of_type(each, {**said, "type": each}, depth) for each in types)

    def _of_type(self, kind: str, said: Mapping[str, Any], depth: int) -> Node:
        self._only(said, _KNOWN.get(kind, _LEAF_WORDS) | {"type"})
        if kind == "array":
            return self._list(said, depth)
        if kind == "object":
            return self._dict(said, depth)
        if kind not in _LEAVES:
            self._refuse(f"type={kind!r:.50}", "is none of JSON's types")
        bounded = len(said) > 1
        return schema_of(said, f"{self._function.place}.parameters") if bounded else _LEAVES[kind]

    def _list(self, said: Mapping[str, Any], depth: int) -> Node:
        least, most = said.get("minItems", 0), said.get("maxItems")
        item = self._value(said.get("items", True), depth + 1)
        more = {"min": max(least - 1, 0), "max": -1 if most is None else most - 1, "content": row(_COMMA, item)}
        items = row(item) if most == 1 else row(item, {"type": "repeat", **more})
        some = [] if most == 0 else [items if least else optional(items)]
        return row(const("["), *some, const("]"))

    def _dict(self, said: Mapping[str, Any], depth: int) -> Node:
        properties, more = said.get("properties", {}), said.get("additionalProperties", True)
        required = frozenset(said.get("required", []))
        if required - set(properties):
            self._refuse("required", "names what is no property")
        if len(properties) > MOST_PARAMETERS:
            self._refuse("properties", f"are more than {MOST_PARAMETERS}")
        if not properties and more is not False:
            pair = row(_STRING, _COLON, self._value(more, depth + 1))
            return row(const("{"), optional(several(pair, parallel=True, between=_COMMA)), const("}"))
        pairs = [(self._pair(name, each, depth), name in required) for name, each in properties.items()]
        return row(const("{"), listed(pairs), const("}"))

    def _pair(self, name: str, schema: Any, depth: int) -> Node:
        return row(either(map(const, _written(name))), _COLON, self._value(schema, depth + 1))

    def _refuse(self, word: str, reason: str) -> Any:
        raise FormError(self._function, "parameters", f"cannot be held in Python's literals: {word} {reason}")

    def _only(self, said: Mapping[str, Any], words: frozenset[str]) -> None:
        for word in said:
            if word not in words:
                self._refuse(word, "is not served there")


def listed(pairs: Sequence[tuple[Node, bool]]) -> Node:
    """Return formats in order with commas between those present. ``pairs``: each format, and whether it is required."""
    behind = [row(_COMMA, part) if needed else optional(_COMMA, part) for part, needed in pairs]
    must = next((place for place, (_, needed) in enumerate(pairs) if needed), len(pairs))
    firsts = [row(part, *behind[place + 1 :]) for place, (part, _) in enumerate(pairs[: must + 1])]
    if not firsts:
        return const("")
    return either(firsts) if must < len(pairs) else optional(either(firsts))


def _written(value: Any) -> list[str]:
    """Return the spellings of a literal; a string with either kind of quotes."""
    return sorted({repr(value), json.dumps(value, ensure_ascii=False)} if isinstance(value, str) else {repr(value)})
