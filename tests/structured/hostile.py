"""Hostile output constraints: each must be rejected or served within a limit of CPU time."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

PADDING = 1_000_000  # characters


def _properties(count: int, name: str = "p") -> dict[str, Any]:
    return {"type": "object", "properties": {f"{name}{i}": {"type": "string"} for i in range(count)}}


def _one_of(depth: int, width: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for level in range(depth):
        names = [f"k{level}_{branch}" for branch in range(width)]
        closed = {"type": "object", "additionalProperties": False}
        schema = {"oneOf": [{**closed, "properties": {name: schema}, "required": [name]} for name in names]}
    return schema


def _chain(length: int) -> dict[str, Any]:
    """Return definitions, each of which refers to the next one."""
    links = {f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(length)}
    return {"$defs": {**links, f"d{length}": {"type": "null"}}, "$ref": "#/$defs/d0"}


def _recursive(schema: dict[str, Any]) -> dict[str, Any]:
    return {"$defs": {"a": schema}, "$ref": "#/$defs/a"}


_LOOP = {"$ref": "#/$defs/a"}


def _lists(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def _rules(length: int) -> str:
    """Return Lark rules, each of which is the next one twice."""
    return "\n".join(["start: r0", *(f"r{i}: r{i + 1} r{i + 1}" for i in range(length)), f'r{length}: "x"'])


_SCHEMAS: dict[str, Callable[[], Any]] = {
    "oneOf within oneOf, twelve deep": lambda: _one_of(12, 2),
    "oneOf within oneOf, many wide": lambda: _one_of(3, 20),
    "oneOf of one, sixty deep": lambda: _one_of(60, 1),
    "all of many any": lambda: {
        "allOf": [{"anyOf": [_properties(1, f"p{i}_{j}_") for j in range(4)]} for i in range(10)]
    },
    "50,000 values": lambda: {"enum": [f"value {i}" for i in range(50_000)]},
    "5,000 properties": lambda: _properties(5_000, "p" * 20),
    "a megabyte of properties": lambda: _properties(20_000, "p" * 20),
    "a megabyte of description": lambda: {"type": "object", "description": "x" * PADDING},
    "a megabyte of one text": lambda: {"const": "x" * PADDING},
    "a megabyte of definitions": lambda: {"$defs": _properties(20_000, "p" * 20)["properties"], "type": "null"},
    "a megabyte of empty objects": lambda: {"enum": [{}] * (PADDING // 4)},
    "refers to itself": lambda: _recursive(_LOOP),
    "is either itself or itself": lambda: _recursive({"anyOf": [_LOOP, _LOOP]}),
    "holds itself": lambda: _recursive({"type": "array", "items": _LOOP}),
    "a chain of 10,000 references": lambda: _chain(10_000),
    "lists within lists": lambda: _lists(300),
    "a long text": lambda: {"type": "string", "maxLength": 10**9},
    "a long list": lambda: {"type": "array", "items": {"type": "integer"}, "minItems": 10**5, "maxItems": 10**9},
    "a pattern of patterns": lambda: {"type": "string", "pattern": "^(([a-z])+.)+[A-Z]([a-z])+$"},
}
_PATTERNS = {
    "plus of plus": "(a+)+b",
    "repeated repetition": "([a-z]{1,500}){1,500}",
    "many any": "(.*a){20}",
    "states without number": "(a|b)*a(a|b){20}",
    "a hundred hundreds of hundreds": "((a{100}){100}){100}",
    "optional or not": "(a?){5000}a{5000}",
    "all letters": r"[\p{L}\p{N}]{1,10000}",
}


def _schema(make: Callable[[], Any]) -> dict[str, Any]:
    return {"json": json.dumps(make())}


HOSTILE: dict[str, Callable[[], dict[str, Any]]] = {
    **{name: functools.partial(_schema, make) for name, make in _SCHEMAS.items()},
    **{name: functools.partial(dict[str, Any], regex=regex) for name, regex in _PATTERNS.items()},
    "4,096 long texts": lambda: {"choice": [f"{i:0250}" for i in range(4_096)]},
    "a rule of 50,000 texts": lambda: {"grammar": "start: " + " | ".join(f'"w{i}"' for i in range(50_000))},
    "a chain of 3,000 rules": lambda: {"grammar": _rules(3_000)},
    "a rule that is itself twice": lambda: {"grammar": 'start: a\na: a a | "x" |'},
    "brackets within brackets": lambda: {"grammar": "root ::= " + "(" * 2_000 + '"x"' + ")" * 2_000},
}
"""``structured_outputs`` by the kind of attack."""


def distinct(number: int) -> dict[str, Any]:
    """Return a schema that was not requested before."""
    properties = {f"a{number}": {"type": "string", "maxLength": number % 50}, "b": {"enum": [number, number + 1]}}
    return {"json": {"type": "object", "properties": properties, "required": ["b"]}}
