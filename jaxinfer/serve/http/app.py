"""HTTP application: its routes, and their OpenAPI description at /docs."""

from __future__ import annotations

import functools
import importlib.resources
import json
import math
import pathlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple

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
from jaxinfer.serve.http import completions, large_response, models, operations, requests, weights
from jaxinfer.serve.http.anthropic.bodies import CountTokensRequest, MessagesRequest
from jaxinfer.serve.http.anthropic.route import count_tokens, create_message
from jaxinfer.serve.http.app_state import AppState
from jaxinfer.serve.http.fields import Body, checked
from jaxinfer.serve.http.middleware import ADMIN, INFER, OBSERVE, AuthMiddleware, error_json, error_response
from jaxinfer.serve.http.prompts import conversation_of, ids_of, names_in_messages
from jaxinfer.serve.http.responses.bodies import ResponsesRequest
from jaxinfer.serve.http.responses.route import respond
from jaxinfer.serve.runtime.event_loop import off_loop
from jaxinfer.serve.telemetry.metrics import render

_SCHEMAS = "#/components/schemas/"

type _Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class Endpoint(NamedTuple):
    """A route.

    Attributes:
        scope: scope that an API key needs; None: no key.
        about: its summary in OpenAPI; with a ``body`` that is the first line of the body's docstring.
        body: request body of a POST route, which the handler parses.
        responses: descriptions of answers besides 200, by status.
    """

    path: str
    scope: str | None
    handler: _Handler
    about: str = ""
    body: type[Body] | None = None
    method: str = "GET"
    responses: dict[int | str, dict[str, Any]] | None = None


def build_app(door: AppState) -> AuthMiddleware:
    """Build the ASGI application with all routes."""
    app = FastAPI(title="jaxinfer", version=door.version, docs_url=None, redoc_url=None)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return _built(app, door, ENDPOINTS)


def build_metrics_app(door: AppState) -> AuthMiddleware:
    """Build the ASGI application that serves only /metrics, /health and /ready."""
    return _built(FastAPI(openapi_url=None), door, OPERATIONS)


def _built(app: FastAPI, door: AppState, endpoints: Sequence[Endpoint]) -> AuthMiddleware:
    for endpoint in endpoints:
        _add(app, endpoint)
    app.state.door = door
    app.add_exception_handler(HTTPException, _unrouted)
    app.add_exception_handler(ServeError, _refused)
    return AuthMiddleware(app, door, SCOPES)


def _add(app: FastAPI, endpoint: Endpoint) -> None:
    body, described = endpoint.body, dict[str, Any](summary=endpoint.about, responses=endpoint.responses)
    if body is not None:
        content = {"application/json": {"schema": {"$ref": _SCHEMAS + body.__name__}}}
        extra = {"requestBody": {"required": True, "content": content}}
        described = {"summary": (body.__doc__ or "").partition("\n")[0], "openapi_extra": extra}
    if not described["summary"]:
        described = {"include_in_schema": False}
    method = "POST" if body is not None else endpoint.method
    app.add_api_route(endpoint.path, _answered(endpoint.handler), methods=[method], **described)


