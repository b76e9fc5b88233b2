"""Errors of invalid response templates."""

from __future__ import annotations

import reprlib
from typing import Any, NoReturn


class ResponseTemplateError(ValueError):
    """A response template that cannot be used. The message names the key and the value."""


def refuse(key: str, value: Any, reason: str) -> NoReturn:
    """Raise ResponseTemplateError for a value of ``key``."""
    raise ResponseTemplateError(f"{key} = {reprlib.repr(value)} {reason}")


def require(fits: bool, key: str, value: Any, reason: str) -> None:
    """Raise ResponseTemplateError unless ``fits``."""
    if not fits:
        refuse(key, value, reason)
