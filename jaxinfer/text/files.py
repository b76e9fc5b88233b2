"""Bounded reading of a checkpoint folder's small files, shared by the tokenizer and the chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MAX_JSON_BYTES = 32 << 20
"""Largest configuration file that is read; the largest in the wild are a few MiB."""

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
"""Keys under which tokenizer_config.json and special_tokens_map.json name special tokens."""


def read_bytes(path: Path, limit: int, error: type[ValueError]) -> bytes:
    """The content of ``path``.

    Raises:
        error: the file cannot be read or has more than ``limit`` bytes.
    """
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as cause:
        raise error(f"cannot read {path}: {cause.strerror or cause}") from cause
    if len(data) > limit:
        raise error(f"{path} is larger than the {limit} bytes that are read")
    return data


def read_text(path: Path, limit: int, error: type[ValueError]) -> str:
    """The UTF-8 text of ``path``. Raises ``error`` as :func:`read_bytes` does, and for text that is not UTF-8."""
    try:
        return read_bytes(path, limit, error).decode("utf-8")
    except UnicodeDecodeError as cause:
        raise error(f"{path} is not UTF-8 text: {cause.reason} at byte {cause.start}") from cause


def read_object(path: Path, error: type[ValueError]) -> dict[str, Any]:
    """The JSON object in ``path``; empty where there is no such file.

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


def special_token_texts(folder: Path, error: type[ValueError]) -> dict[str, str]:
    """Special tokens by name (``bos_token`` ...), tokenizer_config.json before special_tokens_map.json.

    Raises:
        error: one of the files is bad.
    """
    texts: dict[str, str] = {}
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        config = read_object(folder / file, error)
        for name in SPECIAL_NAMES:
            text = _content(config.get(name))
            if text is not None:
                texts.setdefault(name, text)
    return texts


def added_token_entries(folder: Path, error: type[ValueError]) -> dict[int, Mapping[str, Any]]:
    """``added_tokens_decoder`` of tokenizer_config.json: by token id, an object with the text (``content``) and flags.

    Raises:
        error: the file is bad, or an entry has no id or no text.
    """
    path = folder / "tokenizer_config.json"
    entries = read_object(path, error).get("added_tokens_decoder") or {}
    for token_id, token in entries.items() if isinstance(entries, Mapping) else [("", None)]:
        if not token_id.isdecimal() or not isinstance(token, Mapping) or not isinstance(token.get("content"), str):
            raise error(f"added_tokens_decoder in {path} has a bad entry {token_id!r}")
    return {int(token_id): token for token_id, token in entries.items()}


def _content(value: object) -> str | None:
    """A token is written as its text or as an object with a ``content``."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None
