"""Bodies of requests: read within bounds, parsed strictly.

JSON leaves open what a server does with duplicate keys, NaN, depth and bad characters; two readers that decide
differently can be played against each other, so all of them are refused here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from jaxinfer.serve.calls import ServeLimits
from jaxinfer.serve.errors import Kind, ServeError

_LONG = 1 << 16  # characters from which on every number is looked at: below, Python's own bound is enough
_MOST_DIGITS = 400  # thousands of numbers of thousands of digits take a third of a second to read
MAX_DEPTH = 64
"""Lists and objects within one another. What templates and validators do with a value may recurse."""

# A string, closed or not, or one bracket. Nothing in it goes back: the scan is linear in the text.
_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[\[\]{}]', re.DOTALL)
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")

_SHORT_BYTES = 256 << 10
_FEW = 4096  # values or escapes: some milliseconds
_TIMES = 8
_MAX_NUMBERS = 4 << 20  # of one body: as many as a text may have characters

type Reader = Callable[[bytes, str], Awaitable[Any]]
"""Reads a long body as `parse` does, but that lists of token ids may be arrays."""


async def read_json(request: Request, limits: ServeLimits, read_long: Reader) -> dict[str, Any]:
    """The object that a request's body holds.

    Raises:
        ServeError: TOO_LARGE beyond ``limits.message_bytes``, INVALID for anything but a JSON object in UTF-8 or for
            too many values, CANCELLED if the client goes.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # also keeps web pages of others out: browsers ask before they send this type
        _refuse(f"content-type={kind[:100]!r} must be application/json")
    body = await read_body(request, limits.message_bytes)
    value = parse(body) if is_short(body, limits.values) else await read_long(body, request.state.tenant)
    if not isinstance(value, dict):
        _refuse("the body must be a JSON object")
    return value


async def read_body(request: Request, limit: int) -> bytes:
    """Read at most ``limit`` bytes, however they are sent.

    Raises:
        ServeError: TOO_LARGE, as soon as it is known; CANCELLED if the client goes.
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
    """Whether a body can be read at once: few bytes, few values (what looks like one in a text counts, too)."""
    return len(body) <= _SHORT_BYTES and sum(map(body.count, b"[{,\\")) <= min(values, _FEW)


def check_count(body: bytes, values: int) -> None:
    """Check the count before anything is made of the values: an empty list has 2 bytes here and 64 as an object.

    Raises:
        ServeError: INVALID: there are many times as many values, or more than four million numbers. What is less is
            parsed, to know which field has too many.
    """
    bare, strings = _STRING.subn(b"", body)
    if sum(map(bare.count, b"[{")) > _TIMES * values or strings > 2 * _TIMES * values:  # a string may be a name, too
        _refuse(f"the body holds more than {values} values (limits.values)")
    if bare.count(b",") > _MAX_NUMBERS:
        _refuse(f"the body holds more than {_MAX_NUMBERS} numbers")


def values_in(text: bytes) -> int:
    """How many values a JSON text may hold, looked at without parsing it: lists, objects and commas outside of
    strings."""
    few = sum(map(text.count, b"[{,"))
    return few if few <= _FEW else sum(map(_STRING.sub(b"", text).count, b"[{,"))


def gone_away() -> ServeError:
    """Make an error for the figures: nobody is there to read it."""
    return ServeError(Kind.CANCELLED, "the client has gone")


def parse(data: bytes, what: str = "the body", field: str | None = None, depth: int = MAX_DEPTH) -> Any:
    """A JSON text in UTF-8, without duplicate keys, NaN, infinite numbers, lone surrogates or much depth.

    Args:
        what: the text's name in a refusal.
        field: of the request, which holds the text.

    Raises:
        ServeError: INVALID, what is wrong and where.
    """
    try:
        return _parse(data, depth)
    except _Broken as cause:
        raise ServeError(Kind.INVALID, f"{what} {cause}", field) from cause


class _Broken(Exception):
    """A text is no such JSON: what is wrong, without the text's name."""


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
    except ValueError as cause:  # Python bounds the digits of a number that it reads, by 4,300
        raise _Broken("holds a number of too many digits") from cause
    if _SURROGATE.search(text):
        _check_characters(value)
    return value


def _check_depth(text: str, most: int) -> None:
    """Check the depth before parsing: the parser recurses."""
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
