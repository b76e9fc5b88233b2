"""Map exceptions to API errors. No jax."""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Iterator, Mapping

from jaxinfer.sampling_params import RequestError
from jaxinfer.serve.async_engine import EngineDeadError
from jaxinfer.serve.errors import Kind, ServeError, refused

RETRY_SECONDS = 1.0
"""Seconds after which a client may retry while the engine does not run: most restarts begin sooner."""

_MAX_MESSAGE = 500

_log = logging.getLogger("jaxinfer.serve")


@contextlib.contextmanager
def answered() -> Iterator[None]:
    """Convert every exception raised inside to `ServeError`. Cancellation passes through."""
    try:
        yield
    except ServeError:
        raise
    except Exception as error:  # front end boundary: every fault gets an error response
        raise answer_to(error) from error


def answer_to(error: Exception) -> ServeError:
    """Return the response to a rejected request, a dead engine, or a fault, which gets the id of its log entry."""
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
    """Rename fields to the client's names in errors raised inside. ``names``: differing names, by front end name."""
    try:
        yield
    except ServeError as error:
        if error.field is not None and error.field in names:
            error.message = names[error.field] + error.message.removeprefix(error.field)
            error.field = names[error.field]
        raise


def prompt_as(name: str) -> dict[str, str]:
    """Map both prompt fields (text and token ids) to the client's ``name``; see `in_its_words`."""
    return {"prompt": name, "prompt_token_ids": name}


def unavailable(message: str) -> ServeError:
    return ServeError(Kind.UNAVAILABLE, message, retry_after=RETRY_SECONDS)


def _internal(error: Exception) -> ServeError:
    fault = uuid.uuid4().hex
    _log.error("internal error %s", fault, exc_info=error)
    return ServeError(Kind.INTERNAL, f"internal error {fault}: the server's log explains it", fault=fault)


def _shortened(message: str) -> str:
    """Truncate a message: a rejected value may be as long as a request."""
    return message if len(message) <= _MAX_MESSAGE else f"{message[:_MAX_MESSAGE]}…"
