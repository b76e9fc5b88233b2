"""Bounded reads of a checkpoint folder's small files, shared by the tokenizer and the chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MAX_JSON_BYTES = 32 << 20
"""Maximum size of a configuration file; the largest in the wild are a few MiB."""


def read_bytes(path: Path, limit: int, error: type[ValueError]) -> bytes:
    """Return the content of ``path``.

    Raises:
        error: the file cannot be read or has more than ``limit`` bytes.
    """
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except (OSError, ValueError) as cause:  # ValueError: a NUL in the path
        raise error(f"cannot read {path}: {getattr(cause, 'strerror', None) or cause}") from cause
    if len(data) > limit:
        raise error(f"{path} is larger than the {limit} bytes that are read")
    return data


def read_text(path: Path, limit: int, error: type[ValueError]) -> str:
    """Return the UTF-8 text of ``path``. Raises ``error`` as :func:`read_bytes`, and for text that is not UTF-8."""
    try:
        return read_bytes(path, limit, error).decode("utf-8")
    except UnicodeDecodeError as cause:
        raise error(f"{path} is not UTF-8 text: {cause.reason} at byte {cause.start}") from cause


def read_object(path: Path, error: type[ValueError]) -> dict[str, Any]:
    """Return the JSON object in ``path``; empty if there is no such file.

    Raises:
        error: the file is unreadable, too large, not JSON, or not an object.
    """
    if not path.exists():
        return {}
    text = read_text(path, MAX_JSON_BYTES, error)
    try:
        value = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as cause:
        raise error(f"{path} is not valid JSON: {cause}") from cause
    if not isinstance(value, dict):
        raise error(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value
