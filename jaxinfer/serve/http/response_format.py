"""Conversion of OpenAI's ``response_format`` to ``structured_outputs``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from jaxinfer.serve.api.errors import Kind, ServeError, short

_TYPES = ("text", "json_object", "json_schema", "structural_tag")
_TAG_FIELDS = ("format", "structures", "triggers")
_SCHEMA_FIELDS = ("name", "description", "schema", "strict")
_FIELDS = {"json_schema": ("json_schema",), "json_object": ("schema",), "structural_tag": _TAG_FIELDS}
GUIDED = {f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar")}
"""vLLM's older names for fields of ``structured_outputs``."""
_ELSEWHERE = {kind: f"structured_outputs.{kind}" for kind in GUIDED.values()} | {
    "ebnf": "structured_outputs.grammar",
    "json": "response_format of type json_schema",
}
"""Types of other APIs, and the field to use here instead."""


def constraint_of(
    response_format: Any, structured_outputs: Any, guided: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return ``{"structured_outputs": ...}`` for the sampling parameters, or {} if no constraint is requested.

    A schema is enforced exactly even if ``strict`` is not true; a schema that cannot be enforced is rejected.

    Args:
        guided: values by the names of `GUIDED`.

    Raises:
        ServeError: INVALID: ``response_format`` is malformed, or several fields constrain the output.
    """
    guided = guided or {}
    for place, name in enumerate(guided):
        others = [*list(guided)[:place], *(["structured_outputs"] if structured_outputs is not None else [])]
        if others:
            _refuse(name, guided[name], f"and {others[0]} exclude each other")
    constraint = {GUIDED[name]: value for name, value in guided.items()} or structured_outputs
    return _of_format(response_format, constraint) or ({"structured_outputs": constraint} if guided else {})


def _of_format(response_format: Any, structured_outputs: Any) -> dict[str, Any]:
    if response_format is None:
        return {}
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if not isinstance(kind, str) or kind not in _TYPES:
        hint = f": there is {_ELSEWHERE[kind]}" if isinstance(kind, str) and kind in _ELSEWHERE else ""
        _refuse("response_format.type", kind, f"must be one of {', '.join(_TYPES)}{hint}")
    fields = _FIELDS.get(kind, ())
    for name in response_format:
        if name != "type" and name not in fields:
            _refuse(f"response_format.{name[:50]}", response_format[name], f"is no field of type {kind}")
    if kind == "text":
        return {}
    if structured_outputs is not None:
        _refuse("response_format.type", kind, "and structured_outputs exclude each other")
    if kind == "structural_tag":
        return {"structured_outputs": {"structural_tag": response_format}}
    if kind == "json_object":
        schema = response_format.get("schema")  # a field of llama.cpp, Together and Fireworks
        if schema is not None and not isinstance(schema, dict):
            _refuse("response_format.schema", schema, "must be an object")
        return {"structured_outputs": {"json": schema} if schema else {"json_object": True}}
    return {"structured_outputs": _of_schema(response_format.get("json_schema"))}


def _of_schema(given: Any) -> dict[str, Any]:
    place = "response_format.json_schema"
    if not isinstance(given, dict):
        _refuse(place, given, "must be an object")
    for name in given:
        if name not in _SCHEMA_FIELDS:
            _refuse(f"{place}.{name[:50]}", given[name], f"is no field of it: they are {', '.join(_SCHEMA_FIELDS)}")
    if not isinstance(given.get("name"), str) or not given["name"]:
        _refuse(f"{place}.name", given.get("name"), "must be a text that is not empty")
    if given.get("strict") not in (None, True, False):
        _refuse(f"{place}.strict", given["strict"], "must be true or false")
    schema = given.get("schema")
    if schema is None:
        return {"json_object": True}
    if not isinstance(schema, dict):
        _refuse(f"{place}.schema", schema, "must be an object")
    return {"json": schema}


def _refuse(place: str, value: Any, reason: str) -> NoReturn:
    raise ServeError(Kind.INVALID, f"{place}={short(value)} {reason}", place.partition(".")[0])
