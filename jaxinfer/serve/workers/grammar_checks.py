"""Task of workers: checks of request grammars. No jax."""

from __future__ import annotations

from collections.abc import Callable

from jaxinfer.sampling_params import RequestError
from jaxinfer.serve.workers.codec import decode
from jaxinfer.structured.grammar import compiled
from jaxinfer.structured.schemas import GrammarError


def checker() -> Callable[[bytes], None]:
    """Return the check of encoded grammars: kind and text."""
    return _check


def _check(question: bytes) -> None:
    kind, text = decode(question)
    try:
        compiled(kind, text)
    except GrammarError as error:
        raise RequestError(error.place or f"structured_outputs.{kind}", f"cannot be held: {error}") from error
