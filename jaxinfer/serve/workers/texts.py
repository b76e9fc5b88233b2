"""Tasks of workers: parsing of long JSON bodies, and tokenization of long texts. No jax.

Both hold the GIL, and need many times the memory of their input.
"""

from __future__ import annotations

import pathlib
from array import array
from collections.abc import Callable
from typing import Any

from jaxinfer.sampling_params import RequestError
from jaxinfer.serve.api.errors import ServeError
from jaxinfer.serve.api.json_bodies import check_count, parse
from jaxinfer.serve.workers.codec import decode
from jaxinfer.text.load import load_tokenizer
from jaxinfer.text.pieces import TokenizerError

ID_FIELDS = ("prompt", "tokens", "allowed_token_ids", "stop_token_ids")
"""Body fields that may hold many token ids."""

_FEW_IDS = 16
_NAME_CHARACTERS = 1024


def tokenizer(folder: str) -> Callable[[bytes], array[int]]:
    """Return the tokenizer of encoded questions: a field, its text, and whether to add special tokens."""
    found = load_tokenizer(pathlib.Path(folder))
    found.forget()  # all tenants share it: timing must not reveal their texts

    def encoded(question: bytes) -> array[int]:
        field, text, special = decode(question)
        try:
            text.encode()
            return array("i", found.encode(text, special))
        except UnicodeEncodeError as error:
            reason = f": the text has a lone surrogate at character {error.start}: not Unicode"
            raise RequestError(field, reason) from error
        except TokenizerError as error:
            raise RequestError(field, f": {error}") from error

    return encoded


def body_parser(values: int) -> Callable[[bytes], Any]:
    """Return the parser of bodies with at most ``values`` values besides token ids, lists of which become arrays."""

    def parsed(body: bytes) -> Any:
        try:
            check_count(body, values)
            value = parse(body)
        except ServeError as error:
            raise RequestError(None, error.message) from error
        if isinstance(value, dict):
            value |= {field: _arrays(value[field]) for field in ID_FIELDS if isinstance(value.get(field), list)}
        _check(value, values)
        return value

    return parsed


def _arrays(ids: list[Any]) -> Any:
    """Return a list of token ids as an array, or a list of such lists as a list of arrays."""
    return _array(ids) if _is_ids(ids) else [_array(each) if _is_ids(each) else each for each in ids]


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and len(value) >= _FEW_IDS and set(map(type, value)) == {int}


def _array(ids: list[int]) -> Any:
    """Return the smallest array that holds integers, or the list if one has more than 64 bits."""
    for kind in ("i", "q"):
        try:
            return array(kind, ids)
        except OverflowError:
            continue
    return ids


def _check(body: Any, most: int) -> None:
    """Check the number of values of a body and the length of its names, and report the field that exceeds them."""
    fields = body if isinstance(body, dict) else {None: body}
    left = most - isinstance(body, dict)
    _check_names(body, None)
    for field, value in fields.items():
        left -= _count(value, field)
        if left < 0:
            raise _too_much(field, f"holds more than {most} values (limits.values)")


def _count(value: Any, field: str | None) -> int:
    _check_names(value, field)
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(_count(item, field) for item in items)


def _check_names(value: Any, field: str | None) -> None:
    if isinstance(value, dict) and (most := max(map(len, value), default=0)) > _NAME_CHARACTERS:
        raise _too_much(field, f"holds a name of {most} characters")


def _too_much(field: str | None, reason: str) -> RequestError:
    return RequestError(field, reason if field else f"the body {reason}")