def _answered(handler: _Handler) -> _Handler:
    """Convert all exceptions to `ServeError` inside the route: Starlette would send its own error responses."""

    @functools.wraps(handler)
    async def wrapper(request: Request) -> Response:
        with map_exceptions(HTTPException):
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
        ids = await off_loop(len(body.tokens) if isinstance(body.tokens, list) else 0, ids_of, "tokens", body.tokens)
        text = await door.serving().detokenize(ids, model=body.model, skip_special_tokens=skip)
    return Response(
        await off_loop(len(text), large_response.text_json, "prompt", text),
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
        bodies = [each.body for each in ENDPOINTS if each.body is not None]
        modes: Sequence[tuple[type[Body], Any]] = [(body, "validation") for body in bodies]
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


OPERATIONS = (
    Endpoint("/health", None, _health, "Liveness check: state of the engine."),
    Endpoint("/ready", None, _ready, "Readiness check.", responses={503: {"description": "Not ready."}}),
    Endpoint("/metrics", OBSERVE, _metrics, "Prometheus metrics."),
)
ENDPOINTS = (
    *OPERATIONS,
    Endpoint("/docs", INFER, _page),
    Endpoint("/docs/{file}", INFER, _file),
    Endpoint("/version", INFER, _version, "Version of jaxinfer."),
    Endpoint("/v1/models", INFER, models.list_models, "List the served model and its LoRA adapters."),
    Endpoint("/v1/models/{model:path}", INFER, models.describe_model, "Describe the model or one LoRA adapter."),
    Endpoint("/v1/completions", INFER, completions.complete, body=requests.CompletionRequest),
    Endpoint("/v1/chat/completions", INFER, completions.chat, body=requests.ChatCompletionRequest),
    Endpoint("/v1/responses", INFER, respond, body=ResponsesRequest),
    Endpoint("/v1/messages", INFER, create_message, body=MessagesRequest),
    Endpoint("/v1/messages/count_tokens", INFER, count_tokens, body=CountTokensRequest),
    Endpoint("/tokenize", INFER, _tokenize, body=requests.TokenizeRequest),
    Endpoint("/detokenize", INFER, _detokenize, body=requests.DetokenizeRequest),
    Endpoint("/v1/load_lora_adapter", ADMIN, models.load_lora, body=models.LoadLoRARequest),
    Endpoint("/v1/unload_lora_adapter", ADMIN, models.unload_lora, body=models.UnloadLoRARequest),
    Endpoint(
        "/reset_prefix_cache",
        ADMIN,
        operations.reset_prefix_cache,
        "Clear the prefix cache. For operators.",
        method="POST",
    ),
    Endpoint("/start_profile", ADMIN, operations.start_profile, body=operations.StartProfileRequest),
    Endpoint("/stop_profile", ADMIN, operations.stop_profile, "Write the profile. For operators.", method="POST"),
    Endpoint("/pause", ADMIN, weights.pause, "Pause the engine. For operators.", method="POST"),
    Endpoint("/resume", ADMIN, weights.resume, "Resume a paused engine. For operators.", method="POST"),
    Endpoint("/is_paused", ADMIN, weights.is_paused, "Whether the engine is paused. For operators."),
    Endpoint("/abort_requests", ADMIN, weights.abort_requests, "Abort all requests. For operators.", method="POST"),
    Endpoint("/sleep", ADMIN, weights.sleep, "Free device memory. For operators.", method="POST"),
    Endpoint("/wake_up", ADMIN, weights.wake_up, "Take back freed memory. For operators.", method="POST"),
    Endpoint("/is_sleeping", ADMIN, weights.is_sleeping, "Whether memory is freed. For operators."),
    Endpoint("/update_weights", ADMIN, weights.update_weights, body=weights.UpdateWeightsRequest),
    Endpoint("/start_weight_update", ADMIN, weights.start_weight_update, body=weights.StartUpdateRequest),
    Endpoint("/finish_weight_update", ADMIN, weights.finish_weight_update, body=weights.FinishUpdateRequest),
    Endpoint("/update_weight_version", ADMIN, weights.update_weight_version, body=weights.UpdateWeightVersionRequest),
    Endpoint("/weight_info", ADMIN, weights.weight_info, "Version of the weights. For operators."),
    Endpoint("/weight_checker", ADMIN, weights.weight_checker, body=weights.WeightCheckerRequest),
    Endpoint(
        "/init_weight_transfer_engine",
        ADMIN,
        weights.init_weight_transfer_engine,
        "Rejected: weights come from folders. For operators.",
        method="POST",
    ),
)
"""All routes; that of a prefix (``{...}``) comes after those of longer paths."""

SCOPES: Mapping[str, str | None] = {each.path: each.scope for each in ENDPOINTS} | {"/openapi.json": INFER}
"""Scope that each route requires; a server for metrics alone checks the same ones."""
