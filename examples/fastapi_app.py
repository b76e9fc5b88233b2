"""A web service around a model, with FastAPI: ``pip install jaxinfer fastapi uvicorn``.

    python examples/fastapi_app.py demo
    curl -N localhost:8000/generate -H 'Content-Type: application/json' -d '{"prompt": "ROMEO:", "max_tokens": 40}'

`jaxinfer serve` is the whole server, with the OpenAI API, keys and limits; this is a start for one of your own.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import fastapi
import pydantic
import uvicorn
from fastapi.responses import JSONResponse, StreamingResponse

from jaxinfer import AsyncLLM, RequestError, SamplingParams


class Body(pydantic.BaseModel):
    """A request: a prompt or a conversation, and fields of `SamplingParams`."""

    model_config = pydantic.ConfigDict(extra="allow")
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    stream: bool = True


def make_app(llm: AsyncLLM) -> fastapi.FastAPI:
    """Return the application. A client that disconnects aborts its request."""

    @contextlib.asynccontextmanager
    async def lifespan(app: fastapi.FastAPI) -> AsyncIterator[None]:
        async with llm:
            yield

    app = fastapi.FastAPI(lifespan=lifespan)

    @app.exception_handler(RequestError)
    async def rejected(request: fastapi.Request, error: RequestError) -> JSONResponse:
        return JSONResponse({"error": str(error), "field": error.field}, 400)

    @app.post("/generate")
    async def generate(body: Body) -> fastapi.Response:
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("prompt", "or messages: a request has one of both")
        asked = body.prompt if body.messages is None else body.messages
        try:
            params = SamplingParams(**(body.model_extra or {}))
        except TypeError as error:
            raise RequestError("body", f": {error}") from error
        deltas = llm.stream(asked, params)
        first = await anext(deltas)  # a rejected request is not a stream
        if body.stream:
            return StreamingResponse(_events(first, deltas), media_type="text/event-stream")
        text = first.text + "".join([delta.text async for delta in deltas])
        return JSONResponse({"text": text})

    return app


async def _events(first: Any, deltas: Any) -> AsyncIterator[str]:
    async with contextlib.aclosing(deltas):
        yield _event(first)
        async for delta in deltas:
            yield _event(delta)


def _event(delta: Any) -> str:
    return f"data: {json.dumps({'text': delta.text, 'finish_reason': delta.finish_reason})}\n\n"


if __name__ == "__main__":
    uvicorn.run(make_app(AsyncLLM(sys.argv[1] if len(sys.argv) > 1 else "demo")), host="127.0.0.1", port=8000)
