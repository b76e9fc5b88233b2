"""Conversion of JSON values written by other tools, where a number may have another type than its field. No jax.

Writers differ: ``20.0`` or ``"20"`` for 20, ``1`` for true. Each function returns the intended value, or None if there
is none; the caller knows the file and the field and raises the error that names them.
"""

from __future__ import annotations

import math

_LONGEST = 40
"""Maximum characters of a number: no float or 64-bit integer needs more, and parse time grows quadratically."""


def whole(value: object) -> int | None:
    """Return an integer for 20, 20.0, "20" and "20.0"; None for all other values, including true and false."""
    number = _parsed(value)
    if isinstance(number, float):
        return int(number) if number.is_integer() else None
    return number


def real(value: object) -> float | None:
    """Return a finite float for 0.5, 1 or "1e-6"; None for other values, including NaN and integers out of range."""
    try:
        number = _parsed(value)
        return float(number) if number is not None and math.isfinite(number) else None
    except OverflowError:
        return None


def flag(value: object) -> bool | None:
    """Return a boolean for true, false, 1 and 0; None for strings, because Python libraries take "false" as true."""
    if isinstance(value, bool):
        return value
    number = None if isinstance(value, str) else whole(value)
    return bool(number) if number in (0, 1) else None


def _parsed(value: object) -> int | float | None:
    if isinstance(value, str):
        return _number(value)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _number(text: str) -> int | float | None:
    if len(text) > _LONGEST or not text.isascii() or "_" in text:  # only Python accepts non-ASCII digits and "1_000"
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return None
