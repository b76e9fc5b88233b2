"""Responses of the item-based APIs: one JSON object, or a stream of events in the API's own format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Send

from jaxinfer.serve.api.errors import ServeError
from jaxinfer.serve.frontend.chat.outputs import EventFilter, hidden_tokens, new_parsers
from jaxinfer.serve.frontend.generation import Generation
from jaxinfer.serve.http.answers import ServerSentEvents, put, while_connected
from jaxinfer.serve.http.app_state import AppState
from jaxinfer.serve.http.completions import Chat, id_headers
from jaxinfer.serve.http.events.parts import PartReader
from jaxinfer.text.output import OutputDelta


@runtime_checkable
class Writer(Protocol):
    """Serializer of one answer: either its events or, after all deltas were taken, the complete object.

    Attributes:
        waiting: keep-alive event, see `ServerSentEvents`.
    """

    waiting: bytes

    def opening(self) -> str:
        """Return the events before the first delta."""
        ...

    def events(self, delta: OutputDelta) -> str:
        """Return the events for a delta; for the last delta including the final events."""
        ...

    def failed(self, error: ServeError) -> str:
        """Return the event that ends an incomplete stream."""
        ...

    def take(self, delta: OutputDelta) -> None: ...

    def whole(self) -> dict[str, Any]: ...


class WrittenEvents(ServerSentEvents):
    """Stream of a writer's events, one write per delta. ``settings``: arguments of `ServerSentEvents`."""

    def __init__(self, generation: Generation, writer: Writer, **settings: Any) -> None:
        super().__init__([generation], **settings)
        self._generation, self._writer, self.waiting = generation, writer, writer.waiting

    async def _events(self, send: Send) -> None:
        await put(send, self._writer.opening().encode())
        async for delta in self._generation:
            if events := self._writer.events(delta):
                await put(send, events.encode())

    def _broken(self, error: ServeError) -> bytes:
        return self._writer.failed(error).encode()


def reader_of(chat: Chat) -> PartReader:
    """Return a reader for the single output of a chat."""
    tokenizer = chat.frontend.tokenizer
    (parser,) = new_parsers(chat.generation, chat.terms, chat.parsers, tokenizer)
    return PartReader(parser, EventFilter.of(chat.terms), chat.frontend, hidden_tokens(chat.parsers, tokenizer))


async def written(request: Request, chat: Chat, writer: Writer) -> Response:
    """Return the response to a chat body, complete or as a stream.

    Raises:
        ServeError: the generation failed before the response started.
    """
    door: AppState = request.app.state.door
    headers = id_headers(chat.body)
    if chat.body.stream:
        return WrittenEvents(chat.generation, writer, headers=headers, door=door)
    try:
        found = await while_connected(request.receive, _collected(chat.generation, writer))
    finally:
        await chat.generation.aclose()
    return Response(json.dumps(found), headers=headers, media_type="application/json")


async def _collected(generation: Generation, writer: Writer) -> dict[str, Any]:
    async for delta in generation:
        writer.take(delta)
    return writer.whole()


def event(name: str, data: Mapping[str, Any]) -> str:
    """Return a server-sent event; its data repeats the name as ``type``."""
    return f"event: {name}\ndata: {json.dumps({'type': name, **data}, separators=(',', ':'))}\n\n"
