"""Endpoints ``POST /v1/messages`` and ``POST /v1/messages/count_tokens``."""

from __future__ import annotations

import json

from starlette.requests import Request
from starlette.responses import Response

from jaxinfer.serve.api.errors import rename_fields
from jaxinfer.serve.api.json_bodies import read_json
from jaxinfer.serve.http.anthropic.answer import MessageWriter
from jaxinfer.serve.http.anthropic.bodies import CountTokensRequest, MessagesRequest
from jaxinfer.serve.http.anthropic.inputs import chat_of, rename_message_fields
from jaxinfer.serve.http.app_state import AppState
from jaxinfer.serve.http.completions import begin_chat
from jaxinfer.serve.http.events.stream import written
from jaxinfer.serve.http.fields import checked
from jaxinfer.serve.http.prompts import conversation_of, names_in_messages, terms_of


async def create_message(request: Request) -> Response:
    """Serve ``/v1/messages``: convert the blocks to a chat, and its output to blocks."""
    door: AppState = request.app.state.door
    body = checked(MessagesRequest, await read_json(request, door.limits, door.long.read))
    asked = await chat_of(body, door.limits, door.serving())
    with rename_message_fields():
        chat = await begin_chat(request, asked)
    return await written(request, chat, MessageWriter(chat, body.max_tokens, request.state.request_id))


async def count_tokens(request: Request) -> Response:
    """Serve ``/v1/messages/count_tokens``: count the prompt tokens of a conversation."""
    door: AppState = request.app.state.door
    body = checked(CountTokensRequest, await read_json(request, door.limits, door.long.read))
    frontend = door.serving()
    asked = await chat_of(body, door.limits, frontend)
    with rename_message_fields(), rename_fields(names_in_messages()):
        terms_of(asked).parsers(frontend.parsers)
        talk = await conversation_of(asked, door.limits)
        ids = await frontend.tokenize(talk, model=body.model, tenant=request.state.tenant)
    return Response(json.dumps({"input_tokens": len(ids)}), media_type="application/json")
