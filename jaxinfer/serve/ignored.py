"""Fields of a request that are accepted although they have no effect: a header of the answer names them. No jax."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator

HEADER = "x-jaxinfer-ignored"
_MOST_CHARACTERS = 1000

_names: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("ignored", default=None)


@contextlib.contextmanager
def collecting() -> Iterator[list[str]]:
    """Yield the list to which everything inside adds what it ignores, threads and tasks that it starts included."""
    names: list[str] = []
    token = _names.set(names)
    try:
        yield names
    finally:
        _names.reset(token)


def ignore(name: str) -> bool:
    """Note that a field has no effect. ``name`` is none of the client's own text: it becomes part of a header.

    Returns:
        Whether the client will be told; else it has to be refused.
    """
    names = _names.get()
    if names is not None:
        names.append(name)
    return names is not None


@contextlib.contextmanager
def renaming(name: Callable[[str], str]) -> Iterator[None]:
    """Call what is ignored inside as another door does."""
    names = _names.get()
    before = 0 if names is None else len(names)
    yield
    if names is not None:
        names[before:] = map(name, names[before:])


def header_of(names: list[str]) -> str:
    """The header's value: each name once, and no more than a header may have."""
    told = ", ".join(dict.fromkeys(names))
    return told if len(told) <= _MOST_CHARACTERS else f"{told[:_MOST_CHARACTERS].rpartition(', ')[0]}, ..."
