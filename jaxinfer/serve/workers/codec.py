"""Messages between the front end and its worker processes: msgpack. No jax.

JSON parsing holds the GIL, and one string of many escapes takes as long as a million numbers. In msgpack strings, and
token ids in arrays, are bytes to copy.
"""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
from msgspec.msgpack import Ext

_TEXT, _INTEGER = ord("s"), ord("n")  # codes of extension types; that of an array is its type code
_ANY = "surrogatepass"  # the renderer or tokenizer of a text reports invalid Unicode
_MOST_BITS = 63  # of an integer in msgpack


def encode(value: Any) -> bytes:
    """Encode JSON-like data, which may also have arrays of integers.

    Raises:
        TypeError, ValueError, RecursionError: the value is not JSON-like.
    """
    try:
        return msgspec.msgpack.encode(value, enc_hook=_extended)
    except (UnicodeEncodeError, OverflowError):
        return msgspec.msgpack.encode(_escaped(value), enc_hook=_extended)


def decode(frame: bytes, kind: Any = Any) -> Any:
    """Decode a message of `encode`, whose value has the type ``kind``."""
    return msgspec.msgpack.decode(frame, type=kind, ext_hook=_found)


def _extended(value: Any) -> Ext:
    if isinstance(value, array):
        return Ext(ord(value.typecode), value.tobytes())
    raise TypeError(f"{type(value).__name__} is not JSON-like")


def _escaped(value: Any) -> Any:
    """Replace what msgpack does not have: lone surrogates and integers of more than 64 bits."""
    if isinstance(value, dict):
        return {key: _escaped(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_escaped(item) for item in value]
    if isinstance(value, str) and not value.isascii():
        return Ext(_TEXT, value.encode(errors=_ANY))
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        return Ext(_INTEGER, value.to_bytes(value.bit_length() // 8 + 1, signed=True))
    return value


def _found(code: int, data: memoryview) -> Any:
    if code == _TEXT:
        return str(data, "utf-8", _ANY)
    return int.from_bytes(data, signed=True) if code == _INTEGER else array(chr(code), bytes(data))
