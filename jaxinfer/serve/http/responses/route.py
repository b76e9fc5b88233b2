"""Endpoint ``POST /v1/responses``."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from jaxinfer.serve.api.json_bodies import read_json
from jaxinfer.serve.http.app_state import AppState
from jaxinfer.serve.http.completions import begin_chat
from jaxinfer.serve.http.events.stream import written
from jaxinfer.serve.http.fields import checked
from jaxinfer.serve.http.responses.answer import ResponseWriter
from jaxinfer.serve.http.responses.bodies import ResponsesRequest
from jaxinfer.serve.http.responses.inputs import chat_of, rename_input_fields


async def respond(request: Request) -> Response:
    """Serve ``/v1/responses``: convert the input items to a chat, and its output to items."""
    door: AppState = request.app.state.door
    body = checked(ResponsesRequest, await read_json(request, door.limits, door.long.read))
    asked = await chat_of(body, door.limits)
    with rename_input_fields():
        chat = await begin_chat(request, asked)
    return await written(request, chat, ResponseWriter(body, chat))
