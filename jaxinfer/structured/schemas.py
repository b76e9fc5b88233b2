"""Normalisation of JSON Schemas before compilation: no-op keywords are dropped, OpenAPI keywords converted. No jax."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jaxinfer.parsers.tools import referred

Schema = Mapping[str, Any] | bool

_ONE = frozenset({"items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains"})
_SOME = frozenset({"allOf", "anyOf", "oneOf", "prefixItems", "items"})
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})
"""Keywords with, as value, a schema, a list of schemas, or schemas by name."""

_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6", "uri"}
    | {
        "uri-reference",
        "iri",
        "iri-reference",
        "uuid",
        "uri-template",
        "json-pointer",
        "relative-json-pointer",
        "regex",
    }
)
"""Formats of JSON Schema 2020-12 (Validation, 7.3). Other formats are annotations."""
_ANY: tuple[Any, ...] = (True, {})


def _says_nothing(word: str, value: Any, schema: Mapping[str, Any]) -> bool:
    neutral = _NEUTRAL.get(word)
    return neutral is not None and neutral(value, schema)


_NEUTRAL: Mapping[str, Callable[[Any, Mapping[str, Any]], bool]] = {
    "format": lambda value, schema: isinstance(value, str) and value not in _FORMATS,
    "$schema": lambda value, schema: isinstance(value, str) and "/draft" not in value,
    "uniqueItems": lambda value, schema: value is False,
    "nullable": lambda value, schema: value is False,
    "not": lambda value, schema: value is False,
    "propertyNames": lambda value, schema: value in (*_ANY, {"type": "string"}),
    **dict.fromkeys(("unevaluatedProperties", "unevaluatedItems"), lambda value, schema: value in _ANY),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), lambda value, schema: value == {}),
    **dict.fromkeys(("minContains", "maxContains"), lambda value, schema: "contains" not in schema),
    "contains": lambda value, schema: schema.get("minContains") == 0 and "maxContains" not in schema,
    **dict.fromkeys(("then", "else"), lambda value, schema: "if" not in schema),
    "if": lambda value, schema: "then" not in schema and "else" not in schema,
}
"""Conditions under which keywords have no effect."""


class GrammarError(ValueError):
    """A grammar that cannot be enforced. The message gives the reason, and names the keyword if there is one.

    Args:
        place: the field of the request; "": the constraint on the output.
    """

    def __init__(self, message: str, place: str = "") -> None:
        super().__init__(message)
        self.place = place


def plain(schema: Schema, place: str = "") -> Schema:
    """Return the schema without no-op keywords, and with null among the types where ``nullable``.

    Raises:
        GrammarError: no finite JSON matches it, or ``nullable`` is neither true nor false.
    """
    _check_finite(schema, place)
    return _plain(schema, place)


def closed(schema: Any) -> Any:
    """Return the schema with ``additionalProperties`` false in each object that constrains only named properties.

    Schemas in ``allOf`` are unchanged: if closed, they would exclude one another.
    """
    found = _mapped(schema, closed, skip="allOf")
    is_object = isinstance(found, Mapping) and isinstance(found.get("properties"), Mapping)
    if is_object and not {"additionalProperties", "patternProperties", "unevaluatedProperties", "allOf"} & found.keys():
        return {**found, "additionalProperties": False}
    return found


def _plain(schema: Any, place: str) -> Any:
    found = _mapped(schema, lambda inner: _plain(inner, place))
    if not isinstance(found, Mapping):
        return found
    said = {word: value for word, value in found.items() if not _says_nothing(word, value, found)}
    if "contains" not in said:
        said.pop("minContains", None)
    return _with_null(said, place) if "nullable" in said else said


def _with_null(schema: dict[str, Any], place: str) -> dict[str, Any]:
    if schema.pop("nullable") is not True:
        raise GrammarError("nullable must be true or false", place)
    kind, null = schema.get("type"), {"type": "null"}
    if "const" in schema or "enum" in schema or "$ref" in schema or "allOf" in schema:
        inner = {word: value for word, value in schema.items() if word not in ("$defs", "definitions")}
        return {**{word: schema[word] for word in schema.keys() - inner.keys()}, "anyOf": [inner, null]}
    if kind is not None:
        types = kind if isinstance(kind, list) else [kind]
        schema["type"] = types if "null" in types else [*types, "null"]
    for word in ("anyOf", "oneOf"):
        if isinstance(schema.get(word), list) and null not in schema[word]:
            schema[word] = [*schema[word], null]
    return schema


def _mapped(schema: Any, make: Callable[[Any], Any], skip: str = "") -> Any:
    """Return the schema with ``make`` applied to each of its subschemas."""
    if not isinstance(schema, Mapping):
        return schema
    found = dict(schema)
    for word, value in schema.items():
        if word == skip:
            continue
        if word in _NAMED and isinstance(value, Mapping):
            found[word] = {name: make(each) for name, each in value.items()}
        elif word in _SOME and isinstance(value, list):
            found[word] = [make(each) for each in value]
        elif word in _ONE:
            found[word] = make(value)
    return found


# ---- whether a schema matches any finite value


def _check_finite(root: Schema, place: str) -> None:
    nodes = list(_reached(root))
    finite: set[int] = set()
    known = -1
    while len(finite) > known:
        known = len(finite)
        for node in reversed(nodes):
            if id(node) not in finite and _is_finite(node, root, finite):
                finite.add(id(node))
    if isinstance(root, Mapping) and id(root) not in finite:
        raise GrammarError("the schema refers to itself, and nothing ends that: no JSON is of it", place)


def _reached(root: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the schemas that ``root`` needs, each once."""
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Mapping) and id(node) not in seen:
            seen.add(id(node))
            yield node
            waiting += [each for group in _needed(node, root) for each in group]


def _needed(schema: Mapping[str, Any], root: Any) -> Iterator[list[Any]]:
    """Yield groups of schemas; this one is finite if at least one of each group is."""
    if "$ref" in schema and (target := referred(schema["$ref"], root)) is not None:
        yield [target]
    for word in ("anyOf", "oneOf"):
        if isinstance(schema.get(word), list):
            yield schema[word]
    yield from ([each] for each in _list(schema.get("allOf")))
    kind = schema.get("type")
    if kind == "object" or kind == ["object"]:
        properties = schema.get("properties")
        for name in _list(schema.get("required")):
            if isinstance(properties, Mapping) and isinstance(name, str) and name in properties:
                yield [properties[name]]
    if kind == "array" or kind == ["array"]:
        least, first = schema.get("minItems", 0), _list(schema.get("prefixItems"))
        if isinstance(least, int):
            yield from ([each] for each in first[:least])
            if least > len(first) and "items" in schema and not isinstance(schema["items"], list):
                yield [schema["items"]]


def _list(found: Any) -> list[Any]:
    return found if isinstance(found, list) else []


def _is_finite(schema: Mapping[str, Any], root: Any, finite: set[int]) -> bool:
    if "const" in schema or "enum" in schema:
        return True
    return all(
        any(not isinstance(each, Mapping) or id(each) in finite for each in group) or not group
        for group in _needed(schema, root)
    )
