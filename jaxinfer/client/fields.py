"""Field setters of protobuf messages with errors that name the field."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from google.protobuf import json_format
from google.protobuf.struct_pb2 import Struct


def set_field(message: Any, name: str, value: Any) -> None:
    """Set a field. Raises `ValueError`: the field cannot have this value."""
    guarded(name, value, setattr, message, name, value)


def extend(name: str, field: Any, values: Iterable[Any]) -> None:
    """Extend a repeated field. Raises `ValueError`: ``values`` is not a list of the type of ``field``."""
    if isinstance(values, str | bytes):
        raise ValueError(f"{name}={values!r} must be a list")
    guarded(name, values, field.extend, values)


def set_struct(name: str, field: Struct, value: Mapping[str, Any]) -> None:
    """Set a Struct field. Raises `ValueError`: the value is not a JSON object."""
    guarded(name, value, json_format.ParseDict, value, field)


def guarded(name: str, value: Any, function: Callable[..., Any], *arguments: Any) -> None:
    """Call ``function``, and name the field of an invalid value, as protobuf does not.

    Raises:
        ValueError: the value is invalid.
    """
    try:
        function(*arguments)
    except (TypeError, ValueError, json_format.ParseError) as error:
        raise ValueError(f"{name}={value!r:.100} cannot be sent: {error}") from error
