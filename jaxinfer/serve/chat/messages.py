"""Messages of answers on their way back to the model, as templates are written for them. No jax."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from jaxinfer.sampling_params import RequestError
from jaxinfer.serve.calls import ServeLimits
from jaxinfer.serve.errors import Kind, ServeError
from jaxinfer.serve.http.bodies import parse, values_in
from jaxinfer.text.contents import message_of

MOST_VALUES = ServeLimits.values
"""Of a call's arguments: as many as a body may hold, in which they are a text."""


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


def for_template(path: str, message: Mapping[str, Any], arguments: str = "function.arguments") -> dict[str, Any]:
    """A message in OpenAI's shape with its thought under the name that templates know, and its calls' arguments as
    objects.

    Args:
        path: of the message in its request, for refusals.
        arguments: what those of a call are called there.

    Raises:
        ServeError: INVALID: arguments are a text that is no JSON, or holds too many values.
    """
    made = dict(message)
    if made.get("reasoning") is not None:  # templates know the older name
        made.setdefault("reasoning_content", made["reasoning"])
    if isinstance(calls := made.get("tool_calls"), list):
        made["tool_calls"] = [_told(f"{path}.tool_calls[{i}].{arguments}", call) for i, call in enumerate(calls)]
    return made


def tool_call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    """A call in OpenAI's shape."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _told(field: str, call: Any) -> Any:
    """OpenAI sends a call's arguments as JSON in a string; templates are written for the object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    return {**call, "function": {**function, "arguments": _parsed(field, function["arguments"].encode())}}


def _parsed(field: str, text: bytes) -> Any:
    if values_in(text) > MOST_VALUES:
        raise ServeError(Kind.INVALID, f"{field} holds more than {MOST_VALUES} values", field)
    return parse(text, f"{field}: the text", field)
