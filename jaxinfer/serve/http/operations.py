"""vLLM's admin routes, except those for LoRA adapters and weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response

from jaxinfer.serve.api.errors import Kind, ServeError, invalid
from jaxinfer.serve.api.json_bodies import read_json
from jaxinfer.serve.core.profiling import checked_steps
from jaxinfer.serve.http.app_state import AppState, Profiler
from jaxinfer.serve.http.fields import Body, checked

_UNSERVED = ("reset_running_requests", "reset_external")
"""Unsupported parameters of vLLM's reset (stop running requests; reset external caches); false is accepted."""


class StartProfileRequest(Body):
    """Start a device profile, below the server's ``profile_dir`` (``POST /start_profile``). For operators.

    ``steps`` and SGLang's ``num_steps`` are the same field: the steps of the engine after which it ends.
    """

    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {"output_dir": (None,), "start_step": (None, 0)}

    steps: int | None = None
    num_steps: int | None = None


async def start_profile(request: Request) -> Response:
    """Start a profile."""
    profiler, body = _profiler(request), await body_of(request, StartProfileRequest, optional=True)
    if None not in (body.steps, body.num_steps) and body.steps != body.num_steps:
        raise invalid("num_steps", body.num_steps, f"is another one than steps={body.steps}")
    steps = checked_steps(body.num_steps, "num_steps") if body.steps is None else checked_steps(body.steps)
    await profiler.start_profile(steps)
    return Response(json.dumps({"steps": steps}), media_type="application/json")


async def stop_profile(request: Request) -> Response:
    """End the profile, unless it has ended by itself, and return the folder with the trace."""
    folder = await _profiler(request).stop_profile()
    return Response(json.dumps({"folder": folder}), media_type="application/json")


def _profiler(request: Request) -> Profiler:
    profiler: Profiler | None = request.app.state.door.profiler
    if profiler is None:
        raise ServeError(Kind.PRECONDITION, "profiling is off: the server was started without profile_dir")
    return profiler


async def body_of[B: Body](request: Request, kind: type[B], *, optional: bool = False) -> B:
    """Return the body of a request. ``optional``: there may be none."""
    door: AppState = request.app.state.door
    headers = request.headers
    if optional and headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers:
        return kind()
    return checked(kind, await read_json(request, door.limits, door.long.read))


async def reset_prefix_cache(request: Request) -> Response:
    """Drop all cached pages and return their number."""
    for name, value in request.query_params.items():
        if name not in _UNSERVED or value.lower() not in ("false", "0"):
            raise ServeError(Kind.INVALID, f"{name}={value[:100]!r} is not served", name)
    pages = await request.app.state.door.serving().flush_prefix_cache()
    return Response(json.dumps({"pages": pages}), media_type="application/json")
