"""Messages of answers on their way back to the model, as templates are written for them. No jax."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from jaxinfer.sampling_params import RequestError
from jaxinfer.serve.calls import ServeLimits
from jaxinfer.serve.errors import Kind, ServeError
from jaxinfer.serve.http.bodies import MAX_DEPTH, parse, values_in
from jaxinfer.text.contents import message_of

MOST_VALUES = ServeLimits.values
"""Of a call's arguments: as many as a body may hold, in which they are a text."""
MOST_DEPTH = MAX_DEPTH - 8
"""Of arguments: they are an object in a body again, a few levels down."""
INVALID = "INVALID_JSON"
"""The one field of arguments that are no object: the text as the model has written it."""


def message_at(path: str, message: Mapping[str, Any]) -> dict[str, Any]:
    """See `message_of`.

    Raises:
        ServeError: INVALID, naming place and value.
    """
    with by_place():
        return message_of(path, message)


@contextlib.contextmanager
def by_place() -> Iterator[None]:
    """Raise a `RequestError` from inside as `ServeError` about the place itself, which may be deep in a request."""
    try:
        yield
    except RequestError as error:
        raise ServeError(Kind.INVALID, str(error), error.place) from error


def for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message in OpenAI's shape with its thought under the name that templates know, and its calls' arguments as
    objects."""
    made = dict(message)
    if made.get("reasoning") is not None:  # templates know the older name
        made.setdefault("reasoning_content", made["reasoning"])
    if isinstance(calls := made.get("tool_calls"), list):
        made["tool_calls"] = list(map(_told, calls))
    return made


def tool_call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    """A call in OpenAI's shape."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def arguments_of(text: str) -> dict[str, Any]:
    """The object that a call's arguments are; of a call without any it is empty.

    An answer may be cut within them, and a model may write what is no JSON, or no object, or more than a body may hold.
    The client may send that back: templates, which are written for objects, get one with the text in it.
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
    """OpenAI sends a call's arguments as JSON in a string; templates are written for the object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments") or "", str):
        return call
    return {**call, "function": {**function, "arguments": arguments_of(function.get("arguments") or "")}}
