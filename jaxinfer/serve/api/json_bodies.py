"""Request bodies: read within limits and parsed strictly.

JSON leaves open how to treat duplicate keys, NaN, deep nesting and invalid characters. All of them are rejected here,
because parsers that treat them differently can be exploited.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from jaxinfer.serve.api.errors import Kind, ServeError
from jaxinfer.serve.api.requests import ServeLimits

_LONG = 1 << 16  # characters; in longer texts, the digits of every number are limited to _MOST_DIGITS
_MOST_DIGITS = 400  # thousands of numbers with thousands of digits take a third of a second to parse
MAX_DEPTH = 64
"""Maximum nesting depth of lists and objects. Templates and validators may recurse over the value."""

# A string, closed or not, or one bracket. Possessive quantifiers prevent backtracking: the scan is linear in the text.
_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[\[\]{}]', re.DOTALL)
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")

_SHORT_BYTES = 256 << 10
_FEW = 4096  # values or escapes: a few milliseconds
_TIMES = 8
_MAX_NUMBERS = 4 << 20  # per body: as many as a text may have characters

type Reader = Callable[[bytes, str], Awaitable[Any]]
"""Parser of long bodies; like `parse`, but lists of token ids may be returned as arrays."""


async def read_json(request: Request, limits: ServeLimits, read_long: Reader) -> dict[str, Any]:
    """Read and parse the body of a request, which must be a JSON object.

    Raises:
        ServeError: TOO_LARGE beyond ``limits.message_bytes``, INVALID for anything but a JSON object in UTF-8 or for
            too many values, CANCELLED if the client disconnects.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # also blocks cross-site requests: browsers send a preflight for this type
        _refuse(f"content-type={kind[:100]!r} must be application/json")
    body = await read_body(request, limits.message_bytes)
    value = parse(body) if is_short(body, limits.values) else await read_long(body, request.state.tenant)
    if not isinstance(value, dict):
        _refuse("the body must be a JSON object")
    return value


async def read_body(request: Request, limit: int) -> bytes:
    """Read at most ``limit`` bytes, with or without a content length.

    Raises:
        ServeError: TOO_LARGE, as soon as it is known; CANCELLED if the client disconnects.
    """
    declared = request.headers.get("content-length", "0")
    if not declared.isdecimal() or int(declared[:20]) > limit:
        _too_large(limit)
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > limit:
                _too_large(limit)
    except ClientDisconnect as cause:
        raise gone_away() from cause
    return bytes(body)


def is_short(body: bytes, values: int) -> bool:
    """Return whether a body is small enough to parse inline: few bytes, few values (also counting those in strings)."""
    return len(body) <= _SHORT_BYTES and sum(map(body.count, b"[{,\\")) <= min(values, _FEW)


def check_count(body: bytes, values: int) -> None:
    """Check the number of values before parsing: an empty list has 2 bytes here and 64 as an object.

    Raises:
        ServeError: INVALID: there are many times more values than allowed, or more than four million numbers. Smaller
            excesses are parsed, to report which field has too many values.
    """
    bare, strings = _STRING.subn(b"", body)
    if sum(map(bare.count, b"[{")) > _TIMES * values or strings > 2 * _TIMES * values:  # keys are strings, too
        _refuse(f"the body holds more than {values} values (limits.values)")
    if bare.count(b",") > _MAX_NUMBERS:
        _refuse(f"the body holds more than {_MAX_NUMBERS} numbers")


def values_in(text: bytes) -> int:
    """Return an upper bound of the values in a JSON text without parsing: lists, objects and commas outside strings."""
    few = sum(map(text.count, b"[{,"))
    return few if few <= _FEW else sum(map(_STRING.sub(b"", text).count, b"[{,"))


def gone_away() -> ServeError:
    """Return the error of a disconnected client, which only shows in metrics."""
    return ServeError(Kind.CANCELLED, "the client has gone")


def parse(data: bytes, what: str = "the body", field: str | None = None, depth: int = MAX_DEPTH) -> Any:
    """Parse JSON in UTF-8; duplicate keys, NaN, infinite numbers, lone surrogates and deep nesting are rejected.

    Args:
        what: name of the text in error messages.
        field: request field that holds the text.

    Raises:
        ServeError: INVALID, with the error and its position.
    """
    try:
        return _parse(data, depth)
    except _Broken as cause:
        raise ServeError(Kind.INVALID, f"{what} {cause}", field) from cause


class _Broken(Exception):
    """Invalid JSON text; the message does not name the text."""


def _parse(data: bytes, depth: int) -> Any:
    try:
        text = data.decode()
    except UnicodeDecodeError as cause:
        raise _Broken(f"is not UTF-8 at byte {cause.start}") from cause
    _check_depth(text, depth)
    try:
        value = (_DECODER if len(text) <= _LONG else _LONG_DECODER).decode(text)
    except json.JSONDecodeError as cause:
        raise _Broken(f"is not JSON: {cause.msg} at character {cause.pos}") from cause
    except ValueError as cause:  # Python limits the digits of an integer to 4,300
        raise _Broken("holds a number of too many digits") from cause
    if _SURROGATE.search(text):
        _check_characters(value)
    return value


def _check_depth(text: str, most: int) -> None:
    """Check the depth before parsing, because the parser recurses."""
    if text.count("[") + text.count("{") <= most:
        return
    depth = 0
    for match in _STRING_OR_BRACKET.finditer(text):
        first = match[0][0]
        if first in "[{":
            depth += 1
            if depth > most:
                raise _Broken(f"is nested deeper than {most} levels at character {match.start()}")
        elif first in "]}":
            depth -= 1


def _check_characters(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as cause:
        raise _Broken("holds half of a surrogate pair, which is no character") from cause


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _Broken(f"holds the key {key[:100]!r} twice")
            seen.add(key)
    return found


def _finite(digits: str) -> float:
    if not math.isfinite(number := float(digits)):
        raise _Broken(f"holds the number {digits[:40]}, which is too large")
    return number


def _constant(name: str) -> NoReturn:
    raise _Broken(f"holds {name}, which is not JSON")


def _integer(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError
    return int(digits)


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_float=_finite, parse_constant=_constant)
_LONG_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique, parse_float=_finite, parse_int=_integer, parse_constant=_constant
)


def _refuse(message: str) -> NoReturn:
    raise ServeError(Kind.INVALID, message)


def _too_large(limit: int) -> NoReturn:
    raise ServeError(Kind.TOO_LARGE, f"the body is larger than {limit} bytes")
