"""Conversion of request messages, such as earlier outputs, to the format that chat templates expect. No jax."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from jaxinfer.sampling_params import RequestError
from jaxinfer.serve.api.errors import Kind, ServeError
from jaxinfer.serve.api.json_bodies import MAX_DEPTH, parse, values_in
from jaxinfer.serve.api.requests import ServeLimits
from jaxinfer.text.contents import message_of

MOST_VALUES = ServeLimits.values
"""JSON values in the arguments of a call: the limit of a body, in which the arguments are a string."""
MOST_DEPTH = MAX_DEPTH - 8
"""JSON depth of arguments: in a body they are an object again, a few levels down."""
INVALID = "INVALID_JSON"
"""Key for arguments that are not an object: it holds the text as the model has written it."""


def message_at(path: str, message: Mapping[str, Any]) -> dict[str, Any]:
    """Normalise a message, see `message_of`.

    Raises:
        ServeError: INVALID, naming path and value.
    """
    with by_place():
        return message_of(path, message)


@contextlib.contextmanager
def by_place() -> Iterator[None]:
    """Convert a `RequestError` raised inside to a `ServeError` about its path in the request."""
    try:
        yield
    except RequestError as error:
        raise ServeError(Kind.INVALID, str(error), error.place) from error


def for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message in OpenAI's format with its reasoning in the field that templates use, and its calls' arguments
    as objects."""
    made = dict(message)
    if made.get("reasoning") is not None:  # templates use the older name
        made.setdefault("reasoning_content", made["reasoning"])
    if isinstance(calls := made.get("tool_calls"), list):
        made["tool_calls"] = list(map(_told, calls))
    return made


def tool_call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    """Return a tool call in OpenAI's format."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def arguments_of(text: str) -> dict[str, Any]:
    """Parse the arguments of a call to an object; it is empty for a call without arguments.

    An output may be cut within them, and a model may write invalid JSON, no object, or more than a body may hold. The
    client may send that back: templates expect objects, so they get one with the text in it.
    """
    if text.strip() in ("", "null"):
        return {}
    data = text.encode(errors="replace")
    with contextlib.suppress(ServeError):
        found = parse(data, depth=MOST_DEPTH) if values_in(data) <= MOST_VALUES else None
        if isinstance(found, dict):
            return found
    return {INVALID: text}


def _told(call: Any) -> Any:
    """Parse the arguments of a call: OpenAI sends a JSON string, templates expect an object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments") or "", str):
        return call
    return {**call, "function": {**function, "arguments": arguments_of(function.get("arguments") or "")}}
