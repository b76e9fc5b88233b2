"""Request fields that are accepted but ignored: a response header names them. No jax."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator

HEADER = "x-jaxinfer-ignored"
_MOST_CHARACTERS = 1000

_names: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("ignored", default=None)


@contextlib.contextmanager
def collecting() -> Iterator[list[str]]:
    """Yield the list of the ignored fields recorded inside, including by threads and tasks started inside."""
    names: list[str] = []
    token = _names.set(names)
    try:
        yield names
    finally:
        _names.reset(token)


def ignore(name: str) -> bool:
    """Record that a field has no effect. ``name`` must not contain client text: it becomes part of a header.

    Returns:
        Whether the client is informed; otherwise the request must be rejected.
    """
    names = _names.get()
    if names is not None:
        names.append(name)
    return names is not None


@contextlib.contextmanager
def renaming(name: Callable[[str], str]) -> Iterator[None]:
    """Rename the fields recorded inside to the names of another API."""
    names = _names.get()
    before = 0 if names is None else len(names)
    yield
    if names is not None:
        names[before:] = map(name, names[before:])


def header_of(names: list[str]) -> str:
    """Return the header value: each name once, truncated to the maximum length of a header."""
    told = ", ".join(dict.fromkeys(names))
    return told if len(told) <= _MOST_CHARACTERS else f"{told[:_MOST_CHARACTERS].rpartition(', ')[0]}, ..."
