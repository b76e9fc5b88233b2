"""HTTP application: its routes, and their OpenAPI description at /docs."""

from __future__ import annotations

import functools
import importlib.resources
import json
import math
import pathlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from jaxinfer.serve.api.errors import Kind, ServeError, map_exceptions, rename_fields
from jaxinfer.serve.api.json_bodies import read_json
from jaxinfer.serve.core.supervisor import READY, Condition
from jaxinfer.serve.http import completions, large_response, models, operations, requests
from jaxinfer.serve.http.anthropic.bodies import CountTokensRequest, MessagesRequest
from jaxinfer.serve.http.anthropic.route import count_tokens, create_message
from jaxinfer.serve.http.app_state import SCOPES, AppState
from jaxinfer.serve.http.fields import Body, checked
from jaxinfer.serve.http.middleware import AuthMiddleware, error_json, error_response
from jaxinfer.serve.http.prompts import conversation_of, ids_of, names_in_messages
from jaxinfer.serve.http.responses.bodies import ResponsesRequest
from jaxinfer.serve.http.responses.route import respond
from jaxinfer.serve.telemetry.metrics import render

_BODIES: Mapping[str, type[Body]] = {
    "/v1/completions": requests.CompletionRequest,
    "/v1/chat/completions": requests.ChatCompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
    "/tokenize": requests.TokenizeRequest,
    "/detokenize": requests.DetokenizeRequest,
    "/v1/load_lora_adapter": models.LoadLoRARequest,
    "/v1/unload_lora_adapter": models.UnloadLoRARequest,
}
"""Request body of each POST route."""
_SCHEMAS = "#/components/schemas/"

type _Handler = Callable[[Request], Coroutine[Any, Any, Response]]


def build_app(door: AppState) -> AuthMiddleware:
    """Build the ASGI application with all routes.

    Raises:
        KeyError: a route has no entry in `SCOPES`.
    """
    app = FastAPI(title="jaxinfer", version=door.version, docs_url=None, redoc_url=None)
    add_page(app)
    _add_operations(app)
    _add_routes(app)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return _gated(app, door)


def build_metrics_app(door: AppState) -> AuthMiddleware:
    """Build the ASGI application that serves only /metrics, /health and /ready."""
    app = FastAPI(openapi_url=None)
    _add_operations(app)
    return _gated(app, door)


def _gated(app: FastAPI, door: AppState) -> AuthMiddleware:
    app.state.door = door
    for route in app.routes:
        SCOPES[route.path]  # type: ignore[attr-defined]
    app.add_exception_handler(HTTPException, _unrouted)
    app.add_exception_handler(ServeError, _refused)
    return AuthMiddleware(app, door)


def _add(app: FastAPI, path: str, handler: _Handler, **described: Any) -> None:
    app.add_api_route(path, _answered(handler), **described)


def _add_operations(app: FastAPI) -> None:
    add = functools.partial(_add, app)
    add("/health", _health, summary="Liveness check: state of the engine.")
    add("/ready", _ready, summary="Readiness check.", responses={503: {"description": "Not ready."}})
    add("/metrics", _metrics, summary="Prometheus metrics.")


def _add_routes(app: FastAPI) -> None:
    add = functools.partial(_add, app)
    add("/version", _version, summary="Version of jaxinfer.")
    add("/v1/models", models.list_models, summary="List the served model and its LoRA adapters.")
    add("/v1/models/{model:path}", models.describe_model, summary="Describe the model or one LoRA adapter.")
    reset = operations.reset_prefix_cache
    add("/reset_prefix_cache", reset, methods=["POST"], summary="Clear the prefix cache. For operators.")
    chats = (completions.complete, completions.chat, respond, create_message, count_tokens)
    handlers = (*chats, _tokenize, _detokenize, models.load_lora, models.unload_lora)
    for (path, body), handler in zip(_BODIES.items(), handlers, strict=True):
        schema = {"schema": {"$ref": _SCHEMAS + body.__name__}}
        described = {"requestBody": {"required": True, "content": {"application/json": schema}}}
        add(path, handler, methods=["POST"], summary=(body.__doc__ or "").partition("\n")[0], openapi_extra=described)


def _answered(handler: _Handler) -> _Handler:
    """Convert all exceptions to `ServeError` inside the route: Starlette would send its own error responses."""

    @functools.wraps(handler)
    async def wrapper(request: Request) -> Response:
        with map_exceptions():
            return await handler(request)

    return wrapper


# ---- routes


async def _health(request: Request) -> Response:
    return _condition(_door(request).condition)


async def _ready(request: Request) -> Response:
    condition = _door(request).condition
    return _condition(condition, 200 if condition.state == READY else 503)


def _condition(condition: Condition, status: int = 200) -> Response:
    """Return the engine's condition and, unless it is ready, when to retry."""
    answer: dict[str, Any] = {"state": condition.state}
    if condition.state == READY:
        return _json(answer)
    seconds = math.ceil(condition.retry_after)
    answer |= {"reason": condition.reason, "retry_after": seconds}
    return Response(json.dumps(answer), status, {"retry-after": str(seconds)}, "application/json")


