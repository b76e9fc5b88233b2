"""Turn whatever went wrong into what the client is told. No jax."""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Iterator, Mapping

from jaxinfer.sampling_params import RequestError
from jaxinfer.serve.async_engine import EngineDeadError
from jaxinfer.serve.errors import Kind, ServeError, refused

RETRY_SECONDS = 1.0
"""Seconds after which a client may try an engine again that does not run: most restarts begin sooner."""

_MAX_MESSAGE = 500

_log = logging.getLogger("jaxinfer.serve")


@contextlib.contextmanager
def answered() -> Iterator[None]:
    """Raise every exception from inside as `ServeError`. Cancellation passes."""
    try:
        yield
    except ServeError:
        raise
    except Exception as error:  # the border of the front end: every fault gets an answer
        raise answer_to(error) from error


def answer_to(error: Exception) -> ServeError:
    """The answer to a refused request, a dead engine, or a fault: that one is opaque, its id leads to the log."""
    match error:
        case ServeError():
            return error
        case RequestError():
            answer = refused(error)
            answer.message = _shortened(answer.message)
            return answer
        case EngineDeadError():
            return unavailable("the engine does not run: try again later")
        case _:
            return _internal(error)


@contextlib.contextmanager
def in_its_words(names: Mapping[str, str]) -> Iterator[None]:
    """A refusal inside names the field as the client does: ``names`` are those of the front end's that differ."""
    try:
        yield
    except ServeError as error:
        if error.field is not None and error.field in names:
            error.message = names[error.field] + error.message.removeprefix(error.field)
            error.field = names[error.field]
        raise


def prompt_as(name: str) -> dict[str, str]:
    """Name a prompt, as a text and as tokens, by the client's ``name`` for it; see `in_its_words`."""
    return {"prompt": name, "prompt_token_ids": name}


def unavailable(message: str) -> ServeError:
    return ServeError(Kind.UNAVAILABLE, message, retry_after=RETRY_SECONDS)


def _internal(error: Exception) -> ServeError:
    fault = uuid.uuid4().hex
    _log.error("internal error %s", fault, exc_info=error)
    return ServeError(Kind.INTERNAL, f"internal error {fault}: the server's log explains it", fault=fault)


def _shortened(message: str) -> str:
    """A refused value may be as long as a request."""
    return message if len(message) <= _MAX_MESSAGE else f"{message[:_MAX_MESSAGE]}…"
