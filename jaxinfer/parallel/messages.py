"""Encoding of dataclasses as frames, for all messages between the processes of a group. No jax.

The fields of a message are integers, tuples of them, arrays, None, mappings of arrays, and named tuples of arrays. The
dtypes and bounds are those of `jaxinfer.parallel.frames`; a received message is built from the types that the receiver
declares, so that no other values are accepted.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from jaxinfer.parallel.frames import ChannelError


def encode(message: Any) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Return the fields of a dataclass as plain values, with an index in place of each array, and the arrays."""
    arrays = list[np.ndarray]()
    names = [field.name for field in dataclasses.fields(message)]
    return {name: _plain(getattr(message, name), arrays) for name in names}, arrays


def _plain(value: Any, arrays: list[np.ndarray]) -> Any:
    if isinstance(value, np.ndarray):
        arrays.append(value)
        return {"array": len(arrays) - 1}
    if isinstance(value, Mapping):
        return {"map": {name: _plain(each, arrays) for name, each in value.items()}}
    if isinstance(value, (tuple, list, range)):
        return [_plain(each, arrays) for each in value]
    return value  # an integer or None; JSON rejects other types


def decode[Message](kind: type[Message], fields: Any, arrays: Sequence[np.ndarray]) -> Message:
    """Rebuild the message that `encode` was given.

    Raises:
        ChannelError: these are not the fields of a ``kind``.
    """
    try:
        types = _field_types(cast(Hashable, kind))
        if fields.keys() != types.keys():
            raise ValueError(f"its fields are {', '.join(fields)}")
        return kind(**{name: _built(types[name], value, arrays) for name, value in fields.items()})
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ChannelError(f"it sent what is no {kind.__name__}: {error}") from error


@functools.cache
def _field_types(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _built(kind: Any, value: Any, arrays: Sequence[np.ndarray]) -> Any:
    found = _value(value, arrays)
    return kind(*found) if hasattr(kind, "_fields") else found


def _value(value: Any, arrays: Sequence[np.ndarray]) -> Any:
    match value:
        case {"array": int(place)}:
            return arrays[place]
        case {"map": dict(items)}:
            return {name: _value(each, arrays) for name, each in items.items()}
        case list():
            return tuple(_value(each, arrays) for each in value)
        case int() | None:
            return value
    raise ValueError(f"{value!r} is no value of a message")
