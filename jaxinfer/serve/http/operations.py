"""vLLM's admin routes, except those for LoRA adapters."""

from __future__ import annotations

import json

from starlette.requests import Request
from starlette.responses import Response

from jaxinfer.serve.api.errors import Kind, ServeError

_UNSERVED = ("reset_running_requests", "reset_external")
"""Unsupported parameters of vLLM's reset (stop running requests; reset external caches); false is accepted."""


async def reset_prefix_cache(request: Request) -> Response:
    """Drop all cached pages and return their number."""
    for name, value in request.query_params.items():
        if name not in _UNSERVED or value.lower() not in ("false", "0"):
            raise ServeError(Kind.INVALID, f"{name}={value[:100]!r} is not served", name)
    pages = await request.app.state.door.serving().flush_prefix_cache()
    return Response(json.dumps({"pages": pages}), media_type="application/json")
