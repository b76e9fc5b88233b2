"""OpenAI's ``response_format``, as ``structured_outputs`` has it."""

from __future__ import annotations

from typing import Any, NoReturn

from jaxinfer.serve.errors import Kind, ServeError, short

_TYPES = ("text", "json_object", "json_schema")
_SCHEMA_FIELDS = ("name", "description", "schema", "strict")


def constraint_of(response_format: Any, structured_outputs: Any) -> dict[str, Any]:
    """The field ``structured_outputs`` of the sampling parameters; nothing where neither asks for any.

    A schema is held exactly whether ``strict`` is true or not: what cannot be is refused.

    Raises:
        ServeError: INVALID: ``response_format`` is no such thing, or both constrain the output.
    """
    if response_format is None:
        return {}
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if not isinstance(kind, str) or kind not in _TYPES:
        _refuse("response_format.type", kind, f"must be one of {', '.join(_TYPES)}")
    for name in response_format:
        if name != "type" and (name != "json_schema" or kind != "json_schema"):
            _refuse(f"response_format.{name[:50]}", response_format[name], f"is no field of type {kind}")
    if kind == "text":
        return {}
    if structured_outputs is not None:
        _refuse("response_format.type", kind, "and structured_outputs exclude each other")
    if kind == "json_object":
        return {"structured_outputs": {"json_object": True}}
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
