"""Decoding of protobuf messages, rejecting those that would expand excessively.

An empty submessage has two bytes on the wire but about sixty as an object, and creating it takes as long as reading a
hundred characters. So the fields of a large message are counted before it is parsed: in Python, in a thread that does
not block the event loop, and only up to the first field above the limit.
"""

from __future__ import annotations

import asyncio

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from jaxinfer.serve.api.errors import Kind, ServeError

MAX_NUMBERS = 4 << 20
"""Maximum count of numbers in repeated numeric fields of one message."""

_SHORT_BYTES = 64 << 10
_FIELDS = 4
"""Fields per value: an entry of a Struct has a name, a value and the kind of the value."""
_MAX_DEPTH = 100  # protobuf's own limit
_SLICE = 1 << 18
_ENDS = bytes(range(128, 256))  # varint bytes except the last one


async def decode[M: Message](kind: type[M], raw: bytes, values: int) -> M:
    """Parse the message in ``raw``.

    Args:
        values: maximum number of values in all its submessages; see `ServeLimits.values`.

    Raises:
        ServeError: INVALID: it is not a valid message (including strings that are not UTF-8), or exceeds limits.
    """
    if len(raw) <= _SHORT_BYTES:
        return _parsed(kind, raw)
    return await asyncio.to_thread(_counted, kind, raw, values)


def _counted[M: Message](kind: type[M], raw: bytes, values: int) -> M:
    try:
        _Count(raw, values).within(kind.DESCRIPTOR, 0, len(raw))
    except IndexError:
        raise _no(kind) from None
    return _parsed(kind, raw)


def _parsed[M: Message](kind: type[M], raw: bytes) -> M:
    try:
        return kind.FromString(raw)
    except DecodeError:
        raise _no(kind) from None


def _no(kind: type[Message]) -> ServeError:
    return ServeError(Kind.INVALID, f"the request is no valid {kind.DESCRIPTOR.full_name}")


class _Count:
    """Countdown of the fields and numbers that a message may contain."""

    def __init__(self, raw: bytes, values: int) -> None:
        self._raw, self._values = raw, values
        self._fields, self._numbers = _FIELDS * values, MAX_NUMBERS
        self._path: list[str] = []

    def within(self, kind: Descriptor, at: int, end: int) -> None:
        """Count the fields from ``at`` to ``end``, recursively.

        Raises:
            IndexError: the bytes are not a message.
            ServeError: INVALID: there are too many fields or numbers.
        """
        fields, raw = kind.fields_by_number, self._raw
        while at < end:
            tag, at = raw[at], at + 1
            if tag > 127:  # field number above 15
                tag, at = self._varint(at - 1)
            self._fields -= 1
            if self._fields < 0:
                raise self._refusal(f"more than {self._values} values (limits.values)", fields.get(tag >> 3))
            match tag & 7:
                case 0:
                    while raw[at] > 127:
                        at += 1
                    at += 1
                case 1:
                    at += 8
                case 5:
                    at += 4
                case 2:
                    size, at = self._varint(at)
                    if at + size > end:
                        raise IndexError
                    self._inside(fields.get(tag >> 3), at, at + size)
                    at += size
                case _:  # groups, which no message here has
                    raise IndexError
        if at != end:
            raise IndexError

    def _inside(self, field: FieldDescriptor | None, at: int, end: int) -> None:
        if field is None or field.type in (field.TYPE_STRING, field.TYPE_BYTES):
            return
        self._path.append(field.name)
        if len(self._path) > _MAX_DEPTH:
            raise IndexError
        if field.message_type is not None:
            self.within(field.message_type, at, end)
        else:
            self._count(at, end)
        self._path.pop()

    def _count(self, at: int, end: int) -> None:
        while at < end:  # packed numbers, in slices
            chunk = self._raw[at : min(at + _SLICE, end)]
            self._numbers -= len(chunk.translate(None, _ENDS))
            at += len(chunk)
        if self._numbers < 0:
            raise self._refusal(f"more than {MAX_NUMBERS} numbers")

    def _refusal(self, what: str, last: FieldDescriptor | None = None) -> ServeError:
        """Return the error; its field path has two names, and sampling fields have the names of other APIs."""
        names = [*self._path, *([] if last is None else [last.name])]
        field = ".".join(names[:2]).removeprefix("sampling.")
        return ServeError(Kind.INVALID, f"{field or 'the request'} holds {what}", field or None)

    def _varint(self, at: int) -> tuple[int, int]:
        """Return the varint at ``at`` and the index after it."""
        byte = self._raw[at]
        if byte < 128:
            return byte, at + 1
        value, shift = byte & 127, 7
        while byte > 127 and shift < 70:
            at += 1
            byte = self._raw[at]
            value |= (byte & 127) << shift
            shift += 7
        return value, at + 1
