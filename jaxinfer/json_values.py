"""Values of JSON files that other tools wrote: a number can be of another type there than the field's own. No jax.

Writers differ: ``20.0`` or ``"20"`` for 20, ``1`` for true. Each function gives the value that is meant, and None where
none is; its caller knows file and field, and raises the error that names them.
"""

from __future__ import annotations

import math

_LONGEST = 40
"""Characters of a number: no float or 64-bit integer takes more, and time to read one grows with its square."""


def whole(value: object) -> int | None:
    """An integer: 20, 20.0, "20" and "20.0"; None for all else, true and false among it."""
    number = _parsed(value)
    if isinstance(number, float):
        return int(number) if number.is_integer() else None
    return number


def real(value: object) -> float | None:
    """A finite number: 0.5, 1, "1e-6"; None for all else, NaN and integers beyond a float's range among it."""
    try:
        number = _parsed(value)
        return float(number) if number is not None and math.isfinite(number) else None
    except OverflowError:
        return None


def flag(value: object) -> bool | None:
    """A boolean: true, false, and the numbers 1 and 0. A string is none: Python's libraries take "false" for true."""
    if isinstance(value, bool):
        return value
    number = None if isinstance(value, str) else whole(value)
    return bool(number) if number in (0, 1) else None


def _parsed(value: object) -> int | float | None:
    if isinstance(value, str):
        return _number(value)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _number(text: str) -> int | float | None:
    if len(text) > _LONGEST or not text.isascii() or "_" in text:  # Python alone takes other digits, and "1_000"
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return None