async def _metrics(request: Request) -> Response:
    """Return Prometheus metrics. Server metrics are returned even if the engine's are not available."""
    door = _door(request)
    door.metrics.ready.set(door.is_ready)
    figures = door.metrics.render()
    if door.frontend is not None:
        try:
            stats = await door.frontend.stats()
        except ServeError:
            return Response(figures, media_type=_PROMETHEUS)
        figures += render(lambda: stats, door.frontend.card.name)
    return Response(figures, media_type=_PROMETHEUS)


_PROMETHEUS = "text/plain; version=0.0.4"


async def _version(request: Request) -> Response:
    return _json({"version": _door(request).version})


async def _tokenize(request: Request) -> Response:
    door = _door(request)
    body = checked(requests.TokenizeRequest, await read_json(request, door.limits, door.long.read))
    frontend = door.serving()
    if (body.prompt is None) == (body.messages is None):
        raise ServeError(Kind.INVALID, "prompt: give either prompt or messages", "prompt")
    text = await conversation_of(body, door.limits) if body.prompt is None else body.prompt
    with rename_fields({} if isinstance(text, str) else names_in_messages()):
        special, tenant = body.add_special_tokens, request.state.tenant
        ids = await frontend.tokenize(text, model=body.model, add_special_tokens=special, tenant=tenant)
    spell = frontend.token_text if body.return_token_strs else None
    about = {"count": len(ids), "max_model_len": frontend.card.max_model_len}
    return large_response.tokens_answer(about, ids, spell)


async def _detokenize(request: Request) -> Response:
    door = _door(request)
    body = checked(requests.DetokenizeRequest, await read_json(request, door.limits, door.long.read))
    skip = body.skip_special_tokens
    with rename_fields({"token_ids": "tokens"}):
        ids = await large_response.off_loop(
            len(body.tokens) if isinstance(body.tokens, list) else 0, ids_of, "tokens", body.tokens
        )
        text = await door.serving().detokenize(ids, model=body.model, skip_special_tokens=skip)
    return Response(
        await large_response.off_loop(len(text), large_response.text_json, "prompt", text),
        media_type="application/json",
    )


# ---- errors


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServeError)
    _door(request).refused(error, request.scope["state"])
    return error_response(error, request.scope["state"])


async def _unrouted(request: Request, error: Exception) -> Response:
    """Answer a request for an unknown route or an unsupported method."""
    assert isinstance(error, HTTPException)
    kind = Kind.NOT_FOUND if error.status_code == 404 else Kind.INVALID
    reason = " is not served; /docs shows what is" if error.status_code == 404 else f": {error.detail}"
    refusal = ServeError(kind, f"{request.method} {request.url.path[:200]}{reason}")
    _door(request).refused(refusal, request.scope["state"])
    body = error_json(refusal, request.scope["state"], code="route_not_found")
    return Response(body, error.status_code, dict(error.headers or {}), "application/json")


# ---- OpenAPI


def _openapi(app: FastAPI) -> dict[str, Any]:
    """Return FastAPI's schema with the request bodies added, since routes parse bodies themselves."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        modes: Sequence[tuple[type[Body], Any]] = [(body, "validation") for body in _BODIES.values()]
        _, found = models_json_schema(modes, ref_template=_SCHEMAS + "{model}")
        components = schema.setdefault("components", {})
        components.setdefault("schemas", {}).update(found["$defs"])
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        schema["security"] = [{"key": []}]
        app.openapi_schema = schema
    return app.openapi_schema


def _door(request: Request) -> AppState:
    return request.app.state.door


def _json(value: Any) -> Response:
    return Response(json.dumps(value), media_type="application/json")


FILES: Mapping[str, str] = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "favicon-32x32.png": "image/png",
}
"""Static files of the page and their media types."""

# The browser blocks resources from other origins.
_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; img-src 'self' data:"
)


def add_page(app: FastAPI) -> None:
    """Serve the page at /docs and its static files below that path."""
    app.add_api_route("/docs", _page, include_in_schema=False)
    app.add_api_route("/docs/{file}", _file, include_in_schema=False)


async def _page(request: Request) -> Response:
    """Return the Swagger UI page. URLs are relative because a proxy may serve the API under a path prefix."""
    answer = get_swagger_ui_html(
        openapi_url="openapi.json",
        title=request.app.title,
        swagger_js_url="docs/swagger-ui-bundle.js",
        swagger_css_url="docs/swagger-ui.css",
        swagger_favicon_url="docs/favicon-32x32.png",
    )
    answer.headers["content-security-policy"] = _POLICY
    return answer


async def _file(request: Request) -> Response:
    name = request.path_params["file"]
    if name not in FILES:
        raise HTTPException(404)
    return FileResponse(_folder() / name, media_type=FILES[name])


def _folder() -> pathlib.Path:
    return pathlib.Path(str(importlib.resources.files("fastapi_swagger"))) / "resources"
