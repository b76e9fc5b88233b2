"""Messages from bytes, but for those that become much more than they are.

An empty message within another has two bytes on the wire and some sixty as an object, and making it takes as long as
reading a hundred characters. So the fields of a large message are counted before it is parsed. That is done in Python,
by a thread that lets others have their turns, and ends at the first field that is one too many.
"""

from __future__ import annotations

import asyncio

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from jaxinfer.serve.errors import Kind, ServeError

MAX_NUMBERS = 4 << 20
"""Numbers in lists of numbers, of one message."""

_SHORT_BYTES = 64 << 10
_FIELDS = 4
"""Fields of one value: as an entry of a Struct it has a name, a value, and that a kind."""
_MAX_DEPTH = 100  # protobuf's own bound
_SLICE = 1 << 18
_ENDS = bytes(range(128, 256))  # bytes of a number that are not its last


async def decode[M: Message](kind: type[M], raw: bytes, values: int) -> M:
    """The message in ``raw``.

    Args:
        values: that it may hold, all its messages together; see `ServeLimits.values`.

    Raises:
        ServeError: INVALID: it is no such message (a string that is no UTF-8 is a reason too), or holds too much.
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
    """Count down the fields and numbers that a message may hold."""

    def __init__(self, raw: bytes, values: int) -> None:
        self._raw, self._values = raw, values
        self._fields, self._numbers = _FIELDS * values, MAX_NUMBERS
        self._path: list[str] = []

    def within(self, kind: Descriptor, at: int, end: int) -> None:
        """Walks over the fields from ``at`` to ``end``, and those within them.

        Raises:
            IndexError: it is no message.
            ServeError: INVALID: there are too many.
        """
        fields, raw = kind.fields_by_number, self._raw
        while at < end:
            tag, at = raw[at], at + 1
            if tag > 127:  # of a field beyond the fifteenth
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
                case _:  # groups: no message of ours has any
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
        while at < end:  # numbers, packed: slice by slice
            chunk = self._raw[at : min(at + _SLICE, end)]
            self._numbers -= len(chunk.translate(None, _ENDS))
            at += len(chunk)
        if self._numbers < 0:
            raise self._refusal(f"more than {MAX_NUMBERS} numbers")

    def _refusal(self, what: str, last: FieldDescriptor | None = None) -> ServeError:
        """Two names say where it is; the fields of sampling have the name that they have everywhere."""
        names = [*self._path, *([] if last is None else [last.name])]
        field = ".".join(names[:2]).removeprefix("sampling.")
        return ServeError(Kind.INVALID, f"{field or 'the request'} holds {what}", field or None)

    def _varint(self, at: int) -> tuple[int, int]:
        """The number, and where it ends."""
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
