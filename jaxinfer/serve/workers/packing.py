"""Serialization of JSON-like data that is cheap to parse, for messages between helper processes and front end. No jax.

JSON parsing holds the GIL, and one string of many escapes takes as long as a million numbers. Therefore long strings
and long lists of token ids (the parts) are appended to the JSON as raw bytes.

A frame is the length of the JSON (4 bytes, big-endian), the JSON, and the parts. The JSON is an object: ``value`` is a
list that holds the value, with nulls in place of the parts; ``parts`` has for each part its path in that list, its kind
and its size in bytes.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Collection, Sequence
from typing import Any

_TEXT_CHARACTERS = 64
_IDS = 16
_NAME_CHARACTERS = 1024
_ANY = "surrogatepass"  # the renderer or tokenizer of a text reports invalid Unicode
_KINDS = ("i", "q")  # type codes of `array`: 4 and 8 bytes


class PackError(ValueError):
    """Error for a value that may not be packed; the message completes "it holds ...".

    Attributes:
        field: top-level field that holds the value.
    """

    def __init__(self, message: str, path: Sequence[int | str]) -> None:
        super().__init__(message)
        self.field = path[1] if len(path) > 1 and isinstance(path[1], str) else None


def pack(value: Any, ids: Collection[str] = (), most: int | None = None) -> bytes:
    """Pack a value into a frame.

    Args:
        ids: fields of ``value`` that may hold token ids: lists of integers in them, and in lists in them, become
            arrays.
        most: maximum number of values besides such integers (None: no limit).

    Raises:
        PackError: there are more values, or a name is too long.
        TypeError, ValueError: the value is not JSON-like.
    """
    packer = _Packer(ids, most)
    skeleton = packer.copied([value])
    head = json.dumps({"value": skeleton, "parts": packer.places}, ensure_ascii=False).encode(errors=_ANY)
    return b"".join([len(head).to_bytes(4), head, *packer.parts])


def unpack(frame: bytes | memoryview) -> Any:
    """Unpack a frame; lists of token ids become arrays."""
    view = memoryview(frame)
    size = 4 + int.from_bytes(view[:4])
    head = json.loads(str(view[4:size], "utf-8", _ANY))
    found = head["value"]
    for path, kind, length in head["parts"]:
        where = found
        for step in path[:-1]:
            where = where[step]
        where[path[-1]] = _part(kind, view[size : size + length])
        size += length
    return found[0]


class _Packer:
    def __init__(self, ids: Collection[str], most: int | None) -> None:
        self.places: list[tuple[list[int | str], str, int]] = []
        self.parts: list[bytes] = []
        self._ids, self._most, self._left = ids, most, most
        self._path: list[int | str] = []

    def copied(self, value: Any) -> Any:
        """Return ``value`` with its parts replaced by None."""
        if self._left is not None:
            self._left -= 1
            if self._left < -1:  # the outermost list is not counted
                raise PackError(f"more than {self._most} values (limits.values)", self._path)
        if isinstance(value, str):
            return value if len(value) <= _TEXT_CHARACTERS else self._part("s", value.encode(errors=_ANY))
        if isinstance(value, dict):
            if long := next((key for key in value if len(key) > _NAME_CHARACTERS), None):
                raise PackError(f"a name of {len(long)} characters", self._path)
            return {key: self._at(key, item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            numbers = self._numbers(value)
            if numbers is not None:
                return self._part(numbers.typecode, numbers.tobytes())
            return [self._at(rank, item) for rank, item in enumerate(value)]
        return value

    def _at(self, step: int | str, value: Any) -> Any:
        self._path.append(step)
        made = self.copied(value)
        self._path.pop()
        return made

    def _part(self, kind: str, data: bytes) -> None:
        self.places.append(([*self._path], kind, len(data)))
        self.parts.append(data)

    def _numbers(self, value: list[Any] | tuple[Any, ...]) -> array[int] | None:
        in_field = 2 <= len(self._path) <= 3 and self._path[1] in self._ids
        if len(value) < _IDS or not in_field or set(map(type, value)) != {int}:
            return None
        for kind in _KINDS:
            try:
                return array(kind, value)
            except OverflowError:
                continue
        return None


def _part(kind: str, data: memoryview) -> str | array[int]:
    if kind == "s":
        return str(data, "utf-8", _ANY)
    numbers: array[int] = array(kind)
    numbers.frombytes(data)
    return numbers
